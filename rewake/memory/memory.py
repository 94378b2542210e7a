"""The memory of agents, as the engine uses it: opens what a prompt can reuse, takes in what was computed, and remembers it.

The life of a sequence here: `open` (match, reserve, load) -> `grow` and `advance` at each step -> `close` (record,
save). Runs on the engine thread; knows no tensors, no text and no schedule.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

from rewake.errors import ContextLengthExceeded, CorruptFile
from rewake.memory.agents import Agents
from rewake.memory.ledger import Ledger, Trace, name_of, note_named
from rewake.memory.residency import Arena, Needed, Piece, Post, files_of
from rewake.memory.tree import Branch, Page, Prefix, to_tokens
from rewake.planes import PagePlanes
from rewake.quant import PAGE_TOKENS
from rewake.request import Match, MatchKind, Request
from rewake.sequence import Sequence
from rewake.store.base import Store

__all__ = ["AgentMemory"]

DIFFERENCE_TOKENS = 8  # how much of a first difference is reported


class Way(NamedTuple):
    """How a request goes on from a prefix: with a branch, in place (in a page of it, if it `has_page`), or with a copy of the `source`
    of its last rows. What is before `start` is remembered; computed is from `position` on, with what is needed of the pages before,
    and with so many pages to grow by.
    """

    prefix: Prefix
    branch: Branch | None
    has_page: bool
    source: Page | Branch | None
    start: int
    position: int
    needed: Needed
    num_to_grow: int


class AgentMemory:
    """All memories of one model in one arena, and in one store unless there is none. `agents` is what people do with them."""

    def __init__(
        self,
        arena: Arena,
        planes: PagePlanes,
        signature: bytes,
        store: Store | None,
        post: Post,
        trace: Trace | None = None,
        *,
        most_step: int = 512,
    ) -> None:
        """A step computes up to `most_step` tokens of a sequence."""
        self.planes = planes
        self.most_step = most_step
        self.ledger = Ledger(arena, planes, signature, store, post, trace)
        self.tree, self.residency, self.trace = self.ledger.tree, self.ledger.residency, self.ledger.trace
        self.open_sequences: list[Sequence] = []
        self.agents = Agents(self.ledger, self.num_unreserved)

    def check_fits(self, request: Request) -> None:
        """Raise ContextLengthExceeded, with the numbers, for what can never fit into the arena."""
        pages = pages_for(len(request.prompt) + request.max_tokens)
        slots, size = self._most_slots(pages), self.planes.slot_bytes
        if slots > self.residency.pool.num_slots:
            raise ContextLengthExceeded(
                f"{len(request.prompt)} prompt tokens and up to {request.max_tokens} new ones need {pages} pages of {PAGE_TOKENS} tokens"
                f" ({slots * size} bytes in {slots} slots at once); the memory budget holds {self.residency.pool.num_slots}",
                param="messages",
            )

    def _most_slots(self, pages: int) -> int:
        """Slots that a sequence needs at once to grow by so many pages."""
        return sum(plane.num_slots * int(min(pages, plane.most_pages(self.most_step))) for plane in self.planes.planes)

    def open(self, request: Request, ready: Callable[[Sequence | None], None]) -> bool:
        """Find, reserve and load what `request` needs. False, and nothing done, if there is no room now.

        `ready` is called once all is in the arena; with None if a file turned out to be damaged: it is gone from
        the tree then, and opening again will match what is left.
        """
        prompt = to_tokens(request.prompt)
        found = self.tree.longest_prefix(request.namespace, prompt, request.agent, self._is_whole)
        way = self._way(self._usable(found, len(prompt)), request)
        if not self._ever_fits(way):  # no room to copy from it: compute those rows
            way = self._way(self._usable(Prefix(way.prefix.pages, None, 0), len(prompt)), request)
        if not self._ever_fits(way):  # nor for windows behind that place beside those before it: compute all
            way = self._way(Prefix((), None, 0), request)
        prefix, branch, has_page, source, start, position, needed, num_to_grow = way
        if not self._has_room(needed, num_to_grow, has_copy=source is not None):
            return False
        cold = [r for r, planes in needed if not self.residency.is_hot(r, planes)]
        match = describe(found, request, prefix.length if branch or source else start, sum(self._rows_used(r, prefix) for r in cold))
        if branch is None:
            owner = self.tree.agent(request.namespace, request.agent)
            parent = prefix.pages[-1] if prefix.pages else self.tree.root(request.namespace)
            branch = Branch(secrets.token_hex(16), owner, parent, turns=turns_within(found, prompt))
            note_named(branch)
        branch.running = True
        first_grown = len(prefix.pages) + has_page
        sequence = Sequence(request, match, branch, list(prefix.pages), list(request.prompt), 0, position, first_grown, num_to_grow)
        self.open_sequences.append(sequence)
        if not has_page:
            self.residency.hold(branch, self.planes.all)
        for resident, planes in needed:
            self.residency.hold(resident, planes)
        if source is not None:  # what is to be copied to is taken now, as others may take what is left
            self.grow(sequence, sequence.page_start + prefix.rows)
        self.ledger.make_room_for(pages_for(len(prompt)) - len(prefix.pages))  # what is held does not have to make room
        self._load(sequence, needed, source, prefix, ready)
        return True

    def _way(self, prefix: Prefix, request: Request) -> Way:
        branch = self._branch_to_continue(prefix, request)
        source = prefix.partial if prefix.rows and branch is None else None
        has_page = branch is not None and branch.stored_rows > 0
        last = branch if has_page else source
        start = len(prefix.pages) * PAGE_TOKENS if last is None else prefix.length
        position = min(start, len(request.prompt) - 1)
        needed = self._needed(Prefix(prefix.pages, last, prefix.rows if last is not None else 0), position)
        num_pages = pages_for(len(request.prompt) + request.max_tokens)
        return Way(prefix, branch, has_page, source, start, position, needed, num_pages - len(prefix.pages) - has_page)

    def _ever_fits(self, way: Way) -> bool:
        """Whether there would be room in an arena that nobody else uses: else it would be waited for for ever."""
        held = sum(self.planes.slots_of(planes) for _, planes in way.needed)
        copied = self.planes.num_slots if way.source is not None else 0
        return held + max(copied, self._most_slots(way.num_to_grow)) <= self.residency.pool.num_slots

    def _needed(self, prefix: Prefix, position: int) -> Needed:
        """What of a prefix is attended to by queries from `position` on."""
        needed: Needed = [(page, self.planes.needed(page.number, position)) for page in prefix.pages]
        if prefix.partial is not None and prefix.rows:
            needed.append((prefix.partial, self.planes.all))
        return needed

    def _usable(self, prefix: Prefix, prompt_length: int) -> Prefix:
        """As much of a prefix as can be gone on with: every plane that is attended to from there is in the arena; or is on disk,
        and reading what is not in the arena is faster than computing all behind it again."""
        while True:
            needed = self._needed(prefix, min(prefix.length, prompt_length - 1))
            lost = next((i for i, (r, planes) in enumerate(needed) if not all(self.residency.is_somewhere(r, p) for p in planes)), None)
            if lost is None:
                cold = [(i, (r, p)) for i, (r, planes) in enumerate(needed) for p in planes if self._is_cold(r, p)]
                num_bytes = sum(f.size for _, piece in cold for f in files_of(piece))
                num_rows = sum(self._rows_used(needed[i][0], prefix) for i in {i for i, _ in cold})
                if not cold or self.residency.gate.pays(num_bytes, num_rows):
                    return prefix
                lost = cold[0][0]
            prefix = Prefix(prefix.pages[:lost], None, 0)

    def _is_whole(self, resident: Page | Branch) -> bool:
        return all(self.residency.is_somewhere(resident, plane) for plane in self.planes.all)

    def _is_cold(self, resident: Page | Branch, plane: int) -> bool:
        return plane not in resident.slots and (resident, plane) not in self.residency.loading

    def _branch_to_continue(self, prefix: Prefix, request: Request) -> Branch | None:
        """The branch this request extends: all its rows are in the prompt, it is the asker's own, and nobody is at it."""
        branch = prefix.partial
        if not isinstance(branch, Branch) or not prefix.ends_branch:
            return None
        return branch if branch.agent == request.agent and not branch.running else None

    def _has_room(self, needed: Needed, num_to_grow: int, *, has_copy: bool) -> bool:
        """Whether all that is needed can be held now, with a page to copy to, and a sequence can grow by so many pages meanwhile."""
        to_take = to_keep = 0
        for resident, planes in needed:
            for plane in planes:
                if not self.residency.is_held(resident, plane):
                    to_take += self.planes.planes[plane].num_slots
                elif isinstance(resident, Page) and not self._is_needed_by_others(resident, plane):
                    to_keep += self.planes.planes[plane].num_slots
        if to_take + has_copy * self.planes.num_slots > self.residency.num_available:
            return False
        return to_take + to_keep + self._most_slots(num_to_grow) <= self._num_promised_to_nobody()

    def _rows_used(self, resident: Page | Branch, prefix: Prefix) -> int:
        return prefix.rows if resident is prefix.partial else PAGE_TOKENS

    def _load(
        self,
        sequence: Sequence,
        needed: Needed,
        source: Page | Branch | None,
        prefix: Prefix,
        ready: Callable[[Sequence | None], None],
    ) -> None:
        def finish(failures: list[tuple[Piece, CorruptFile]]) -> None:
            if failures:
                self._abandon(sequence, needed)
                for piece, error in failures:
                    self.ledger.discard(piece, error)
                ready(None)
            else:
                self._start(sequence, source, prefix)
                ready(sequence)

        self.residency.load_all([(resident, plane) for resident, planes in needed for plane in planes], finish)

    def _abandon(self, sequence: Sequence, needed: Needed) -> None:
        sequence.branch.running = False
        self.open_sequences.remove(sequence)
        if all(resident is not sequence.branch for resident, _ in needed):
            self.residency.give(sequence.branch.slots)
            self.residency.release(sequence.branch, self.planes.all)
        for resident, planes in reversed(needed):
            self.residency.release(resident, planes)

    def _start(self, sequence: Sequence, source: Page | Branch | None, prefix: Prefix) -> None:
        """All pages are hot: attach the branch, with a copy of a shared page if its rows continue one."""
        branch = sequence.branch
        if branch not in branch.parent.branches:
            self.tree.add_branch(branch)
        if source is not None:
            self.residency.copy(source, branch.slots)
            self.trace("copy", name_of(source), sequence.page_names()[-1])
            self.residency.release(source, self.planes.all)
            branch.tokens, branch.num_rows = source.tokens[: prefix.rows], prefix.rows
        sequence.num_stored = sequence.page_start + branch.num_rows

    def grow(self, sequence: Sequence, length: int) -> None:
        """Have slots for the first `length` tokens; they were reserved."""
        for _ in range(pages_for(length) - sequence.num_pages):
            slots = self.residency.take_page()
            sequence.num_to_grow -= 1
            if sequence.branch.slots:
                sequence.spare.append(slots)
            else:
                sequence.branch.slots.update(slots)

    def with_room(self, growing: list[tuple[Sequence, int]]) -> list[int]:
        """Which of some sequences can have slots for so many tokens now; the others wait for what is being written to be let go."""
        left, having = self.residency.num_available, []
        for i, (sequence, length) in enumerate(growing):
            pages = max(0, pages_for(length) - sequence.num_pages)
            reserved = self._reserved(sequence)
            if pages == 0 or (pages * self.planes.num_slots <= left and all(pages <= most for most in reserved)):
                left -= pages * self.planes.num_slots
                having.append(i)
        return having

    def _reserved(self, sequence: Sequence) -> list[int]:
        """How many pages' planes, of each plane, a sequence may still take: all it will grow by, less what it gives back meanwhile."""
        sequence.lent = [(page, plane) for page, plane in sequence.lent if self._is_needed_by_others(page, plane)]
        reserved = []
        for number, plane in enumerate(self.planes.planes):
            own = plane.num_needed(sequence.first_grown, sequence.num_pages, sequence.held_from)
            most = plane.most_pages(self.most_step) - own - sum(p == number for _, p in sequence.lent)
            reserved.append(int(max(0, min(sequence.num_to_grow, most))) if plane.reach is not None else sequence.num_to_grow)
        return reserved

    def _is_needed_by_others(self, page: Page, plane: int) -> bool:
        """Whether anybody needs it but the writer, who will be done soon."""
        return page.needs.get(plane, 0) > (plane in page.saving)

    def advance(self, sequence: Sequence, length: int) -> None:
        """K/V of the first `length` tokens are in the pages now: full ones settle, and what no later query needs is let go."""
        sequence.num_stored = max(sequence.num_stored, length)
        while sequence.num_stored - sequence.page_start >= PAGE_TOKENS:
            self._settle(sequence)
        branch = sequence.branch
        branch.tokens = to_tokens(sequence.tokens[sequence.page_start : sequence.num_stored])
        branch.num_rows = len(branch.tokens)
        self._let_go(sequence, sequence.next_position)

    def _let_go(self, sequence: Sequence, position: int) -> None:
        for number in self.planes.fleeting:
            plane = self.planes.planes[number]
            # page 0 may be needed for longer than those behind it
            passed = sequence.pages[plane.first_needed(sequence.held_from) : plane.first_needed(position)]
            first = [page for page in sequence.pages[:1] if plane.first_needed(sequence.held_from) > 0]
            for page in (*first, *passed):
                if plane.is_needed(page.number, position) or not plane.is_needed(page.number, sequence.held_from):
                    continue
                self.residency.let_go(page, number)
                if page.number >= sequence.first_grown and self._is_needed_by_others(page, number):
                    sequence.lent.append((page, number))
        sequence.held_from = position

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
        branch, slots = sequence.branch, dict(sequence.branch.slots)
        name = f"{branch.id}:{len(sequence.pages)}"
        tokens = to_tokens(sequence.tokens[sequence.page_start : sequence.page_start + PAGE_TOKENS])
        page = branch.parent.children.get(self.tree.key(branch.namespace, branch.parent, tokens))
        is_new = page is None
        if page is None:
            page = self.tree.add_page(branch.namespace, branch.parent, tokens)
            page.slots.update(slots)
            self.residency.hold(page, self.planes.all)
            taken = self.planes.all
        else:
            assert page.tokens == tokens, "two texts have one key"
            self.residency.hold(page, self.planes.all)
            taken = self.ledger.adopt(branch, page, slots)
        self._trace_settling(name, page, taken)
        sequence.pages.append(page)
        segments = tuple(s for s in branch.segments if self.planes.planes[s.plane].keeps_segments and is_new)
        branch.segments = []
        branch.slots = sequence.spare.pop(0) if sequence.spare else {}
        self.tree.move_branch(branch, page)
        note_named(branch)
        self.ledger.save_filled(branch, segments)

    def _trace_settling(self, name: str, page: Page, taken: tuple[int, ...]) -> None:
        if not taken:
            self.trace("intern", name, page.key.hex())
        elif taken == self.planes.all:
            self.trace("settle", name, page.key.hex())
        else:
            self.trace("mend", name, page.key.hex(), ",".join(map(str, taken)))

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
        for slots in sequence.spare:
            self.residency.give(slots)
        if branch.num_rows == 0:
            self.residency.give(branch.slots)
        self.ledger.save_turn(branch, closed)
        self.residency.release(branch, self.planes.all)
        for page in reversed(sequence.pages):  # the first pages are worth most: they are to be evicted last
            self.residency.release(page, self.planes.needed(page.number, sequence.held_from))

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """A step took so long; those that compute much show what a prompt's tokens cost."""
        if num_tokens >= PAGE_TOKENS:
            self.residency.gate.note_computed(num_tokens, seconds)

    def seconds_to_load(self) -> float:
        """About how long the reads that are under way will take if nothing is computed meanwhile."""
        return self.residency.gate.soonest(sum(f.size for piece in self.residency.loading for f in files_of(piece)))

    def num_unreserved(self) -> int:
        """Slots that can be had now and are not promised to anybody."""
        return min(self.residency.num_available, self._num_promised_to_nobody())

    def _num_promised_to_nobody(self) -> int:
        """The same, with those that will be there once they are written to disk."""
        leaving = sum(
            self.planes.planes[plane].num_slots
            for page in self.ledger.saving
            for plane in page.saving
            if plane in page.slots and not self._is_needed_by_others(page, plane)
        )
        return self.residency.num_available + leaving - self._num_reserved()

    def _num_reserved(self) -> int:
        return sum(
            plane.num_slots * count for s in self.open_sequences for plane, count in zip(self.planes.planes, self._reserved(s), strict=True)
        )

    def check(self) -> None:
        """Add everything up: slots, references, reservations and rows."""
        opening = [s.branch.slots for s in self.open_sequences if s.branch not in s.branch.parent.branches]
        spare = [page for s in self.open_sequences for page in s.spare]
        self.ledger.check([slot for page in (*opening, *spare) for slots in page.values() for slot in slots])
        reserved, to_nobody = self._num_reserved(), self._num_promised_to_nobody()
        assert reserved >= 0 and to_nobody >= 0, f"{reserved} slots reserved, {-to_nobody} more than there are"


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
