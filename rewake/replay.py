"""Recording the steps of an engine, and computing them again in a process that never evicts anything.

The proof of "a restored agent answers as one that was never evicted": the same pages and the same step composition
give the same bits. A recording has one JSON line for each step (what was computed, over which pages, and a digest of
the logits) and for each change of a page's name or content. Page names hold across eviction and restart, so a
recording may span several processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewake.backends.base import Backend, Batch, Output, Row
from rewake.memory.pool import PagePool
from rewake.request import Sampling

__all__ = ["Recorder", "Replayed", "num_pages", "replay"]

GREEDY = Sampling(temperature=0)


class Recorder:
    """Appends to a file. `step` and `event` are the engine's traces."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 (open as long as the engine is)

    def step(self, batch: Batch, output: Output) -> None:
        rows = [[r.tokens, r.start, r.first_append, r.names, r.sampling is not None] for r in batch.rows]
        self._write({"step": rows, "logits": digest(output)})

    def event(self, kind: str, *names: str) -> None:
        self._write({kind: names})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def digest(output: Output) -> str:
    return hashlib.sha256(output.logits.tobytes()).hexdigest()


@dataclass(frozen=True)
class Replayed:
    """One step, computed again."""

    number: int
    recorded: str
    computed: str

    @property
    def same(self) -> bool:
        return self.recorded == self.computed


def lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path) as file:
        for line in file:
            if line.endswith("\n"):  # a killed process may leave half a line, of a step nobody saw
                yield json.loads(line)


def num_pages(path: Path) -> int:
    """How many pages a recording names: what a replay that never evicts has to hold."""
    return len({name for line in lines(path) for row in line.get("step", ()) for name in row[3]})


def replay(path: Path, backend: Backend) -> Iterator[Replayed]:
    """Compute every step of a recording again. The backend's arena must hold all its pages."""
    pool = PagePool(len(backend.arena), backend.layout.page_bytes)
    slots: dict[str, int] = {}

    def slot(name: str) -> int:
        if name not in slots:
            slots[name] = pool.take()
        return slots[name]

    def copy(source: str, target: str) -> None:
        size = backend.layout.page_bytes
        backend.arena[slot(target) : slot(target) + size] = backend.arena[slots[source] : slots[source] + size]

    def settle(name: str, key: str) -> None:
        slots[key] = slots.pop(name)

    def intern(name: str, key: str) -> None:
        assert key in slots
        pool.give(slots.pop(name))

    def forget(key: str) -> None:
        if key in slots:
            pool.give(slots.pop(key))

    events: dict[str, Callable[..., None]] = {"copy": copy, "settle": settle, "intern": intern, "forget": forget}
    number = 0
    for line in lines(path):
        if "step" not in line:
            ((kind, names),) = line.items()
            events[kind](*names)
            continue
        rows = tuple(
            Row(tuple(tokens), start, first, tuple(slot(n) for n in names), tuple(names), str(i), GREEDY if sampled else None)
            for i, (tokens, start, first, names, sampled) in enumerate(line["step"])
        )
        output = backend.forward(Batch(rows))
        yield Replayed(number, line["logits"], digest(output))
        number += 1
