"""Time to the first token: cold, hot, restored, and after a restart.

The work: an agent knows a context of N tokens and is given 16 new ones.
  cold      nothing is known: N + 16 tokens are computed
  hot       the context's pages are in memory: 16 are computed
  restored  they were evicted: read from disk, checked, then 16 computed
  restart   as restored, but in a new process, and its first request

Cold is bound by the model's GEMMs (2 x 135M FLOPs a token) and attention over what is before; the others by 16 rows
of the same and one pass over N tokens of coded K/V; restored adds the reads (6,480 bytes a token with q4). Times are
from handing the request to the engine to its first token; medians of interleaved repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import geometry
from bench.common import Bar, finish, flags, table
from rewake.config import Config
from rewake.errors import ModelError
from rewake.request import Done, Event, Failed, Generated, Request, Sampling
from rewake.service import Service, open_service

CONTEXTS = (500, 1000, 2000, 4000, 7000)
NEW_TOKENS = 16
STATES = ("cold", "hot", "restored", "restart")


class Prompts:
    """Random token ids: contexts by (size, repetition), and 16 new tokens that differ for every state."""

    def context(self, size: int, repetition: int) -> list[int]:
        return random.Random(f"{size}/{repetition}").choices(range(100, 49_000), k=size)

    def new(self, state: str) -> list[int]:
        return random.Random(state).choices(range(100, 49_000), k=NEW_TOKENS)


def ttft(service: Service, prompt: list[int], agent: str) -> tuple[float, Done]:
    """Milliseconds from submission to the first token, and how the request ended."""
    import queue

    events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
    started = time.perf_counter()
    request = Request(
        f"{agent}-{started}", tuple(prompt), 1, lambda e: events.put((time.perf_counter(), e)), Sampling(temperature=0), agent=agent
    )
    service.engine.submit(request)
    first = None
    while True:
        at, event = events.get()
        if isinstance(event, Generated) and first is None:
            first = at
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            assert first is not None
            return (first - started) * 1000, event


def evict(service: Service) -> None:
    geometry.evict(service.engine)


def measure(service: Service, state: str, size: int, repetition: int) -> float:
    prompts = Prompts()
    prompt = prompts.context(size, repetition) + prompts.new(state)
    took, done = ttft(service, prompt, f"{state}-{size}-{repetition}")
    computed = done.match.computed_tokens
    assert computed == (size if state == "cold" else 0) + NEW_TOKENS or computed <= NEW_TOKENS + 1, f"{state}: {computed} computed"
    if state in ("restored", "restart"):
        assert done.match.loaded_tokens >= size, f"{state}: {done.match}"
    return took


def run(config: Config, contexts: tuple[int, ...], repetitions: int) -> dict[tuple[str, int], list[float]]:
    """All states of one repetition for every size, then a new process for its restart, then the next repetition."""
    times: dict[tuple[str, int], list[float]] = {}
    for repetition in range(repetitions):
        service = open_service(config)
        for size in contexts:
            for state in ("cold", "hot", "restored"):
                if state == "restored":
                    evict(service)
                times.setdefault((state, size), []).append(measure(service, state, size, repetition))
        service.close()
        command = [sys.executable, "-m", "bench.ttft", "--restarted", str(repetition), str(config.data), config.kv]
        out = subprocess.run([*command, *map(str, contexts)], capture_output=True, text=True, check=True).stdout
        for size, took in zip(contexts, json.loads(out.splitlines()[-1]), strict=True):
            times.setdefault(("restart", size), []).append(took)
        print(f"repetition {repetition + 1} of {repetitions}", file=sys.stderr)
    return times


def restarted(arguments: list[str]) -> None:
    """In the new process."""
    repetition, data, kv, *sizes = arguments
    service = open_service(Config(data=Path(data), kv=kv))
    print(json.dumps([measure(service, "restart", int(size), int(repetition)) for size in sizes]))
    service.close()


def sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def of_geometry(args: argparse.Namespace) -> int:
    contexts, threads = args.contexts or geometry.CONTEXTS[: 1 if args.quick else None], args.threads or os.cpu_count() or 1
    try:
        rows, bars = geometry.measure(args.geometry, contexts, args.kv, threads)
    except ModelError as refused:
        print(f"bench.ttft: {refused}", file=sys.stderr)
        return 2
    return finish("ttft", rows, bars, args)


def main() -> int:
    if sys.argv[1:2] == ["--restarted"]:
        restarted(sys.argv[2:])
        return 0
    parser = flags(__doc__)
    parser.add_argument("--kv", default="q4", help="codec (q4)")
    parser.add_argument(
        "--geometry", choices=geometry.GEOMETRIES, help="a model of the paper's size, with random weights; see bench.geometry"
    )
    parser.add_argument("--contexts", type=sizes, metavar="N,N", help="tokens, for --geometry (1024,2048,4096; --quick: 1024)")
    parser.add_argument("--threads", type=int, default=0, help="for --geometry (all cores)")
    args = parser.parse_args()
    if args.geometry:
        return of_geometry(args)
    contexts, repetitions = ((500, 4000), 2) if args.quick else (CONTEXTS, 5)
    with tempfile.TemporaryDirectory() as data:
        config = replace(Config(), data=Path(data), kv=args.kv)
        times = run(config, contexts, repetitions)
    rows: list[dict[str, Any]] = []
    for size in contexts:
        median = {state: statistics.median(times[state, size]) for state in STATES}
        ratios = {f"cold/{state}": median["cold"] / median[state] for state in STATES[1:]}
        rows.append({"kv": args.kv, "context": size, **{f"{s} ms": median[s] for s in STATES}, **ratios})
    table(rows)
    at_4k = next(row for row in rows if row["context"] == 4000)
    bars = [
        Bar("ttft", "4k: cold / restored", at_4k["cold/restored"], 20),
        Bar("ttft", "4k: cold / restart", at_4k["cold/restart"], 20),
        Bar("ttft", "4k: restored / hot", at_4k["restored ms"] / at_4k["hot ms"], 1.3, most=True),
    ]
    return finish("ttft", rows, bars, args)


if __name__ == "__main__":
    raise SystemExit(main())
