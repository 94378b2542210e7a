"""What is in the arena: slots are taken, shared, given back, and filled from disk by I/O threads.

    free     nobody's
    held     a sequence, a write or a load needs it
    cached   nobody needs it now; what is worth least goes first when slots are wanted (memory.value)

free + held + cached = all slots, always. What is held, cached, loaded and let go is a plane of a page: a piece. Runs on the
engine thread; only the reads themselves happen elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import numpy.typing as npt

from rewake.errors import CorruptFile
from rewake.memory.gate import LoadGate
from rewake.memory.pool import PagePool
from rewake.memory.tree import Branch, Page
from rewake.memory.value import ByValue
from rewake.planes import PagePlanes
from rewake.quant import PAGE_TOKENS
from rewake.store.base import Store, StoredFile

__all__ = ["Needed", "Piece", "Residency", "files_of"]

Arena = npt.NDArray[np.uint8]
Piece = tuple[Page | Branch, int]  # of a page, the plane of that number
Needed = list[tuple[Page | Branch, tuple[int, ...]]]  # pages, and the planes of each that are attended to
Post = Callable[[Callable[[], None]], None]  # runs a function on the engine thread, soon
Loaded = Callable[[CorruptFile | None], None]
Slots = tuple[int, ...]

NUM_READERS = 2

log = logging.getLogger(__name__)


class Residency:
    """The hot set. `cost` says in seconds what it takes to have a piece back that leaves, 0 if nobody will ask for it; `evicted` is
    told of all that does leave. `orphaned` is told of pages that nobody needs here any more, and no transcript either.
    """

    def __init__(
        self,
        arena: Arena,
        planes: PagePlanes,
        store: Store | None,
        post: Post,
        cost: Callable[[Page | Branch, int], float],
        evicted: Callable[[Page | Branch, int], None],
        orphaned: Callable[[Page], None],
    ) -> None:
        self.arena = arena
        self.planes = planes
        self.pool = PagePool(len(arena), planes.slot_bytes)
        self.store = store
        self.post = post
        self.cost = cost
        self.evicted = evicted
        self.orphaned = orphaned
        self.gate = LoadGate()
        self.cached: ByValue[Piece] = ByValue()
        self.num_cached = 0  # slots of these
        self.loading: dict[Piece, tuple[Slots, list[Loaded]]] = {}
        self.leaving: set[Page | Branch] = set()  # out of the tree, and held
        self._burst_began, self._burst_bytes = 0.0, 0
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="rewake-load")

    @property
    def num_available(self) -> int:
        """Slots that can be had now: free ones, and cached ones to evict."""
        return self.pool.num_free + self.num_cached

    def is_held(self, resident: Page | Branch, plane: int) -> bool:
        """Whether somebody needs it and it has slots, or is about to: what is held may be cold all the same."""
        return resident.needs.get(plane, 0) > 0 and (plane in resident.slots or (resident, plane) in self.loading)

    def is_somewhere(self, resident: Page | Branch, plane: int) -> bool:
        """Whether it is in memory, or all of it on disk."""
        return plane in resident.slots or (resident, plane) in self.loading or resident.stored(plane) >= resident.stored_rows

    def is_hot(self, resident: Page | Branch, planes: Iterable[int]) -> bool:
        return all(plane in resident.slots for plane in planes)

    def bytes_of(self, resident: Page | Branch, plane: int) -> list[Arena]:
        """What each slot of the plane holds; it is in the arena."""
        return self.views(resident.slots[plane], plane)

    def views(self, slots: Slots, plane: int) -> list[Arena]:
        size = self.planes.planes[plane].slot.page_bytes
        return [self.arena[slot : slot + size] for slot in slots]

    def take(self, plane: int) -> Slots:
        """Slots nobody uses for a plane, evicting what is worth least if need be. There must be enough."""
        count = self.planes.planes[plane].num_slots
        while self.pool.num_free < count:
            self.drop(self.cached.first_to_go())
        return tuple(self.pool.take() for _ in range(count))

    def take_page(self) -> dict[int, Slots]:
        """Slots for all planes of a page."""
        return {plane: self.take(plane) for plane in self.planes.all}

    def give(self, slots: dict[int, Slots]) -> None:
        for slot in chain.from_iterable(slots.values()):
            self.pool.give(slot)
        slots.clear()

    def drop(self, piece: Piece) -> None:
        """Give back the slots of something cached."""
        resident, plane = piece
        assert not resident.needs.get(plane) and plane in resident.slots
        self.vacate_plane(resident, plane)
        self.evicted(resident, plane)

    def vacate(self, resident: Page | Branch) -> None:
        """Give back all its slots."""
        for plane in tuple(resident.slots):
            self.vacate_plane(resident, plane)
        resident.stale = False

    def vacate_plane(self, resident: Page | Branch, plane: int) -> None:
        """With its residuals, which refine these very codes: those on disk may be others."""
        self._uncache((resident, plane))
        for slot in resident.slots.pop(plane, ()):
            self.pool.give(slot)
        if self.planes.codes_of(plane) not in resident.newer:
            resident.newer = tuple(p for p in resident.newer if p != plane)
        residual = self.planes.residual_of(plane)
        if residual is not None and not resident.needs.get(residual):
            self.vacate_plane(resident, residual)

    def _cache(self, piece: Piece, cost: float) -> None:
        self._uncache(piece)
        self.cached.add(piece, cost)
        self.num_cached += self.planes.planes[piece[1]].num_slots

    def _uncache(self, piece: Piece) -> None:
        if piece in self.cached:
            self.cached.remove(piece)
            self.num_cached -= self.planes.planes[piece[1]].num_slots

    def forget(self, resident: Page | Branch) -> None:
        """It is out of the tree: its slots are given back, now or with the last need."""
        resident.forgotten = True
        if resident.refs:
            self.leaving.add(resident)
            self.vacate_unneeded(resident)
        else:
            self.vacate(resident)

    def vacate_unneeded(self, resident: Page | Branch) -> None:
        for plane in tuple(resident.slots):
            if not resident.needs.get(plane):
                self.vacate_plane(resident, plane)

    def hold(self, resident: Page | Branch, planes: Iterable[int]) -> None:
        """Be at it, and need these planes, which may be cold."""
        resident.refs += 1
        for plane in planes:
            resident.needs[plane] = resident.needs.get(plane, 0) + 1
            self._uncache((resident, plane))

    def let_go(self, resident: Page | Branch, plane: int) -> None:
        """One need of a plane less. Without any it is cached as just used; or given back, if it is on disk and nobody will ask for it."""
        assert resident.needs[plane] > 0
        resident.needs[plane] -= 1
        if resident.needs[plane] or plane not in resident.slots:
            return
        codes = self.planes.codes_of(plane)
        if resident.forgotten or resident.stale or (codes is not None and codes not in resident.slots):
            self.vacate_plane(resident, plane)
            return
        cost = self.cost(resident, plane)
        if not cost and resident.stored(plane) >= resident.stored_rows:
            self.vacate_plane(resident, plane)
        else:
            self._cache((resident, plane), cost)

    def release(self, resident: Page | Branch, planes: Iterable[int]) -> None:
        """Be at it no longer, nor need these planes."""
        assert resident.refs > 0
        for plane in planes:
            self.let_go(resident, plane)
        resident.refs -= 1
        if resident.refs:
            return
        if resident.forgotten:
            self.leaving.discard(resident)
            self.vacate(resident)
            return
        if resident.stale:
            self.vacate(resident)
        if isinstance(resident, Page) and resident.is_orphan:
            self.orphaned(resident)

    def place(self, resident: Page | Branch, slots: dict[int, Slots]) -> None:
        """These slots are its own from here on; what of it nobody needs is cached."""
        for plane, own in slots.items():
            resident.slots[plane] = own
            if not resident.needs.get(plane):
                self._cache((resident, plane), self.cost(resident, plane))

    def value_again(self, resident: Page | Branch) -> None:
        """Its cost has changed."""
        for plane in resident.slots:
            if (resident, plane) in self.cached:
                self._cache((resident, plane), self.cost(resident, plane))

    def load(self, piece: Piece, loaded: Loaded) -> None:
        """Bring a plane that is held into the arena; `loaded` is called on the engine thread when it is there, or cannot be."""
        resident, plane = piece
        assert resident.needs[plane] > 0
        if plane in resident.slots:
            loaded(None)
        elif piece in self.loading:
            self.loading[piece][1].append(loaded)
        else:
            slots = self.take(plane)
            if not self.loading:
                self._burst_began, self._burst_bytes = time.perf_counter(), 0
            self.loading[piece] = slots, [loaded]
            self._readers.submit(self._read, piece, files_of(piece), slots)

    def load_all(self, pieces: Sequence[Piece], loaded: Callable[[list[tuple[Piece, CorruptFile]]], None]) -> None:
        """As `load`, for several; `loaded` is called once, when all are there or cannot be, with those that failed."""
        waiting = len(pieces)
        failures: list[tuple[Piece, CorruptFile]] = []

        def one_loaded(piece: Piece, error: CorruptFile | None) -> None:
            nonlocal waiting
            waiting -= 1
            if error is not None:
                failures.append((piece, error))
            if not waiting:
                loaded(failures)

        if not pieces:
            loaded(failures)
        for piece in pieces:
            self.load(piece, lambda error, piece=piece: one_loaded(piece, error))  # type: ignore[misc]

    def _read(self, piece: Piece, files: tuple[StoredFile, ...], slots: Slots) -> None:
        """On an I/O thread."""
        error = None
        try:
            self.read(files, piece[1], self.views(slots, piece[1]))
        except CorruptFile as corrupt:
            error = corrupt
        except Exception as other:  # the edge of the thread: somebody waits for this page
            log.exception("a page could not be read")
            error = CorruptFile(str(other))
        ended = time.perf_counter()
        self.post(lambda: self._finish_load(piece, files, slots, error, ended))

    def run(self, function: Callable[[], None]) -> None:
        """Run something that reads many files, on an I/O thread."""
        self._readers.submit(function)

    def read(self, files: Sequence[StoredFile], plane: int, targets: list[Arena]) -> None:
        """Fill what each slot of a plane holds from disk, checked. Raises CorruptFile."""
        if self.store is None or not files:
            raise CorruptFile("nothing of it was saved")
        for file in files:
            if file.rows == PAGE_TOKENS:
                self.store.read(file, *(target.data for target in targets))
            else:
                rows = np.empty(file.size, np.uint8)
                self.store.read(file, rows.data)
                self.planes.planes[plane].copy_rows(targets, file.first, rows, file.rows, out=False)

    def _finish_load(self, piece: Piece, files: tuple[StoredFile, ...], slots: Slots, error: CorruptFile | None, ended: float) -> None:
        resident, plane = piece
        _, waiting = self.loading.pop(piece)
        if error is None:
            self._burst_bytes += sum(f.size for f in files)
            if files != files_of(piece):  # a page before it was damaged: these are not its rows any more
                error = CorruptFile("a page's rows were forgotten while they were read")
        if plane in resident.slots:  # an equal page was computed meanwhile
            self.give({plane: slots})
            error = None
        elif error is None:
            resident.slots[plane] = slots
        else:
            self.give({plane: slots})
        if not self.loading:  # reads run beside each other: what they take is seen when all are done
            self.gate.note_read(self._burst_bytes, ended - self._burst_began)
        for loaded in waiting:
            loaded(error)

    def copy(self, source: Page | Branch, slots: dict[int, Slots]) -> None:
        """Copy on write: the whole page; rows behind those that are meant are never attended to."""
        for plane, own in slots.items():
            for target, origin in zip(self.views(own, plane), self.bytes_of(source, plane), strict=True):
                target[:] = origin

    def check(self, residents: Iterable[Page | Branch], extra_slots: Iterable[int]) -> None:
        """Add everything up: each slot is free, held, loading or cached, and just one of these."""
        used = [slot for r in (*residents, *self.leaving) for slots in r.slots.values() for slot in slots]
        used += [*extra_slots, *(slot for slots, _ in self.loading.values() for slot in slots)]
        free = self.pool.free_slots()
        assert len(used) == len(set(used)), "a slot has two owners"
        assert not free & set(used), "a slot is free and used"
        assert len(used) + len(free) == self.pool.num_slots, f"{len(used)} used + {len(free)} free != {self.pool.num_slots}"
        for resident, plane in self.cached:
            assert not resident.needs.get(plane) and plane in resident.slots, "something cached is held or cold"
            codes = self.planes.codes_of(plane)
            assert codes is None or codes in resident.slots, "residuals without their codes"
        assert self.num_cached == sum(len(resident.slots[plane]) for resident, plane in self.cached)

    def close(self) -> None:
        self._readers.shutdown()


def files_of(piece: Piece) -> tuple[StoredFile, ...]:
    """What of it is on disk, and is what it is in memory, or would be."""
    resident, plane = piece
    return () if plane in resident.newer else tuple(f for f in resident.files if f.plane == plane)
