"""A directory of memories: one safetensors file for each page and segment, and the manifest beside them.

    DIR/manifest.sqlite   what counts: nothing is remembered that is not in it
    DIR/pages/ab/KEY.safetensors, DIR/segments/ab/BRANCH-FIRST-NONCE.safetensors
    DIR/quarantine/       files that were not what had been written
    DIR/lock              held by the one process that owns the directory

Order of a write: data to a temporary file, fsync, rename, fsync of the folder; then the manifest, in one
transaction. Deletions go the other way round. `docs/format.md` has the bytes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from rewake.errors import CorruptFile, DirectoryLocked, StoreError
from rewake.quant import PageLayout
from rewake.store.base import Commit, Snapshot, StoredFile
from rewake.store.index import Index

__all__ = ["BLOCK", "FORMAT", "Directory", "checksum", "file_header"]

FORMAT = "rewake-page-1"
BLOCK = 4096  # headers are padded to it, so that the data can be read directly to where pages start
FOLDERS = ("pages", "segments")
CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)  # Windows would translate line ends

log = logging.getLogger(__name__)


def checksum(data: memoryview | bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def file_header(layout: PageLayout, about: Mapping[str, str]) -> bytes:
    """A safetensors header (length, then JSON padded with spaces) for the bytes of a page or segment of `layout`."""
    tensors: dict[str, object] = {"__metadata__": {"format": FORMAT, **about}}
    for layer, field, at in layout.arrays():
        shape = [layout.kv_heads, layout.rows, field.width]
        tensors[f"{layer}.{field.name}"] = {"dtype": field.dtype, "shape": shape, "data_offsets": [at, at + layout.field_bytes(field)]}
    text = json.dumps(tensors, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // BLOCK) * BLOCK - 8
    return length.to_bytes(8, "little") + text.ljust(length)


class Directory:
    """The store on a file system, for the pages of one signature. Owned by one process at a time."""

    def __init__(self, path: Path, signature: bytes, layout: PageLayout) -> None:
        """Create or open `path`. Raises DirectoryLocked if another process has it open, StoreError if it cannot be used."""
        self.path = path
        self.layout = layout
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FileLock(path / "lock", mode=0o600)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise DirectoryLocked(f"{path} is in use by another rewake process: stop it, or choose another --data") from None
        except OSError as error:
            raise StoreError(f"{path} cannot be used as a directory of memories ({error.strerror}): choose another --data") from error
        self._index = Index(path / "manifest.sqlite", signature)
        self._written_in: set[Path] = set()

    def load(self) -> Snapshot:
        """All records of the signature; also removes files that a crash left unreferenced."""
        self._collect_garbage()
        return self._index.load()

    def write(self, name: str, data: memoryview, first: int, rows: int, about: Mapping[str, str]) -> StoredFile:
        target = self.path / name
        if not target.parent.is_dir():
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._written_in |= {target.parent.parent, self.path}
        header = file_header(self.layout.with_rows(rows), about)
        temporary = target.with_suffix(".tmp")
        try:
            with open(os.open(temporary, CREATE, 0o600), "wb", buffering=0) as file:
                write_all(file.fileno(), header)
                write_all(file.fileno(), data)
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError:
            temporary.unlink(missing_ok=True)  # it may be the disk that is full
            raise
        self._written_in.add(target.parent)
        return StoredFile(name, first, rows, len(header), len(data), checksum(data))

    def commit(self, commit: Commit) -> None:
        folders, self._written_in = self._written_in, set()
        for folder in folders:
            fsync_folder(folder)
        self._index.check_in_place()
        self._index.commit(commit)

    def read(self, file: StoredFile, into: memoryview) -> None:
        """One positional read of the data, then their checksum."""
        assert len(into) == file.size
        try:
            with open(self.path / file.name, "rb", buffering=0) as opened:
                opened.seek(file.offset)
                got = opened.readinto(into)
        except OSError as error:
            raise CorruptFile(f"{file.name}: {error.strerror}") from error
        if got != file.size:
            raise CorruptFile(f"{file.name}: {got} bytes where {file.size} were written")
        if checksum(into) != file.checksum:
            raise CorruptFile(f"{file.name}: the checksum is not that of what was written")

    def quarantine(self, file: StoredFile) -> None:
        target = self.path / "quarantine" / Path(file.name).name
        try:
            target.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(self.path / file.name, target)
        except OSError as error:
            log.warning("cannot quarantine %s: %s", file.name, error.strerror)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        self._index.close()
        self._lock.release()

    def _collect_garbage(self) -> None:
        """Remove what a crash between data and manifest left; name what is not ours, and leave it."""
        known = self._index.file_names()
        for folder in FOLDERS:
            for path in sorted((self.path / folder).glob("*/*")):
                name = path.relative_to(self.path).as_posix()
                if name in known:
                    continue
                if path.suffix in (".safetensors", ".tmp") and path.is_file() and not self._index.is_new:
                    path.unlink()
                else:
                    log.warning("%s is in no manifest: left alone, and not used", path)


def write_all(fd: int, data: memoryview | bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def fsync_folder(folder: Path) -> None:
    if os.name == "nt":  # a folder cannot be opened there; renames are journalled by the file system
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
