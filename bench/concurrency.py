"""Many agents at once: what an arrival waits for, what it costs those who are there, and what all of them get together.

  arrival    B knows 4,096 tokens that are on disk only, and is given 16 new ones while A decodes. It cannot begin before the step
             under way is over; from then on it should take what it takes alone: the read (6,480 bytes a token with q4, on two I/O
             threads) and one step of 17 rows, which now has A's row, too. Then B and C, 20 ms apart: their reads and steps share
             the same cores, so that the later one's work delays the earlier one's
  staggered  A is new with 4,096 tokens, and so is B, a quarter of A's time later. Prompts are computed one after another, 512 tokens
             a step: B should wait for the rest of A, then take its own time, A's tokens being one row of each of B's steps. A, for its
             part, gets a token with each step: no two of its tokens are more than two such steps apart
  together   decoding, N agents share one pass over the weights (270 MB in bf16) and each reads its own K/V; so tokens a second grow with
             N until the cores are full. Then the paper's table 4: two agents of 1k, 4k and 7k at once, 64 tokens each; cold (nothing is
             known), warm (on disk only), hot (in memory)
  robin      ten agents of 4k take turns, and there is memory for three: see bench.robin

Times are from handing a request to the engine to a token, on the engine's thread; medians of interleaved repetitions.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import robin
from bench.common import Bar, finish, flags, table
from bench.memory import ids
from bench.ttft import evict
from rewake.backends.base import Backend, Batch, Output
from rewake.config import Config
from rewake.request import Done, Event, Failed, Generated, Request, Sampling
from rewake.service import Service, open_service

Row = dict[str, Any]
MEMORY = 2**30
CONTEXT, NEW_TOKENS, APART = 4096, 16, 0.020


# ---- asking, and listening


class Ask:
    """A request under way: which tokens came, and when."""

    def __init__(self, service: Service, prompt: Sequence[int], agent: str, max_tokens: int) -> None:
        self.service, self.prompt = service, list(prompt)
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.end: Done | Failed | None = None
        self._grown = threading.Condition()
        self.started = time.perf_counter()
        self.id = f"{agent}-{self.started}"
        service.engine.submit(Request(self.id, tuple(prompt), max_tokens, self._emit, Sampling(temperature=0), agent=agent))

    def _emit(self, event: Event) -> None:
        now = time.perf_counter()
        with self._grown:
            if isinstance(event, Generated):
                self.tokens.append(event.token)
                self.times.append(now)
            else:
                self.end = event
            self._grown.notify_all()

    def wait_for(self, num_tokens: int) -> None:
        with self._grown:
            assert self._grown.wait_for(lambda: len(self.tokens) >= num_tokens or self.end is not None, 600), "no answer"

    def done(self) -> Ask:
        self.wait_for(sys.maxsize)
        if isinstance(self.end, Failed):
            raise self.end.error
        return self

    def cancel(self) -> None:
        self.service.engine.cancel(self.id)
        self.done()

    @property
    def ttft(self) -> float:
        """Milliseconds."""
        return (self.times[0] - self.started) * 1000

    @property
    def ended(self) -> Done:
        assert isinstance(self.end, Done)
        return self.end


class Talk:
    """An agent's conversation: each turn is given `NEW_TOKENS` more."""

    def __init__(self, service: Service, name: str, size: int) -> None:
        self.service, self.name, self.turns = service, name, 0
        self.text = ids(name, size)
        self.hear(Ask(service, self.text, name, 1).done())

    def ask(self, max_tokens: int = 1) -> Ask:
        self.turns += 1
        return Ask(self.service, self.text + ids((self.name, self.turns), NEW_TOKENS), self.name, max_tokens)

    def hear(self, ask: Ask) -> Ask:
        """Go on from a complete answer."""
        self.text = ask.done().prompt + ask.tokens
        return ask


@dataclass(frozen=True)
class Step:
    start: float
    end: float
    rows: dict[str, int]  # tokens of each request

    @property
    def ms(self) -> float:
        return (self.end - self.start) * 1000


@dataclass
class Clock:
    """A backend that keeps when its steps were, and of what."""

    backend: Backend
    steps: list[Step] = field(default_factory=list)

    def forward(self, batch: Batch) -> Output:
        start = time.perf_counter()
        output = self.backend.forward(batch)
        self.steps.append(Step(start, time.perf_counter(), {row.sampler: len(row.tokens) for row in batch.rows}))
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@dataclass(frozen=True)
class Timeline:
    """What lay between an arrival and its first token, in milliseconds."""

    rest: float  # of the step under way
    before: float  # matching, reading, waiting, and steps that were computed without it
    without: int  # their number
    own: float  # the steps it was in
    ttft: float

    @staticmethod
    def of(ask: Ask, steps: Sequence[Step]) -> Timeline:
        first = ask.times[0]
        around = [s for s in steps if s.end > ask.started and s.start <= first]
        own = [s for s in around if ask.id in s.rows]
        begun = next((s for s in around if s.start <= ask.started), None)
        free = begun.end if begun else ask.started
        return Timeline(
            (free - ask.started) * 1000,
            (own[0].start - free) * 1000,
            sum(ask.id not in s.rows and s.start > ask.started for s in around),
            (own[-1].end - own[0].start) * 1000,
            ask.ttft,
        )

    @property
    def after_rest(self) -> float:
        return self.ttft - self.rest


