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
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rewake.errors import StoreError, StoreLost
from rewake.memory.residency import Arena, Post
from rewake.planes import PagePlanes
from rewake.quant import PAGE_TOKENS
from rewake.store.base import AgentRecord, BranchRecord, Commit, PageRecord, Store, StoredFile

__all__ = ["Amend", "Job", "Reclaim", "SavePage", "SaveTurn", "Writer"]

log = logging.getLogger(__name__)


class Job(Protocol):
    """Something to write. `write` runs on the writer thread, `tell` on the engine's, with the error if it failed.

    Who waits for a job is told what was written, and does not hold the job: the two would be garbage that only a full collection finds,
    and with them all that is known of a request.
    """

    def tell(self, error: Exception | None) -> None: ...

    @property
    def num_rows(self) -> int:
        """Rows that it writes."""
        ...

    @property
    def planes(self) -> tuple[int, ...]:
        """Of which planes."""
        ...

    def write(self, store: Store) -> Commit: ...

    @property
    def replaced(self) -> tuple[StoredFile, ...]:
        """Files to remove once it is committed."""
        ...


@dataclass(eq=False)
class SavePage:
    """Planes of a full page, in place of those of the same tokens in `replaced`. `done` is told of all the files it has then."""

    name: str
    key: bytes
    parent: bytes
    depth: int
    namespace: str
    tokens: bytes
    layout: PagePlanes
    data: dict[int, list[Arena]]  # of each plane that is written, what each of its slots holds
    kept: tuple[StoredFile, ...]
    replaced: tuple[StoredFile, ...]
    done: Callable[[Exception | None, tuple[StoredFile, ...]], None]
    files: tuple[StoredFile, ...] = ()
    num_rows: int = PAGE_TOKENS

    @property
    def planes(self) -> tuple[int, ...]:
        return tuple(self.data)

    def write(self, store: Store) -> Commit:
        about = {"key": self.key.hex(), "parent": self.parent.hex(), "namespace": self.namespace, "tokens": self.tokens.hex()}
        written = []
        for number, slots in self.data.items():
            first, parts = sum(f.rows for f in self.kept if f.plane == number), slots
            if first:  # those before are in segments that are kept
                plane = self.layout.planes[number]
                parts = [np.empty(plane.num_bytes(PAGE_TOKENS - first), np.uint8)]
                plane.copy_rows(slots, first, parts[0], PAGE_TOKENS - first, out=True)
            data = [part.data for part in parts]
            written.append(store.write(plane_name(self.name, number), data, first, PAGE_TOKENS - first, about, number))
        self.files = tuple(sorted((*self.kept, *written), key=lambda f: (f.plane, f.first)))
        return Commit(pages=(PageRecord(self.key, self.parent, self.depth, self.namespace, self.tokens, self.files),))

    def tell(self, error: Exception | None) -> None:
        self.done(error, self.files)


@dataclass(eq=False)
class SaveTurn:
    """A branch as it stands after a turn: rows [first, last) of its page go into a new segment of each plane.

    `done` is told of all the segments it has then.
    """

    branch: BranchRecord  # with the segments there are already
    owner: tuple[AgentRecord, ...]
    ancestors: frozenset[bytes]
    first: int
    last: int
    layout: PagePlanes
    page: dict[int, list[Arena]]
    replaced: tuple[StoredFile, ...]
    done: Callable[[Exception | None, tuple[StoredFile, ...]], None]
    segments: tuple[StoredFile, ...] = field(default=(), init=False)

    @property
    def num_rows(self) -> int:
        return self.last - self.first

    @property
    def planes(self) -> tuple[int, ...]:
        return self.layout.all

    def write(self, store: Store) -> Commit:
        b = self.branch
        self.segments = b.segments
        if self.num_rows > 0:
            # the nonce: a segment never overwrites one that the manifest may still name
            name = f"segments/{b.id[:2]}/{b.id}-{self.first}-{secrets.token_hex(4)}.safetensors"
            about = {"branch": b.id, "parent": b.parent.hex(), "namespace": b.namespace, "tokens": b.tokens.hex()}
            for number, plane in enumerate(self.layout.planes):
                data = np.empty(plane.num_bytes(self.num_rows), np.uint8)
                plane.copy_rows(self.page[number], self.first, data, self.num_rows, out=True)
                self.segments += (store.write(plane_name(name, number), [data.data], self.first, self.num_rows, about, number),)
        return Commit(branches=(replace(b, segments=self.segments),), agents=self.owner)

    def tell(self, error: Exception | None) -> None:
        self.done(error, self.segments)


def plane_name(name: str, plane: int) -> str:
    """The first plane's file has the plain name."""
    return name.replace(".safetensors", f".{plane}.safetensors") if plane else name


@dataclass(eq=False)
class Amend:
    """A change of the manifest, and the files that no longer count then; damaged ones are kept aside instead of removed."""

    commit: Commit
    replaced: tuple[StoredFile, ...]
    done: Callable[[Exception | None], None]
    damaged: tuple[StoredFile, ...] = ()
    num_rows: int = 0
    planes: tuple[int, ...] = ()

    def write(self, store: Store) -> Commit:
        for file in self.damaged:
            store.quarantine(file)
        return self.commit

    def tell(self, error: Exception | None) -> None:
        self.done(error)


