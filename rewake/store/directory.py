"""A directory of memories: one safetensors file for each plane of a page or segment, and the manifest beside them.

    DIR/manifest.sqlite   what counts: nothing is remembered that is not in it
    DIR/pages/ab/KEY-NONCE.safetensors, DIR/segments/ab/BRANCH-FIRST-NONCE.safetensors
    DIR/quarantine/       files that were not what had been written
    DIR/lock              held by the one process that owns the directory, for all models that it serves

Order of a write: data to a temporary file, fsync, rename, fsync of the folder; then the manifest, in one
transaction. Deletions go the other way round. Its files never take more than the budget, nor the disk's last bytes.
`docs/format.md` has the bytes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import xxhash

from rewake.errors import CorruptFile, DiskFull, StoreError, StoreLost
from rewake.planes import PagePlanes, Plane
from rewake.quant import PAGE_TOKENS
from rewake.store.base import Commit, Snapshot, StoredFile
from rewake.store.crypto import ALGORITHM, Cipher, fields
from rewake.store.files import Files
from rewake.store.index import Index
from rewake.store.shared import Shared

__all__ = ["BLOCK", "FORMAT", "MANIFEST", "UNLIMITED", "Directory", "checksum", "file_header"]

FORMAT = "rewake-page-1"
BLOCK = 4096  # headers are padded to it, so that the data can be read directly to where pages start
MANIFEST = "manifest.sqlite"
FOLDERS = ("pages", "segments")
UNLIMITED = 2**63 - 1
FREE_FLOOR = 512 * 2**20  # bytes left free for everybody else

log = logging.getLogger(__name__)


def checksum(*parts: memoryview | bytes) -> bytes:
    """Of the parts one behind the other."""
    if len(parts) == 1:
        return xxhash.xxh3_128_digest(parts[0])
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def file_header(plane: Plane, rows: int, about: Mapping[str, str]) -> bytes:
    """A safetensors header (length, then JSON padded with spaces) for the bytes of `rows` rows of `plane`."""
    tensors: dict[str, object] = {"__metadata__": {"format": FORMAT, **about}}
    layout = plane.slot.with_rows(rows)
    for slot in range(plane.num_slots):
        for layer, field, at in layout.arrays():
            begin = slot * layout.page_bytes + at
            tensors[f"{plane.layers[slot * layout.layers + layer]}.{field.name}"] = {
                "dtype": field.dtype,
                "shape": [layout.kv_heads, rows, field.width],
                "data_offsets": [begin, begin + layout.field_bytes(field)],
            }
    text = json.dumps(tensors, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // BLOCK) * BLOCK - 8
    return length.to_bytes(8, "little") + text.ljust(length)


class Directory:
    """The store on a file system, for the pages of one signature. Owned by one process at a time.

    Stores of several models of a process have one directory: they are given what they share. Each has a budget of its own, within
    which are its own files and those of none of the models.
    """

    def __init__(
        self,
        path: Path,
        signature: bytes,
        planes: PagePlanes,
        *,
        budget: int = UNLIMITED,
        free_floor: int = FREE_FLOOR,
        files: Files | None = None,
        cipher: Cipher | None = None,
        shared: Shared | None = None,
        model: str = "",
    ) -> None:
        """Create or open `path`; its files may take `budget` bytes, and leave `free_floor` of the disk free.

        `shared` is for several models of one process, and `model` is what this one is called among them.

        What was begun with a `cipher` is opened with that one only, what was begun without with none.
        Raises DirectoryLocked if another process has it open, StoreError if it cannot be used, or not by this model too.
        """
        self.path = path
        self.signature = signature
        self.planes = planes
        self.budget = budget
        self.free_floor = free_floor
        self.bytes_written = 0
        self.bytes_read = 0
        self.page_secret = cipher.page_secret if cipher is not None else b""
        self._files = files or Files()
        self._cipher = cipher
        self._written_in: set[Path] = set()  # folders to sync before the next commit
        self._uncommitted: dict[str, int] = {}  # files of this store that no commit has named yet, and their bytes
        self._shared = shared or Shared(path)
        self._model = model
        self._open()

    def _open(self) -> None:
        try:
            # a folder is an entry in its parent, which has to be on disk before anything is promised; the process before may not
            # have come to that
            missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            there = [path for path in (self.path, *(self.path / folder for folder in FOLDERS)) if path.is_dir()]
            self._written_in = {self.path.parent, *there, *(path.parent for path in missing)}
            self._shared.join(self)
        except OSError as error:
            raise StoreError(f"{self.path} cannot be used as a directory of memories ({error.strerror}): choose another --data") from error
        try:
            with self._shared.mutex:
                self._index = Index(self.path / MANIFEST, self.signature, self._files, self._cipher)
                self._shared.is_new |= self._index.is_new
                if self._shared.models:
                    self._index.note_served(self._model)
                self._count()
        except BaseException:
            self._shared.leave(self)
            raise

    def _count(self) -> None:
        """What is ours, and what is nobody's; what is another served model's is counted where that is."""
        with self._shared.mutex:
            by_signature = self._index.bytes_by_signature()
            self._own = by_signature.pop(self.signature, 0) + sum(self._uncommitted.values())
            others = sum(size for signature, size in by_signature.items() if signature not in self._served())
            in_quarantine = sum(size for _, size in self._quarantined())
            self._shared.foreign = others + in_quarantine + self._stray_bytes()
            self._shared.reclaimable = others + in_quarantine

    def _served(self) -> set[bytes]:
        """Signatures of all models that are served, whether they are loaded now or were when they were served last."""
        return self._shared.signatures() | self._index.served(self._shared.models)

    def _stray_bytes(self) -> int:
        """Where there was no manifest, files that are there all the same are nobody's, or will be named again; they take room."""
        return sum(size_of(self.path / name) for name in self._nobodys()) if self._shared.is_new else 0

    @property
    def used(self) -> int:
        return self._own + self._shared.foreign

    @property
    def reclaimable(self) -> int:
        return self._shared.reclaimable

    def unfinished(self) -> tuple[str, ...]:
        return tuple(self._uncommitted)

    def load(self) -> Snapshot:
        """All records of the signature; also removes files that a crash, or a damaged record, left unreferenced."""
        snapshot = self._index.load()
        self._uncommitted = {}
        self._collect_garbage()
        self._count()
        return snapshot

    # ---- writing

    def write(self, name: str, data: Sequence[memoryview], first: int, rows: int, about: Mapping[str, str], plane: int = 0) -> StoredFile:
        target = self.path / name
        header = file_header(self.planes.planes[plane], rows, about if self._cipher is None else {"encryption": ALGORITHM})
        size = sum(map(len, data))
        self._check_room(len(header) + size)
        if not target.parent.is_dir():
            for folder in (self.path, target.parent.parent, target.parent):  # `parents` would make some that others can read
                folder.mkdir(mode=0o700, exist_ok=True)
            self._written_in |= {target.parent.parent, self.path}
        temporary = target.with_suffix(".tmp")
        before = self._uncommitted.setdefault(name, 0)  # before it is there: another store may be looking for what is nobody's
        body, check, secret = self._sealed(data, self._about(name, first, rows), about["namespace"])
        try:
            self._files.write(temporary, (header, *body))
            self._files.rename(temporary, target)
        except OSError:
            temporary.unlink(missing_ok=True)  # it may be the disk that is full
            raise
        self._written_in.add(target.parent)
        file = StoredFile(name, first, rows, len(header), size, check, secret, plane)
        self._own += file.file_bytes - before
        self._uncommitted[name] = file.file_bytes
        self.bytes_written += file.file_bytes
        return file

    def _sealed(self, data: Sequence[memoryview], about: bytes, namespace: str) -> tuple[Sequence[memoryview | bytes], bytes, bytes]:
        """What is written, its checksum, and its secret."""
        if self._cipher is None:
            return data, checksum(*data), b""
        return self._cipher.seal_file(namespace, data, about)

    def _about(self, name: str, first: int, rows: int) -> bytes:
        """What sealed data are bound to: in the place of any other file they are not authentic."""
        return fields("file", self.signature, name, first, rows)

    def file_bytes(self, rows: int, plane: int = 0) -> int:
        return header_bytes(self.planes.planes[plane], rows) + self.planes.planes[plane].num_bytes(rows)

    def _check_room(self, wanted: int) -> None:
        if self.used + wanted > self.budget:
            raise DiskFull(f"{self.path} has {self.used} of {self.budget} bytes: no room for {wanted} more (--disk)")
        if (free := self._files.free(self.path)) < wanted + self.free_floor:
            raise DiskFull(f"the disk of {self.path} has {free} bytes left, and {self.free_floor} are to stay free: no room for {wanted}")

    def commit(self, commit: Commit) -> None:
        if not self._index.is_in_place():
            self._begin_anew()
            raise StoreLost(f"{self.path} was deleted while in use: begun anew with what is in memory")
        self._sync_folders()
        self._index.commit(commit)
        # what an earlier commit failed to name could still have turned out to be named; now it cannot
        lost = self._uncommitted.keys() - commit.file_names()
        self._own -= sum(self._uncommitted[name] for name in lost)
        for name in lost:
            if self._uncommitted[name]:
                self._discard(self.path / name)
        self._uncommitted = {}

    def _sync_folders(self) -> None:
        """One that fails stays to be synced before the next commit: its older entries are not on disk either."""
        for folder in tuple(self._written_in):
            try:
                self._files.sync_folder(folder)
            except FileNotFoundError:  # deleted, with all that this commit would name: it fails, later ones need not
                self._written_in.discard(folder)
                raise
            except PermissionError:  # above the directory: ours to pass through, not to open
                if folder.is_relative_to(self.path):
                    raise
            self._written_in.discard(folder)

    def _begin_anew(self) -> None:
        self._index.close()
        self._uncommitted = {}
        self._open()

    # ---- reading

    def read(self, file: StoredFile, *into: memoryview) -> None:
        """One positional read for each place of the data, then their checksum; encrypted, they are opened where they lie."""
        assert sum(map(len, into)) == file.size
        got = 0
        for part in into:
            try:
                got += self._files.read(self.path / file.name, file.offset + got, part)
            except OSError as error:
                raise CorruptFile(f"{file.name}: {error.strerror}") from error
        self.bytes_read += got
        if got != file.size:
            raise CorruptFile(f"{file.name}: {got} bytes where {file.size} were written")
        if self._cipher is not None:
            self._open_sealed(self._cipher, file, into)
        elif checksum(*into) != file.checksum:
            raise CorruptFile(f"{file.name}: the checksum is not that of what was written")

    def _open_sealed(self, cipher: Cipher, file: StoredFile, data: Sequence[memoryview]) -> None:
        try:
            cipher.open_file(file.secret, file.checksum, data, self._about(file.name, file.first, file.rows))
        except CorruptFile as error:
            raise CorruptFile(f"{file.name}: {error}") from error

    def holds(self, file: StoredFile) -> bool:
        return os.path.isfile(self.path / file.name)  # what cannot be looked at is not there

    # ---- removing

    def quarantine(self, file: StoredFile) -> None:
        target = self.path / "quarantine" / Path(file.name).name
        try:
            target.parent.mkdir(mode=0o700, exist_ok=True)
            self._files.rename(self.path / file.name, target)
            with self._shared.mutex:
                self._own -= file.file_bytes
                self._shared.foreign += file.file_bytes
                self._shared.reclaimable += file.file_bytes
        except OSError as error:
            log.warning("cannot quarantine %s: %s", file.name, error.strerror)

    def remove(self, files: Iterable[StoredFile]) -> None:
        files = tuple(files)
        freed = self._removed(files)
        self._own -= freed
        if freed < sum(f.file_bytes for f in files) and not any(map(self.holds, files)):
            self._count()  # another store was faster: to it they were nobody's

    def _removed(self, files: Iterable[StoredFile]) -> int:
        """Remove them; the bytes this gives back."""
        return sum(f.file_bytes for f in files if self.holds(f) and self._discard(self.path / f.name))

    def _discard(self, path: Path) -> bool:
        """Remove what no longer counts. What stays all the same is named in no manifest: the next start removes it."""
        try:
            self._files.remove(path)
        except OSError as error:
            log.warning("%s is no longer needed and could not be removed: %s", path, error.strerror)
            return False
        return True

    def room(self) -> int:
        """Bytes that may still be written."""
        try:
            free = self._files.free(self.path) - self.free_floor
        except OSError as error:  # nothing can be removed for it that would help; writing will say what is wrong
            log.warning("%s: it cannot be seen how much room there is (%s)", self.path, error.strerror)
            free = UNLIMITED
        return min(self.budget - self.used, free)

    def reclaim(self, wanted: int) -> None:
        with self._shared.mutex:
            goal = self._shared.foreign - wanted
            for path, size in self._quarantined():
                if self._shared.foreign > goal and self._discard(path):
                    self._shared.foreign -= size
            if self._shared.foreign > goal and (freed := self._index.forget_foreign(self._shared.foreign - goal, self._served())):
                log.warning("%d files of other models' memories are removed: the disk budget is used up", len(freed))
                self._shared.foreign -= self._removed(freed)
            # what is left then belongs to pinned agents
            self._shared.reclaimable = max(0, self._shared.reclaimable - wanted) if self._shared.foreign <= goal else 0

    def _quarantined(self) -> list[tuple[Path, int]]:
        """Damaged files, the oldest first, and their bytes."""
        found: list[tuple[float, Path, int]] = []
        for path in (self.path / "quarantine").glob("*"):
            with suppress(FileNotFoundError):  # another store has removed it
                if path.is_file():
                    found.append(((stat := path.stat()).st_mtime, path, stat.st_size))
        return [(path, size) for _, path, size in sorted(found)]

    def _collect_garbage(self) -> None:
        """Remove what a crash between data and manifest left; name what is not ours, and leave it."""
        for name in self._nobodys():
            path = self.path / name
            if path.suffix in (".safetensors", ".tmp") and path.is_file() and not self._shared.is_new:
                self._discard(path)
            else:
                log.warning("%s is in no manifest: left alone, and not used", path)

    def _nobodys(self) -> list[str]:
        """Files that no manifest names, and that no store is writing."""
        there = list(self._files_in(*FOLDERS))
        # in this order: what another store writes meanwhile is not there yet, or unfinished, or known
        unfinished = self._shared.unfinished()
        known = self._index.file_names()
        return [n for n in there if n not in known and Path(n).with_suffix(".safetensors").as_posix() not in unfinished]

    def _files_in(self, *folders: str) -> Iterator[str]:
        """Names of all files two levels down, as the manifest has them; pathlib would take half a second for 20,000."""
        for folder in folders:
            for shard in os.scandir(self.path / folder) if (self.path / folder).is_dir() else ():
                for file in os.scandir(shard.path) if shard.is_dir() else ():
                    yield f"{folder}/{shard.name}/{file.name}"

    def close(self) -> None:
        try:
            self._index.close()
        finally:
            self._shared.leave(self)


def size_of(path: Path) -> int:
    """0 if it is gone: another store of the directory has removed it, or given it its name."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


@cache
def header_bytes(plane: Plane, rows: int) -> int:
    """What `file_header` will take, or a block more."""
    about = {"key": "0" * 64, "parent": "0" * 64, "namespace": "0" * 64, "tokens": "0" * 8 * PAGE_TOKENS}
    return len(file_header(plane, rows, about))
