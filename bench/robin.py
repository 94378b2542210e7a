"""The group `robin` of bench.concurrency: ten agents of 4,096 tokens take turns, and there is memory for three of them.

Each turn gives an agent 16 new tokens and asks for 16. What was answered is dropped, so that all engines are given the same ids: a turn
reuses what stood before the answer. In turns, the least recently used agent is always the next to come, so a cache of three keeps nobody:
who has only a cache computes 4,096 tokens a turn; who keeps agents on disk reads them back. After the last round everybody is started
anew, and each agent comes once more.

  rewake         K/V in q4 (6,480 bytes a token), saved with every turn. Once with memory for three agents of its own size (85 MB), once
                 with the bytes that the others have, which hold all ten
  no-persist     the same engine and the 85 MB, without a disk
  llama-server   f16 K/V, three slots (300 MB), each saved by the client after a turn and restored before the next
  vllm           bf16 K/V, its prefix cache, in as many bytes (300 MB; in 85 MB it could not run one agent)

They are in turn at each round, and stopped in between. Milliseconds to the first token include what a client has to wait for before: a
restored slot. A round's time includes saving. Starting is in neither.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.common import Bar, table
from bench.memory import ids
from bench.peers.base import Absent, Peer, Worker
from bench.peers.llama_server import Slots
from bench.peers.ours import Ours
from bench.peers.vllm import BLOCK, Vllm
from rewake.errors import ModelError
from rewake.memory.memory import pages_for
from rewake.planes import slot_bytes
from rewake.quant import CODECS, PageLayout

__all__ = ["PEERS", "measure"]

PEERS = ("llama-server", "vllm")
GROUP = "robin"
NEW_TOKENS, ANSWER = 16, 16
LAYERS, HEADS, DIM = 30, 3, 64  # SmolLM2-135M's
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """How much of everything there is."""

    agents: int
    held: int  # agents that memory holds
    context: int
    rounds: int

    @property
    def most(self) -> int:
        """Tokens of an agent in the end, the round after the restart included; in whole pages."""
        return pages_for(self.context + (self.rounds + 1) * NEW_TOKENS + ANSWER) * 256

    def bytes_with(self, kv: str) -> int:
        page = PageLayout(LAYERS, HEADS, DIM, DIM, CODECS[kv]).page_bytes
        return self.held * self.most // 256 * slot_bytes(page)


class Running(Protocol):
    def ask(self, agent: str, prompt: list[int], new: int) -> tuple[float, float]:
        """Milliseconds to the first token, and until all is done. Raises Absent."""
        ...

    def close(self) -> None: ...


class InWorker:
    """A peer of bench.peers; who asks is known by the prompt alone."""

    def __init__(self, peer: Peer) -> None:
        self.worker = Worker(peer)

    def ask(self, agent: str, prompt: list[int], new: int) -> tuple[float, float]:
        started = time.perf_counter()
        (times,) = self.worker.generate([prompt], new)
        return times[0], (time.perf_counter() - started) * 1000

    def close(self) -> None:
        self.worker.close()


@dataclass
class Contestant:
    name: str
    kv_bytes: int
    start: Callable[[], Running]
    running: Running | None = None
    why_absent: str = ""
    first: list[list[float]] = field(default_factory=list)  # by round, the one after the restart last
    total: list[float] = field(default_factory=list)

    def attempt(self, act: Callable[[], None]) -> None:
        """Whoever fails is absent from then on; the others go on."""
        if self.why_absent:
            return
        try:
            act()
        except (Absent, ModelError, OSError) as absent:
            self.why_absent = f"{type(absent).__name__}: {absent}"
            print(f"{self.name} is absent: {absent}", file=sys.stderr)

    def restart(self) -> None:
        self.close()
        self.running = self.start()

    def play(self, size: Size, number: int) -> None:
        assert self.running is not None
        first, total = [], 0.0
        for agent in (f"agent{i}" for i in range(size.agents)):
            prompt = ids(agent, size.context) + [t for r in range(number + 1) for t in ids((agent, r), NEW_TOKENS)]
            to_first, whole = self.running.ask(agent, prompt, ANSWER)
            first.append(to_first)
            total += whole
        self.first.append(first)
        self.total.append(total)
        print(f"  {self.name}: round {number + 1}: {total / 1000:.1f} s", file=sys.stderr)

    def close(self) -> None:
        if self.running is not None:
            self.running.close()
            self.running = None

    def row(self) -> Row:
        rounds = [t for of_round in self.first[1:-1] for t in of_round]
        first, last = self.first[0], self.first[-1]
        return {
            "engine": self.name,
            "K/V MB": self.kv_bytes / 1e6,
            "all rounds s": sum(self.total[:-1]) / 1000,
            "1st round p50 ms": statistics.median(first),
            "later p50 ms": statistics.median(rounds),
            "later p99 ms": nearest(rounds, 0.99),
            "restarted s": self.total[-1] / 1000,
            "restarted p50 ms": statistics.median(last),
            "restarted p99 ms": nearest(last, 0.99),
        }


def nearest(values: Sequence[float], share: float) -> float:
    """The percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def contestants(kv: str, peers: Sequence[str], size: Size, folder: Path) -> list[Contestant]:
    small, large = size.bytes_with(kv), size.bytes_with("bf16")
    saved = folder / "slots"
    saved.mkdir()

    def ours(name: str, memory: int, persist: bool = True) -> Contestant:
        return Contestant(name, memory, lambda: InWorker(Ours(kv, memory, folder / name.replace(" ", "-"), persist)))

    others = {
        "llama-server": lambda: Slots(size.held, size.most, saved),
        "vllm": lambda: InWorker(Vllm(size.held * size.most // BLOCK)),
    }
    return [
        ours("rewake", small),
        ours("rewake no-persist", small, persist=False),
        ours("rewake same bytes", large),
        *(Contestant(name, large, others[name]) for name in peers),
    ]


def measure(kv: str, peers: Sequence[str], rounds: int, quick: bool) -> tuple[list[Row], list[Bar]]:
    size = Size(4, 2, 1024, 2) if quick else Size(10, 3, 4096, rounds)
    with tempfile.TemporaryDirectory() as folder:
        all_of_them = contestants(kv, peers, size, Path(folder))
        try:
            for contestant in all_of_them:
                contestant.attempt(contestant.restart)
            for number in range(size.rounds + 1):
                for contestant in all_of_them:
                    if number == size.rounds:
                        contestant.attempt(contestant.restart)
                    contestant.attempt(lambda c=contestant, n=number: c.play(size, n))  # type: ignore[misc]
        finally:
            for contestant in all_of_them:
                contestant.close()
    print(f"robin: {size.agents} agents of {size.context}, memory for {size.held}, {size.rounds} rounds, then a restart:")
    present = [c for c in all_of_them if not c.why_absent]
    rows = [c.row() for c in present]
    table(rows)
    for contestant in all_of_them:
        if contestant.why_absent:
            print(f"{contestant.name} is absent: {contestant.why_absent}")
            rows.append({"engine": contestant.name, "absent": contestant.why_absent})
    return rows, bars(present, rows)


def bars(present: Sequence[Contestant], rows: Sequence[Row]) -> list[Bar]:
    ours = rows[0]
    made = []
    for other in rows[1 : len(present)]:
        if not other["engine"].startswith("rewake same"):
            made.append(Bar(GROUP, f"all rounds: {other['engine']} / ours", other["all rounds s"] / ours["all rounds s"], 1))
            made.append(
                Bar(GROUP, f"p50 after a restart: {other['engine']} / ours", other["restarted p50 ms"] / ours["restarted p50 ms"], 1)
            )
    return made
