"""The memory of agents: opens what a prompt can reuse, takes in what was computed, and remembers it.

The life of a sequence here: `open` (match, reserve, load) -> `grow` and `advance` at each step -> `close` (record,
save). Runs on the engine thread; knows no tensors, no text and no schedule.
"""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rewake.errors import Conflict, ContextLengthExceeded, CorruptFile, NotFound
from rewake.memory.residency import Arena, Post, Residency
from rewake.memory.tree import TOKEN, Branch, Page, Prefix, PrefixTree, SavedTurn, to_tokens
from rewake.memory.writer import Forget, SavePage, SaveTurn, Writer
from rewake.quant import PAGE_TOKENS, PageLayout
from rewake.request import Match, MatchKind, Request
from rewake.sequence import Sequence
from rewake.store.base import BranchRecord, Commit, PageRecord, Store, StoredFile

__all__ = ["AgentMemory", "AgentSummary", "Trace"]

log = logging.getLogger(__name__)

DIFFERENCE_TOKENS = 8  # how much of a first difference is reported
Forgotten = Callable[[Exception | None], None]
Trace = Callable[..., None]  # told of each change of a page's name or content; see rewake.replay


@dataclass(frozen=True)
class AgentSummary:
    """What is kept of one agent. `tokens` are those of its latest turn; sizes count shared pages in full."""

    agent: str
    branches: int
    tokens: int
    pages_in_memory: int
    pages_on_disk: int
    bytes_on_disk: int
    created: float
    used: float


