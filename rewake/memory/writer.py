"""Write-behind: one thread that makes memories durable, in the order in which they were handed over.

All that waits is written, then committed in one transaction, so that a burst of pages costs one sync of the
manifest. Reads rows that the engine never touches again (a page's rows below its length are immutable), so nothing
is copied for it; whoever hands over a page holds it until `done`. Knows nothing of agents or matching.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rewake.memory.residency import Arena, Post
from rewake.quant import PAGE_TOKENS, PageLayout
from rewake.store.base import BranchRecord, Commit, PageRecord, Store, StoredFile

__all__ = ["Forget", "Job", "SavePage", "SaveTurn", "Writer"]

log = logging.getLogger(__name__)


class Job(Protocol):
    """Something to write. `write` runs on the writer thread, `done` on the engine's: with the error, if it failed."""

    @property
    def done(self) -> Callable[[Exception | None], None]: ...

    def write(self, store: Store) -> Commit: ...

    def obsolete(self) -> tuple[str, ...]:
        """Files to remove once it is committed."""
        ...


@dataclass(eq=False)
class SavePage:
    """A full page. `file` is there when it is done."""

    key: bytes
    parent: bytes
    depth: int
    namespace: str
    tokens: bytes
    data: Arena
    done: Callable[[Exception | None], None]
    file: StoredFile | None = None

    def write(self, store: Store) -> Commit:
        name = f"pages/{self.key.hex()[:2]}/{self.key.hex()}.safetensors"
        about = {"key": self.key.hex(), "parent": self.parent.hex(), "namespace": self.namespace, "tokens": self.tokens.hex()}
        self.file = store.write(name, self.data.data, 0, PAGE_TOKENS, about)
        return Commit(pages=(PageRecord(self.key, self.parent, self.depth, self.namespace, self.tokens, self.file),))

    def obsolete(self) -> tuple[str, ...]:
        return ()


@dataclass(eq=False)
class SaveTurn:
    """A branch as it stands after a turn: rows [first, last) of its page go into a new segment."""

    branch: BranchRecord  # with the segments there are already
    ancestors: frozenset[bytes]
    first: int
    last: int
    layout: PageLayout
    page: Arena | None
    replaced: tuple[StoredFile, ...]
    done: Callable[[Exception | None], None]
    segments: tuple[StoredFile, ...] = field(default=(), init=False)

    def write(self, store: Store) -> Commit:
        b = self.branch
        self.segments = b.segments
        if self.last > self.first:
            assert self.page is not None
            rows = self.last - self.first
            data = np.empty(self.layout.with_rows(rows).page_bytes, np.uint8)
            self.layout.copy_rows(self.page, self.first, data, rows, out=True)
            # the nonce: a segment never overwrites one that the manifest may still name
            name = f"segments/{b.id[:2]}/{b.id}-{self.first}-{secrets.token_hex(4)}.safetensors"
            about = {"branch": b.id, "parent": b.parent.hex(), "namespace": b.namespace, "tokens": b.tokens.hex()}
            self.segments += (store.write(name, data.data, self.first, rows, about),)
        record = BranchRecord(b.id, b.namespace, b.agent, b.parent, b.tokens, self.segments, b.created, b.used)
        return Commit(branches=(record,))

    def obsolete(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.replaced)


@dataclass(eq=False)
class Forget:
    """What no longer counts, and its files; damaged ones are kept aside instead of removed."""

    commit: Commit
    files: tuple[str, ...]
    done: Callable[[Exception | None], None]
    damaged: tuple[StoredFile, ...] = ()

    def write(self, store: Store) -> Commit:
        for file in self.damaged:
            store.quarantine(file)
        return self.commit

    def obsolete(self) -> tuple[str, ...]:
        return self.files


class Writer:
    """The thread, and its queue."""

    def __init__(self, store: Store, post: Post) -> None:
        self.store = store
        self.post = post
        self._jobs: deque[Job] = deque()
        self._waiting = threading.Condition()
        self._closing = False
        self._unsaved_pages: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, name="rewake-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        with self._waiting:
            self._jobs.append(job)
            self._waiting.notify()

    def close(self) -> None:
        """Write all that waits, then stop."""
        with self._waiting:
            self._closing = True
            self._waiting.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._save(batch)

    def _next_batch(self) -> list[Job]:
        """All that waits, up to and without the next `Forget`, which goes alone: order matters to it. Empty at the end."""
        with self._waiting:
            self._waiting.wait_for(lambda: self._jobs or self._closing)
            batch: list[Job] = []
            while self._jobs and not (batch and isinstance(self._jobs[0], Forget)):
                batch.append(self._jobs.popleft())
                if isinstance(batch[0], Forget):
                    break
            return batch

    def _save(self, jobs: list[Job]) -> None:
        written = [(job, *self._write(job)) for job in jobs]
        failed: Exception | None = None
        try:
            self.store.commit(merge([commit for _, commit, _ in written if commit is not None]))
        except Exception as caught:  # the edge of the thread: whatever it was, the jobs failed
            log.exception("memories could not be committed")
            failed = caught
        for job, _, error in written:
            if error is None and failed is None:
                self._remove(job.obsolete())
            self._report(job, error or failed)

    def _remove(self, names: tuple[str, ...]) -> None:
        """What cannot be removed is no longer in the manifest; the next start removes it."""
        try:
            self.store.remove(names)
        except OSError as error:
            log.warning("a file that is no longer needed could not be removed: %s", error)

    def _write(self, job: Job) -> tuple[Commit | None, Exception | None]:
        try:
            if isinstance(job, SaveTurn) and not job.ancestors.isdisjoint(self._unsaved_pages):
                raise OSError("a page before it could not be saved")
            commit = job.write(self.store)
            if isinstance(job, SavePage):
                self._unsaved_pages.discard(job.key)
            return commit, None
        except Exception as error:  # noqa: BLE001 (as above)
            log.error("a memory could not be saved: %s", error)
            if isinstance(job, SavePage):
                self._unsaved_pages.add(job.key)
            return None, error

    def _report(self, job: Job, error: Exception | None) -> None:
        if isinstance(job, SavePage) and error is not None:
            self._unsaved_pages.add(job.key)
        self.post(lambda: job.done(error))


def merge(commits: list[Commit]) -> Commit:
    return Commit(
        tuple(p for c in commits for p in c.pages),
        tuple(b for c in commits for b in c.branches),
        tuple(k for c in commits for k in c.gone_pages),
        tuple(b for c in commits for b in c.gone_branches),
    )
