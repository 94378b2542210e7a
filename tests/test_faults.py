"""Faults of the file system: a small seeded set of what `bench.faults` does ten thousand times, and one test for each bug it has found."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from rewake.quant import PAGE_TOKENS
from rewake.store.files import Files
from tests.fakes import LAYOUT, EchoBackend, EngineHarness, expected_answer
from tests.faults import CELLS, Toll, seeded, trial
from tests.test_engine import prompt

EACH = 4  # faults of every kind


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in CELLS}))
def test_no_fault_makes_an_answer_wrong_or_a_promise_untrue(kind: str) -> None:
    """R8, W2, W3, D3, L3."""
    toll = Toll()
    for broken, step, seed in seeded(EACH * len(CELLS), seed=20_000):
        if broken == kind:
            toll.include(trial(kind, step, seed))
    assert toll.is_clean, "\n".join(toll.stories)


def test_the_fake_notices_rows_of_another_model_and_of_another_history() -> None:
    """Without this the rest would prove nothing: equal tokens at equal positions, and only what was before them differs."""
    page = LAYOUT.page_bytes
    for model, first in ((b"finetune", 5), (b"", 6)):
        text, other = [5, *prompt(299)], [first, *prompt(299)]
        ours, theirs = EngineHarness(None, EchoBackend(4)), EngineHarness(None, EchoBackend(4, model))
        ours.ask(text, "a")
        theirs.ask(other, "a")
        residents = [harness.engine.call(lambda h=harness: list(h.memory.tree.residents())).result() for harness in (ours, theirs)]  # type: ignore[misc]
        slots = [[r.slots[0][0] for r in found] for found in residents]
        at, foreign = slots[0][0], slots[1][0]
        ours.backend.arena[at : at + page] = theirs.backend.arena[foreign : foreign + page]
        assert ours.ask(text, "a").tokens != expected_answer(text, 4)
        assert ours.backend.num_wrong > 0 and theirs.backend.num_wrong == 0
        ours.close()
        theirs.close()


class Slow(Files):
    """Asking for the free space takes a while: the writer goes on meanwhile."""

    def free(self, folder: Path) -> int:
        time.sleep(0.2)
        return super().free(folder)


def test_what_a_start_forgets_may_be_forgotten_before_the_start_is_over(tmp_path: Path) -> None:
    """The writer posted to an engine that had no inbox yet, and died of it; nothing was answered from then on."""
    harness = EngineHarness(tmp_path)
    harness.ask(prompt(600), "a")
    harness.close()
    for page in tmp_path.glob("pages/*/*"):
        page.unlink()
    with_lost_pages(tmp_path)
    harness = EngineHarness(tmp_path, files=Slow())
    again = harness.ask(prompt(600), "a")
    assert again.tokens == expected_answer(prompt(600), 4) and again.result(10).saved
    harness.close()


def with_lost_pages(data: Path) -> None:
    """Pages that no branch needs, as a crash leaves them."""
    with closing(sqlite3.connect(data / "manifest.sqlite", isolation_level=None)) as db:
        db.execute("DELETE FROM branches")


class ParentFails(Files):
    """The first page read fails, but only when the second tail is being read, which goes on when somebody has been answered."""

    def __init__(self) -> None:
        self.armed = False
        self.num_tails = 0
        self.second_tail, self.answered = threading.Event(), threading.Event()

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        if self.armed and path.parts[-3] == "pages":
            self.armed = False
            assert self.second_tail.wait(10)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        got = super().read(path, offset, into)
        if path.parts[-3] == "segments":
            self.num_tails += 1
            if self.num_tails == 2:
                self.second_tail.set()
                assert self.answered.wait(10)
        return got


def test_a_branch_that_is_emptied_while_it_is_read_is_computed_again(tmp_path: Path) -> None:
    """Its page was found damaged by another request; what was read of the tail then ended the engine."""
    files = ParentFails()
    harness = EngineHarness(tmp_path, files=files)
    talks = {name: [*prompt(PAGE_TOKENS), *prompt(40, seed=i)] for i, name in enumerate(("a", "b"), start=1)}
    for name, text in talks.items():
        harness.ask(text, name)
    harness.evict_all()
    files.armed = True
    pendings = {name: harness.submit(text, name) for name, text in talks.items()}
    pendings["a"].result(20)
    files.answered.set()
    for name, text in talks.items():
        pendings[name].result(20)
        assert pendings[name].tokens == expected_answer(text, 4)
        assert harness.ask(text, name).match.computed_tokens == 1
    harness.close()


class FirstPageFails(Files):
    """Transactions wait for `go`; the first page that is written afterwards cannot be."""

    def __init__(self) -> None:
        self.armed = False
        self.waiting, self.go = threading.Event(), threading.Event()

    def begin(self, cursor: sqlite3.Cursor) -> None:
        if self.armed:
            self.waiting.set()
            assert self.go.wait(10)
        super().begin(cursor)

    def create(self, path: Path) -> int:
        if self.armed and path.parts[-3] == "pages":
            self.armed = False
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


def test_a_page_of_two_agents_that_could_not_be_saved_at_first_is_saved_later(tmp_path: Path) -> None:
    """It was handed over twice; the failure of the first kept every later turn from being saved, though the second had succeeded."""
    files = FirstPageFails()
    harness = EngineHarness(tmp_path, files=files)
    text = prompt(PAGE_TOKENS + 20)
    files.armed = True
    other = harness.submit(prompt(5, seed=1), "other", max_tokens=1)
    assert files.waiting.wait(10)
    pendings = [harness.submit(text, name, max_tokens=1) for name in ("a", "b")]
    for pending in pendings:
        assert pending.first_token.wait(10)
    files.go.set()
    for pending in (other, *pendings):
        pending.result(10)
    for name in ("a", "b"):
        assert harness.ask(text, name).result().saved
    harness.restart()
    assert harness.ask(text, "a").match.computed_tokens == 1
    harness.close()
