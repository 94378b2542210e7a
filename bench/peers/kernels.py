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

from collections.abc import Sequence
from typing import Any

from bench.common import Bar, table
from bench.peers import own
from bench.peers.base import Peer
from bench.peers.measured import DECODED, DEPTH, EIGHT, Measured, long, repetitions, short, started, together, warm_up
from bench.peers.prompts import Prompts

__all__ = ["measure"]

GROUP = "kernels"
Row = dict[str, Any]
PEER_BARS = (  # a peer, what is compared, the limit, and whether it is an upper one
    ("vllm", "ours / vLLM (bf16)", 1.5, True),
    ("transformers", "ours / transformers (bf16)", 1.0, True),
    ("llama.cpp", "llama.cpp (f16) / ours", 3.0, False),
    ("llama.cpp-q4", "llama.cpp (q4_0) / ours", 25.0, False),
)


def measure(peers: Sequence[Peer], prompts: Prompts, kv: str, quick: bool) -> tuple[list[Row], list[Bar]]:
    ourselves = [own.attention(kv, quick), own.depth(kv, prompts, quick), *own.restore(kv, prompts, quick)]
    with started(peers) as measured:
        for _ in repetitions(measured, (warm_up, long) if quick else (warm_up, long, short, eight), prompts, quick):
            pass
    rows = [peer_row(m, measured[0]) for m in measured]
    report(rows, ourselves, measured)
    return rows + ourselves, own_bars(ourselves, kv) + peer_bars(measured, kv)


def eight(m: Measured, prompts: Prompts, repetition: int) -> None:
    if m.peer.batches:
        contexts = [prompts.take(f"eight {i} {repetition}", 1024) for i in range(EIGHT)]
        m.note("eight", together(m.ask(contexts, 2 * DECODED)))


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
