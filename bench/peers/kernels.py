"""Group `kernels`: attention over 4 bits beside others' attention over 16 (and 4), and what depth and a restore cost us.

  cold    from the ids of a prompt nobody has seen to the first token: GEMMs of 0.27 GFLOP a token, and attention that
          grows with the square of the length (4,096 tokens: 0.58 TFLOP over all layers, against 1.1 in the GEMMs)
  hot     16 new tokens behind a prefix in the cache: one small step, and one pass over the prefix's K/V
  decode  a token at a time at some depth: the weights (270 MB in bf16, 85 MB in Q4_1) and the K/V (23 KB a token of
          depth in 16 bits, 6.5 KB in q4) are read once for each
  eight   sequences of 1,024 decode together: the weights are read once for all

All peers compute the same ids on two threads, in turn within each repetition, and only one runs at a time. Medians.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.common import Bar, table
from bench.peers import own
from bench.peers.base import Absent, Peer, Times, Worker
from bench.peers.prompts import Prompts
from rewake.errors import ModelError

__all__ = ["measure"]

GROUP = "kernels"
DEPTH = 4096
NEW_TOKENS = 16
DECODED = 33  # the first token is the prompt's; the others are decoded
EIGHT = 8
Row = dict[str, Any]
PEER_BARS = (  # a peer, what is compared, the limit, and whether it is an upper one
    ("vllm", "ours / vLLM (bf16)", 1.5, True),
    ("transformers", "ours / transformers (bf16)", 1.0, True),
    ("llama.cpp", "llama.cpp (f16) / ours", 3.0, False),
    ("llama.cpp-q4", "llama.cpp (q4_0) / ours", 25.0, False),
)


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


def measure(peers: Sequence[Peer], prompts: Prompts, kv: str, quick: bool) -> tuple[list[Row], list[Bar]]:
    ourselves = [own.attention(kv, quick), own.depth(kv, prompts, quick), *own.restore(kv, prompts, quick)]
    measured = [Measured(peer) for peer in peers]
    try:
        for m in measured:
            attempt(m, start)
        for repetition in range(1 if quick else max(m.peer.repetitions for m in measured)):
            for stage in (warm_up, long) if quick else (warm_up, long, short, eight):
                for m in (m for m in measured if repetition < m.peer.repetitions):
                    attempt(m, partial(stage, prompts=prompts, repetition=repetition))
            print(f"repetition {repetition + 1} is done", file=sys.stderr)
    finally:
        for m in measured:
            if m.worker is not None:
                m.worker.close()
    rows = [peer_row(m, measured[0]) for m in measured]
    report(rows, ourselves, measured)
    return rows + ourselves, own_bars(ourselves, kv) + peer_bars(measured, kv)


def attempt(m: Measured, act: Callable[[Measured], None]) -> None:
    """A peer that fails is absent from then on; the others go on."""
    if m.why_absent:
        return
    try:
        act(m)
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


def eight(m: Measured, prompts: Prompts, repetition: int) -> None:
    if m.peer.batches:
        contexts = [prompts.take(f"eight {i} {repetition}", 1024) for i in range(EIGHT)]
        m.note("eight", together(m.ask(contexts, 2 * DECODED)))


def together(times: Times) -> float:
    """Tokens a second while all sequences decode: from the last one's first token to the first one's last."""
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(begin < t <= end for of_sequence in times for t in of_sequence) / (end - begin) * 1000


def peer_row(m: Measured, ours: Measured) -> Row:
    cold, our_cold = m.median("cold"), ours.median("cold")
    return {
        "peer": m.peer.name,
        "kv": m.peer.kv,
        "weights": m.peer.weights,
        "cold 4096 ms": cold,
        "/ ours": cold / our_cold if cold and our_cold else None,
        "hot +16 ms": m.median("hot"),
        "decode 0": m.median("decode 0"),
        "1024": m.median("decode 1024"),
        "4096 tok/s": m.median(f"decode {DEPTH}"),
        "8 x 1024 tok/s": m.median("eight"),
        "repetitions": len(m.seen.get("cold", ())),
        "about": m.why_absent or m.about,
    }


def report(rows: list[Row], ourselves: list[Row], measured: list[Measured]) -> None:
    print()
    table([{k: "-" if v is None else v for k, v in row.items() if k != "about"} for row in rows])
    print()
    table([{k: row.get(k, "-") for k in ("what", "kv", "ms", "GB/s", "of plain", "how")} for row in ourselves])
    for m in measured:
        print(f"{m.peer.name}: {'ABSENT, ' + m.why_absent if m.why_absent else m.about}")


def own_bars(rows: list[Row], kv: str) -> list[Bar]:
    attention, step, *restores = rows
    bars = [
        Bar(GROUP, f"{kv} decode attention at 4096, ms a token", attention["ms"], 3, most=True),
        Bar(GROUP, f"{kv} decode step from 64 to 7000, ms added", step["ms"], 6, most=True),
    ]
    return bars + [
        Bar(GROUP, f"{kv} {row['what']} / readinto", row["of plain"], 0.8 if "dropped" in row["what"] else 0.5) for row in restores
    ]


def peer_bars(measured: list[Measured], kv: str) -> list[Bar]:
    """A peer that was asked for and did not answer leaves a bar without a number: missed."""
    cold = {m.peer.name: m.median("cold") for m in measured}
    ours = cold["rewake"]
    bars = []
    for name, title, limit, most in PEER_BARS:
        if name in cold:
            theirs = cold[name]
            ratio = (ours / theirs if most else theirs / ours) if ours and theirs else float("nan")
            bars.append(Bar(GROUP, f"cold {DEPTH}: {title}, ours {kv}", ratio, limit, most))
    return bars
