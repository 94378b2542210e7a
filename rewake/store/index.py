"""The manifest: which pages and branches exist, in SQLite. What it does not name is not remembered."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from rewake.errors import StoreError
from rewake.store.base import AgentRecord, BranchRecord, Commit, PageRecord, Snapshot, StoredFile
from rewake.store.crypto import Cipher
from rewake.store.files import Files
from rewake.store.sealed import Sealing

__all__ = ["VERSION", "Index"]

VERSION = 3
CHECKPOINT_SECONDS = 5.0  # how long the log may be in somebody else's use
FILE = "name, first, rows, at, size, checksum, secret"
FILE_COLUMNS = (
    "name TEXT NOT NULL, first INTEGER NOT NULL, rows INTEGER NOT NULL, at INTEGER NOT NULL, size INTEGER NOT NULL,"
    " checksum BLOB NOT NULL, secret BLOB NOT NULL DEFAULT x''"
)
AGENTS = """
CREATE TABLE agents (
    signature BLOB NOT NULL, id TEXT PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, pinned INTEGER NOT NULL, ttl REAL
) WITHOUT ROWID;
"""
SEGMENTS = f"""
CREATE TABLE segments (
    branch TEXT NOT NULL, plane INTEGER NOT NULL, {FILE_COLUMNS}, PRIMARY KEY (branch, plane, first)
) WITHOUT ROWID;
"""
# What a page has beside its first plane, which is in `pages`.
PLANES = f"""
CREATE TABLE planes (
    signature BLOB NOT NULL, key BLOB NOT NULL, plane INTEGER NOT NULL, {FILE_COLUMNS}, PRIMARY KEY (signature, key, plane, first)
) WITHOUT ROWID;
"""
# One row: the proof of the key that the directory is encrypted with, empty if it is not.
ENCRYPTION = "CREATE TABLE encryption (proof BLOB NOT NULL); INSERT INTO encryption VALUES (x'{}');"
SCHEMA = f"""
CREATE TABLE pages (
    signature BLOB NOT NULL, key BLOB NOT NULL, parent BLOB NOT NULL, namespace TEXT NOT NULL, depth INTEGER NOT NULL,
    tokens BLOB NOT NULL, {FILE_COLUMNS}, PRIMARY KEY (signature, key)
) WITHOUT ROWID;
CREATE TABLE branches (
    signature BLOB NOT NULL, id TEXT PRIMARY KEY, namespace TEXT NOT NULL, agent TEXT, parent BLOB NOT NULL,
    tokens BLOB NOT NULL, created REAL NOT NULL, used REAL NOT NULL, turns BLOB NOT NULL DEFAULT x''
) WITHOUT ROWID;
{SEGMENTS}
{PLANES}
{AGENTS}
"""
# Only where several models are served: what each was when it was loaded last. Older versions do not miss it.
SERVED = "CREATE TABLE IF NOT EXISTS served (model TEXT PRIMARY KEY, signature BLOB NOT NULL) WITHOUT ROWID"
FROM_1 = f"""
ALTER TABLE pages ADD COLUMN secret BLOB NOT NULL DEFAULT x'';
ALTER TABLE segments ADD COLUMN secret BLOB NOT NULL DEFAULT x'';
ALTER TABLE branches ADD COLUMN turns BLOB NOT NULL DEFAULT x'';
{AGENTS}
"""
FROM_2 = f"""
ALTER TABLE segments RENAME TO old_segments;
{SEGMENTS}
INSERT INTO segments SELECT branch, 0, {FILE} FROM old_segments;
DROP TABLE old_segments;
{PLANES}
"""

TABLES = ("pages", "planes", "segments")  # that name files

log = logging.getLogger(__name__)


class Index:
    """One connection, used by one thread at a time: the writer's once the server runs."""

    def __init__(self, path: Path, signature: bytes, files: Files, cipher: Cipher | None = None) -> None:
        """Open or create the manifest. Raises StoreError if a newer Rewake wrote it, if it is damaged, or if `cipher` is not its own."""
        self.signature = signature
        self._sealing = Sealing(cipher, signature) if cipher is not None else None
        self._files = files
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            os.chmod(path, 0o600)
            self._path, self._inode = path, os.stat(path).st_ino
            # FULL: what was committed survives a power cut. WAL: one fsync a commit.
            self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            self.is_new = version == 0
            proof = cipher.proof if cipher is not None else b""
            if version < VERSION:
                script = (SCHEMA + ENCRYPTION.format(proof.hex()), FROM_1 + ENCRYPTION.format("") + FROM_2, FROM_2)[version]
                self._db.executescript(f"BEGIN; {script} PRAGMA user_version = {VERSION}; COMMIT;")
            found = self._db.execute("SELECT proof FROM encryption").fetchone() if version <= VERSION else None
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{path} cannot be read as a manifest ({error}): move the directory away to start anew") from error
        if version > VERSION:
            raise StoreError(f"{path} was written by a newer version of rewake (format {version}, we know {VERSION})")
        if found != (proof,):
            self._db.close()
            raise StoreError(f"{path.parent} {refusal(found, proof)}")
        if proof:
            # what is deleted is overwritten, in the file and, by emptying it, in the log that a killed process may have left
            self._db.execute("PRAGMA secure_delete = ON")
            self._empty_log()

    def is_in_place(self) -> bool:
        """Whether the manifest's file is still there: nothing committed to a removed one would be found again."""
        try:
            return os.stat(self._path).st_ino == self._inode
        except OSError:
            return False

    def load(self) -> Snapshot:
        """All of it. Raises StoreError if it cannot be read."""
        try:
            return self._believed(self._load())
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self._path} is damaged ({error}): move the directory away to start anew") from error

    def _believed(self, stored: Snapshot) -> Snapshot:
        if self._sealing is None:
            return stored
        opened, damaged = self._sealing.opened(stored)
        if damaged != Commit():
            log.warning("%s has records that are not what was written: forgotten, and computed again", self._path)
            self.commit(damaged)
        return opened

    def _load(self) -> Snapshot:
        planes: dict[bytes, list[StoredFile]] = {}
        for key, *file in self._db.execute(
            f"SELECT key, {FILE}, plane FROM planes WHERE signature = ? ORDER BY key, plane, first", (self.signature,)
        ):
            planes.setdefault(key, []).append(StoredFile(*file))
        pages = tuple(
            PageRecord(key, parent, depth, namespace, tokens, (StoredFile(*file), *planes.get(key, ())))
            for key, parent, depth, namespace, tokens, *file in self._db.execute(
                f"SELECT key, parent, depth, namespace, tokens, {FILE} FROM pages WHERE signature = ? ORDER BY depth",
                (self.signature,),
            )
        )
        segments: dict[str, list[StoredFile]] = {}
        for branch, *file in self._db.execute(f"SELECT branch, {FILE}, plane FROM segments ORDER BY branch, plane, first"):
            segments.setdefault(branch, []).append(StoredFile(*file))
        branches = tuple(
            BranchRecord(id, namespace, agent, parent, tokens, tuple(segments.get(id, ())), created, used, turns)
            for id, namespace, agent, parent, tokens, created, used, turns in self._db.execute(
                "SELECT id, namespace, agent, parent, tokens, created, used, turns FROM branches WHERE signature = ?", (self.signature,)
            )
        )
        agents = tuple(
            AgentRecord(id, namespace, name, created, used, bool(pinned), ttl)
            for id, namespace, name, created, used, pinned, ttl in self._db.execute(
                "SELECT id, namespace, name, created, used, pinned, ttl FROM agents WHERE signature = ?", (self.signature,)
            )
        )
        return Snapshot(pages, branches, agents)

    def bytes_by_signature(self) -> dict[bytes, int]:
        """What the files that count take, of each signature."""
        pages, planes = (f"SELECT signature, SUM(at + size) FROM {table} GROUP BY signature" for table in ("pages", "planes"))
        segments = "SELECT signature, SUM(at + size) FROM segments s, branches b WHERE s.branch = b.id GROUP BY signature"
        taken: Counter[bytes] = Counter()
        for query in (pages, planes, segments):
            taken.update(dict(self._db.execute(query).fetchall()))
        return taken

    def note_served(self, model: str) -> None:
        """Remember which signature a model has that is served beside others: its memories are not foreign while it is not loaded."""
        self._db.execute(SERVED)
        self._db.execute("INSERT OR REPLACE INTO served VALUES (?, ?)", (model, self.signature))

    def served(self, models: Sequence[str]) -> set[bytes]:
        """What was noted for these."""
        if not models:
            return set()
        self._db.execute(SERVED)
        return {s for (s,) in self._db.execute(f"SELECT signature FROM served WHERE model IN ({slots(len(models))})", tuple(models))}

    def file_names(self) -> set[str]:
        """Every file that counts, of all signatures."""
        return {name for table in TABLES for (name,) in self._db.execute(f"SELECT name FROM {table}")}

    def commit(self, commit: Commit) -> None:
        """Make it true, all or nothing. Raises StoreError if what is gone from an encrypted manifest can still be found on disk."""
        with self._transaction() as cursor:
            self._apply(cursor, self._sealing.sealed(commit) if self._sealing is not None else commit)
        if self._sealing is not None and (commit.gone_pages or commit.gone_branches or commit.gone_agents):
            self._empty_log()

    def _empty_log(self) -> None:
        """Nothing is forgotten as long as the write-ahead log has the keys it was sealed with."""
        # SQLite waits for readers, but not for the checkpoint of another connection: another model's, in this process
        until = time.monotonic() + CHECKPOINT_SECONDS
        while (busy := self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]) and time.monotonic() < until:
            time.sleep(0.01)
        if busy:
            raise StoreError(f"what was forgotten is still in {self._path}-wal: close the other program that reads the manifest")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        with closing(self._db.cursor()) as cursor:
            self._files.begin(cursor)
            try:
                yield cursor
                self._files.commit(cursor)
            except BaseException:
                if self._db.in_transaction:
                    cursor.execute("ROLLBACK")
                raise

    def _apply(self, cursor: sqlite3.Cursor, commit: Commit) -> None:
        for page in commit.pages:
            cursor.execute(
                f"INSERT OR REPLACE INTO pages (signature, key, parent, namespace, depth, tokens, {FILE}) VALUES ({slots(13)})",
                (self.signature, page.key, page.parent, page.namespace, page.depth, page.tokens, *file_columns(page.files[0])),
            )
            cursor.execute("DELETE FROM planes WHERE signature = ? AND key = ?", (self.signature, page.key))
            cursor.executemany(
                f"INSERT INTO planes (signature, key, plane, {FILE}) VALUES ({slots(10)})",
                [(self.signature, page.key, f.plane, *file_columns(f)) for f in page.files[1:]],
            )
        for branch in commit.branches:
            b = branch
            cursor.execute(
                "INSERT OR REPLACE INTO branches (signature, id, namespace, agent, parent, tokens, created, used, turns)"
                f" VALUES ({slots(9)})",
                (self.signature, b.id, b.namespace, b.agent, b.parent, b.tokens, b.created, b.used, b.turns),
            )
            cursor.execute("DELETE FROM segments WHERE branch = ?", (b.id,))
            cursor.executemany(
                f"INSERT INTO segments (branch, plane, {FILE}) VALUES ({slots(9)})",
                [(b.id, s.plane, *file_columns(s)) for s in b.segments],
            )
        cursor.executemany(
            f"INSERT OR REPLACE INTO agents (signature, id, namespace, name, created, used, pinned, ttl) VALUES ({slots(8)})",
            [(self.signature, a.id, a.namespace, a.name, a.created, a.used, a.pinned, a.ttl) for a in commit.agents],
        )
        for table in ("pages", "planes"):
            cursor.executemany(f"DELETE FROM {table} WHERE signature = ? AND key = ?", [(self.signature, key) for key in commit.gone_pages])
        cursor.executemany("DELETE FROM branches WHERE id = ?", [(id,) for id in commit.gone_branches])
        cursor.executemany("DELETE FROM segments WHERE branch = ?", [(id,) for id in commit.gone_branches])
        cursor.executemany("DELETE FROM agents WHERE id = ?", [(id,) for id in commit.gone_agents])

    def forget_foreign(self, wanted: int, served: Collection[bytes]) -> list[StoredFile]:
        """Forget branches of signatures that are not served, the least recently used first, until `wanted` bytes are not referenced.

        Whole branches go, and the pages only they needed; those of pinned agents stay. What can be removed is returned.
        """
        freed: list[StoredFile] = []
        with self._transaction() as cursor:
            oldest = cursor.execute(
                "SELECT id, signature, parent, namespace, agent FROM branches b"
                f" WHERE signature NOT IN ({slots(len(served))}) AND NOT EXISTS"
                " (SELECT 1 FROM agents a WHERE a.pinned AND a.signature = b.signature AND a.namespace = b.namespace AND a.name = b.agent)"
                " ORDER BY used",
                tuple(served),
            ).fetchall()
            for id, signature, parent, *owner in oldest:
                if sum(f.file_bytes for f in freed) >= wanted:
                    break
                freed += [StoredFile(*f) for f in cursor.execute(f"SELECT {FILE} FROM segments WHERE branch = ?", (id,))]
                cursor.execute("DELETE FROM segments WHERE branch = ?", (id,))
                cursor.execute("DELETE FROM branches WHERE id = ?", (id,))
                freed += self._forget_childless(cursor, signature, parent)
                of_owner = "signature = ? AND namespace = ? AND {} = ?"
                if not cursor.execute(f"SELECT 1 FROM branches WHERE {of_owner.format('agent')}", (signature, *owner)).fetchone():
                    cursor.execute(f"DELETE FROM agents WHERE {of_owner.format('name')}", (signature, *owner))
        if self._sealing is not None:
            self._empty_log()
        return freed

    def _forget_childless(self, cursor: sqlite3.Cursor, signature: bytes, key: bytes) -> list[StoredFile]:
        """A page nothing hangs from any more, and its ancestors as long as that is so."""
        freed: list[StoredFile] = []
        while True:
            needed = "SELECT 1 FROM {} WHERE signature = ? AND parent = ? LIMIT 1"
            if any(cursor.execute(needed.format(t), (signature, key)).fetchone() for t in ("pages", "branches")):
                return freed
            row = cursor.execute(f"SELECT parent, {FILE} FROM pages WHERE signature = ? AND key = ?", (signature, key)).fetchone()
            if row is None:
                return freed
            planes = cursor.execute(f"SELECT {FILE} FROM planes WHERE signature = ? AND key = ?", (signature, key)).fetchall()
            for table in ("pages", "planes"):
                cursor.execute(f"DELETE FROM {table} WHERE signature = ? AND key = ?", (signature, key))
            freed += [StoredFile(*row[1:]), *(StoredFile(*f) for f in planes)]
            key = row[0]

    def close(self) -> None:
        self._db.close()


def refusal(found: tuple[bytes] | None, proof: bytes) -> str:
    """Why a directory of the proof `found` is not opened with a key of `proof`, and what to do."""
    if found is None:
        return "does not say whether its memories are encrypted: move it away to start anew"
    if found == (b"",):
        return "holds memories that are not encrypted: start without --encrypt, or choose another --data"
    if not proof:
        return "holds encrypted memories: start with --encrypt, and with their key"
    return "is encrypted with another key: give that one, in REWAKE_KEY or in the key file, or choose another --data"


def file_columns(file: StoredFile) -> tuple[object, ...]:
    return (file.name, file.first, file.rows, file.offset, file.size, file.checksum, file.secret)


def slots(count: int) -> str:
    return ", ".join("?" * count)
