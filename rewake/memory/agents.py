"""What people do with agents: create, list, show, pin, wake, fork, rewind, export, import, forget.

Runs on the engine thread, between two steps. What takes longer ends by calling `done` there: with an error, or with None.
"""

from __future__ import annotations

import heapq
import math
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rewake.errors import Conflict, CorruptFile, InternalError, InvalidRequest, NotFound, Overloaded
from rewake.memory.ledger import Ledger, name_of, note_named
from rewake.memory.portable import Bytes, PlanesOfPage, Portable, write_portable
from rewake.memory.residency import Arena, Needed, Piece, files_of
from rewake.memory.tree import Agent, Branch, Page, to_tokens
from rewake.quant import PAGE_TOKENS
from rewake.store.base import StoredFile

__all__ = ["AgentSummary", "Agents"]

Told = Callable[[Exception | None], None]
Sources = tuple[dict[int, list[Arena]], dict[int, tuple[StoredFile, ...]]]  # of planes in the arena, and of planes on disk
LOOK_EVERY = 1.0  # seconds between looks for agents whose time to live is over


@dataclass(frozen=True)
class AgentSummary:
    """What is kept of one agent. `tokens` and `turns` are those of its latest branch; sizes count shared pages in full.

    `state` is hot if all its latest branch needs is in memory, warm if some of that would be read from disk, empty if there is nothing.
    """

    agent: str
    state: str
    tokens: int
    turns: tuple[int, ...]
    branches: int
    pages_in_memory: int
    pages_loading: int
    pages_on_disk: int
    pages_shared: int
    bytes_in_memory: int
    bytes_on_disk: int
    pinned: bool
    ttl: float | None
    created: float
    used: float


