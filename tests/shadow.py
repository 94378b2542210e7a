"""Real weights in tests: a backend on them, one that watches what is attended to, and text to give them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rewake.backends.base import NOWHERE, Batch, Output, Row
from rewake.quant import CODECS, PAGE_TOKENS, PageLayout

WORDS = "river stone cloud lamp paper engine garden window violin harbour copper meadow signal".split()


def story(agent: int, sentences: int) -> str:
    """Text that differs from agent to agent from its first sentence on, and that the model has something to say about."""
    rng = np.random.default_rng(agent)
    told = (f"The {rng.choice(WORDS)} stood near the {rng.choice(WORDS)}, and the {rng.choice(WORDS)} was quiet." for _ in range(sentences))
    return f"Story {agent}. " + " ".join(told)


class ShadowBackend:
    """Keeps a copy of every row that was appended, and compares it with the pages at each step, before and after.

    What no query attends to any more is not there to be compared.
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.spec, self.planes, self.arena = backend.spec, backend.planes, backend.arena
        self.copies: dict[str, list[np.ndarray[Any, Any]]] = {}  # of each page's slots
        self.layouts = [plane.slot for plane in self.planes.planes for _ in range(plane.num_slots)]
        self.num_compared = 0

    def forward(self, batch: Batch) -> Output:
        for row in batch.rows:
            self.compare(row, row.first_append)
        output = self.backend.forward(batch)
        for row in batch.rows:
            self.compare(row, row.first_append)
            for i in range(row.first_append // PAGE_TOKENS, len(row.names)):
                self.copies[row.names[i]] = [self.slot(table[i]).copy() for table in row.tables]
        assert self.arena.nbytes == self.backend.arena.nbytes
        return output

    def slot(self, at: int) -> np.ndarray[Any, Any]:
        return self.arena[at : at + self.planes.slot_bytes]

    def compare(self, row: Row, length: int) -> None:
        for i, name in enumerate(row.names):
            rows = min(length - i * PAGE_TOKENS, PAGE_TOKENS)
            if rows <= 0:
                return
            for table, copy, layout in zip(row.tables, self.copies[name], self.layouts, strict=True):
                if table[i] != NOWHERE:
                    assert np.array_equal(rows_of(self.slot(table[i]), layout, rows), rows_of(copy, layout, rows)), f"{name} has changed"
            self.num_compared += rows

    def trace(self, kind: str, *names: str) -> None:
        if kind == "copy":
            self.copies[names[1]] = [slot.copy() for slot in self.copies[names[0]]]
        elif kind == "settle":
            self.copies[names[1]] = self.copies.pop(names[0])
        elif kind == "mend":
            for i in self.slots_of(names[2]):
                self.copies[names[1]][i] = self.copies[names[0]][i]
            del self.copies[names[0]]
        elif kind == "intern":
            del self.copies[names[0]]

    def slots_of(self, planes: str) -> list[int]:
        numbers = [str(number) for number, plane in enumerate(self.planes.planes) for _ in range(plane.num_slots)]
        return [i for i, number in enumerate(numbers) if number in planes.split(",")]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def rows_of(slot: np.ndarray[Any, Any], layout: PageLayout, rows: int) -> np.ndarray[Any, Any]:
    out = np.empty(layout.with_rows(rows).page_bytes, np.uint8)
    layout.copy_rows(slot[: layout.page_bytes], 0, out, rows, out=True)
    return out


def torch_backend(model: Any, kv: str, num_pages: int, k_mean: Any = None) -> Any:
    from rewake.backends.torch.model import TorchBackend

    return TorchBackend(model, kv, page_slots(model, kv, num_pages), k_mean=k_mean)


def page_slots(model: Any, kv: str, num_pages: int) -> int:
    """Bytes of an arena for so many whole pages."""
    planes = model.spec.planes(CODECS[kv], 64)
    return int(num_pages * planes.num_slots * planes.slot_bytes)
