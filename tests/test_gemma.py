"""Gemma 3 270M on real weights: 15 of its 18 layers see a window of 512 tokens, and hold no more than that in memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewake.backends.base import Batch, Output
from rewake.memory.tree import Page
from rewake.models import resolve
from rewake.replay import digest
from rewake.service import signature
from tests.fakes import EngineHarness
from tests.shadow import ShadowBackend, torch_backend

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


def rewind(harness: EngineHarness, agent: str, tokens: int) -> None:
    errors: list[Exception | None] = []
    ended = threading.Event()

    def done(error: Exception | None) -> None:
        errors.append(error)
        ended.set()

    harness.engine.call(lambda: harness.memory.agents.rewind("default", agent, done, tokens=tokens)).result()
    assert ended.wait(60) and errors == [None]


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
    for length in (1025, 700, 300):  # windows that have left memory are read again
        between()
        rewind(harness, "a", length)
        between()
        computed.append(harness.ask([*text[:length], 6], "a", max_tokens=2).match.computed_tokens)
    between()
    harness.ask(ids(0, 1030), "b", max_tokens=2)  # shares all of its pages
    in_memory(harness)
    return [*computed, pending.match.computed_tokens]


def in_memory(harness: EngineHarness) -> None:
    """What sliding layers hold in memory is what some agent's next token sees, and no more."""
    memory = harness.memory

    def look() -> None:
        memory.check()
        full, sliding = memory.planes.base
        assert (len(full.layers), full.num_slots, full.reach) == (3, 1, None)
        assert (len(sliding.layers), sliding.num_slots, sliding.reach) == (15, 5, WINDOW - 1)
        residents = list(memory.tree.residents())
        for page in (r for r in residents if isinstance(r, Page)):
            below = [b for r in memory.tree.subtree(page) for b in r.branches]
            seen = any(sliding.is_needed(page.number, b.next_query) for b in below)
            parted = any(len(r.children) + len(r.branches) > 1 and sliding.is_needed(page.number, r.end) for r in memory.tree.subtree(page))
            assert 1 not in page.slots or seen or parted, page.number
            assert {f.plane for f in page.files} == set(memory.planes.all), "the disk has all"

    harness.engine.call(look).result()


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
    assert computed == [511, 1, 511, 1, 512, 1, 1399, 1 + 8, 1 + 8, 1, 1, 1, 100]  # all begin with one token


def test_what_is_attended_to_is_what_was_appended(tmp_path: Path, gemma: Any) -> None:
    """Claim 2: every row of every plane that a step attends to is, byte for byte, what was appended for it."""
    shadow = ShadowBackend(torch_backend(gemma, "q4", 14))
    harness = EngineHarness(tmp_path, shadow, signature=signature(shadow.facts()), trace=shadow.trace)
    texts = {agent: ids(i, length) for i, (agent, length) in enumerate({"a": 1100, "b": 1100, "c": 600, "d": 900}.items())}
    texts["b"] = [*texts["a"][:800], *texts["b"][800:]]  # shares pages with "a", and parts
    for _ in range(2):
        pending = {agent: harness.submit(text, agent, 3) for agent, text in texts.items()}
        for agent, answer in pending.items():
            answer.result()
            texts[agent] = [*texts[agent], *answer.tokens, 7]
        harness.check()
        harness.restart(shadow)
    assert shadow.num_compared > 5000
    harness.close()
