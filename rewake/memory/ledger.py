"""The books of the memory: what is remembered, where it lies, how it is saved, and what leaves.

Keeps tree, arena and store in agreement. Runs on the engine thread; knows no sequences, no schedule, and none of the
things people do with agents.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np

from rewake.errors import CorruptFile
from rewake.memory.eviction import Eviction
from rewake.memory.residency import Arena, Piece, Post, Residency, files_of
from rewake.memory.tree import TOKEN, Agent, Branch, Page, PrefixTree, SavedTurn, to_tokens
from rewake.memory.writer import Amend, Reclaim, SavePage, SaveTurn, Writer
from rewake.planes import PagePlanes
from rewake.quant import PAGE_TOKENS
from rewake.store.base import AgentRecord, BranchRecord, Commit, PageRecord, Store, StoredFile
from rewake.store.directory import checksum

__all__ = ["Ledger", "Trace", "name_of", "record_of"]

log = logging.getLogger(__name__)

Told = Callable[[Exception | None], None]
Trace = Callable[..., None]  # told of each change of a page's name or content; see rewake.replay


class Ledger:
    """Everything remembered under one signature."""

    def __init__(self, arena: Arena, planes: PagePlanes, signature: bytes, store: Store | None, post: Post, trace: Trace | None) -> None:
        self.planes = planes
        self.store = store
        self.tree = PrefixTree(signature, store.page_secret if store is not None else b"")
        self.eviction = Eviction(self.tree, planes)
        self.residency = Residency(arena, planes, store, post, self.eviction.cost, self._evicted, self._orphaned)
        self.writer = Writer(store, post, self._store_lost) if store is not None else None
        self.trace = trace or (lambda *_: None)
        self.saving: set[Page] = set()
        self._to_remove = 0  # bytes that waiting jobs will give back
        if store is not None:
            self._recall(store)

    # ---- at start

    def _recall(self, store: Store) -> None:
        """Build the tree from the manifest; no page is read."""
        snapshot = store.load()
        for a in snapshot.agents:
            self.tree.agents[a.namespace, a.name] = Agent(a.id, a.namespace, a.name, a.created, a.used, a.pinned, a.ttl)
        pages: dict[tuple[str, bytes], Page] = {}
        lost: list[PageRecord] = []
        for p in snapshot.pages:
            parent = pages.get((p.namespace, p.parent)) if p.parent else self.tree.root(p.namespace)
            if parent is None:
                lost.append(p)
                continue
            page = Page(p.key, p.namespace, parent, array(TOKEN, p.tokens), p.files)
            parent.children[p.key] = pages[p.namespace, p.key] = page
        for b in snapshot.branches:
            parent = pages.get((b.namespace, b.parent)) if b.parent else self.tree.root(b.namespace)
            if parent is None:
                log.warning("a branch of agent %r has lost its pages: forgotten", b.agent)
                self._forget(Commit(gone_branches=(b.id,)), b.segments)
                continue
            owner = self.tree.agent(b.namespace, b.agent)
            tokens, turns = array(TOKEN, b.tokens), array(TOKEN, b.turns)
            branch = Branch(b.id, owner, parent, tokens, segments=list(b.segments), created=b.created, used=b.used, turns=turns)
            branch.num_rows = branch.saved_rows
            branch.note_saved()
            self.tree.add_branch(branch)
            note_named(branch)
        for agent in self.tree.agents.values():  # of older formats, which had no records of agents
            agent.created = min([agent.created, *(b.created for b in agent.branches)])
        self._forget_ownerless(list(pages.values()), lost)
        self.make_room(0)

    def _forget_ownerless(self, pages: list[Page], lost: list[PageRecord]) -> None:
        """Forget pages that no branch needs: nobody could ever forget them by name."""
        gone = [p.key for p in lost]
        files = [f for p in lost for f in p.files]
        for page in reversed(pages):
            self._prune(page, gone, files)
        if gone:
            self._forget(Commit(gone_pages=tuple(gone)), files)

    # ---- saving

    def save_filled(self, branch: Branch, segments: tuple[StoredFile, ...] = ()) -> None:
        """A branch has just filled a page, its parent now. Whatever happens from here on, the agent remembers all up to there.

        `segments` are rows of the page that are on disk, and stay where they are.
        """
        branch.moved += segments
        jobs = [self._page_job(branch, branch.parent, segments), self._checkpoint(branch)]
        self._submit(*(job for job in jobs if job is not None))

    def save_page(self, branch: Branch, page: Page) -> None:
        """Write what of a full page is in memory and not on disk; in place of files that hold the same tokens, if there are such."""
        if (job := self._page_job(branch, page)) is not None:
            self._submit(job)

    def _page_job(self, branch: Branch, page: Page, segments: tuple[StoredFile, ...] = ()) -> SavePage | None:
        planes = tuple(plane for plane in self.planes.all if plane in page.slots and not page.stored(plane))
        # without its first plane nothing is there to be named
        if self.writer is None or not planes or page.saving or not (0 in planes or page.stored(0)):
            return None
        assert page.parent is not None
        codes = {self.planes.codes_of(plane) for plane in planes}
        held = tuple(plane for plane in self.planes.all if plane in planes or plane in codes)  # residuals' codes stay what they refine
        self.residency.hold(page, held)
        page.saving = planes
        self.saving.add(page)

        def done(error: Exception | None, files: tuple[StoredFile, ...]) -> None:
            page.saving = ()
            self.saving.discard(page)
            written = [f for f in files if f not in before]
            if error is None:
                still = [f for f in page.files if f not in replaced]  # others have been found damaged
                page.files = tuple(sorted((*still, *written), key=lambda f: (f.plane, f.first)))
                page.newer = tuple(plane for plane in page.newer if plane not in obsolete)
            else:
                branch.moved = tuple(f for f in branch.moved if f not in segments)
            if page.forgotten and error is None:  # meanwhile, and with it what the manifest said of it
                self._forget(Commit(), written)
            self.residency.release(page, held)

        # what the manifest names is never overwritten: until the commit, that is what counts
        if page.files or not page.file_name:
            page.file_name = f"pages/{page.key.hex()[:2]}/{page.key.hex()}-{secrets.token_hex(4)}.safetensors"
        obsolete = {*planes, *page.newer}  # residuals that have left memory, too, if their codes are written anew
        before, replaced = (tuple(f for f in page.files if (f.plane in obsolete) == gone) for gone in (False, True))
        data = {plane: self.residency.bytes_of(page, plane) for plane in planes}
        return SavePage(
            page.file_name,
            page.key,
            page.parent.key,
            page.number + 1,
            branch.namespace,
            page.tokens.tobytes(),
            self.planes,
            data,
            (*before, *segments),
            replaced,
            done,
        )

    def _checkpoint(self, branch: Branch) -> SaveTurn | None:
        if self.writer is None:
            return None
        if branch.owner.pinned:
            self.eviction.pins_changed()
        page, turns = branch.parent, array(TOKEN, (t for t in branch.turns if t <= branch.parent.end))

        def done(error: Exception | None, _: tuple[StoredFile, ...]) -> None:
            if error is None and not page.forgotten:
                branch.saved = SavedTurn(page, to_tokens(), (), turns)

        record = BranchRecord(branch.id, branch.namespace, branch.agent, page.key, b"", (), branch.created, branch.used, turns.tobytes())
        ancestors = frozenset(p.key for p in page.path())
        return SaveTurn(record, agent_record(branch.owner), ancestors, 0, 0, self.planes, {}, branch.obsolete_files(), done)

    def save_turn(self, branch: Branch, closed: Callable[[bool], None]) -> None:
        """Write what is not on disk yet of a branch; its pages are, or are on their way. It is held, and `running`, meanwhile."""
        if self.writer is None:
            branch.running = False
            self._forget_repeats(branch)
            closed(False)
            return
        if branch.owner.pinned:
            self.eviction.pins_changed()
        for page in branch.parent.path():
            if page.slots:
                self.save_page(branch, page)  # whose write has failed before
        self.residency.hold(branch, self.planes.all)

        record = record_of(branch)

        def done(error: Exception | None, segments: tuple[StoredFile, ...]) -> None:
            branch.running = False
            is_saved = error is None and branch.parent.key == record.parent
            if is_saved:
                branch.segments = list(segments)
                branch.note_saved()
                self._forget_repeats(branch)
            elif error is None:  # a page before it was lost meanwhile, and its rows with it
                self._forget(Commit(), segments[len(record.segments) :])
            self.residency.release(branch, self.planes.all)
            if not is_saved:
                self._forget_nothing([branch])
            closed(is_saved)

        rows = {plane: self.residency.bytes_of(branch, plane) for plane in branch.slots}
        ancestors = frozenset(p.key for p in branch.parent.path())
        first, last = branch.saved_rows, branch.num_rows
        owner = agent_record(branch.owner)
        self._submit(SaveTurn(record, owner, ancestors, first, last, self.planes, rows, branch.obsolete_files(), done))

    def save_agent(self, agent: Agent, done: Told) -> None:
        """Write what is known of an agent beside its transcripts."""
        if self.writer is None:
            done(None)
        else:
            self.writer.submit(Amend(Commit(agents=agent_record(agent)), (), done))

    def _submit(self, *jobs: SavePage | SaveTurn) -> None:
        """Hand over to the writer, with room on disk if any can be had."""
        if self.writer is not None:
            self.make_room(sum(map(self.writer.size_of, jobs)))
            self.writer.submit(*jobs)

    @property
    def is_backed_up(self) -> bool:
        """Whether so much waits to be written that nothing more should be computed that is to be written, too."""
        return self.writer is not None and self.writer.waiting_bytes > len(self.residency.arena) // 2

    def adopt(self, branch: Branch, page: Page, slots: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
        """A page was computed that is remembered already; the caller holds it. What is in the arena wins, so that hot and restored
        agents attend to the same bytes; what is only on disk is written anew, unless it is equal. The planes taken from `slots`."""
        read = [self._agree_on_residuals(page, plane, slots) for plane in range(len(self.planes.base))]
        taken = tuple(plane for plane in slots if plane not in page.slots)
        self.residency.give({plane: own for plane, own in slots.items() if plane not in taken})
        self.residency.place(page, {plane: slots[plane] for plane in taken})
        for plane in taken:
            files = files_of((page, plane))
            data = [slot.data for slot in self.residency.bytes_of(page, plane)]
            # an encrypted file's checksum is a tag, and never equal: written anew
            if files and not (len(files) == 1 and files[0].checksum == checksum(*data)) and plane not in read:
                page.newer += (plane,)
        if taken:
            self.save_page(branch, page)  # or, if it is being written already, with the next turn
        return tuple(plane for plane in taken if plane not in read)

    def _agree_on_residuals(self, page: Page, plane: int, slots: dict[int, tuple[int, ...]]) -> int | None:
        """Residuals refine the very codes they were computed with, and a page that is hot may have let go of its own.

        Then codes and residuals are both taken, or the codes are equal, or the page's own residuals are read into `slots`: their plane
        is returned. Where there are none any more, the middle of a step is as good as anything. Residuals that have come before their
        codes, which are still being read, go: nobody attends to them yet.
        """
        residual, residency = self.planes.residual_of(plane), self.residency
        if residual is None:
            return None
        if plane not in page.slots:
            residency.vacate_plane(page, residual)
            return None
        if residual in page.slots:
            return None
        ours, theirs = residency.views(slots[plane], plane), residency.bytes_of(page, plane)
        if all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            return None
        if page.needs[plane] == 1:
            residency.vacate_plane(page, plane)
            return None
        own = residency.views(slots[residual], residual)
        try:
            if page.stored(residual) < PAGE_TOKENS:
                raise CorruptFile("not all of it is on disk")
            residency.read(files_of((page, residual)), residual, own)
        except CorruptFile:
            for slot in own:
                slot[:] = 0x88
        return residual

    # ---- the disk's budget

    def make_room(self, wanted: int) -> None:
        """Have room for `wanted` more bytes on disk: others' models' memories go first, then what is worth least.

        Never anything of an agent that is pinned or at work; so there may be no room in the end, and writing will say so.
        """
        if self.store is None or self.writer is None:
            return
        short = wanted + self.writer.waiting_bytes - self._to_remove - self.store.room()
        if short <= 0:
            return
        if (foreign := min(short, self.store.reclaimable)) > 0:
            self.writer.submit(Reclaim(foreign))
            short -= foreign
        while short > 0 and (branches := self.eviction.least_worth()):
            log.info("the disk budget is used up: a branch of agent %r is forgotten", branches[0].agent)
            short -= self.forget_branches(branches)

    def make_room_for(self, num_pages: int) -> None:
        """Have room for so many new pages, before they are computed."""
        if self.store is not None:
            self.make_room(num_pages * sum(self.store.file_bytes(PAGE_TOKENS, plane) for plane in self.planes.all))

    # ---- leaving

    def pins_changed(self, agent: Agent) -> None:
        """An agent was pinned or unpinned, or a pinned one's transcript has grown."""
        self.eviction.pins_changed()
        for branch in agent.branches:
            residents: tuple[Page | Branch, ...] = (branch, *branch.parent.path())
            for resident in residents:
                self.residency.value_again(resident)

    def _evicted(self, resident: Page | Branch, plane: int) -> None:
        """A plane left the arena. What was never saved is no longer remembered."""
        if resident.forgotten or plane in resident.newer or resident.stored(plane) >= resident.stored_rows:
            if isinstance(resident, Branch) and not resident.forgotten and is_nothing(resident):
                self.forget_branches([resident])
            return
        if isinstance(resident, Branch):
            cut_to_saved(resident)
            self.residency.vacate_unneeded(resident)
            if is_nothing(resident):
                self.forget_branches([resident])
        elif self.planes.planes[plane].reach_in(resident.number) is None:
            self._cut(resident)
        elif self.writer is None:  # whoever needed it would have to begin anew
            self.forget_branches([b for b in self.eviction.asking(resident, plane) if isinstance(b, Branch) and not (b.running or b.refs)])

    def _orphaned(self, page: Page) -> None:
        gone: list[bytes] = []
        files: list[StoredFile] = []
        self._prune(page, gone, files)
        self._forget(Commit(gone_pages=tuple(gone)), files)

    def discard(self, piece: Piece, error: CorruptFile) -> None:
        """A file is not what was written: it, and all that was computed behind it, is no longer remembered.

        Where later tokens do not attend to it, they stay.
        """
        resident, plane = piece
        if resident.forgotten or plane in resident.slots or not resident.stored_rows:  # somebody else has seen it first
            return
        log.warning("%s: it is put aside, and what it held will be computed again", error)
        damaged = files_of(piece)  # none, if the directory has been deleted meanwhile
        if isinstance(resident, Branch):
            rest = [f for f in resident.files if f not in damaged]
            empty(resident)
            self._drop_rows(resident)
            self._forget(Commit(branches=(record_of(resident),)), rest, damaged)
        elif plane == 0 or self.planes.planes[plane].reach_in(resident.number) is None:
            self._cut(resident, damaged)
        elif damaged:
            refining = files_of((resident, residual)) if (residual := self.planes.residual_of(plane)) is not None else ()
            resident.files = tuple(f for f in resident.files if f not in (*damaged, *refining))
            self._forget(Commit(pages=(page_record(resident),)), refining, damaged)

    def _cut(self, page: Page, damaged: tuple[StoredFile, ...] = ()) -> None:
        """Take `page` and all below it out of the tree; branches there end before it. What of it is on disk goes, too.

        A sequence that is just being opened on one of them waits for `page` too: it fails, and is matched again.
        """
        assert page.parent is not None
        files: list[StoredFile] = []
        kept: set[StoredFile] = set()
        cut: list[BranchRecord] = []
        pages = self.tree.subtree(page)
        for below in pages:
            self.residency.forget(below)
        for below in pages:
            for branch in list(below.branches):
                if branch.saved is not None and not branch.saved.parent.forgotten:
                    kept.update(branch.saved.segments)
                    self._revert(branch, branch.saved)
                else:
                    files += [*branch.segments, *branch.obsolete_files()]
                    self.tree.move_branch(branch, page.parent)
                    empty(branch)
                self._drop_rows(branch)
                cut.append(record_of(branch))
            files += (f for f in below.files if f not in kept)
            self.trace("forget", below.key.hex())
            self.tree.remove_page(below)
        self.eviction.pins_changed()
        commit = Commit(branches=tuple(cut), gone_pages=tuple(p.key for p in pages))
        self._forget(commit, [f for f in files if f not in damaged], damaged)
        self._forget_nothing(page.parent.branches)
        if page.parent.is_orphan and not page.parent.refs:
            self._orphaned(page.parent)

    def _forget_nothing(self, branches: Iterable[Branch]) -> None:
        """Of those who do not say who they are nothing is kept that has no rows; nor of anybody where nothing is on disk."""
        self.forget_branches([b for b in branches if is_nothing(b) and not b.forgotten and (b.agent is None or self.writer is None)])

    def _revert(self, branch: Branch, saved: SavedTurn) -> None:
        """What came after the last turn that was saved is lost; that turn is not."""
        self.tree.move_branch(branch, saved.parent)
        branch.tokens, branch.segments, branch.turns = saved.tokens, list(saved.segments), saved.turns
        branch.num_rows = branch.saved_rows

    def _drop_rows(self, branch: Branch) -> None:
        """What is in its slot are not its rows any more. Whoever is at it, a write for example, may still look at them."""
        if branch.running and branch.refs:
            branch.stale = True
            self.residency.vacate_unneeded(branch)
        else:
            self.residency.vacate(branch)

    def _forget(self, commit: Commit, files: Iterable[StoredFile], damaged: tuple[StoredFile, ...] = (), done: Told | None = None) -> None:
        files = tuple(files)
        if self.writer is None:
            if done is not None:
                done(None)
            return
        size = sum(f.file_bytes for f in files)
        self._to_remove += size

        def removed(error: Exception | None) -> None:
            self._to_remove -= size
            if done is not None:
                done(error)

        self.writer.submit(Amend(commit, files, removed, damaged))

    def forget_branches(self, branches: Iterable[Branch], done: Told | None = None) -> int:
        """Forget branches, every page no other branch needs, and agents that were nothing else. The bytes this gives back on disk."""
        gone: list[bytes] = []
        files: list[StoredFile] = []
        ids: list[str] = []
        agents: list[str] = []
        for branch in list(branches):
            files += [*branch.segments, *branch.obsolete_files()]
            ids.append(branch.id)
            self.tree.remove_branch(branch)
            self.residency.forget(branch)
            self._prune(branch.parent, gone, files)
            if not branch.owner.branches and not branch.owner.pinned:
                agents.append(branch.owner.id)
                self.tree.remove_agent(branch.owner)
        self.eviction.pins_changed()
        if ids:
            commit = Commit(gone_pages=tuple(gone), gone_branches=tuple(ids), gone_agents=tuple(agents))
            self._forget(commit, files, done=done)
        elif done is not None:
            done(None)
        return sum(f.file_bytes for f in files)

    def forget_agent(self, agent: Agent, done: Told) -> None:
        """All of an agent that is not at work. `done` is told when it is gone from the disk."""
        agent.pinned = False
        if agent.branches:
            self.forget_branches(agent.branches, done)
        else:
            self.tree.remove_agent(agent)
            self._forget(Commit(gone_agents=(agent.id,)), (), done=done)

    def _forget_repeats(self, branch: Branch) -> None:
        self.forget_branches([b for b in branch.parent.branches if repeats(b, branch)])

    def _prune(self, page: Page, gone: list[bytes], files: list[StoredFile]) -> None:
        """Remove `page` and its ancestors as long as nothing hangs from them and nobody holds them."""
        while page.is_orphan and not (page.refs or page.forgotten):
            parent = page.parent
            assert parent is not None
            gone.append(page.key)
            files += page.files
            self.trace("forget", page.key.hex())
            self.tree.remove_page(page)
            self.residency.forget(page)
            page = parent

    def _store_lost(self) -> None:
        """The directory was deleted under us: what is still in memory, or still there, is written into a new one."""
        assert self.store is not None and self.writer is not None
        log.warning("the directory of memories was deleted: what is in memory is saved again")
        residents = list(self.tree.residents())
        for resident in residents:
            there = tuple(f for f in resident.files if self.store.holds(f))
            if isinstance(resident, Branch):
                resident.saved = None
                resident.segments = list(there) if len(there) == len(resident.segments) else []
            else:
                resident.files = there if any(f.plane == 0 for f in there) else ()
        for page in residents:
            if isinstance(page, Page) and not (page.forgotten or page.refs) and not self._is_anywhere(page):
                self._cut(page)
        pages = [page_record(r) for r in self.tree.residents() if isinstance(r, Page) and r.files]
        self.writer.submit(Amend(Commit(pages=tuple(pages)), (), lambda _: None))
        agents = list(self.tree.agents.values())
        for agent in agents:
            self.save_agent(agent, lambda _: None)
        for branch in [b for a in agents for b in a.branches]:
            if not (branch.running or branch.forgotten):  # to make room for another one
                if not self.residency.is_hot(branch, self.planes.all) and branch.saved_rows < branch.num_rows:
                    cut_to_saved(branch)
                    self.residency.vacate(branch)
                branch.running = True
                self.save_turn(branch, lambda _: None)

    def _is_anywhere(self, page: Page) -> bool:
        """Whether all that is needed of a page for ever, and its first plane, is in memory or on disk."""
        return all(
            self.residency.is_somewhere(page, number)
            for number, plane in enumerate(self.planes.planes)
            if number == 0 or plane.reach_in(page.number) is None
        )

    # ---- adding up

    def check(self, extra_slots: Iterable[int]) -> None:
        """Slots, references, rows, and that the tree, the agents and the arena know of the same things."""
        residents = list(self.tree.residents())
        self.residency.check(residents, extra_slots)
        branches = [r for r in residents if isinstance(r, Branch)]
        for branch in branches:
            assert branch.num_rows <= len(branch.tokens) and len(branch.tokens) <= PAGE_TOKENS + branch.running
            assert branch.saved_rows == branch.num_rows or branch.running or self.residency.is_hot(branch, self.planes.all)
        for resident in residents:
            assert sum(resident.needs.values()) == 0 or resident.refs
            for plane in self.planes.all:
                is_cached = plane in resident.slots and not resident.needs.get(plane)
                assert ((resident, plane) in self.residency.cached) == is_cached
        assert set(branches) == set(chain.from_iterable(a.branches for a in self.tree.agents.values()))
        assert self._to_remove >= 0

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.residency.close()


