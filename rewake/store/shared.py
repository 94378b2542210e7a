"""What the stores of one directory have in common: one store for each model that a process serves.

The lock belongs to the process, files that are nobody's to all of them, and each knows which files the others are writing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from rewake.errors import DirectoryLocked, StoreError

__all__ = ["Shared"]


class Sharer(Protocol):
    """A store, as the others see it."""

    signature: bytes

    def unfinished(self) -> tuple[str, ...]:
        """Names of files that it has begun to write and that no commit names yet."""
        ...


class Shared:
    """One for each directory that is open. `models` are the names of all that are served, if they are several.

    `foreign` counts bytes of files that belong to none of the models served: of others, damaged, or of no manifest; `reclaimable` is
    the part of it that may be removed when room is needed. Both, and the manifest's records of others, are changed with `mutex` held.
    """

    def __init__(self, path: Path, models: Sequence[str] = ()) -> None:
        self.path = path
        self.models = tuple(models) if len(models) > 1 else ()
        self.mutex = threading.RLock()
        self.foreign = 0
        self.reclaimable = 0
        self.is_new = False  # there was no manifest: files that are there all the same are left alone
        self.is_kept = False  # the lock stays while no store is open
        self._stores: list[Sharer] = []
        self._lock: FileLock | None = None
        self._inode = 0

    def join(self, store: Sharer) -> None:
        """Take the lock, unless another store of this process has it. Raises DirectoryLocked, StoreError, OSError."""
        with self.mutex:
            others = [s for s in self._stores if s is not store]
            if any(s.signature == store.signature for s in others):
                raise StoreError("two of the models that are served are the same: their memories are, too; name one of them")
            if not self._is_locked():
                self._unlock()  # of a directory that was deleted
                lock = FileLock(self.path / "lock", mode=0o600, thread_local=False)  # the writer may have to begin anew
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    message = f"{self.path} is in use by another rewake process: stop it, or choose another --data"
                    raise DirectoryLocked(message) from None
                self._lock, self._inode = lock, os.stat(lock.lock_file).st_ino
            self._stores = [*others, store]

    def leave(self, store: Sharer) -> None:
        with self.mutex:
            self._stores = [s for s in self._stores if s is not store]
            if not (self._stores or self.is_kept):
                self._unlock()

    def close(self) -> None:
        """Give the lock back, once no store is open."""
        with self.mutex:
            self.is_kept = False
            if not self._stores:
                self._unlock()

    def _is_locked(self) -> bool:
        try:
            return self._lock is not None and os.stat(self._lock.lock_file).st_ino == self._inode
        except OSError:
            return False

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def signatures(self) -> set[bytes]:
        """Of the stores that are open."""
        return {store.signature for store in self._stores}

    def unfinished(self) -> set[str]:
        """Names of files that some store is writing."""
        return {name for store in self._stores for name in store.unfinished()}