class AgentMemory:
    """All memories of one model in one arena, and in one store unless there is none."""

    def __init__(
        self, arena: Arena, layout: PageLayout, signature: bytes, store: Store | None, post: Post, trace: Trace | None = None
    ) -> None:
        self.layout = layout
        self.tree = PrefixTree(signature)
        self.residency = Residency(arena, layout, store, post, self._evicted)
        self.writer = Writer(store, post) if store is not None else None
        self.trace = trace or (lambda *_: None)
        self.open_sequences: list[Sequence] = []
        if store is not None:
            self._recall(store)

    def _recall(self, store: Store) -> None:
        """Build the tree from the manifest; no page is read."""
        snapshot = store.load()
        pages: dict[tuple[str, bytes], Page] = {}
        lost: list[PageRecord] = []
        for p in snapshot.pages:
            parent = pages.get((p.namespace, p.parent)) if p.parent else self.tree.root(p.namespace)
            if parent is None:
                lost.append(p)
                continue
            page = Page(p.key, parent, array(TOKEN, p.tokens), p.file)
            parent.children[p.key] = pages[p.namespace, p.key] = page
        for b in snapshot.branches:
            parent = pages.get((b.namespace, b.parent)) if b.parent else self.tree.root(b.namespace)
            if parent is None:
                log.warning("a branch of agent %r has lost its pages: forgotten", b.agent)
                self._forget(Commit(gone_branches=(b.id,)), tuple(s.name for s in b.segments))
                continue
            branch = Branch(
                b.id, b.namespace, b.agent, parent, array(TOKEN, b.tokens), segments=list(b.segments), created=b.created, used=b.used
            )
            branch.num_rows = branch.saved_rows
            branch.note_saved()
            self.tree.add_branch(branch)
        self._forget_unfinished(list(pages.values()), lost)

    def _forget_unfinished(self, pages: list[Page], lost: list[PageRecord]) -> None:
        """Forget pages of turns a crash has cut off: no agent owns them, so nobody could ever forget them by name."""
        gone = [p.key for p in lost]
        files = [p.file.name for p in lost]
        for page in reversed(pages):
            self._prune(page, gone, files)
        if gone:
            self._forget(Commit(gone_pages=tuple(gone)), tuple(files))

    # ---- a sequence's life

    def check_fits(self, request: Request) -> None:
        """Raise ContextLengthExceeded, with the numbers, for what can never fit into the arena."""
        pages = pages_for(len(request.prompt) + request.max_tokens)
        if pages > self.residency.pool.num_slots:
            raise ContextLengthExceeded(
                f"{len(request.prompt)} prompt tokens and up to {request.max_tokens} new ones need {pages} pages of {PAGE_TOKENS} tokens"
                f" ({pages * self.layout.page_bytes} bytes); the memory budget holds {self.residency.pool.num_slots}",
                param="messages",
            )

    def open(self, request: Request, ready: Callable[[Sequence | None], None]) -> bool:
        """Find, reserve and load what `request` needs. False, and nothing done, if there is no room now.

        `ready` is called once all is in the arena; with None if a file turned out to be damaged: it is gone from
        the tree then, and opening again will match what is left.
        """
        prompt = to_tokens(request.prompt)
        prefix = self.tree.longest_prefix(request.namespace, prompt, request.agent)
        num_pages = pages_for(len(prompt) + request.max_tokens)
        branch = self._branch_to_continue(prefix, request)
        source = prefix.partial if prefix.rows and branch is None else None
        if source is not None and num_pages + 1 > self.residency.pool.num_slots:
            source = None  # no room to copy from it: compute those rows
        if not self._has_room(num_pages, prefix, source):
            return False
        needed: list[Page | Branch] = [*prefix.pages]
        needed += [r for r in (branch, source) if r is not None and r.stored_rows]
        loaded_tokens = sum(self._rows_used(r, prefix) for r in needed if r.slot is None)
        match = describe(prefix, request, prefix.length if branch or source else len(prefix.pages) * PAGE_TOKENS, loaded_tokens)
        if branch is None:
            branch = Branch(
                secrets.token_hex(16),
                request.namespace,
                request.agent,
                prefix.pages[-1] if prefix.pages else self.tree.root(request.namespace),
            )
        branch.running = True
        has_page = branch in needed
        sequence = Sequence(request, match, branch, list(prefix.pages), list(request.prompt), 0, num_pages - len(prefix.pages) - has_page)
        self.open_sequences.append(sequence)
        if not has_page:
            self.residency.hold(branch)
        for resident in needed:
            self.residency.hold(resident)
        self._load(sequence, needed, source, prefix, ready)
        return True

    def _branch_to_continue(self, prefix: Prefix, request: Request) -> Branch | None:
        """The branch this request extends: all its rows are in the prompt, it is the asker's own, and nobody is at it."""
        branch = prefix.partial
        if not isinstance(branch, Branch) or not prefix.ends_branch:
            return None
        return branch if branch.agent == request.agent and not branch.running else None

    def _has_room(self, num_pages: int, prefix: Prefix, source: Page | Branch | None) -> bool:
        held = sum(page.refs > 0 for page in prefix.pages)
        wanted = num_pages - held + (source is not None and source.refs == 0)
        reserved = sum(s.num_reserved for s in self.open_sequences)
        return wanted + reserved <= self.residency.num_available

    def _rows_used(self, resident: Page | Branch, prefix: Prefix) -> int:
        return prefix.rows if resident is prefix.partial else PAGE_TOKENS

    def _load(
        self,
        sequence: Sequence,
        needed: list[Page | Branch],
        source: Page | Branch | None,
        prefix: Prefix,
        ready: Callable[[Sequence | None], None],
    ) -> None:
        waiting = len(needed)
        failures: list[tuple[Page | Branch, CorruptFile]] = []

        def loaded(resident: Page | Branch, error: CorruptFile | None) -> None:
            nonlocal waiting
            waiting -= 1
            if error is not None:
                failures.append((resident, error))
            if waiting == 0:
                finish()

        def finish() -> None:
            if failures:
                self._abandon(sequence, needed)
                for resident, error in failures:
                    self.discard(resident, error)
                ready(None)
            else:
                self._start(sequence, source, prefix)
                ready(sequence)

        if not needed:
            finish()
        for resident in needed:
            self.residency.load(resident, lambda error, resident=resident: loaded(resident, error))  # type: ignore[misc]

    def _abandon(self, sequence: Sequence, needed: list[Page | Branch]) -> None:
        sequence.branch.running = False
        self.open_sequences.remove(sequence)
        if sequence.branch not in needed:
            self.residency.release(sequence.branch)
        for resident in reversed(needed):
            self.residency.release(resident)

    def _start(self, sequence: Sequence, source: Page | Branch | None, prefix: Prefix) -> None:
        """All pages are hot: attach the branch, with a copy of a shared page if its rows continue one."""
        branch = sequence.branch
        if branch not in branch.parent.branches:
            self.tree.add_branch(branch)
        if source is not None:
            self.grow(sequence, sequence.page_start + prefix.rows)
            assert branch.slot is not None
            self.residency.copy(source, branch.slot)
            self.trace("copy", name_of(source), sequence.page_names()[-1])
            self.residency.release(source)
            branch.tokens, branch.num_rows = source.tokens[: prefix.rows], prefix.rows
        sequence.num_stored = sequence.page_start + branch.num_rows

    def grow(self, sequence: Sequence, length: int) -> None:
        """Have slots for the first `length` tokens; they were reserved."""
        for _ in range(pages_for(length) - len(sequence.slots())):
            slot = self.residency.take()
            sequence.num_reserved -= 1
            if sequence.branch.slot is None:
                sequence.branch.slot = slot
            else:
                sequence.spare_slots.append(slot)

    def advance(self, sequence: Sequence, length: int) -> None:
        """K/V of the first `length` tokens are in the pages now: full ones settle."""
        sequence.num_stored = max(sequence.num_stored, length)
        while sequence.num_stored - sequence.page_start >= PAGE_TOKENS:
            self._settle(sequence)
        branch = sequence.branch
        branch.tokens = to_tokens(sequence.tokens[sequence.page_start : sequence.num_stored])
        branch.num_rows = len(branch.tokens)

    def _settle(self, sequence: Sequence) -> None:
        """The branch's page is full: it becomes a page of the tree, or gives way to the equal one that is there."""
        branch, slot = sequence.branch, sequence.branch.slot
        assert slot is not None
        name = f"{branch.id}:{len(sequence.pages)}"
        tokens = to_tokens(sequence.tokens[sequence.page_start : sequence.page_start + PAGE_TOKENS])
        page = branch.parent.children.get(self.tree.key(branch.namespace, branch.parent, tokens))
        if page is None:
            page = self.tree.add_page(branch.namespace, branch.parent, tokens)
            page.slot = slot
            self.trace("settle", name, page.key.hex())
        else:
            assert page.tokens == tokens, "two texts have one key"
            kept = self._intern(page, slot)
            self.trace("intern" if kept else "settle", name, page.key.hex())
        self.residency.hold(page)
        sequence.pages.append(page)
        branch.segments = []
        branch.slot = sequence.spare_slots.pop(0) if sequence.spare_slots else None
        self.tree.move_branch(branch, page)
        self._save_page(branch.namespace, page)

    def _intern(self, page: Page, slot: int) -> bool:
        """Use the page that is there instead of the equal one in `slot`, so that hot and restored agents attend to the same bytes.

        False if its file turned out to be damaged: then it is the one in `slot`.
        """
        if page.slot is not None:
            self.residency.pool.give(slot)
            return True
        stored = np.empty(self.layout.page_bytes, np.uint8)
        try:
            self.residency.read(page, stored)
            self.residency.bytes_of(slot)[:] = stored
        except CorruptFile as error:
            log.warning("%s: replaced by what was just computed", error)
            page.file = None
        page.slot = slot
        return page.file is not None

    def close(self, sequence: Sequence, closed: Callable[[bool], None]) -> None:
        """The answer is complete: remember it. `closed` is told whether it is on disk, once that is known."""
        branch = sequence.branch
        # an answer's last token was sampled, but never computed on; a prompt that was cancelled is known as far as it was computed
        end = len(sequence.tokens) if sequence.num_pending == 1 else sequence.num_stored
        branch.tokens = to_tokens(sequence.tokens[sequence.page_start : end])
        branch.used = time.time()
        self.open_sequences.remove(sequence)
        for slot in sequence.spare_slots:
            self.residency.pool.give(slot)
        if branch.num_rows == 0 and branch.slot is not None:
            self.residency.pool.give(branch.slot)
            branch.slot = None
        self._save_turn(sequence, closed)
        self.residency.release(branch)
        for page in reversed(sequence.pages):  # the first pages are worth most: they are to be evicted last
            self.residency.release(page)

    # ---- saving

    def _save_page(self, namespace: str, page: Page) -> None:
        if self.writer is None or page.file is not None:
            return
        assert page.slot is not None and page.parent is not None
        self.residency.hold(page)

        def done(error: Exception | None) -> None:
            if error is None:
                page.file = job.file
            self.residency.release(page)

        data = self.residency.bytes_of(page.slot)
        job = SavePage(page.key, page.parent.key, len(page.path()), namespace, page.tokens.tobytes(), data, done)
        self.writer.submit(job)

    def _save_turn(self, sequence: Sequence, closed: Callable[[bool], None]) -> None:
        branch = sequence.branch
        if self.writer is None:
            branch.running = False
            self._forget_repeats(branch)
            closed(False)
            return
        for page in sequence.pages:
            if page.file is None and page.refs == 1:  # not on its way either: its write has failed before
                self._save_page(branch.namespace, page)
        self.residency.hold(branch)

        def done(error: Exception | None) -> None:
            branch.running = False
            if error is None and branch.parent.key == job.branch.parent:
                branch.segments = list(job.segments)
                branch.note_saved()
                self._forget_repeats(branch)
            self.residency.release(branch)
            closed(error is None)

        rows = self.residency.bytes_of(branch.slot) if branch.slot is not None else None
        ancestors = frozenset(p.key for p in sequence.pages)
        first, last = branch.saved_rows, branch.num_rows
        job = SaveTurn(record_of(branch), ancestors, first, last, self.layout, rows, branch.obsolete_files(), done)
        self.writer.submit(job)

    # ---- leaving

    def _evicted(self, resident: Page | Branch) -> None:
        """Something left the arena. What was never saved is no longer remembered."""
        if resident.forgotten:
            return
        if isinstance(resident, Branch):
            if resident.saved_rows < resident.num_rows:
                resident.tokens = resident.tokens[: resident.saved_rows]
                resident.num_rows = resident.saved_rows
            if is_nothing(resident):
                self._forget_branches([resident])
        elif resident.file is None:
            self._cut(resident)

    def discard(self, resident: Page | Branch, error: CorruptFile) -> None:
        """A file is not what was written: it, and all that was computed behind it, is no longer remembered."""
        if resident.forgotten or resident.slot is not None:  # somebody else has seen it first
            return
        log.warning("%s: it is put aside, and what it held will be computed again", error)
        damaged = tuple(resident.files)
        if isinstance(resident, Page):
            commit, files = self._cut(resident)
        else:
            empty(resident)
            commit, files = Commit(branches=(record_of(resident),)), ()
        self._forget(commit, tuple(f for f in files if f not in {d.name for d in damaged}), damaged)

    def _cut(self, page: Page) -> tuple[Commit, tuple[str, ...]]:
        """Take `page` and all below it out of the tree; branches there end before it. What to forget on disk.

        A sequence that is just being opened on one of them waits for `page` too: it fails, and is matched again.
        """
        assert page.parent is not None
        files: list[str] = []
        cut: list[BranchRecord] = []
        pages = self.tree.subtree(page)
        for below in pages:
            below.forgotten = True
        for below in pages:
            for branch in list(below.branches):
                if branch.saved is not None and not branch.saved.parent.forgotten:
                    self._revert(branch, branch.saved)
                    continue
                files += [s.name for s in (*branch.segments, *branch.obsolete_files())]
                self.tree.move_branch(branch, page.parent)
                empty(branch)
                self._drop_slot(branch)
                cut.append(record_of(branch))
            files += [f.name for f in below.files]
            self.trace("forget", below.key.hex())
            self.tree.remove_page(below)
            self._drop_slot(below)
        if self.writer is None:
            self._forget_branches([b for b in page.parent.branches if is_nothing(b)])
        return Commit(branches=tuple(cut), gone_pages=tuple(p.key for p in pages)), tuple(files)

    def _revert(self, branch: Branch, saved: SavedTurn) -> None:
        """What came after the last turn that was saved is lost; that turn is not."""
        self.tree.move_branch(branch, saved.parent)
        branch.tokens, branch.segments = saved.tokens, list(saved.segments)
        branch.num_rows = branch.saved_rows
        self._drop_slot(branch)

    def _drop_slot(self, resident: Page | Branch) -> None:
        if resident.slot is not None and resident.refs == 0:
            self.residency.drop(resident)

    def _forget(
        self, commit: Commit, files: tuple[str, ...], damaged: tuple[StoredFile, ...] = (), done: Forgotten = lambda _: None
    ) -> None:
        if self.writer is None:
            done(None)
        else:
            self.writer.submit(Forget(commit, files, done, damaged))

    def forget(self, namespace: str, agent: str, done: Forgotten) -> None:
        """Forget an agent: its branches, and every page no other branch needs. Raises NotFound or Conflict.

        `done` is called when it is gone from the disk, too; with the error if it is not.
        """
        branches = self.tree.branches_of(namespace, agent)
        if not branches:
            raise NotFound(f"no agent {agent!r} is remembered", param="agent")
        if any(b.running or b.refs for b in branches):
            raise Conflict(f"agent {agent!r} is at work", param="agent")
        self._forget_branches(branches, done)

    def _forget_branches(self, branches: list[Branch], done: Forgotten = lambda _: None) -> None:
        gone: list[bytes] = []
        files: list[str] = []
        for branch in branches:
            files += [s.name for s in (*branch.segments, *branch.obsolete_files())]
            self.tree.remove_branch(branch)
            branch.forgotten = True
            self._drop_slot(branch)
            self._prune(branch.parent, gone, files)
        if branches:
            self._forget(Commit(gone_pages=tuple(gone), gone_branches=tuple(b.id for b in branches)), tuple(files), done=done)

    def _forget_repeats(self, branch: Branch) -> None:
        self._forget_branches([b for b in branch.parent.branches if repeats(b, branch)])

    def _prune(self, page: Page, gone: list[bytes], files: list[str]) -> None:
        """Remove `page` and its ancestors as long as nothing hangs from them and nobody holds them."""
        while page.parent is not None and not (page.children or page.branches or page.refs or page.forgotten):
            parent = page.parent
            gone.append(page.key)
            files += [f.name for f in page.files]
            self.trace("forget", page.key.hex())
            self.tree.remove_page(page)
            page.forgotten = True
            self._drop_slot(page)
            page = parent

    # ---- looking

    def transcripts(self, namespace: str, agent: str | None, most: int = 16) -> list[array[int]]:
        """Token ids of the latest branches, the head first."""
        return [b.transcript() for b in self.tree.branches_of(namespace, agent)[:most]]

    def agents(self, namespace: str) -> list[AgentSummary]:
        names = sorted(agent for space, agent in self.tree.agents if space == namespace and agent is not None)
        return [self.agent(namespace, name) for name in names]

    def agent(self, namespace: str, agent: str) -> AgentSummary:
        """Raises NotFound."""
        branches = self.tree.branches_of(namespace, agent)
        if not branches:
            raise NotFound(f"no agent {agent!r} is remembered", param="agent")
        pages = {page for b in branches for page in b.parent.path()}
        on_disk = [p.file for p in pages if p.file is not None] + [s for b in branches for s in b.segments]
        return AgentSummary(
            agent=agent,
            branches=len(branches),
            tokens=branches[0].num_tokens,
            pages_in_memory=sum(r.slot is not None for r in (*pages, *branches)),
            pages_on_disk=sum(p.file is not None for p in pages),
            bytes_on_disk=sum(f.size for f in on_disk),
            created=min(b.created for b in branches),
            used=branches[0].used,
        )

    def check(self) -> None:
        """Add everything up: slots, references, reservations and rows."""
        residents = list(self.tree.residents())
        self.residency.check(residents, [slot for s in self.open_sequences for slot in s.spare_slots])
        for resident in residents:
            if isinstance(resident, Branch):
                assert resident.num_rows <= len(resident.tokens) and len(resident.tokens) <= PAGE_TOKENS + resident.running
                assert resident.slot is not None or resident.saved_rows == resident.num_rows or resident.running
            assert (resident in self.residency.cached) == (resident.slot is not None and resident.refs == 0)
        held = sum(s.num_reserved for s in self.open_sequences)
        assert 0 <= held <= self.residency.num_available, f"{held} slots reserved, {self.residency.num_available} to be had"

    def close_all(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.residency.close()


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


def empty(branch: Branch) -> None:
    """Its rows are gone, in memory and, once that is committed, on disk."""
    branch.segments, branch.tokens, branch.num_rows = [], to_tokens(), 0
    branch.note_saved()


def is_nothing(branch: Branch) -> bool:
    """Whether a branch holds no row of its own, and no page either, here and on disk."""
    return branch.num_rows == 0 and branch.parent.parent is None and not branch.running and not branch.refs


def repeats(older: Branch, newer: Branch) -> bool:
    """Whether all that `older` remembers stands in `newer` too, for the same asker: regenerating an answer leaves such."""
    if older is newer or older.agent != newer.agent or older.running or older.refs:
        return False
    return older.num_rows <= newer.num_rows and older.tokens == newer.tokens[: len(older.tokens)]


def name_of(resident: Page | Branch) -> str:
    """The page's name in a trace."""
    return resident.key.hex() if isinstance(resident, Page) else f"{resident.id}:{len(resident.parent.path())}"


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
    )


def describe(prefix: Prefix, request: Request, reused: int, loaded: int) -> Match:
    """Name how a prompt matches: all of it is stored, it extends a branch, it parts from what is stored, or nothing is."""
    prompt, common = request.prompt, prefix.length
    kind: MatchKind = "miss"
    difference = None
    if common == len(prompt):
        kind = "exact"
    elif common and prefix.ends_branch:
        kind = "extend"
    elif common:
        kind = "diverge"
    if kind in ("diverge", "miss") and prefix.partial is not None:
        stored = tuple(prefix.partial.tokens[prefix.rows : prefix.rows + DIFFERENCE_TOKENS])
        difference = (common, stored, tuple(prompt[common : common + DIFFERENCE_TOKENS]))
    return Match(kind, len(prompt), min(reused, len(prompt) - 1), min(loaded, len(prompt) - 1), difference)
