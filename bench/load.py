"""Two hundred clients at one server, some of them bad: what good ones get, who is turned away, and what is left behind.

A real server process (`rewake serve`, SmolLM2-135M) with memory for less than its agents have. Every client is an agent: it shares a
system prompt of some 800 tokens with all others, and has a talk of its own, whose turns are answered with up to 128 tokens over a
stream. Of its requests, at random: 8 % are left in mid-stream, 4 % before anything has come, 8 % are read slowly (four chunks a
second, through a small socket buffer), and 6 % are malformed, from bytes that are not HTTP to prompts that are too long.

  goodput    tokens that arrive within the time measured, of answers that come to their end, against what 16 agents get together in
             an engine without HTTP and without anything else to do (bench.concurrency, group together, at a depth of 1,024). What is lost:
             prompts (some 30 tokens a turn), tokens of those who leave, and what HTTP and saving cost on the same cores
  refusals   429 and 503 against all requests that were well formed. 16 run, 256 may wait: 200 clients fit, and wait for long
  memory     resident bytes of the process against requests that have ended: least squares, after the first 200, when the arena is
             full. What is known of a turn's pages, branch and texts takes some 2 KB; all else would be a leak
  books      all slots, references and reservations add up (`/health/books`), when everybody has gone
  isolation  what another namespace has stored takes as long as what nobody has: the time to the first token of some 1,000 tokens, by
             two keys in turn. Tests say that the work is equal, token for token; this says that nothing else gives it away

Clients run in a process of their own, on the same cores. They ask again after as many seconds as Retry-After says. All use one API key.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from bench.common import Bar, finish, flags, table
from bench.concurrency import Ask, decode_rate
from bench.crowd import ANSWER, CONTEXT, RULES, SYSTEM, Address, Client, Manners, Tally, send, turn
from bench.memory import ids
from rewake.config import Config
from rewake.keys import KeyFile
from rewake.service import open_service
from tests.server import ServerProcess

MEMORY = "256MiB"  # 160 pages of 256 tokens
DEPTH, TOGETHER = 1024, 16
SETTLED = 200  # requests until memory is expected to stay as it is


async def watch(process: psutil.Process, tally: Tally, seen: list[tuple[int, int]]) -> None:
    while True:
        seen.append((tally.ended, process.memory_info().rss))
        await asyncio.sleep(0.25)


def slope(seen: Sequence[tuple[int, int]]) -> float:
    """Bytes a request."""
    late = [(requests, rss) for requests, rss in seen if requests >= SETTLED]
    if len({requests for requests, _ in late}) < 10:
        return math.nan
    return statistics.linear_regression(*zip(*late, strict=True)).slope


def together(quick: bool) -> float:
    """What 16 agents get together, in tokens a second: the reference."""
    with tempfile.TemporaryDirectory() as data:
        service = open_service(replace(Config(), data=Path(data), memory=2**30))
        contexts = [ids(("together", i), DEPTH) for i in range(TOGETHER)]
        for i, context in enumerate(contexts):
            Ask(service, context, f"t{i}", 1).done()
        rates = [decode_rate(service, contexts, repetition, ANSWER) for repetition in range(1 if quick else 3)]
        service.close()
    return statistics.median(rates)


@contextmanager
def serving() -> Iterator[tuple[ServerProcess, list[Address]]]:
    """A server, and ways to it with three keys, each of a namespace of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = KeyFile(Path(folder) / "keys.json")
        keys = [file.create(name, operator=True)[1] for name in ("crowd", "another", "a third")]
        flags = ("--memory", MEMORY, "--context", str(CONTEXT), "--threads", "0", "--keys", str(file.path))
        with ServerProcess(Path(folder) / "data", *flags) as server:
            server.http.headers["X-API-Key"] = keys[0]
            server.chat("first", [SYSTEM, {"role": "user", "content": "Hello."}], max_tokens=2)
            yield server, [Address(server.port, key) for key in keys]