class Agents:
    """The verbs. `num_unreserved` says how many slots of the arena can be had."""

    def __init__(self, ledger: Ledger, num_unreserved: Callable[[], int]) -> None:
        self.ledger = ledger
        self.tree = ledger.tree
        self.residency = ledger.residency
        self.num_unreserved = num_unreserved
        self._next_look = 0.0

    # ---- looking

    def transcripts(self, namespace: str, agent: str | None, most: int = 16) -> list[array[int]]:
        """Token ids of the latest branches, the head first."""
        return [b.transcript() for b in self.tree.branches_of(namespace, agent)[:most]]

    def list(self, namespace: str) -> list[AgentSummary]:
        names = sorted(name for space, name in self.tree.agents if space == namespace and name is not None)
        return [self._summary(self.tree.agents[namespace, name]) for name in names]

    def latest(self, namespace: str, most: int) -> tuple[AgentSummary, ...]:
        """The `most` that were used last."""
        own = (a for (space, name), a in self.tree.agents.items() if space == namespace and name is not None)
        return tuple(self._summary(agent) for agent in heapq.nlargest(most, own, key=lambda agent: agent.used))

    def show(self, namespace: str, name: str) -> AgentSummary:
        """Raises NotFound."""
        return self._summary(self._known(namespace, name))

    def _known(self, namespace: str, name: str) -> Agent:
        agent = self.tree.agents.get((namespace, name))
        if agent is None:
            raise NotFound(f"no agent {name!r} is remembered", param="agent")
        return agent

    def _summary(self, agent: Agent) -> AgentSummary:
        assert agent.name is not None
        head = agent.head
        pages = {page for b in agent.branches for page in b.parent.path()}
        residents: list[Page | Branch] = [*pages, *agent.branches]
        needed = self._needed(head) if head else []
        slots = sum(len(slots) for r in residents for slots in r.slots.values())
        return AgentSummary(
            agent=agent.name,
            state="empty" if not needed else "hot" if all(self.residency.is_hot(r, planes) for r, planes in needed) else "warm",
            tokens=head.num_tokens if head else 0,
            turns=tuple(head.turns) if head else (),
            branches=len(agent.branches),
            pages_in_memory=sum(bool(r.slots) for r in residents),
            pages_loading=len({r for r, _ in self.residency.loading}.intersection(residents)),
            pages_on_disk=sum(bool(r.files) for r in residents),
            pages_shared=sum(len(p.children) + len(p.branches) > 1 for p in pages),
            bytes_in_memory=slots * self.residency.pool.slot_bytes,
            bytes_on_disk=sum(f.file_bytes for r in residents for f in r.files),
            pinned=agent.pinned,
            ttl=agent.ttl,
            created=agent.created,
            used=agent.used,
        )

    def _needed(self, branch: Branch) -> Needed:
        """What is attended to when a branch is gone on with."""
        planes = self.ledger.planes
        needed: Needed = [(page, planes.needed(page.number, branch.next_query)) for page in branch.parent.path()]
        return [*needed, (branch, planes.all)] if branch.num_rows else needed

    # ---- records

    def create(self, namespace: str, name: str, *, pinned: bool, ttl: float | None, done: Told) -> None:
        """An agent that remembers nothing yet. Raises Conflict if there is one of that name."""
        self._must_be_new(namespace, name)
        agent = self.tree.agent(namespace, name)
        self.tree.agents[namespace, name] = agent
        agent.pinned, agent.ttl = pinned, ttl
        self.ledger.save_agent(agent, done)

    def update(self, namespace: str, name: str, *, done: Told, **changes: bool | float | None) -> None:
        """Set `pinned` or `ttl` (seconds after the last use; None: for ever). Raises NotFound."""
        agent = self._known(namespace, name)
        for field, value in changes.items():
            setattr(agent, field, value)
        self.ledger.pins_changed(agent)
        self.ledger.save_agent(agent, done)

    def forget(self, namespace: str, name: str, done: Told) -> None:
        """Forget an agent: its branches, and every page no other branch needs. Raises NotFound or Conflict.

        `done` is called when it is gone from the disk, too; with the error if it is not.
        """
        agent = self._known(namespace, name)
        self._must_be_idle(agent)
        self.ledger.forget_agent(agent, done)

    def expire(self) -> None:
        """Forget the agents whose time to live is over."""
        now = time.time()
        for agent in [a for a in self.tree.agents.values() if a.ttl is not None and now - a.used > a.ttl]:
            if not agent.pinned and not is_busy(agent):
                self.ledger.forget_agent(agent, lambda _: None)

    def expire_now_and_then(self) -> None:
        """As `expire`, but only if the last time is a while ago."""
        if time.monotonic() > self._next_look:
            self.expire()
            self._next_look = time.monotonic() + LOOK_EVERY

    def seconds_to_look(self) -> float:
        """Until somebody should look again for what has expired."""
        return LOOK_EVERY if any(a.ttl is not None for a in self.tree.agents.values()) else math.inf

    def _must_be_new(self, namespace: str, name: str) -> None:
        if (namespace, name) in self.tree.agents:
            raise Conflict(f"there is an agent {name!r} already", param="agent")

    def _must_be_idle(self, agent: Agent) -> None:
        if is_busy(agent):
            raise Conflict(f"agent {agent.name!r} is at work", param="agent")

    # ---- transcripts

    def fork(self, namespace: str, name: str, to: str, done: Told, *, tokens: int | None = None, turn: int | None = None) -> None:
        """A new agent `to` that remembers what `name` does, or its first `tokens` or turns. Shares all whole pages.

        Raises NotFound, Conflict, InvalidRequest for a length there is not, and Overloaded if there is no room to copy the last rows.
        """
        agent = self._known(namespace, name)
        self._must_be_idle(agent)
        self._must_be_new(namespace, to)
        head, length = measured(agent, tokens, turn)
        owner = self.tree.agent(namespace, to)
        owner.ttl = agent.ttl
        self._begin_with(head, owner, length, done)

    def rewind(self, namespace: str, name: str, done: Told, *, tokens: int | None = None, turn: int | None = None) -> None:
        """Go back to the first `tokens`, or to the end of answer number `turn`. What came after stays as an older branch.

        Raises as `fork` does.
        """
        agent = self._known(namespace, name)
        self._must_be_idle(agent)
        head, length = measured(agent, tokens, turn)
        if length == head.num_tokens:
            done(None)
        else:
            self._begin_with(head, agent, length, done)

    def _begin_with(self, source: Branch, owner: Agent, length: int, done: Told) -> None:
        """A new branch for `owner`: the first `length` tokens of `source`. The rows behind the last whole page are copied."""
        path = source.parent.path()
        whole = min(length // PAGE_TOKENS, len(path))
        parent = path[whole - 1] if whole else self.tree.root(owner.namespace)
        rest: Page | Branch = source if whole == len(path) else path[whole]
        branch = Branch(secrets.token_hex(16), owner, parent, rest.tokens[: length - whole * PAGE_TOKENS])
        branch.turns = to_tokens([t for t in source.turns if t <= length])
        num_rows = min(len(branch.tokens), rest.stored_rows)
        every, pool = self.ledger.planes.all, self.residency
        if not num_rows or not all(pool.is_somewhere(rest, plane) for plane in every):  # what is nowhere is computed again
            self._save(self._attached(branch), done)
            return
        needed: Needed = [(p, self.ledger.planes.needed(p.number, length)) for p in path[:whole]]
        needed.append((rest, every))
        for resident, planes in needed:  # the copy needs room, which must not be that of the pages before it
            pool.hold(resident, planes)
        cold = tuple(plane for plane in every if plane not in rest.slots and (rest, plane) not in pool.loading)
        if self.num_unreserved() < self.ledger.planes.num_slots + self.ledger.planes.slots_of(cold):
            self._release(needed)
            raise Overloaded("there is no room in memory for the rows to copy: try again")
        self._attached(branch).slots.update(pool.take_page())

        def loaded(failures: Sequence[tuple[Piece, CorruptFile]]) -> None:
            if not failures and branch.parent is parent:  # else a page before it has been lost meanwhile, and the rows with it
                assert branch.slots
                pool.copy(rest, branch.slots)
                self.ledger.trace("copy", name_of(rest), name_of(branch))
                branch.num_rows = num_rows
            self._release(needed)
            for piece, error in failures:  # what can no longer be read is computed again when it is asked for
                self.ledger.discard(piece, error)
            self._save(branch, done)

        pool.load_all([(rest, plane) for plane in every], loaded)

    def _release(self, held: Needed) -> None:
        for resident, planes in reversed(held):  # the first pages are worth most: they are to be evicted last
            self.residency.release(resident, planes)

    def _attached(self, branch: Branch) -> Branch:
        branch.running = True
        self.tree.add_branch(branch)
        self.residency.hold(branch, self.ledger.planes.all)
        note_named(branch)
        return branch

    def _save(self, branch: Branch, done: Told) -> None:
        has_store = self.ledger.writer is not None
        if not branch.num_rows:
            self.residency.give(branch.slots)
        error = InternalError("it is in memory, but could not be saved: see the server's log")
        self.ledger.save_turn(branch, lambda saved: done(None if saved or not has_store else error))
        self.residency.release(branch, self.ledger.planes.all)

    def wake(self, namespace: str, name: str, done: Callable[[int], None]) -> None:
        """Bring the latest branch into memory, as much as there is room for; `done` is told how many pages were read. Raises NotFound."""
        head = self._known(namespace, name).head
        needed = self._needed(head) if head is not None else []
        for resident, planes in needed:
            self.residency.hold(resident, planes)  # those that are there must not leave for the others
        room, missing = self.num_unreserved(), []
        for piece in ((r, plane) for r, planes in needed for plane in planes):
            if piece[1] not in piece[0].slots and files_of(piece) and piece not in self.residency.loading:
                room -= self.ledger.planes.planes[piece[1]].num_slots
                if room < 0:
                    break
                missing.append(piece)

        def finish(failures: Sequence[tuple[Piece, CorruptFile]]) -> None:
            for piece, error in failures:
                self.ledger.discard(piece, error)
            self._release(needed)
            done(len({r for r, _ in missing} - {r for (r, _), _ in failures}))

        self.residency.load_all(missing, finish)

    # ---- from machine to machine

    def export(self, namespace: str, name: str, path: Path, done: Told) -> None:
        """Write the latest branch into one file. Raises NotFound or Conflict; `done` is given CorruptFile or OSError."""
        agent = self._known(namespace, name)
        self._must_be_idle(agent)
        head = agent.head
        if head is None:
            raise InvalidRequest(f"agent {name!r} remembers nothing that could be exported", param="agent")
        pages = head.parent.path()  # remembered: where a page turns out to be damaged meanwhile, the branch ends before it
        every = self.ledger.planes.all
        residents: list[Page | Branch] = [*pages, *([head] if head.num_rows else [])]
        about = Portable(self.tree.signature, name, agent.created, head.transcript(), head.turns, num_computed(head))
        head.running = True
        held: Needed = [(head, every), *((page, every) for page in pages)]
        for resident, planes in held:
            self.residency.hold(resident, planes)
        found = [self._sources_of(resident) for resident in residents]  # now: what is only on disk may be computed anew meanwhile

        def write() -> None:
            """On an I/O thread: what is held in memory neither changes nor goes."""
            error: Exception | None = None
            try:
                write_portable(path, about, self.ledger.planes, map(self._bytes_of, found))
            except (CorruptFile, OSError) as caught:
                error = caught
            self.residency.post(lambda: finish(error))

        def finish(error: Exception | None) -> None:
            head.running = False
            self._release([*held[1:], held[0]])
            done(error)

        self.residency.run(write)

    def _sources_of(self, resident: Page | Branch) -> Sources:
        """Where the bytes of each plane are that is still somewhere."""
        slots = {plane: self.residency.bytes_of(resident, plane) for plane in resident.slots}
        cold = [plane for plane in self.ledger.planes.all if plane not in slots]
        files = {plane: files_of((resident, plane)) for plane in cold if plane == 0 or self.residency.is_somewhere(resident, plane)}
        return slots, files

    def _bytes_of(self, sources: Sources) -> dict[int, Bytes]:
        """Raises CorruptFile."""
        slots, files = sources
        found = {}
        for number in sorted({*slots, *files}):
            plane = self.ledger.planes.planes[number]
            found[number] = np.zeros(plane.num_bytes(), np.uint8)
            parts = list(plane.split(found[number]))
            if number in slots:
                for part, slot in zip(parts, slots[number], strict=True):
                    part[:] = slot
            else:
                self.residency.read(files[number], number, parts)
        return found

    def take_in(self, namespace: str, name: str, exported: Portable, pages: PlanesOfPage, done: Told) -> None:
        """Import what `export` wrote elsewhere; `pages(i)` are the bytes of the planes of its page `i`, checked.

        Raises Conflict or InvalidRequest.
        """
        self._must_be_new(namespace, name)
        if exported.signature != self.tree.signature:
            raise InvalidRequest("it was exported from another model, or with another --kv: it cannot be attended to here")
        owner = self.tree.agent(namespace, name)
        branch = self._attached(Branch(secrets.token_hex(16), owner, self.tree.root(namespace)))
        self._take_in_page(branch, 0, exported, pages, done)

    def _take_in_page(self, branch: Branch, number: int, exported: Portable, pages: PlanesOfPage, done: Told) -> None:
        """One page, then the next: the engine goes on in between, and what has been saved may leave memory for it."""
        tokens = exported.tokens[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS]
        num_rows = exported.rows(number)
        known = branch.parent.children.get(self.tree.key(branch.namespace, branch.parent, tokens)) if num_rows == PAGE_TOKENS else None
        if known is None and num_rows and self.num_unreserved() < self.ledger.planes.num_slots:
            self._wait_for_room(branch, number, exported, pages, done)
            return
        data = pages(number) if known is None and num_rows else {}
        slots = {plane: self.residency.take(plane) for plane in data}
        if branch.parent.number + 1 != number:  # one of them could not be saved, or was damaged, and has left memory: perhaps just now
            branch.slots.update(slots)
            self._give_up(branch, done)
            return
        page = branch if num_rows < PAGE_TOKENS else known or self.tree.add_page(branch.namespace, branch.parent, tokens)
        page.slots.update(slots)
        for plane, content in data.items():
            for slot, part in zip(self.residency.bytes_of(page, plane), self.ledger.planes.planes[plane].split(content), strict=True):
                slot[:] = part
        if isinstance(page, Branch):
            branch.tokens, branch.num_rows, branch.turns = tokens, num_rows, exported.turns
            self._save(branch, done)
            return
        self.residency.hold(page, self.ledger.planes.all)
        self.tree.move_branch(branch, page)
        note_named(branch)
        self.ledger.save_page(branch, page)
        self.residency.release(page, self.ledger.planes.all)
        self.residency.post(lambda: self._take_in_page(branch, number + 1, exported, pages, done))

    def _wait_for_room(self, branch: Branch, number: int, exported: Portable, pages: PlanesOfPage, done: Told) -> None:
        """Until what waits to be written is written; what is saved may leave memory."""

        def written() -> None:
            if self.num_unreserved() >= self.ledger.planes.num_slots:
                self._take_in_page(branch, number, exported, pages, done)
                return
            self._give_up(branch, done)

        if self.ledger.writer is not None:
            self.ledger.writer.barrier(written)
        else:
            written()

    def _give_up(self, branch: Branch, done: Told) -> None:
        branch.running = False
        self.residency.release(branch, self.ledger.planes.all)
        self.ledger.forget_branches([branch])
        done(Overloaded("there is no room to import it, in memory or on disk: try again"))


def num_computed(branch: Branch) -> int:
    return branch.parent.end + branch.num_rows


def is_busy(agent: Agent) -> bool:
    return any(b.running or b.refs for b in agent.branches)


def measured(agent: Agent, tokens: int | None, turn: int | None) -> tuple[Branch, int]:
    """The head, and the length that is meant: of so many tokens, or to the end of an answer; all of it if neither is given."""
    head = agent.head
    if head is None:
        raise InvalidRequest(f"agent {agent.name!r} remembers nothing yet", param="agent")
    if turn is not None and tokens is not None:
        raise InvalidRequest("give tokens or turn, not both", param="turn")
    if turn is not None:
        if not 0 <= turn <= (num := len(head.turns)):
            raise InvalidRequest(f"agent {agent.name!r} has had {num} turn{'s' * (num != 1)}, not {turn}", param="turn")
        tokens = head.turns[turn - 1] if turn else 0
    if tokens is not None and not 0 <= tokens <= head.num_tokens:
        raise InvalidRequest(f"agent {agent.name!r} has {head.num_tokens} tokens, not {tokens}", param="tokens")
    return head, head.num_tokens if tokens is None else tokens