def record_of(branch: Branch) -> BranchRecord:
    return BranchRecord(
        branch.id,
        branch.namespace,
        branch.agent,
        branch.parent.key,
        branch.tokens.tobytes(),
        tuple(branch.segments),
        branch.created,
        branch.used,
        branch.turns.tobytes(),
    )


def agent_record(agent: Agent) -> tuple[AgentRecord, ...]:
    """Nothing is recorded of those who do not say who they are."""
    if agent.name is None:
        return ()
    return (AgentRecord(agent.id, agent.namespace, agent.name, agent.created, agent.used, agent.pinned, agent.ttl),)


def page_record(page: Page) -> PageRecord:
    assert page.parent is not None and page.files
    return PageRecord(page.key, page.parent.key, page.number + 1, page.namespace, page.tokens.tobytes(), page.files)


def note_named(branch: Branch) -> None:
    """Its pages are those of somebody who will come back."""
    page = branch.parent
    while branch.agent is not None and page.parent is not None and not page.named:
        page.named = True
        page = page.parent


def empty(branch: Branch) -> None:
    """Its rows are gone, in memory and, once that is committed, on disk."""
    branch.segments = []
    cut_to_saved(branch)
    branch.note_saved()


def cut_to_saved(branch: Branch) -> None:
    """Rows that are only in memory are lost."""
    branch.num_rows = branch.saved_rows
    branch.tokens = branch.tokens[: branch.num_rows]
    length = branch.num_tokens
    branch.turns = array(TOKEN, (t for t in branch.turns if t <= length))


def is_nothing(branch: Branch) -> bool:
    """Whether a branch holds no row of its own, and no page either, here and on disk."""
    return branch.num_rows == 0 and branch.parent.parent is None and not branch.running and not branch.refs


def repeats(older: Branch, newer: Branch) -> bool:
    """Whether all that `older` remembers stands in `newer` too, for the same asker: regenerating an answer leaves such."""
    if older is newer or older.owner is not newer.owner or older.running or older.refs:
        return False
    return older.num_rows <= newer.num_rows and older.tokens == newer.tokens[: len(older.tokens)]


def name_of(resident: Page | Branch) -> str:
    """The page's name in a trace."""
    return resident.key.hex() if isinstance(resident, Page) else f"{resident.id}:{resident.parent.number + 1}"
