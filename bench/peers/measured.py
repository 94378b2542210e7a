"""Peers that are asked the same things in turn, and what was seen of each. Knows no bar."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

from bench.peers.base import Absent, Peer, Times, Worker
from bench.peers.prompts import Prompts
from rewake.errors import ModelError

__all__ = [
    *("DECODED", "DEPTH", "EIGHT", "NEW_TOKENS"),
    *("Measured", "attempt", "long", "repetitions", "short", "started", "together", "warm_up"),
]

DEPTH = 4096
NEW_TOKENS = 16
DECODED = 33  # the first token is the prompt's; the others are decoded
EIGHT = 8

P = ParamSpec("P")


@dataclass
class Measured:
    """A peer and what was seen of it: lists of numbers, one for each repetition."""

    peer: Peer
    worker: Worker | None = None
    why_absent: str = ""
    about: str = ""
    seen: dict[str, list[float]] = field(default_factory=dict)

    def ask(self, contexts: list[list[int]], new: int) -> Times:
        assert self.worker is not None
        return self.worker.generate(contexts, new)

    def note(self, name: str, value: float) -> None:
        self.seen.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        return statistics.median(self.seen[name]) if name in self.seen else None


Stage = Callable[[Measured, Prompts, int], None]  # of a repetition, by its number


@contextmanager
def started(peers: Sequence[Peer]) -> Iterator[list[Measured]]:
    """Their workers run meanwhile."""
    measured = [Measured(peer) for peer in peers]
    try:
        for m in measured:
            attempt(m, start)
        yield measured
    finally:
        for m in measured:
            if m.worker is not None:
                m.worker.close()


def repetitions(measured: Sequence[Measured], stages: Sequence[Stage], prompts: Prompts, quick: bool) -> Iterator[int]:
    """Each repetition, when all have been through its stages, one peer after the other in each."""
    for repetition in range(1 if quick else max(m.peer.repetitions for m in measured)):
        for stage in stages:
            for m in measured:
                if repetition < m.peer.repetitions:
                    attempt(m, stage, prompts, repetition)
        yield repetition
        print(f"repetition {repetition + 1} is done", file=sys.stderr)


def attempt(m: Measured, act: Callable[Concatenate[Measured, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
    """A peer that fails is absent from then on; the others go on."""
    if m.why_absent:
        return
    try:
        act(m, *args, **kwargs)
    except (Absent, ModelError) as absent:
        m.why_absent = str(absent)
        print(f"{m.peer.name} is absent: {absent}", file=sys.stderr)


def start(m: Measured) -> None:
    m.worker = Worker(m.peer)
    m.about = m.worker.about
    print(f"{m.peer.name}: {m.about}", file=sys.stderr)


def warm_up(m: Measured, prompts: Prompts, repetition: int) -> None:
    """What comes is the second of its kind; engines so slow that they are asked less often see only what is short."""
    if not repetition:
        m.ask([prompts.take("warm-up", DEPTH if m.peer.repetitions == Peer.repetitions else 64)], 3)


def long(m: Measured, prompts: Prompts, repetition: int) -> None:
    context = prompts.take(f"cold {repetition}", DEPTH)
    times = m.ask([context], DECODED)
    m.note("cold", times[0][0])
    m.note(f"decode {DEPTH}", together(times))
    if m.peer.reuses:
        m.note("hot", m.ask([context + prompts.take(f"new {repetition}", NEW_TOKENS)], 1)[0][0])


def short(m: Measured, prompts: Prompts, repetition: int) -> None:
    for name, size in (("decode 0", NEW_TOKENS), ("decode 1024", 1024)):
        m.note(name, together(m.ask([prompts.take(f"{name} {repetition}", size)], DECODED)))


def together(times: Times) -> float:
    """Tokens a second while all sequences decode: from the last one's first token to the first one's last."""
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(begin < t <= end for of_sequence in times for t in of_sequence) / (end - begin) * 1000
