"""What each piece is worth: the same work with one of them taken away.

Eight agents of 2,048 tokens, and bytes in memory for four of them in 4 bits. First they take turns, each given 16 new tokens: the least
recently used one is always the next to come, so that turns of whoever is not in memory count. Then the first four are asked at once.

  persistence  without it (--no-persist), whoever leaves memory is computed anew
  4 bits       without them (--kv bf16), the same bytes hold a quarter of the agents; all others are read from disk, more bytes each
  batching     without it (--max-running 1), one answer is computed after another
  phases       without them, agents begin each phase with nothing: that is what bench.workflows compares

In memory are the agents that are complete there after the turns. Milliseconds are to the first token of a turn, reading apart; tokens
a second are from asking four to the end of the last answer (33 tokens each).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import Bar, finish, flags, table
from bench.concurrency import NEW_TOKENS, Talk
from bench.robin import DIM, HEADS, LAYERS
from rewake.config import Config
from rewake.memory.memory import pages_for
from rewake.planes import slot_bytes
from rewake.quant import CODECS, PageLayout
from rewake.service import Service, open_service

AGENTS, HELD, ANSWER, TOGETHER = 8, 4, 33, 3
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "persistence": {"persist": False},
    "4 bits": {"kv": "bf16"},
    "batching": {"max_running": 1},
}


def bytes_for(context: int, rounds: int) -> int:
    """Of as many agents as memory should hold, in 4 bits and whole pages."""
    most = context + NEW_TOKENS * (rounds + TOGETHER) + (ANSWER + 1) * TOGETHER + rounds
    return HELD * pages_for(most) * slot_bytes(PageLayout(LAYERS, HEADS, DIM, DIM, CODECS["q4"]).page_bytes)


def num_hot(service: Service) -> int:
    memory = service.engine.memory
    return service.engine.call(lambda: sum(agent.state == "hot" for agent in memory.agents.latest("default", AGENTS))).result()


def measure(settings: dict[str, Any], context: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as data:
        service = open_service(replace(Config(), data=Path(data), memory=bytes_for(context, rounds), **settings))
        try:
            talks = [Talk(service, f"agent{i}", context) for i in range(AGENTS)]
            turns = [talk.hear(talk.ask()).ttft for _ in range(rounds) for talk in talks]
            held = num_hot(service)
            rates = []
            for _ in range(TOGETHER):
                asked = [talk.ask(ANSWER) for talk in talks[:HELD]]
                ended = max(talk.hear(ask).times[-1] for talk, ask in zip(talks, asked, strict=False))
                rates.append(HELD * ANSWER / (ended - asked[0].started))
        finally:
            service.close()
    return {"agents in memory": held, "turn ms": statistics.median(turns), "four at once, tokens/s": statistics.median(rates)}


def main(args: argparse.Namespace) -> int:
    context, rounds = (512, 1) if args.quick else (2048, 2)
    rows: list[dict[str, Any]] = []
    for without, settings in VARIANTS.items():
        rows.append({"without": without, **measure(settings, context, rounds)})
        print(f"without {without}", file=sys.stderr)
    table(rows)
    whole, memoryless, wide, alone = rows
    bars = [
        Bar("ablation", "persistence: turn ms, without / with", memoryless["turn ms"] / whole["turn ms"], 1),
        Bar("ablation", "4 bits: agents in memory, with / without", whole["agents in memory"] / max(1, wide["agents in memory"]), 1),
        Bar("ablation", "batching: tokens/s, with / without", whole["four at once, tokens/s"] / alone["four at once, tokens/s"], 1),
    ]
    return finish("ablation", rows, bars, args)


if __name__ == "__main__":
    raise SystemExit(main(flags(__doc__).parse_args()))