# ---- arrival


def arrival(service: Service, clock: Clock, quick: bool) -> tuple[list[Row], list[Bar]]:
    talker, b, c = (Talk(service, name, size) for name, size in (("a", 512), ("b", CONTEXT), ("c", CONTEXT)))
    chance = random.Random(0)
    seen: dict[str, list[Timeline]] = {"alone": [], "while A decodes": [], "20 ms apart": []}

    def alone() -> list[Ask]:
        evict(service)
        return [b.hear(b.ask())]

    def busy() -> list[Ask]:
        a = talker.ask(2000)
        a.wait_for(4)
        evict(service)
        a.wait_for(len(a.tokens) + 3)
        step = clock.steps[-1].ms / 1000
        time.sleep(chance.random() * 2 * step)
        asked = [b.hear(b.ask())]
        a.cancel()
        return asked

    def two() -> list[Ask]:
        evict(service)
        first = b.ask()
        time.sleep(APART)
        second = c.ask()
        return [b.hear(first), c.hear(second)]

    for _ in range(3 if quick else 11):
        for name, run in zip(seen, (alone, busy, two), strict=True):
            for ask in run():
                assert ask.ended.match.loaded_tokens >= CONTEXT, ask.ended
                seen[name].append(Timeline.of(ask, clock.steps))
    rows = [timeline_row(name, timelines) for name, timelines in seen.items()]
    table(rows)
    once = statistics.median(t.ttft for t in seen["alone"])
    pairs = seen["20 ms apart"]
    bars = [
        Bar(
            "arrival",
            "after the step under way / alone",
            statistics.median(t.after_rest for t in seen["while A decodes"]) / once,
            1.15,
            True,
        ),
        Bar(
            "arrival",
            "two 20 ms apart, mean / one alone",
            statistics.median((x.ttft + y.ttft) / 2 for x, y in zip(pairs[::2], pairs[1::2], strict=True)) / once,
            1.4,
            True,
        ),
    ]
    return rows, bars


def timeline_row(name: str, timelines: Sequence[Timeline]) -> Row:
    def median(of: Callable[[Timeline], float]) -> float:
        return statistics.median(map(of, timelines))

    return {
        "B arrives": name,
        "ttft ms": median(lambda t: t.ttft),
        "rest of step ms": median(lambda t: t.rest),
        "then ms": median(lambda t: t.after_rest),
        "before its step ms": median(lambda t: t.before),
        "steps without it": statistics.mean(t.without for t in timelines),
        "its step ms": median(lambda t: t.own),
    }


# ---- staggered


def staggered(service: Service, clock: Clock, quick: bool) -> tuple[list[Row], list[Bar]]:
    rows: list[Row] = []
    for repetition in range(1 if quick else 5):
        alone = Ask(service, ids(("alone", repetition), CONTEXT), f"alone{repetition}", 1).done()
        a = Ask(service, ids(("first", repetition), CONTEXT), f"first{repetition}", 64)
        time.sleep(alone.ttft / 4000)
        b = Ask(service, ids(("second", repetition), CONTEXT), f"second{repetition}", 1).done()
        a.cancel()
        left = (a.times[0] - b.started) * 1000
        mixed = [s.ms for s in clock.steps if s.rows.get(a.id) == 1 and s.rows.get(b.id) == service.config.chunk]
        gaps = [(y - x) * 1000 for x, y in pairwise(t for t in a.times if t <= b.times[0])]
        step, longest = statistics.median(mixed), max(gaps)
        rows.append(
            {
                "alone ms": alone.ttft,
                "rest of A ms": left,
                "B ms": b.ttft,
                "B / (rest + alone)": b.ttft / (left + alone.ttft),
                "mixed step ms": step,
                "A's longest gap ms": longest,
                "gap in steps": longest / step,
            }
        )
    table(rows)
    of_b, of_a = (statistics.median(row[name] for row in rows) for name in ("B / (rest + alone)", "gap in steps"))
    return rows, [
        Bar("staggered", "B / (rest of A + B alone)", of_b, 1.1, True),
        Bar("staggered", "A's longest gap, in steps", of_a, 2, True),
    ]


# ---- together