@dataclass(eq=False)
class Reclaim:
    """Room is needed for `wanted` bytes: what this model cannot use goes."""

    wanted: int
    replaced: tuple[StoredFile, ...] = ()
    num_rows: int = 0
    planes: tuple[int, ...] = ()

    def write(self, store: Store) -> Commit:
        store.reclaim(self.wanted)
        return Commit()

    def tell(self, error: Exception | None) -> None: ...


@dataclass(eq=False)
class Resume:
    """The engine knows that the directory has been begun anew: what is handed over from here on rests on what is there."""

    replaced: tuple[StoredFile, ...] = ()
    num_rows: int = 0
    planes: tuple[int, ...] = ()

    def write(self, store: Store) -> Commit:
        return Commit()

    def tell(self, error: Exception | None) -> None: ...


ALONE = (Amend, Reclaim, Resume)


class Writer:
    """The thread, and its queue. `lost` is called on the engine thread if the directory was deleted, and begun anew."""

    def __init__(self, store: Store, post: Post, lost: Callable[[], None]) -> None:
        self.store = store
        self.post = post
        self.lost = lost
        self.waiting_bytes = 0  # of files that wait to be written; counted on the engine thread
        self._failing = False
        self._is_lost = False  # begun anew, and the engine does not know it yet
        self._jobs: deque[Job] = deque()
        self._waiting = threading.Condition()
        self._closing = False
        self._unsaved_pages: set[bytes] = set()
        self._thread = threading.Thread(target=self._run, name="rewake-writer", daemon=True)
        self._thread.start()

    def submit(self, *jobs: Job) -> None:
        """Jobs handed over together are committed together, unless one must go alone."""
        self.waiting_bytes += sum(map(self.size_of, jobs))
        with self._waiting:
            self._jobs.extend(jobs)
            self._waiting.notify()

    def size_of(self, job: Job) -> int:
        return sum(self.store.file_bytes(job.num_rows, plane) for plane in job.planes) if job.num_rows else 0

    def barrier(self, reached: Callable[[], None]) -> None:
        """Call `reached` on the engine thread once all that was handed over before is on disk, or has failed."""
        self.submit(Amend(Commit(), (), lambda _: reached()))

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
        """All that waits, up to and without the next `Amend` or `Reclaim`, which go alone: order matters to them. Empty at the end."""
        with self._waiting:
            self._waiting.wait_for(lambda: self._jobs or self._closing)
            batch: list[Job] = []
            while self._jobs and not (batch and isinstance(self._jobs[0], ALONE)):
                batch.append(self._jobs.popleft())
                if isinstance(batch[0], ALONE):
                    break
            return batch

    def _save(self, jobs: list[Job]) -> None:
        self._is_lost = self._is_lost and not isinstance(jobs[0], Resume)
        written = [(job, *self._write(job)) for job in jobs]
        failed: Exception | None = None
        try:
            self.store.commit(merge([commit for _, commit, _ in written if commit is not None]))
        except Exception as caught:  # noqa: BLE001 (the edge of the thread: whatever it was, the jobs failed)
            failed = caught
        reports: list[Callable[[], None]] = []
        for job, _, error in written:
            if error is None and failed is None:
                self.store.remove(job.replaced)
            self._note(job, error or failed)
            reports.append(lambda job=job, error=error or failed: self._report(job, error))  # type: ignore[misc]
        self._say_once(failed or next((error for *_, error in written if error is not None), None))
        if isinstance(failed, StoreLost):
            self._unsaved_pages.clear()
            self._is_lost = True
            self.post(lambda: self._resume(reports))
        else:
            for report in reports:
                self.post(report)

    def _resume(self, reports: list[Callable[[], None]]) -> None:
        """On the engine thread, at once: who is told that a turn is not saved may come with the next one."""
        for report in reports:
            report()
        self.submit(Resume())
        self.lost()

    def _say_once(self, error: Exception | None) -> None:
        """A disk that is full is worth two lines in the log, not two for each page."""
        if error is not None and not self._failing:
            log.error("memories cannot be saved: %s", error, exc_info=None if isinstance(error, (OSError, StoreError)) else error)
        elif error is None and self._failing:
            log.warning("memories are saved again")
        self._failing = error is not None

    def _write(self, job: Job) -> tuple[Commit | None, Exception | None]:
        try:
            if self._is_lost:
                raise StoreLost("it goes on from what was deleted")
            if isinstance(job, SaveTurn) and not job.ancestors.isdisjoint(self._unsaved_pages):
                raise OSError("a page before it could not be saved")
            commit = job.write(self.store)
            self._note(job, None)
            return commit, None
        except Exception as error:  # noqa: BLE001 (as above)
            self._note(job, error)
            return None, error

    def _note(self, job: Job, error: Exception | None) -> None:
        """Which pages are not on disk: nothing behind them is remembered. One that was to be replaced is there as it was."""
        if isinstance(job, SavePage):
            if error is None:
                self._unsaved_pages.discard(job.key)
            elif not any(file.plane == 0 for file in (*job.replaced, *job.kept)):  # what is kept may be a branch's
                self._unsaved_pages.add(job.key)

    def _report(self, job: Job, error: Exception | None) -> None:
        """On the engine thread."""
        self.waiting_bytes -= self.size_of(job)
        job.tell(error)


def merge(commits: list[Commit]) -> Commit:
    return Commit(
        tuple(p for c in commits for p in c.pages),
        tuple(b for c in commits for b in c.branches),
        tuple(a for c in commits for a in c.agents),
        tuple(k for c in commits for k in c.gone_pages),
        tuple(b for c in commits for b in c.gone_branches),
        tuple(a for c in commits for a in c.gone_agents),
    )
