"""The records a store keeps, and what it must be able to do. Knows bytes; not what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["AgentRecord", "BranchRecord", "Commit", "PageRecord", "Snapshot", "Store", "StoredFile"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Rows [first, first + rows) of a plane of a page, in a file of its own.

    `name` is relative to the directory; the data are `size` bytes at `offset`, and `checksum` is their xxh3-128.
    Where they are encrypted, `checksum` is the cipher's tag, and `secret` the file's own key, wrapped.
    """

    name: str
    first: int
    rows: int
    offset: int
    size: int
    checksum: bytes
    secret: bytes = b""
    plane: int = 0

    @property
    def file_bytes(self) -> int:
        """What it takes on disk, header included."""
        return self.offset + self.size


@dataclass(frozen=True)
class AgentRecord:
    """What is known of an agent beside its transcripts; times are seconds since 1970, `ttl` seconds after the last use."""

    id: str
    namespace: str
    name: str
    created: float
    used: float
    pinned: bool = False
    ttl: float | None = None


@dataclass(frozen=True)
class PageRecord:
    """A full page: `tokens` are int32, little-endian; `depth` is 1 for the first page of a transcript.

    `files` hold its planes, in order; the first plane is always there.
    """

    key: bytes
    parent: bytes
    depth: int
    namespace: str
    tokens: bytes
    files: tuple[StoredFile, ...]


@dataclass(frozen=True)
class BranchRecord:
    """A transcript's end: `tokens` behind the page `parent`, K/V of its first rows in `segments`.

    `turns` are the lengths of the whole transcript at which answers ended: int32, little-endian.
    """

    id: str
    namespace: str
    agent: str | None
    parent: bytes
    tokens: bytes
    segments: tuple[StoredFile, ...]
    created: float
    used: float
    turns: bytes = b""


@dataclass(frozen=True)
class Commit:
    """What becomes true at once: new pages, branches and agents as they are now, and what is gone."""

    pages: tuple[PageRecord, ...] = ()
    branches: tuple[BranchRecord, ...] = ()
    agents: tuple[AgentRecord, ...] = ()
    gone_pages: tuple[bytes, ...] = ()
    gone_branches: tuple[str, ...] = ()
    gone_agents: tuple[str, ...] = ()

    def file_names(self) -> set[str]:
        return {f.name for p in self.pages for f in p.files} | {s.name for b in self.branches for s in b.segments}


@dataclass(frozen=True)
class Snapshot:
    """All records of one signature, parents before children."""

    pages: tuple[PageRecord, ...] = ()
    branches: tuple[BranchRecord, ...] = ()
    agents: tuple[AgentRecord, ...] = ()


class Store(Protocol):
    """Where memories survive the process. What was written is durable once it is committed.

    `budget` is the most bytes its files may take, `used` what they take, `reclaimable` the part of it that this model cannot use.
    `bytes_written` and `bytes_read` count since the start. `page_secret` goes into page keys, which are names of files:
    where files are encrypted, nobody is to guess a text by its key. Empty where they are not.
    """

    budget: int
    bytes_written: int
    bytes_read: int
    page_secret: bytes

    @property
    def used(self) -> int: ...

    @property
    def reclaimable(self) -> int: ...

    def load(self) -> Snapshot: ...

    def write(self, name: str, data: Sequence[memoryview], first: int, rows: int, about: Mapping[str, str], plane: int = 0) -> StoredFile:
        """Put rows [first, first + rows) of a plane into a new file; `about` is for people and for rebuilding the manifest.

        `data` are the file's, in parts that lie one behind the other.

        `about` names the namespace. Raises DiskFull where the budget or the disk has no room for it.
        """
        ...

    def file_bytes(self, rows: int, plane: int = 0) -> int:
        """What a file of `rows` rows of a plane takes."""
        ...

    def commit(self, commit: Commit) -> None:
        """All or nothing. Raises StoreLost if the directory was deleted meanwhile; it has been begun anew then."""
        ...

    def reclaim(self, wanted: int) -> None:
        """Remove what this model cannot use (others' memories, unless pinned; damaged files), the oldest first, up to `wanted` bytes."""
        ...

    def room(self) -> int:
        """Bytes that may still be written, by the budget and by the disk."""
        ...

    def holds(self, file: StoredFile) -> bool:
        """Whether the file is there; not whether it is sound."""
        ...

    def read(self, file: StoredFile, *into: memoryview) -> None:
        """Fill `into`, one behind the other, with the data. Raises CorruptFile if they are not, byte for byte, what was written."""
        ...

    def quarantine(self, file: StoredFile) -> None: ...

    def remove(self, files: Iterable[StoredFile]) -> None:
        """Give their bytes back. Never raises: what cannot be removed is no longer named, and goes at the next start."""
        ...

    def close(self) -> None: ...