async def isolation(addresses: Sequence[Address], quick: bool) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token of what another has stored, and of what nobody has."""
    stores, asks, cold = addresses
    seen: dict[Address, list[float]] = {asks: [], cold: []}
    for number in range(2 if quick else 7):
        in_turn = [(asks, number), (cold, -1 - number)]
        for to, text in [(stores, number), *(in_turn if number % 2 else reversed(in_turn))]:
            words = random.Random(text).choices(RULES.split(), k=800)
            data = turn(f"isolated {number}", [{"role": "user", "content": " ".join(words)}], max_tokens=1)
            started = time.monotonic()
            answer = await send(to, data, Manners())
            if to in seen:
                seen[to].append(((answer.times or [time.monotonic()])[0] - started) * 1000)
    return seen[asks], seen[cold]


async def crowd(server: ServerProcess, to: Address, count: int, seconds: float) -> tuple[Tally, float, list[tuple[int, int]]]:
    """All clients for so long; then they have the rest of their answers. What happened, goodput, memory."""
    tally, seen = Tally(), list[tuple[int, int]]()
    begin = time.monotonic()
    watching = asyncio.create_task(watch(psutil.Process(server.process.pid), tally, seen))
    await asyncio.gather(*(Client(n, to, tally, begin + seconds).run() for n in range(count)))
    watching.cancel()
    return tally, tally.rate(begin, begin + seconds), seen


def balanced(server: ServerProcess) -> float:
    """1 if the books add up once nobody is served any more."""
    for _ in range(100):
        numbers = dict(line.rsplit(" ", 1) for line in server.http.get("/metrics").text.splitlines() if line[0] != "#")
        if float(numbers["rewake_requests_running"]) == float(numbers["rewake_requests_waiting"]) == 0:
            break
        time.sleep(0.1)
    found = server.http.get("/health/books")
    print(f"books: {found.text}")
    return float(found.is_success)


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--clients", type=int, help="how many at once (200; 20 with --quick)")
    parser.add_argument("--seconds", type=float, help="for how long (120; 15 with --quick)")
    args = parser.parse_args()
    count, seconds = args.clients or (20 if args.quick else 200), args.seconds or (15.0 if args.quick else 120.0)
    reference = together(args.quick)
    print(f"{TOGETHER} agents together, without a server: {reference:.0f} tokens/s\n")
    with serving() as (server, addresses):
        stored, cold = (statistics.median(times) for times in asyncio.run(isolation(addresses, args.quick)))
        print(f"first token of what another namespace has stored: {stored:.0f} ms; of what nobody has: {cold:.0f} ms\n")
        tally, goodput, seen = asyncio.run(crowd(server, addresses[0], count, seconds))
        well = balanced(server)
    rows, bars = summary(tally, goodput, reference, seen, count)
    bars += [Bar("load", "the books add up", well, 1)]
    if not args.quick:
        bars.append(Bar("load", "bytes of memory a request, after the first 200", slope(seen), 5000, True))
        bars.append(Bar("isolation", "first token, stored by another / cold: at least", stored / cold, 0.9))
        bars.append(Bar("isolation", "first token, stored by another / cold: at most", stored / cold, 1.1, True))
    rows.append({"stored by another ms": stored, "cold ms": cold})
    return finish("load", rows, bars, args)


def summary(
    tally: Tally, goodput: float, reference: float, seen: Sequence[tuple[int, int]], count: int
) -> tuple[list[dict[str, Any]], list[Bar]]:
    ttft = sorted(tally.ttft) or [math.nan]
    row = {
        "clients": count,
        "tokens/s": goodput,
        "reference": reference,
        "asked": tally.asked,
        "done": tally.done,
        "left": tally.left,
        "refused": tally.refused,
        "malformed": tally.malformed,
        "wrong": sum(tally.wrong.values()),
        "ttft p50 s": ttft[len(ttft) // 2],
        "p95 s": ttft[len(ttft) * 95 // 100],
        "rss MB": seen[-1][1] / 1e6,
    }
    table([row])
    for what, times in tally.wrong.most_common():
        print(f"wrong: {times} x {what}")
    bars = [
        Bar("load", "goodput / what 16 agents get together", goodput / reference, 0.8),
        Bar("load", "refused / asked", tally.refused / max(tally.asked, 1), 0.2, True),
        Bar("load", "answers that went wrong", sum(tally.wrong.values()), 0, True),
    ]
    return [{**row, "memory": list(seen[:: max(1, len(seen) // 100)])}], bars


if __name__ == "__main__":
    raise SystemExit(main())