def together(service: Service, clock: Clock, quick: bool) -> tuple[list[Row], list[Bar]]:
    depths, most = ((1024,), 4) if quick else ((1024, CONTEXT), 16)
    contexts = [ids(("together", i), max(depths)) for i in range(most)]
    for i, context in enumerate(contexts):
        Ask(service, context, f"t{i}", 1).done()
    seen: dict[tuple[int, int], list[float]] = {}
    for repetition in range(2 if quick else 3):
        for depth in depths:
            for count in (n for n in (1, 2, 4, 8, 16) if n <= most):
                seen.setdefault((depth, count), []).append(decode_rate(service, [c[:depth] for c in contexts[:count]], repetition))
    rows = [{"depth": depth, "agents": count, "tokens/s": statistics.median(rates)} for (depth, count), rates in seen.items()]
    for row in rows:
        row["/ one"] = row["tokens/s"] / next(r["tokens/s"] for r in rows if r["depth"] == row["depth"])
    table(rows)
    print()
    return rows + table_4(service, quick), []


def decode_rate(service: Service, contexts: Sequence[Sequence[int]], repetition: int, answer: int = 33) -> float:
    """Tokens a second of as many agents as there are contexts, each of which is known and given `NEW_TOKENS` more."""
    new = ids(("new", repetition, len(contexts)), NEW_TOKENS)
    asked = [Ask(service, [*context, *new], f"t{i}", answer) for i, context in enumerate(contexts)]
    return rate([ask.done().times for ask in asked])


def rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second while all decode: from the last one's first token to the first one's last."""
    begin, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(begin < t <= end for of_one in times for t in of_one) / (end - begin)


def table_4(service: Service, quick: bool) -> list[Row]:
    """The paper's: system tokens a second / each agent's, answers of 64 tokens, from the requests to the end of both answers."""
    answer = 64
    seen: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for repetition in range(1 if quick else 3):
        for size in (1024,) if quick else (1024, CONTEXT, 7168):
            prompts = [ids(("pair", size, repetition, i), size) for i in range(2)]
            for state in ("cold", "warm", "hot"):
                if state == "warm":
                    evict(service)
                asked = [Ask(service, prompt, f"p{size}-{repetition}-{i}", answer) for i, prompt in enumerate(prompts)]
                took = max(ask.done().times[-1] for ask in asked) - asked[0].started
                matches = [ask.ended.match for ask in asked]
                assert all(m.reused_tokens == (0 if state == "cold" else size - 1) for m in matches), matches
                seen.setdefault((size, state), []).append((2 * answer / took, statistics.mean(ask.ttft for ask in asked)))
    rows = []
    for (size, state), values in seen.items():
        system, ttft = (statistics.median(column) for column in zip(*values, strict=True))
        rows.append({"two agents": size, "state": state, "system tokens/s": system, "per agent": system / 2, "mean ttft ms": ttft})
    table(rows)
    return rows


# ---- all of it

Group = Callable[[Service, Clock, bool], tuple[list[Row], list[Bar]]]
IN_PROCESS: dict[str, Group] = {"arrival": arrival, "staggered": staggered, "together": together}
GROUPS = (*IN_PROCESS, "robin")


def measure(kv: str, groups: Sequence[str], quick: bool) -> tuple[list[Row], list[Bar]]:
    """All groups that need only an engine, on one."""
    rows: list[Row] = []
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as data:
        service = open_service(replace(Config(), data=Path(data), kv=kv, memory=MEMORY))
        service.engine.backend = clock = Clock(service.backend)
        Ask(service, ids("warm-up", 1024), "warm-up", 8).done()
        for group in groups:
            print(f"{group}:")
            of_group, its_bars = IN_PROCESS[group](service, clock, quick)
            rows += [{"group": group, **row} for row in of_group]
            bars += its_bars
            print()
        service.close()
    return rows, bars


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--kv", default="q4", help="our codec (q4)")
    parser.add_argument("--only", action="append", choices=GROUPS, help="measure only this group (may be repeated; all)")
    parser.add_argument("--peers", default=None, metavar="A,B", help=f"of {', '.join(robin.PEERS)} (all; none with --quick)")
    parser.add_argument("--rounds", type=int, default=5, help="of robin (5)")
    args = parser.parse_args()
    if args.check and args.check not in GROUPS:
        parser.error(f"--check: no group {args.check!r}: there are {', '.join(GROUPS)}")
    groups = args.only or ([args.check] if args.check else list(GROUPS))
    rows, bars = measure(args.kv, [g for g in groups if g in IN_PROCESS], args.quick) if set(groups) & set(IN_PROCESS) else ([], [])
    if "robin" in groups:
        of_robin, its_bars = robin.measure(args.kv, peers(parser, args), args.rounds, args.quick)
        rows += [{"group": "robin", **row} for row in of_robin]
        bars += its_bars
    return finish("concurrency", rows, bars, args)


def peers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    if args.peers is None:
        return [] if args.quick else list(robin.PEERS)
    names = [name for name in args.peers.split(",") if name]
    if unknown := set(names) - set(robin.PEERS):
        parser.error(f"--peers: no {', '.join(unknown)}: there are {', '.join(robin.PEERS)}")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
