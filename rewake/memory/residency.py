"""What is in the arena: slots are taken, shared, given back, and filled from disk by I/O threads.

    free     nobody's
    held     a sequence, a write or a load needs it (refs > 0)
    cached   nobody needs it now; what is worth least goes first when a slot is wanted (memory.value)

free + held + cached = all slots, always. Runs on the engine thread; only the reads themselves happen elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from rewake.errors import CorruptFile
from rewake.memory.gate import LoadGate
from rewake.memory.pool import PagePool
from rewake.memory.tree import Branch, Page
from rewake.memory.value import ByValue
from rewake.quant import PageLayout
from rewake.store.base import Store, StoredFile

__all__ = ["Residency"]

Arena = npt.NDArray[np.uint8]
Post = Callable[[Callable[[], None]], None]  # runs a function on the engine thread, soon
Loaded = Callable[[CorruptFile | None], None]

NUM_READERS = 2

log = logging.getLogger(__name__)


class Residency:
    """The hot set. `cost` says in seconds what it takes to have something back that leaves; `evicted` is told of all that does.

    `orphaned` is told of pages that nobody needs here any more, and no transcript either.
    """

    def __init__(
        self,
        arena: Arena,
        layout: PageLayout,
        store: Store | None,
        post: Post,
        cost: Callable[[Page | Branch], float],
        evicted: Callable[[Page | Branch], None],
        orphaned: Callable[[Page], None],
    ) -> None:
        self.arena = arena
        self.layout = layout
        self.pool = PagePool(len(arena), layout.page_bytes)
        self.store = store
        self.post = post
        self.cost = cost
        self.evicted = evicted
        self.orphaned = orphaned
        self.gate = LoadGate()
        self.cached: ByValue[Page | Branch] = ByValue()
        self.loading: dict[Page | Branch, tuple[int, list[Loaded]]] = {}
        self.leaving: set[Page | Branch] = set()  # out of the tree, and held
        self._burst_began, self._burst_bytes = 0.0, 0
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="rewake-load")

    @property
    def num_available(self) -> int:
        """Slots that can be had now: free ones, and cached ones to evict."""
        return self.pool.num_free + len(self.cached)

    def has_place(self, resident: Page | Branch) -> bool:
        """Whether something held has a slot, or is about to: what is held may be cold all the same."""
        return resident.slot is not None or resident in self.loading

    def bytes_of(self, slot: int) -> Arena:
        return self.arena[slot : slot + self.layout.page_bytes]

    def take(self) -> int:
        """A slot nobody uses, evicting what is worth least if need be. There must be one."""
        if not self.pool.num_free:
            self.drop(self.cached.first_to_go())
        return self.pool.take()

    def drop(self, resident: Page | Branch) -> None:
        """Give back the slot of something cached."""
        assert resident.refs == 0 and resident.slot is not None
        self.vacate(resident)
        self.evicted(resident)

    def vacate(self, resident: Page | Branch) -> None:
        """Give back its slot, if it has one."""
        self.cached.remove(resident)
        if resident.slot is not None:
            self.pool.give(resident.slot)
        resident.slot, resident.stale = None, False

    def forget(self, resident: Page | Branch) -> None:
        """It is out of the tree: its slot is given back, now or with the last need."""
        resident.forgotten = True
        if resident.refs:
            self.leaving.add(resident)
        else:
            self.vacate(resident)

    def hold(self, resident: Page | Branch) -> None:
        resident.refs += 1
        self.cached.remove(resident)

    def release(self, resident: Page | Branch) -> None:
        """One need less; without any, it is cached as just used."""
        assert resident.refs > 0
        resident.refs -= 1
        if resident.refs:
            return
        if resident.forgotten:
            self.leaving.discard(resident)
            self.vacate(resident)
            return
        if resident.stale:
            self.vacate(resident)
        if resident.slot is not None:
            self.cached.add(resident, self.cost(resident))
        if isinstance(resident, Page) and resident.is_orphan:
            self.orphaned(resident)

    def value_again(self, resident: Page | Branch) -> None:
        """Its cost has changed."""
        if resident in self.cached:
            self.cached.add(resident, self.cost(resident))

    def load(self, resident: Page | Branch, loaded: Loaded) -> None:
        """Bring something held into the arena; `loaded` is called on the engine thread when it is there, or cannot be."""
        assert resident.refs > 0
        if resident.slot is not None:
            loaded(None)
        elif resident in self.loading:
            self.loading[resident][1].append(loaded)
        else:
            slot = self.take()
            if not self.loading:
                self._burst_began, self._burst_bytes = time.perf_counter(), 0
            self.loading[resident] = slot, [loaded]
            self._readers.submit(self._read, resident, tuple(resident.files), slot)

    def load_all(self, residents: Sequence[Page | Branch], loaded: Callable[[list[tuple[Page | Branch, CorruptFile]]], None]) -> None:
        """As `load`, for several; `loaded` is called once, when all are there or cannot be, with those that failed."""
        waiting = len(residents)
        failures: list[tuple[Page | Branch, CorruptFile]] = []

        def one_loaded(resident: Page | Branch, error: CorruptFile | None) -> None:
            nonlocal waiting
            waiting -= 1
            if error is not None:
                failures.append((resident, error))
            if not waiting:
                loaded(failures)

        if not residents:
            loaded(failures)
        for resident in residents:
            self.load(resident, lambda error, resident=resident: one_loaded(resident, error))  # type: ignore[misc]

    def _read(self, resident: Page | Branch, files: tuple[StoredFile, ...], slot: int) -> None:
        """On an I/O thread."""
        error = None
        try:
            self.read(files, self.bytes_of(slot))
        except CorruptFile as corrupt:
            error = corrupt
        except Exception as other:  # the edge of the thread: somebody waits for this page
            log.exception("a page could not be read")
            error = CorruptFile(str(other))
        ended = time.perf_counter()
        self.post(lambda: self._finish_load(resident, files, slot, error, ended))

    def run(self, function: Callable[[], None]) -> None:
        """Run something that reads many files, on an I/O thread."""
        self._readers.submit(function)

    def read(self, files: Sequence[StoredFile], target: Arena) -> None:
        """Fill a page's bytes from disk, checked. Raises CorruptFile."""
        if self.store is None or not files:
            raise CorruptFile("nothing of it was saved")
        for file in files:
            if file.rows == self.layout.rows:
                self.store.read(file, target.data)
            else:
                rows = np.empty(file.size, np.uint8)
                self.store.read(file, rows.data)
                self.layout.copy_rows(target, file.first, rows, file.rows, out=False)

    def _finish_load(
        self,
        resident: Page | Branch,
        files: tuple[StoredFile, ...],
        slot: int,
        error: CorruptFile | None,
        ended: float,
    ) -> None:
        _, waiting = self.loading.pop(resident)
        if error is None:
            self._burst_bytes += sum(f.size for f in files)
            if files != tuple(resident.files):  # a page before it was damaged: these are not its rows any more
                error = CorruptFile("a page's rows were forgotten while they were read")
        if resident.slot is not None:  # an equal page was computed meanwhile
            self.pool.give(slot)
            error = None
        elif error is None:
            resident.slot = slot
        else:
            self.pool.give(slot)
        if not self.loading:  # reads run beside each other: what they take is seen when all are done
            self.gate.note_read(self._burst_bytes, ended - self._burst_began)
        for loaded in waiting:
            loaded(error)

    def copy(self, source: Page | Branch, slot: int) -> None:
        """Copy on write: the whole page; rows behind those that are meant are never attended to."""
        assert source.slot is not None
        self.bytes_of(slot)[:] = self.bytes_of(source.slot)

    def check(self, residents: Iterable[Page | Branch], extra_slots: Iterable[int]) -> None:
        """Add everything up: each slot is free, held, loading or cached, and just one of these."""
        used = (
            [r.slot for r in (*residents, *self.leaving) if r.slot is not None]
            + list(extra_slots)
            + [slot for slot, _ in self.loading.values()]
        )
        free = self.pool.free_slots()
        assert len(used) == len(set(used)), "a slot has two owners"
        assert not free & set(used), "a slot is free and used"
        assert len(used) + len(free) == self.pool.num_slots, f"{len(used)} used + {len(free)} free != {self.pool.num_slots}"
        for resident in self.cached:
            assert resident.refs == 0 and resident.slot is not None, "something cached is held or cold"

    def close(self) -> None:
        self._readers.shutdown()
