"""The manifest: which pages and branches exist, in SQLite. What it does not name is not remembered."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from rewake.errors import StoreError
from rewake.store.base import BranchRecord, Commit, PageRecord, Snapshot, StoredFile

__all__ = ["VERSION", "Index"]

VERSION = 1
FILE = "name, first, rows, at, size, checksum"
FILE_COLUMNS = (
    "name TEXT NOT NULL, first INTEGER NOT NULL, rows INTEGER NOT NULL, at INTEGER NOT NULL, size INTEGER NOT NULL, checksum BLOB NOT NULL"
)
SCHEMA = f"""
CREATE TABLE pages (
    signature BLOB NOT NULL, key BLOB NOT NULL, parent BLOB NOT NULL, namespace TEXT NOT NULL, depth INTEGER NOT NULL,
    tokens BLOB NOT NULL, {FILE_COLUMNS}, PRIMARY KEY (signature, key)
) WITHOUT ROWID;
CREATE TABLE branches (
    signature BLOB NOT NULL, id TEXT PRIMARY KEY, namespace TEXT NOT NULL, agent TEXT, parent BLOB NOT NULL,
    tokens BLOB NOT NULL, created REAL NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE segments (branch TEXT NOT NULL, {FILE_COLUMNS}, PRIMARY KEY (branch, first)) WITHOUT ROWID;
"""


class Index:
    """One connection, used by one thread at a time: the writer's once the server runs."""

    def __init__(self, path: Path, signature: bytes) -> None:
        """Open or create the manifest. Raises StoreError if a newer Rewake wrote it, or if it is damaged."""
        self.signature = signature
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            os.chmod(path, 0o600)
            self._path, self._inode = path, os.stat(path).st_ino
            # FULL: what was committed survives a power cut. WAL: one fsync a commit.
            self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            self.is_new = version == 0
            if self.is_new:
                self._db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{path} cannot be read as a manifest ({error}): move the directory away to start anew") from error
        if version > VERSION:
            raise StoreError(f"{path} was written by a newer version of rewake (format {version}, we know {VERSION})")

    def check_in_place(self) -> None:
        """Raise StoreError if the manifest's file was removed or replaced: nothing committed to it would be found again."""
        try:
            same = os.stat(self._path).st_ino == self._inode
        except OSError:
            same = False
        if not same:
            raise StoreError(f"{self._path} is gone: memories are not saved until rewake is started again")

    def load(self) -> Snapshot:
        """All of it. Raises StoreError if it cannot be read."""
        try:
            return self._load()
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self._path} is damaged ({error}): move the directory away to start anew") from error

    def _load(self) -> Snapshot:
        pages = tuple(
            PageRecord(key, parent, depth, namespace, tokens, StoredFile(*file))
            for key, parent, depth, namespace, tokens, *file in self._db.execute(
                f"SELECT key, parent, depth, namespace, tokens, {FILE} FROM pages WHERE signature = ? ORDER BY depth",
                (self.signature,),
            )
        )
        segments: dict[str, list[StoredFile]] = {}
        for branch, *file in self._db.execute(f"SELECT branch, {FILE} FROM segments ORDER BY branch, first"):
            segments.setdefault(branch, []).append(StoredFile(*file))
        branches = tuple(
            BranchRecord(id, namespace, agent, parent, tokens, tuple(segments.get(id, ())), created, used)
            for id, namespace, agent, parent, tokens, created, used in self._db.execute(
                "SELECT id, namespace, agent, parent, tokens, created, used FROM branches WHERE signature = ?", (self.signature,)
            )
        )
        return Snapshot(pages, branches)

    def file_names(self) -> set[str]:
        """Every file that counts, of all signatures."""
        return {name for table in ("pages", "segments") for (name,) in self._db.execute(f"SELECT name FROM {table}")}

    def commit(self, commit: Commit) -> None:
        """Make it true, all or nothing."""
        with closing(self._db.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            try:
                self._apply(cursor, commit)
                cursor.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    cursor.execute("ROLLBACK")
                raise

    def _apply(self, cursor: sqlite3.Cursor, commit: Commit) -> None:
        for page in commit.pages:
            cursor.execute(
                "INSERT OR REPLACE INTO pages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (self.signature, page.key, page.parent, page.namespace, page.depth, page.tokens, *file_columns(page.file)),
            )
        for branch in commit.branches:
            cursor.execute(
                "INSERT OR REPLACE INTO branches VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (self.signature, branch.id, branch.namespace, branch.agent, branch.parent, branch.tokens, branch.created, branch.used),
            )
            cursor.execute("DELETE FROM segments WHERE branch = ?", (branch.id,))
            cursor.executemany(
                "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)", [(branch.id, *file_columns(s)) for s in branch.segments]
            )
        cursor.executemany("DELETE FROM pages WHERE signature = ? AND key = ?", [(self.signature, key) for key in commit.gone_pages])
        cursor.executemany("DELETE FROM branches WHERE id = ?", [(id,) for id in commit.gone_branches])
        cursor.executemany("DELETE FROM segments WHERE branch = ?", [(id,) for id in commit.gone_branches])

    def close(self) -> None:
        self._db.close()


def file_columns(file: StoredFile) -> tuple[object, ...]:
    return (file.name, file.first, file.rows, file.offset, file.size, file.checksum)
