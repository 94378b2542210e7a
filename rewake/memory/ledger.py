"""The books of the memory: what is remembered, where it lies, how it is saved, and what leaves.

Keeps tree, arena and store in agreement. Runs on the engine thread; knows no sequences, no schedule, and none of the
things people do with agents.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from array import array
from collections.abc import Callable, Iterable
from itertools import chain

from rewake.errors import CorruptFile
from rewake.memory.residency import Arena, Post, Residency
from rewake.memory.tree import TOKEN, Agent, Branch, Page, PrefixTree, SavedTurn, to_tokens
from rewake.memory.value import worth
from rewake.memory.writer import Amend, Reclaim, SavePage, SaveTurn, Writer
from rewake.quant import PAGE_TOKENS, PageLayout
from rewake.store.base import AgentRecord, BranchRecord, Commit, PageRecord, Store, StoredFile
from rewake.store.directory import checksum

__all__ = ["Ledger", "Trace", "name_of", "record_of"]

log = logging.getLogger(__name__)

Told = Callable[[Exception | None], None]
Trace = Callable[..., None]  # told of each change of a page's name or content; see rewake.replay

# What it costs to have a page back, in tokens computed: reading it takes about as long as some tokens do.
READ_COST, COMPUTE_COST, ANONYMOUS = 8.0, float(PAGE_TOKENS), 0.1
SORT_EVERY = 1.0  # seconds for which what is on disk keeps its order by worth: with thousands of agents, finding it takes a while


class Ledger:
    """Everything remembered under one signature."""

    def __init__(self, arena: Arena, layout: PageLayout, signature: bytes, store: Store | None, post: Post, trace: Trace | None) -> None:
        self.layout = layout
        self.store = store
        self.tree = PrefixTree(signature, store.page_secret if store is not None else b"")
        self.residency = Residency(arena, layout, store, post, self._cost, self._evicted, self._orphaned)
        self.writer = Writer(store, post, self._store_lost) if store is not None else None
        self.trace = trace or (lambda *_: None)
        self._pinned: set[Page | Branch] | None = None  # None: to be collected again
        self._to_remove = 0  # bytes that waiting jobs will give back
        self._by_worth: list[Branch] = []
        self._sorted_at = 0.0
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
            page = Page(p.key, p.namespace, parent, array(TOKEN, p.tokens), p.file)
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
        files = [p.file for p in lost]
        for page in reversed(pages):
            self._prune(page, gone, files)
        if gone:
            self._forget(Commit(gone_pages=tuple(gone)), files)

    # ---- saving

    def save_filled(self, branch: Branch) -> None:
        """A branch has just filled a page, its parent now. Whatever happens from here on, the agent remembers all up to there."""
        jobs = [self._page_job(branch, branch.parent), self._checkpoint(branch)]
        self._submit(*(job for job in jobs if job is not None))

    def save_page(self, branch: Branch, page: Page, replaced: StoredFile | None = None) -> None:
        """Write a full page, unless it is on disk; in place of `replaced`, if that held the same tokens."""
        if (job := self._page_job(branch, page, replaced)) is not None:
            self._submit(job)

    def _page_job(self, branch: Branch, page: Page, replaced: StoredFile | None = None) -> SavePage | None:
        if self.writer is None or page.file is not None or page.saving:
            return None
        assert page.slot is not None and page.parent is not None
        self.residency.hold(page)
        page.saving = True

        def done(error: Exception | None) -> None:
            page.saving = False
            page.file = job.file if error is None else replaced
            if page.forgotten and error is None:  # meanwhile, and with it what the manifest said of it
                self._forget(Commit(), page.files)
            self.residency.release(page)

        # what the manifest names is never overwritten: until the commit, that is what counts
        page.file_name = page.file_name or f"pages/{page.key.hex()[:2]}/{page.key.hex()}-{secrets.token_hex(4)}.safetensors"
        data = self.residency.bytes_of(page.slot)
        old = (replaced,) if replaced else ()
        job = SavePage(
            page.file_name, page.key, page.parent.key, len(page.path()), branch.namespace, page.tokens.tobytes(), data, old, done
        )
        return job

    def _checkpoint(self, branch: Branch) -> SaveTurn | None:
        if self.writer is None:
            return None
        if branch.owner.pinned:
            self._pinned = None
        page, turns = branch.parent, array(TOKEN, (t for t in branch.turns if t <= len(branch.parent.path()) * PAGE_TOKENS))

        def done(error: Exception | None) -> None:
            if error is None and not page.forgotten:
                branch.saved = SavedTurn(page, to_tokens(), (), turns)

        record = BranchRecord(branch.id, branch.namespace, branch.agent, page.key, b"", (), branch.created, branch.used, turns.tobytes())
        ancestors = frozenset(p.key for p in page.path())
        return SaveTurn(record, agent_record(branch.owner), ancestors, 0, 0, self.layout, None, branch.obsolete_files(), done)

    def save_turn(self, branch: Branch, closed: Callable[[bool], None]) -> None:
        """Write what is not on disk yet of a branch; its pages are, or are on their way. It is held, and `running`, meanwhile."""
        if self.writer is None:
            branch.running = False
            self._forget_repeats(branch)
            closed(False)
            return
        if branch.owner.pinned:
            self._pinned = None
        for page in branch.parent.path():
            if page.slot is not None:
                self.save_page(branch, page)  # whose write has failed before
        self.residency.hold(branch)

        def done(error: Exception | None) -> None:
            branch.running = False
            is_saved = error is None and branch.parent.key == job.branch.parent
            if is_saved:
                branch.segments = list(job.segments)
                branch.note_saved()
                self._forget_repeats(branch)
            elif error is None:  # a page before it was lost meanwhile, and its rows with it
                self._forget(Commit(), job.segments[len(job.branch.segments) :])
            self.residency.release(branch)
            if not is_saved:
                self._forget_nothing([branch])
            closed(is_saved)

        rows = self.residency.bytes_of(branch.slot) if branch.slot is not None else None
        ancestors = frozenset(p.key for p in branch.parent.path())
        first, last = branch.saved_rows, branch.num_rows
        owner = agent_record(branch.owner)
        job = SaveTurn(record_of(branch), owner, ancestors, first, last, self.layout, rows, branch.obsolete_files(), done)
        self._submit(job)

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

    def adopt(self, branch: Branch, page: Page, slot: int) -> bool:
        """A page was computed that is remembered already. What is in the arena wins, so that hot and restored agents attend to the
        same bytes; what is only on disk is written anew, unless it is equal. True if `slot` is given back."""
        if page.slot is not None:
            self.residency.pool.give(slot)
            return True
        page.slot = slot
        old = page.file
        # an encrypted file's checksum is a tag, and never equal: written anew
        if old is not None and old.checksum != checksum(self.residency.bytes_of(slot).data):
            page.file, page.file_name = None, ""
            self.save_page(branch, page, old)
        return False

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
        while short > 0 and (branches := self._least_worth()):
            log.info("the disk budget is used up: a branch of agent %r is forgotten", branches[0].agent)
            short -= self.forget_branches(branches)

    def make_room_for(self, num_pages: int) -> None:
        """Have room for so many new pages, before they are computed."""
        if self.store is not None:
            self.make_room(num_pages * self.store.file_bytes(PAGE_TOKENS))

    def _least_worth(self) -> list[Branch]:
        """What to forget next, so that the disk has more room; none if nothing would help."""
        is_fresh = False
        while not is_fresh:
            if is_fresh := not self._by_worth or time.time() > self._sorted_at + SORT_EVERY:
                self._by_worth, self._sorted_at = self._sorted_by_worth(), time.time()
            while self._by_worth:
                branch = self._by_worth.pop()
                if can_go(branch) and branch.used <= self._sorted_at and (branches := self._with_sharers(branch)):
                    return branches
        return []

    def _sorted_by_worth(self) -> list[Branch]:
        """What may be forgotten, what is worth least last."""
        now = time.time()
        heads = {a.head for a in self.tree.agents.values()}

        def value(branch: Branch) -> float:
            idle, anonymous = max(0.0, now - branch.used), branch.agent is None
            return worth(branch.num_tokens, self._own_bytes(branch), idle, anonymous=anonymous, is_head=branch in heads)

        return sorted((b for a in self.tree.agents.values() for b in a.branches if can_go(b)), key=value, reverse=True)

    def _with_sharers(self, branch: Branch) -> list[Branch]:
        """It, if that gives something back; else all that share its last page, unless one of these must stay."""
        if self._own_bytes(branch):
            return [branch]
        if branch.parent.file is None:  # it is in memory only
            return []
        sharers = [b for page in self.tree.subtree(branch.parent) for b in page.branches]
        return sharers if all(map(can_go, sharers)) else []

    def _own_bytes(self, branch: Branch) -> int:
        """What forgetting it would give back."""
        files = [*branch.segments]
        page = branch.parent
        while page.parent is not None and len(page.children) + len(page.branches) == 1:
            files += page.files
            page = page.parent
        return sum(f.file_bytes for f in files)

    # ---- leaving

    def _cost(self, resident: Page | Branch) -> float:
        """What it takes to have it back, in tokens computed. Pinned ones go when there is nothing else."""
        if resident in self.pinned():
            return math.inf
        if isinstance(resident, Branch):
            saved, named, sharers = resident.saved_rows == resident.num_rows, resident.agent is not None, 1
        else:
            saved, named, sharers = resident.file is not None, resident.named, max(1, len(resident.children) + len(resident.branches))
        return (READ_COST if saved else COMPUTE_COST) * (sharers if named else ANONYMOUS)

    def pinned(self) -> set[Page | Branch]:
        if self._pinned is None:
            branches = [b for a in self.tree.agents.values() if a.pinned for b in a.branches]
            self._pinned = set(branches).union(*(b.parent.path() for b in branches))
        return self._pinned

    def pins_changed(self, agent: Agent) -> None:
        """An agent was pinned or unpinned, or a pinned one's transcript has grown."""
        self._pinned = None
        for branch in agent.branches:
            residents: tuple[Page | Branch, ...] = (branch, *branch.parent.path())
            for resident in residents:
                self.residency.value_again(resident)

    def _evicted(self, resident: Page | Branch) -> None:
        """Something left the arena. What was never saved is no longer remembered."""
        if resident.forgotten:
            return
        if isinstance(resident, Branch):
            if resident.saved_rows < resident.num_rows:
                cut_to_saved(resident)
            if is_nothing(resident):
                self.forget_branches([resident])
        elif resident.file is None:
            self._cut(resident)

    def _orphaned(self, page: Page) -> None:
        gone: list[bytes] = []
        files: list[StoredFile] = []
        self._prune(page, gone, files)
        self._forget(Commit(gone_pages=tuple(gone)), files)

    def discard(self, resident: Page | Branch, error: CorruptFile) -> None:
        """A file is not what was written: it, and all that was computed behind it, is no longer remembered."""
        if resident.forgotten or resident.slot is not None:  # somebody else has seen it first
            return
        log.warning("%s: it is put aside, and what it held will be computed again", error)
        damaged = tuple(resident.files)
        if isinstance(resident, Page):
            self._cut(resident, damaged)
        else:
            empty(resident)
            self._forget(Commit(branches=(record_of(resident),)), (), damaged)

    def _cut(self, page: Page, damaged: tuple[StoredFile, ...] = ()) -> None:
        """Take `page` and all below it out of the tree; branches there end before it. What of it is on disk goes, too.

        A sequence that is just being opened on one of them waits for `page` too: it fails, and is matched again.
        """
        assert page.parent is not None
        files: list[StoredFile] = []
        cut: list[BranchRecord] = []
        pages = self.tree.subtree(page)
        for below in pages:
            self.residency.forget(below)
        for below in pages:
            for branch in list(below.branches):
                if branch.saved is not None and not branch.saved.parent.forgotten:
                    self._revert(branch, branch.saved)
                else:
                    files += [*branch.segments, *branch.obsolete_files()]
                    self.tree.move_branch(branch, page.parent)
                    empty(branch)
                self._drop_rows(branch)
                cut.append(record_of(branch))
            files += below.files
            self.trace("forget", below.key.hex())
            self.tree.remove_page(below)
        self._pinned = None
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
        self._pinned = None
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
            is_there = all(map(self.store.holds, resident.files))
            if isinstance(resident, Branch):
                resident.saved = None
                resident.segments = resident.segments if is_there else []
            elif not is_there:
                resident.file = None
        for page in residents:
            if (
                isinstance(page, Page)
                and not page.files
                and page not in self.residency.loading
                and page.slot is None
                and not page.forgotten
                and not page.refs
            ):
                self._cut(page)
        pages = [page_record(r) for r in self.tree.residents() if isinstance(r, Page) and r.file is not None]
        self.writer.submit(Amend(Commit(pages=tuple(pages)), (), lambda _: None))
        agents = list(self.tree.agents.values())
        for agent in agents:
            self.save_agent(agent, lambda _: None)
        for branch in [b for a in agents for b in a.branches]:
            if not (branch.running or branch.forgotten):  # to make room for another one
                if branch.slot is None and branch.saved_rows < branch.num_rows:
                    cut_to_saved(branch)
                branch.running = True
                self.save_turn(branch, lambda _: None)

    # ---- adding up

    def check(self, extra_slots: Iterable[int]) -> None:
        """Slots, references, rows, and that the tree, the agents and the arena know of the same things."""
        residents = list(self.tree.residents())
        self.residency.check(residents, extra_slots)
        branches = [r for r in residents if isinstance(r, Branch)]
        for branch in branches:
            assert branch.num_rows <= len(branch.tokens) and len(branch.tokens) <= PAGE_TOKENS + branch.running
            assert branch.slot is not None or branch.saved_rows == branch.num_rows or branch.running
        for resident in residents:
            assert (resident in self.residency.cached) == (resident.slot is not None and resident.refs == 0)
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
    assert page.parent is not None and page.file is not None
    return PageRecord(page.key, page.parent.key, len(page.path()), page.namespace, page.tokens.tobytes(), page.file)


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


def can_go(branch: Branch) -> bool:
    """Whether it may be forgotten for want of room."""
    return not (branch.owner.pinned or branch.running or branch.refs or branch.forgotten)


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
    return resident.key.hex() if isinstance(resident, Page) else f"{resident.id}:{len(resident.parent.path())}"
