"""Rewake itself: the engine in the worker's process, without HTTP, saving to a temporary directory as it does in use."""

from __future__ import annotations

import itertools
import queue
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from bench.peers.base import THREADS, Generate, Peer, Times, serve
from rewake.config import Config
from rewake.request import Done, Event, Failed, Generated, Request, Sampling
from rewake.service import Service, open_service

__all__ = ["Ours", "generate", "open_ours"]

MEMORY = 2 * 2**30
numbers = itertools.count()


class Ours(Peer):
    name = "rewake"
    weights = "shipped"

    def __init__(self, kv: str, memory: int = MEMORY, data: Path | None = None, persist: bool = True) -> None:
        """Memories in `data`, or in a temporary directory that goes with the worker."""
        self.kv, self.memory, self.data, self.persist = kv, memory, data, persist

    def python(self) -> Path:
        return Path(sys.executable)

    @property
    def arguments(self) -> list[str]:
        return [self.kv, str(self.memory), "1" if self.persist else "", str(self.data or "")]


def open_ours(kv: str, data: Path, memory: int = MEMORY, persist: bool = True) -> Service:
    return open_service(Config(data=data, kv=kv, threads=THREADS, memory=memory, persist=persist))


def generate(service: Service, prompts: list[list[int]], new: int, agent: str | None = None) -> Times:
    """As a worker's: milliseconds to each token of each prompt. All is saved when it returns."""
    events: queue.SimpleQueue[tuple[int, float, Event]] = queue.SimpleQueue()

    def emit(index: int, event: Event) -> None:
        events.put((index, time.perf_counter(), event))

    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        name = f"request-{next(numbers)}"
        service.engine.submit(Request(name, tuple(prompt), new, partial(emit, index), Sampling(temperature=0), agent=agent))
    times: Times = [[] for _ in prompts]
    running = len(prompts)
    while running:
        index, at, event = events.get()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Generated):
            times[index].append((at - started) * 1000)
        running -= isinstance(event, Done)
    return times


def start(kv: str, memory: int, persist: bool, data: Path) -> tuple[str, Generate]:
    service = open_ours(kv, data, memory, persist)
    about = "; ".join(f"{k}: {v}" for k, v in getattr(service.backend, "describe", dict)().items())
    return about, partial(generate, service)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        kv, memory, persist, data = sys.argv[1:]
        serve(partial(start, kv, int(memory), bool(persist), Path(data or folder)))
