"""A long context, woken: Gemma 3 270M (real weights, 15 of 18 layers see 512 tokens) at 32k tokens, cold against restored and hot.

The work: an agent knows a context of N tokens and is given 16 new ones. Times run from handing it to the engine to its first token.
  cold      nothing is known: N + 16 tokens are computed; the models' products grow with N, attention of the 3 full layers with N x N
  restored  the server was started anew: every page is read from disk and checked, then 16 tokens are computed. Medians
  hot       the pages are in memory. Medians

Restored is bound by reading N tokens of coded K/V (5,184 bytes each with q4, if all layers keep all of them: 170 MB at 32k, from the
system's page cache here) and by one pass over those of the full layers. arXiv 2603.04428 has 95x from disk and 136x from memory for
Gemma 3 12B at 32k.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.common import Bar, finish, flags, table
from bench.ttft import ttft as measured
from rewake.config import Config
from rewake.request import Done
from rewake.service import Service, open_service

MODEL = "gemma3-270m"
NEW_TOKENS = 16
LONGEST = 32_768 - 2 * NEW_TOKENS  # prompt and answer have to fit the model's 32k
FIRST_TOKEN = 2  # what Gemma's texts begin with
PAPER = {"restored": 95, "hot": 136}
LIMIT = 300


def text(seed: str, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 200_000), k=count)


def ttft(service: Service, prompt: list[int], agent: str) -> tuple[float, Done]:
    """As bench.ttft's, with what is new on disk."""
    took, done = measured(service, prompt, agent)
    assert done.saved
    return took, done


def opened(config: Config) -> Service:
    """A server that has computed something, though nothing of the agent."""
    service = open_service(config)
    ttft(service, text(f"warm-up {time.perf_counter()}", 64), "warm-up")
    return service


def run(config: Config, size: int, repetitions: int) -> dict[str, Any]:
    context = [FIRST_TOKEN, *text("context", size - 1)]
    service = opened(config)
    cold, done = ttft(service, context + text("cold", NEW_TOKENS), "agent")
    assert done.match.computed_tokens == size + NEW_TOKENS
    print(f"{size} tokens cold: {cold / 1000:.1f} s", file=sys.stderr)
    restored, hot = [], []
    for repetition in range(repetitions):
        service.close()
        service = opened(config)
        took, done = ttft(service, context + text(f"restored {repetition}", NEW_TOKENS), "agent")
        assert done.match.loaded_tokens >= size - 1 and done.match.computed_tokens <= NEW_TOKENS + 1, done.match
        restored.append(took)
        took, done = ttft(service, context + text(f"hot {repetition}", NEW_TOKENS), "agent")
        assert done.match.loaded_tokens == 0 and done.match.computed_tokens <= NEW_TOKENS + 1, done.match
        hot.append(took)
    service.close()
    median = {"restored": statistics.median(restored), "hot": statistics.median(hot)}
    return {
        "kv": config.kv,
        "context": size,
        "cold ms": cold,
        **{f"{state} ms": ms for state, ms in median.items()},
        **{f"cold/{state}": cold / ms for state, ms in median.items()},
    }


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--kv", default="q4", help="codec (q4)")
    args = parser.parse_args()
    size, repetitions = (4096, 2) if args.quick else (LONGEST, 5)
    with tempfile.TemporaryDirectory() as data:
        row = run(replace(Config(), model=MODEL, data=Path(data), kv=args.kv), size, repetitions)
    paper = {"kv": "paper: Gemma 3 12B", "context": 32_768, **{f"cold/{state}": ratio for state, ratio in PAPER.items()}}
    table([row, paper])
    bars = [] if args.quick else [Bar("longctx", "32k: cold / restored", row["cold/restored"], LIMIT)]
    return finish("longctx", [row, paper], bars, args)


if __name__ == "__main__":
    raise SystemExit(main())
