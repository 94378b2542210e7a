"""Recording the steps of an engine, and computing them again in a process that never evicts anything.

The proof of "a restored agent answers as one that was never evicted": the same pages and the same step composition
give the same bits. A recording has one JSON line for each step (what was computed, over which pages, and a digest of
the logits) and for each change of a page's name or content. Page names hold across eviction and restart, so a
recording may span several processes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewake.backends.base import Backend, Batch, Output, Row
from rewake.errors import ConfigError
from rewake.memory.pool import PagePool
from rewake.quant import PAGE_TOKENS
from rewake.request import Sampling

__all__ = ["Recorder", "Replayed", "num_pages", "replay"]

GREEDY = Sampling(temperature=0)
EVENTS = {"copy": 2, "settle": 2, "intern": 2, "mend": 3, "forget": 1}  # and how many pages they name


class Recorder:
    """Appends to a file. `step` and `event` are the engine's traces."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if there can be no such file."""
        try:
            self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (open as long as the engine is)
        except OSError as error:
            raise ConfigError(f"--record {path}: {error.strerror}") from error
        if ends_in_half_a_line(path):  # of a process that was killed: ours must not be its other half
            self._file.write("\n")

    def step(self, batch: Batch, output: Output) -> None:
        rows = [[r.tokens, r.start, r.first_append, r.names, r.sampling is not None] for r in batch.rows]
        self._write({"step": rows, "logits": digest(output)})

    def event(self, kind: str, *names: str) -> None:
        self._write({kind: names})

    def close(self) -> None:
        self._file.close()

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


def ends_in_half_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Raises ConfigError for what is no recording."""
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                with suppress(json.JSONDecodeError):  # a killed process may leave half a line, of a step nobody saw
                    yield checked(json.loads(line))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} is not a recording of `rewake serve --record`") from error


def checked(line: Any) -> dict[str, Any]:
    """A line of a recording. Raises ValueError for anything else."""
    if not isinstance(line, dict) or not (is_step(line) or is_event(line)):
        raise ValueError("neither a step nor an event")
    return line


def is_step(line: dict[str, Any]) -> bool:
    rows = line.get("step")
    return line.keys() == {"step", "logits"} and isinstance(rows, list) and all(len(row) == 5 and are_names(row[3]) for row in rows)


def is_event(line: dict[str, Any]) -> bool:
    return len(line) == 1 and all(kind in EVENTS and are_names(names) and len(names) == EVENTS[kind] for kind, names in line.items())


def are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def num_pages(path: Path) -> int:
    """How many pages a recording names: what a replay that never evicts has to hold. Raises ConfigError for what is no recording."""
    computed = {name for line in lines(path) for row in line.get("step", ()) for name in row[3]}
    if not computed:
        raise ConfigError(f"{path} is not a recording of `rewake serve --record`, or records no step")
    return len(computed.union(*(names for line in lines(path) for kind, names in line.items() if kind in ("copy", "settle"))))


def replay(path: Path, backend: Backend) -> Iterator[Replayed]:
    """Compute every step of a recording again. The backend's arena must hold all its pages.

    Raises ConfigError if it begins with pages that it does not say how to make.
    """
    pages = Pages(backend)
    steps = 0
    for line in lines(path):
        if "step" not in line:
            ((kind, names),) = line.items()
            getattr(pages, kind)(*names)
            continue
        output = backend.forward(Batch(tuple(pages.row(i, *row) for i, row in enumerate(line["step"]))))
        yield Replayed(steps, line["logits"], digest(output))
        steps += 1


class Pages:
    """The pages of a replay, by name. Methods are named as events.

    Each keeps its slot to the end, even one that has settled or was forgotten: a process that is killed just then is followed by one
    that goes on from what was saved before.
    """

    def __init__(self, backend: Backend) -> None:
        self.arena = backend.arena
        self.planes = backend.planes
        self.pool = PagePool(len(backend.arena), self.planes.slot_bytes)
        self.slots: dict[str, tuple[int, ...]] = {}  # of all planes

    def row(self, number: int, tokens: list[int], start: int, first_append: int, names: list[str], sampled: bool) -> Row:
        self.must_know(names[: -(-first_append // PAGE_TOKENS)])
        tables = tuple(zip(*(self.slots_of(name) for name in names), strict=True))
        return Row(tuple(tokens), start, first_append, tables, tuple(names), str(number), GREEDY if sampled else None)

    def must_know(self, names: list[str]) -> None:
        if not self.slots.keys() >= set(names):
            raise ConfigError("the recording begins in the middle: record from an empty --data directory on")

    def slots_of(self, name: str) -> tuple[int, ...]:
        if name not in self.slots:
            self.slots[name] = tuple(self.pool.take() for _ in range(self.planes.num_slots))
        return self.slots[name]

    def copy(self, source: str, target: str) -> None:
        self.mend(source, target, ",".join(map(str, self.planes.all)))

    def settle(self, name: str, key: str) -> None:
        self.copy(name, key)

    def mend(self, name: str, key: str, planes: str) -> None:
        """A page that is there takes those planes that it had lost."""
        self.must_know([name])
        of_plane = [str(number) for number, plane in enumerate(self.planes.planes) for _ in range(plane.num_slots)]
        size = self.planes.slot_bytes
        for origin, target, plane in zip(self.slots[name], self.slots_of(key), of_plane, strict=True):
            if plane in planes.split(","):
                self.arena[target : target + size] = self.arena[origin : origin + size]

    def intern(self, name: str, key: str) -> None:
        self.must_know([name, key])

    def forget(self, key: str) -> None:
        """What is recorded of it later is computed anew, and settles in its place."""
