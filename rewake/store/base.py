"""The records a store keeps, and what it must be able to do. Knows bytes; not what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = ["BranchRecord", "Commit", "PageRecord", "Snapshot", "Store", "StoredFile"]


@dataclass(frozen=True)
class StoredFile:
    """Rows [first, first + rows) of a page, in a file of its own.

    `name` is relative to the directory; the data are `size` bytes at `offset`, and `checksum` is their xxh3-128.
    """

    name: str
    first: int
    rows: int
    offset: int
    size: int
    checksum: bytes


@dataclass(frozen=True)
class PageRecord:
    """A full page: `tokens` are int32, little-endian; `depth` is 1 for the first page of a transcript."""

    key: bytes
    parent: bytes
    depth: int
    namespace: str
    tokens: bytes
    file: StoredFile


@dataclass(frozen=True)
class BranchRecord:
    """A transcript's end: `tokens` behind the page `parent`, K/V of its first rows in `segments`."""

    id: str
    namespace: str
    agent: str | None
    parent: bytes
    tokens: bytes
    segments: tuple[StoredFile, ...]
    created: float
    used: float


@dataclass(frozen=True)
class Commit:
    """What becomes true at once: new pages, branches as they are now, and what is gone."""

    pages: tuple[PageRecord, ...] = ()
    branches: tuple[BranchRecord, ...] = ()
    gone_pages: tuple[bytes, ...] = ()
    gone_branches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """All records of one signature, parents before children."""

    pages: tuple[PageRecord, ...] = ()
    branches: tuple[BranchRecord, ...] = ()


class Store(Protocol):
    """Where memories survive the process. What was written is durable once it is committed."""

    def load(self) -> Snapshot: ...

    def write(self, name: str, data: memoryview, first: int, rows: int, about: Mapping[str, str]) -> StoredFile:
        """Put rows [first, first + rows) of a page into a new file; `about` is for people and for rebuilding the manifest."""
        ...

    def commit(self, commit: Commit) -> None: ...

    def read(self, file: StoredFile, into: memoryview) -> None:
        """Fill `into` with the data. Raises CorruptFile if they are not, byte for byte, what was written."""
        ...

    def quarantine(self, file: StoredFile) -> None: ...

    def remove(self, names: Iterable[str]) -> None: ...

    def close(self) -> None: ...
