"""The memory of agents, as the engine uses it: opens what a prompt can reuse, takes in what was computed, and remembers it.

The life of a sequence here: `open` (match, reserve, load) -> `grow` and `advance` at each step -> `close` (record,
save). Runs on the engine thread; knows no tensors, no text and no schedule.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable

from rewake.errors import ContextLengthExceeded, CorruptFile
from rewake.memory.agents import Agents
from rewake.memory.ledger import Ledger, Trace, name_of, note_named
from rewake.memory.residency import Arena, Post
from rewake.memory.tree import Branch, Page, Prefix, to_tokens
from rewake.quant import PAGE_TOKENS, PageLayout
from rewake.request import Match, MatchKind, Request
from rewake.sequence import Sequence
from rewake.store.base import Store

__all__ = ["AgentMemory"]

DIFFERENCE_TOKENS = 8  # how much of a first difference is reported


class AgentMemory:
    """All memories of one model in one arena, and in one store unless there is none. `agents` is what people do with them."""

    def __init__(
        self, arena: Arena, layout: PageLayout, signature: bytes, store: Store | None, post: Post, trace: Trace | None = None
    ) -> None:
        self.layout = layout
        self.ledger = Ledger(arena, layout, signature, store, post, trace)
        self.tree, self.residency, self.trace = self.ledger.tree, self.ledger.residency, self.ledger.trace
        self.open_sequences: list[Sequence] = []
        self.agents = Agents(self.ledger, self.num_unreserved)

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
        found = self.tree.longest_prefix(request.namespace, prompt, request.agent)
        prefix = self._worth_loading(found)
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
        match = describe(found, request, prefix.length if branch or source else len(prefix.pages) * PAGE_TOKENS, loaded_tokens)
        if branch is None:
            owner = self.tree.agent(request.namespace, request.agent)
            parent = prefix.pages[-1] if prefix.pages else self.tree.root(request.namespace)
            branch = Branch(secrets.token_hex(16), owner, parent, turns=turns_within(found, prompt))
            note_named(branch)
        branch.running = True
        has_page = branch in needed
        sequence = Sequence(request, match, branch, list(prefix.pages), list(request.prompt), 0, num_pages - len(prefix.pages) - has_page)
        self.open_sequences.append(sequence)
        if not has_page:
            self.residency.hold(branch)
        for resident in needed:
            self.residency.hold(resident)
        self.ledger.make_room_for(pages_for(len(prompt)) - len(prefix.pages))  # what is held does not have to make room
        self._load(sequence, needed, source, prefix, ready)
        return True

    def _worth_loading(self, found: Prefix) -> Prefix:
        """As much of a prefix as is in the arena, and the rest of it if reading that is faster than computing it again."""
        wanted = [*found.pages, *([found.partial] if found.partial is not None and found.rows else [])]
        cold = [r for r in wanted if r.slot is None and r not in self.residency.loading]
        num_bytes = sum(f.size for r in cold for f in r.files)
        if not cold or self.residency.gate.pays(num_bytes, sum(self._rows_used(r, found) for r in cold)):
            return found
        return Prefix(found.pages[: wanted.index(cold[0])], None, 0)

    def _branch_to_continue(self, prefix: Prefix, request: Request) -> Branch | None:
        """The branch this request extends: all its rows are in the prompt, it is the asker's own, and nobody is at it."""
        branch = prefix.partial
        if not isinstance(branch, Branch) or not prefix.ends_branch:
            return None
        return branch if branch.agent == request.agent and not branch.running else None

    def _has_room(self, num_pages: int, prefix: Prefix, source: Page | Branch | None) -> bool:
        def is_placed(resident: Page | Branch) -> bool:
            return resident.refs > 0 and self.residency.has_place(resident)

        placed = sum(map(is_placed, prefix.pages))
        wanted = num_pages - placed + (source is not None and not is_placed(source))
        return wanted <= self.num_unreserved()

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
        def finish(failures: list[tuple[Page | Branch, CorruptFile]]) -> None:
            if failures:
                self._abandon(sequence, needed)
                for resident, error in failures:
                    self.ledger.discard(resident, error)
                ready(None)
            else:
                self._start(sequence, source, prefix)
                ready(sequence)

        self.residency.load_all(needed, finish)

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

    def shorten(self, sequence: Sequence, length: int) -> None:
        """The answer ends before its last tokens: forget them, but for those in a page that is full, which others may use by now.

        Their rows lie behind what is recorded, where nobody attends to them.
        """
        branch = sequence.branch
        length = max(length, sequence.page_start)
        del sequence.tokens[length:]
        sequence.num_stored = min(sequence.num_stored, length)
        branch.num_rows = sequence.num_stored - sequence.page_start
        branch.tokens = to_tokens(sequence.tokens[sequence.page_start : sequence.num_stored])

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
            kept = self.ledger.adopt(branch, page, slot)
            self.trace("intern" if kept else "settle", name, page.key.hex())
        self.residency.hold(page)
        sequence.pages.append(page)
        branch.segments = []
        branch.slot = sequence.spare_slots.pop(0) if sequence.spare_slots else None
        self.tree.move_branch(branch, page)
        note_named(branch)
        self.ledger.save_filled(branch)

    def close(self, sequence: Sequence, closed: Callable[[bool], None], *, is_turn: bool = True) -> None:
        """The answer is over: remember it, as a turn if it is complete. `closed` is told whether it is on disk, once that is known."""
        branch = sequence.branch
        # an answer's last token was sampled, but never computed on; a prompt that was cancelled is known as far as it was computed,
        # and one token more: that may be the last one of the answer before
        end = min(sequence.num_stored + 1, len(sequence.tokens))
        branch.tokens = to_tokens(sequence.tokens[sequence.page_start : end])
        branch.used = branch.owner.used = time.time()
        branch.turns = to_tokens([*(t for t in branch.turns if t < end + (not is_turn)), *([end] if is_turn else [])])
        self.open_sequences.remove(sequence)
        for slot in sequence.spare_slots:
            self.residency.pool.give(slot)
        if branch.num_rows == 0 and branch.slot is not None:
            self.residency.pool.give(branch.slot)
            branch.slot = None
        self.ledger.save_turn(branch, closed)
        self.residency.release(branch)
        for page in reversed(sequence.pages):  # the first pages are worth most: they are to be evicted last
            self.residency.release(page)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """A step took so long; those that compute much show what a prompt's tokens cost."""
        if num_tokens >= PAGE_TOKENS:
            self.residency.gate.note_computed(num_tokens, seconds)

    def seconds_to_load(self) -> float:
        """About how long the reads that are under way will take if nothing is computed meanwhile."""
        return self.residency.gate.soonest(sum(f.size for resident in self.residency.loading for f in resident.files))

    def num_unreserved(self) -> int:
        """Slots that can be had now and are not promised to anybody."""
        return self.residency.num_available - sum(s.num_reserved for s in self.open_sequences)

    def check(self) -> None:
        """Add everything up: slots, references, reservations and rows."""
        self.ledger.check([slot for s in self.open_sequences for slot in s.spare_slots])
        held = sum(s.num_reserved for s in self.open_sequences)
        assert 0 <= held <= self.residency.num_available, f"{held} slots reserved, {self.residency.num_available} to be had"


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


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


def turns_within(found: Prefix, prompt: array[int]) -> array[int]:
    """Where answers ended in what a prompt shares with a transcript, whether its K/V are used or not."""
    partial, length = found.partial, found.length
    node: Page | Branch | None = found.pages[-1] if found.pages else None
    if partial is not None and (found.rows or found.ends_branch):
        node = partial
    while isinstance(node, Page):
        below: list[Page | Branch] = [*node.branches, *node.children.values()]
        node = below[0] if below else None
    if partial is not None and found.ends_branch and partial.tokens[found.rows : found.rows + 1] == prompt[length : length + 1]:
        length += 1  # an answer's last token, which was sampled, but never computed on
    return to_tokens([t for t in node.turns if t <= length] if node is not None else ())
