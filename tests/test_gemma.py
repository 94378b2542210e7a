"""Gemma 3 270M on real weights: 15 of its 18 layers see a window of 512 tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewake.backends.base import Batch, Output
from rewake.models import resolve
from rewake.replay import digest
from rewake.service import signature
from tests.fakes import EngineHarness
from tests.shadow import torch_backend

WINDOW = 512


@pytest.fixture(scope="module")
def gemma() -> Any:
    from rewake.backends.torch.loader import load_model

    return load_model(resolve("gemma3-270m"), threads=2)


def ids(seed: int, count: int) -> list[int]:
    return [2, *np.random.default_rng(seed).integers(1000, 200_000, count - 1).tolist()]


class Logits:
    """Digests of the logits of every step."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def __call__(self, batch: Batch, output: Output) -> None:
        self.digests.append(digest(output))


def talk(harness: EngineHarness, between: Any) -> list[int]:
    """Prompts around the window's edge, three turns, then an edit in the middle; how many tokens each computed."""
    computed = []
    for length in (WINDOW - 1, WINDOW, WINDOW + 1):
        between()
        computed.append(harness.ask(ids(length, length), f"edge{length}", max_tokens=3).match.computed_tokens)
        between()
        again = harness.ask([*ids(length, length), 7], f"edge{length}", max_tokens=2)
        computed.append(again.match.computed_tokens)
    text = ids(0, 1400)
    for turn in range(3):
        between()
        pending = harness.ask(text, "a", max_tokens=6)
        computed.append(pending.match.computed_tokens)
        text = [*text, *pending.tokens, *ids(10 + turn, 9)[1:]]
    between()
    edited = [*text[:900], 77, *text[901:1000]]
    pending = harness.ask(edited, "a", max_tokens=4)
    assert (pending.match.kind, pending.match.reused_tokens) == ("diverge", 900)
    between()
    assert harness.ask([*text, 5], "a", max_tokens=2).match.kind == "extend", "the older branch is still there"
    return [*computed, pending.match.computed_tokens]


def test_it_is_woken_bit_for_bit_and_computes_only_what_is_new(tmp_path: Path, gemma: Any, kv: str) -> None:
    """Claim 1, with windows: an engine whose agents are evicted and restarted all the time, and one that keeps all."""
    runs = {}
    for name, disturbed in (("disturbed", True), ("kept", False)):
        backend, logits = torch_backend(gemma, kv, 40), Logits()
        harness = EngineHarness(tmp_path / name, backend, signature=signature(backend.facts()), step_trace=logits)
        count = iter(range(100))

        def between(harness: EngineHarness = harness, disturbed: bool = disturbed, count: Any = count) -> None:
            if disturbed and next(count) % 3 == 2:
                harness.restart(harness.backend)
            elif disturbed:
                harness.evict_all()

        runs[name] = talk(harness, between), logits.digests
        harness.close()
    assert runs["disturbed"] == runs["kept"]
    computed, _ = runs["kept"]
    assert computed == [511, 1, 511, 1, 512, 1, 1399, 1 + 8, 1 + 8, 100]  # all begin with one token
