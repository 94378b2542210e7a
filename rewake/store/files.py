"""The file system, as far as the store needs it. Each method is one step that can fail or be the process's last.

`bench.faults` and the tests break one step at a time by overriding it.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Files"]

CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)  # Windows would translate line ends


class Files:
    """Steps of a write, in their order, and those of a read."""

    def write(self, path: Path, parts: Sequence[memoryview | bytes]) -> None:
        """A file of its own, for nobody else to read, on disk when this returns."""
        with open(self.create(path), "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part)
                while view:
                    view = view[self.append(file.fileno(), view) :]
            self.sync(file.fileno())

    def create(self, path: Path) -> int:
        return os.open(path, CREATE, 0o600)

    def append(self, fd: int, data: memoryview) -> int:
        """How many bytes were taken: it may be fewer than there are."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def sync_folder(self, folder: Path) -> None:
        if os.name == "nt":  # a folder cannot be opened there; renames are journalled by the file system
            return
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def begin(self, cursor: sqlite3.Cursor) -> None:
        cursor.execute("BEGIN IMMEDIATE")

    def commit(self, cursor: sqlite3.Cursor) -> None:
        cursor.execute("COMMIT")

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        """One positional read; how many bytes there were."""
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            return file.readinto(into) or 0

    def free(self, folder: Path) -> int:
        """Bytes that can still be written there, or where it will be made again if it has been deleted."""
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free
