"""Group `steps`: what a step costs, alone and together, beside others and beside a process that takes one of the cores.

  decode   every weight is read once a step: 97 MB as the default model is shipped (4.5 ms at 20 GB/s), and K and V,
           6.5 KB a token of depth in q4, once for each agent
  together eight agents share the reading of weights; what remains is 0.13 GFLOP of products for each
  cold     4,096 tokens: 0.43 TFLOP of integer products, and attention
  hot      16 new tokens behind 4,096: one step of 16 rows
  busy     the same decoding while another process spins on one of the two cores
  start    a new process, from its start to the first token behind 4,096 remembered ones; and what HTTP adds: see wake.py
  memory   of the process once it has answered, without the arena, of which next to nothing is in use by then

Rates are tokens a second. All compute the same ids on two threads, in turn within each repetition. Medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common import Bar, table
from bench.peers import wake
from bench.peers.base import Peer, cores
from bench.peers.measured import DECODED, DEPTH, EIGHT, Measured, attempt, long, repetitions, short, started, together, warm_up
from bench.peers.ours import Ours
from bench.peers.prompts import Prompts

__all__ = ["measure"]

GROUP = "steps"
Row = dict[str, Any]
DEPTHS = (16, 1024, DEPTH)
BASE = 600e6  # bytes of a process besides weights and pages: Python, torch, tokenizer
PEER_BARS = (  # a peer, at which depth, ours over theirs
    ("llama.cpp", "decode 0", 0.6),
    ("llama.cpp", "decode 1024", 1.2),
    ("vllm", "decode 1024", 2.0),
    ("llama.cpp", f"decode {DEPTH}", 2.5),
    ("vllm", f"decode {DEPTH}", 2.0),
    ("llama.cpp-q4", f"decode {DEPTH}", 5.0),
    ("vllm", "eight 1024", 1.5),
    ("llama.cpp", "eight 1024", 2.5),
)
PEER_TIMES = (  # the same of milliseconds, which are to be at most so many times theirs
    ("vllm", "cold", 1.25),
    ("vllm", "hot", 1.0),
    ("llama.cpp", "hot", 0.2),
)


def measure(peers: Sequence[Peer], prompts: Prompts, kv: str, quick: bool) -> tuple[list[Row], list[Bar]]:
    with started(peers) as measured:
        ours = measured[0]
        attempt(ours, resident)
        for repetition in repetitions(measured, (warm_up, short, long) if quick else (warm_up, short, long, eight), prompts, quick):
            attempt(ours, beside_a_busy_loop, prompts, repetition)
            if not repetition:
                attempt(ours, come_back, prompts, kv, repetitions=2 if quick else 7)
    rows = [row_of(m) for m in measured]
    print()
    table([{k: "-" if v is None else v for k, v in row.items() if k != "about"} for row in rows])
    for m in measured:
        print(f"{m.peer.name}: {'ABSENT, ' + m.why_absent if m.why_absent else m.about}")
    return rows, bars_of(measured, kv)


def resident(m: Measured) -> None:
    """Bytes in memory behind a first, short answer, beyond the weights' file."""
    from rewake.models import DEFAULT_MODEL, resolve

    assert m.worker is not None
    m.ask([[100] * 16], 3)
    status = Path(f"/proc/{m.worker.pid}/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
        weights = resolve(DEFAULT_MODEL) / "coded" / "weights.safetensors"
        m.note("resident", int(line.split()[1]) * 1024 - weights.stat().st_size)


def eight(m: Measured, prompts: Prompts, repetition: int) -> None:
    """Others only where they are compared: llama.cpp would compute eight prompts of 4,096 for minutes."""
    if m.peer.batches:
        for depth in DEPTHS if isinstance(m.peer, Ours) else (1024,):
            contexts = [prompts.take(f"eight {i} {repetition}", depth) for i in range(EIGHT)]
            m.note(f"eight {depth}", together(m.ask(contexts, 2 * DECODED)))


def beside_a_busy_loop(m: Measured, prompts: Prompts, repetition: int) -> None:
    prompt = prompts.take(f"busy {repetition}", 1024)
    free = together(m.ask([prompt], DECODED))
    with busy_loop():
        m.note("busy", together(m.ask([prompt], DECODED)) / free)


def come_back(m: Measured, prompts: Prompts, kv: str, repetitions: int) -> None:
    """Our worker is stopped meanwhile, as all are that are not asked."""
    m.note("start", wake.start(kv, prompts.take("start", wake.CONTEXT), prompts.take("start", wake.NEW_TOKENS + 1), repetitions))
    m.note("http", wake.over_http(kv, repetitions))


@contextmanager
def busy_loop() -> Iterator[None]:
    """Another process that takes the first of the cores."""
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(spin.pid, cores()[:1])
    try:
        yield
    finally:
        spin.kill()
        spin.wait()


def row_of(m: Measured) -> Row:
    rates = {f"{depth} tok/s": m.median(f"decode {depth}") for depth in (0, 1024, DEPTH)}
    of_eight = {f"8 x {depth}": m.median(f"eight {depth}") for depth in DEPTHS}
    return {
        "peer": m.peer.name,
        "kv": m.peer.kv,
        "weights": m.peer.weights,
        **rates,
        **of_eight,
        "cold 4096 ms": m.median("cold"),
        "hot +16 ms": m.median("hot"),
        "about": m.why_absent or m.about,
    }


def bars_of(measured: list[Measured], kv: str) -> list[Bar]:
    by_name = {m.peer.name: m for m in measured}
    ours = measured[0]

    def ours_over(m: Measured, name: str) -> float:
        mine, theirs = ours.median(name), m.median(name)
        return mine / theirs if mine and theirs else float("nan")

    def number(name: str) -> float:
        return statistics.median(ours.seen.get(name, [float("nan")]))

    bars = [
        Bar(GROUP, f"{name}: ours {kv} / {peer}", ours_over(by_name[peer], name), limit)
        for peer, name, limit in PEER_BARS
        if peer in by_name
    ]
    bars += [
        Bar(GROUP, f"{name} {DEPTH}: ours {kv} / {peer}", ours_over(by_name[peer], name), limit, most=True)
        for peer, name, limit in PEER_TIMES
        if peer in by_name
    ]
    bars += [
        Bar(GROUP, "eight at 1024 / one", number("eight 1024") / number("decode 1024"), 3),
        Bar(GROUP, f"16 new tokens behind {DEPTH}, ms", number("hot"), 42, most=True),
        Bar(GROUP, f"start of a process to the first token behind {DEPTH}, s", number("start"), 3, most=True),
        Bar(GROUP, "HTTP adds, ms", number("http"), 10, most=True),
        Bar(GROUP, "beside a busy loop / alone", number("busy"), 0.4),
        Bar(GROUP, "resident beyond weights and pages, MB", number("resident") / 1e6, BASE / 1e6, most=True),
    ]
    return bars
