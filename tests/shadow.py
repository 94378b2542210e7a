"""Real weights in tests: a backend on them, one that watches what is attended to, and text to give them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rewake.backends.base import Batch, Output
from rewake.memory.pool import slot_bytes
from rewake.quant import PAGE_TOKENS

WORDS = "river stone cloud lamp paper engine garden window violin harbour copper meadow signal".split()


def story(agent: int, sentences: int) -> str:
    """Text that differs from agent to agent from its first sentence on, and that the model has something to say about."""
    rng = np.random.default_rng(agent)
    told = (f"The {rng.choice(WORDS)} stood near the {rng.choice(WORDS)}, and the {rng.choice(WORDS)} was quiet." for _ in range(sentences))
    return f"Story {agent}. " + " ".join(told)


class ShadowBackend:
    """Keeps a copy of every row that was appended, and compares it with the pages at each step, before and after."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.spec, self.layout, self.arena = backend.spec, backend.layout, backend.arena
        self.copies: dict[str, np.ndarray[Any, Any]] = {}
        self.num_compared = 0

    def forward(self, batch: Batch) -> Output:
        for row in batch.rows:
            self.compare(row.names, row.slots, row.first_append)
        output = self.backend.forward(batch)
        for row in batch.rows:
            self.compare(row.names, row.slots, row.first_append)
            for i in range(row.first_append // PAGE_TOKENS, len(row.slots)):
                self.copies[row.names[i]] = self.page(row.slots[i]).copy()
        assert self.arena.nbytes == self.backend.arena.nbytes
        return output

    def page(self, slot: int) -> np.ndarray[Any, Any]:
        return self.arena[slot : slot + self.layout.page_bytes]

    def compare(self, names: tuple[str, ...], slots: tuple[int, ...], length: int) -> None:
        for i, (name, slot) in enumerate(zip(names, slots, strict=True)):
            rows = min(length - i * PAGE_TOKENS, PAGE_TOKENS)
            if rows <= 0:
                return
            assert np.array_equal(self.rows(self.page(slot), rows), self.rows(self.copies[name], rows)), f"{name} has changed"
            self.num_compared += rows

    def rows(self, page: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
        if rows == PAGE_TOKENS:
            return page
        out = np.empty(self.layout.with_rows(rows).page_bytes, np.uint8)
        self.layout.copy_rows(page, 0, out, rows, out=True)
        return out

    def trace(self, kind: str, *names: str) -> None:
        if kind == "copy":
            self.copies[names[1]] = self.copies[names[0]].copy()
        elif kind == "settle":
            self.copies[names[1]] = self.copies.pop(names[0])
        elif kind == "intern":
            del self.copies[names[0]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def torch_backend(model: Any, kv: str, num_pages: int, k_mean: Any = None) -> Any:
    from rewake.backends.torch.model import TorchBackend

    page = slot_bytes(TorchBackend(model, kv, 8 * 2**20).layout.page_bytes)
    return TorchBackend(model, kv, num_pages * page, k_mean=k_mean)
