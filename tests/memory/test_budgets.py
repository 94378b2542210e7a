"""Budgets are kept, and the disk never stops anybody."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from rewake.errors import DiskFull
from rewake.memory.tree import Branch, to_tokens
from rewake.memory.writer import Writer
from rewake.planes import slot_bytes
from rewake.quant import PAGE_TOKENS
from rewake.store.base import StoredFile
from rewake.store.crypto import Cipher
from rewake.store.directory import UNLIMITED, Directory
from rewake.store.files import Files
from tests.fakes import LAYOUT, PLANES, EchoBackend, EngineHarness, Pending, expected_answer
from tests.memory.test_agents import do, show, talk
from tests.test_engine import prompt

FILE = 4096 + LAYOUT.page_bytes + 4096  # a page with its header, and a block to spare


def on_disk(data: Path) -> int:
    return sum(p.stat().st_size for folder in ("pages", "segments", "quarantine") for p in data.glob(f"{folder}/**/*") if p.is_file())


def settled(harness: EngineHarness) -> None:
    """Wait for the writer."""
    reached = threading.Event()
    assert harness.memory.ledger.writer is not None
    harness.engine.call(lambda: harness.memory.ledger.writer.barrier(reached.set)).result(10)  # type: ignore[union-attr]
    assert reached.wait(10)


def test_a_hundred_agents_in_memory_for_ten_cost_what_ten_cost(tmp_path: Path) -> None:
    """L1."""
    harness = EngineHarness(tmp_path, num_pages=10 * 5)
    rng_prompts = {f"a{i}": prompt(1030, seed=i) for i in range(100)}
    process = psutil.Process()
    for i in range(1000):
        if i == 300:
            before = process.memory_info().rss
        name = f"a{i * 37 % 100}"
        pending = harness.ask(rng_prompts[name], name, max_tokens=1)
        assert pending.tokens == expected_answer(rng_prompts[name], 1)
    assert process.memory_info().rss - before < 8 * 2**20
    assert len(harness.memory.residency.arena) == 50 * slot_bytes(LAYOUT.page_bytes)
    harness.close()


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """An engine whose disk holds some twelve pages."""
    made = EngineHarness(tmp_path / "data", num_pages=64, disk=12 * FILE)
    yield made
    made.close()


def test_a_disk_budget_is_kept_on_every_write_and_the_least_valuable_goes(small: EngineHarness) -> None:
    """L2."""
    assert small.data is not None
    for i in range(12):
        name = f"a{i}"
        text = talk(small, name, 600)
        if i == 0:
            do(small, "update", "a0", pinned=True)
        assert on_disk(small.data) <= 12 * FILE
        assert small.ask(text, name).match.computed_tokens <= 2
        assert small.ask(text, name).result().saved
    settled(small)
    assert on_disk(small.data) == small.engine._store.used  # type: ignore[union-attr]
    small.restart()
    names = [a.agent for a in small.engine.call(lambda: small.memory.agents.list("default")).result(10)]
    assert "a0" in names and "a11" in names and "a1" not in names and 3 <= len(names) <= 5


def test_a_smaller_budget_is_kept_from_the_start(small: EngineHarness) -> None:
    """L2."""
    assert small.data is not None
    for i in range(3):
        talk(small, f"a{i}", 600)
    small.disk = 5 * FILE
    small.restart()
    settled(small)
    assert on_disk(small.data) <= 5 * FILE
    assert show(small, "a2").tokens == 604


def test_who_does_not_say_who_they_are_goes_first(small: EngineHarness) -> None:
    talk(small, "named", 600)
    for i in range(6):
        small.ask(prompt(600, seed=50 + i))
    assert show(small, "named").tokens == 604


def test_what_this_model_cannot_use_goes_first(small: EngineHarness) -> None:
    """L2: incompatible files first, but those of a pinned agent stay."""
    talk(small, "pinned", 300)
    do(small, "update", "pinned", pinned=True)
    talk(small, "other", 900)
    small.signature = b"finetune"
    small.restart()
    for i in range(6):
        talk(small, f"a{i}", 500)
    settled(small)
    assert [show(small, f"a{i}").tokens for i in range(6)] == [504] * 6
    small.signature = b"echo"
    small.disk = UNLIMITED
    small.restart()
    assert [a.agent for a in small.engine.call(lambda: small.memory.agents.list("default")).result(10)] == ["pinned"]


def test_with_everything_pinned_answers_go_on_and_say_they_are_not_saved(small: EngineHarness) -> None:
    """L3, and saving resumes when there is room."""
    do(small, "create", "a", pinned=True, ttl=None)
    talk(small, "a", 2000)
    text = prompt(2600, seed=5)
    pending = small.ask(text, "b")
    assert pending.tokens == expected_answer(text, 4) and not pending.result().saved
    assert small.ask(text, "b").match.computed_tokens == 1, "it stays in memory"
    do(small, "update", "a", pinned=False)
    assert small.ask([*text, 3], "b").result().saved
    small.restart()
    assert small.ask([*text, 3], "b").match.computed_tokens == 1


def test_what_two_share_to_the_last_byte_can_go(small: EngineHarness) -> None:
    """Neither would give anything back alone."""
    talk(small, "a", 12 * PAGE_TOKENS - 3)
    do(small, "rewind", "a", tokens=11 * PAGE_TOKENS)
    do(small, "fork", "a", "b")
    for i in range(4):
        text = prompt(1500, seed=70 + i)
        assert small.ask(text, f"c{i}").result().saved


def test_of_thousands_of_branches_the_oldest_go_first(tmp_path: Path) -> None:
    """Of those who do not say who they are, each request is a branch of one asker."""
    harness = EngineHarness(tmp_path)
    ledger, tree = harness.memory.ledger, harness.memory.tree

    def choose() -> list[str]:
        owner = tree.agent("default", None)
        for i in range(5000):
            file = StoredFile(f"segments/{i}", 0, 1, 4096, 32, b"")
            branch = tree.add_branch(Branch(f"{i}", owner, tree.root("default"), to_tokens([i + 2]), 1, [file], used=float(i)))
            owner = branch.owner
        chosen = [ledger.eviction.least_worth()[0].id for _ in range(3)]
        ledger.forget_branches(owner.branches)
        return chosen

    assert harness.engine.call(choose).result(60) == ["0", "1", "2"]
    harness.close()


def test_the_last_bytes_of_the_disk_are_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Files, "free", lambda self, folder: 2**20)
    store = Directory(tmp_path, b"sig", PLANES, free_floor=2**20)
    with pytest.raises(DiskFull, match="are to stay free"):
        store.write("pages/ab/x.safetensors", [memoryview(bytes(LAYOUT.page_bytes))], 0, PAGE_TOKENS, {})
    store.close()


def test_full_memory_keeps_what_is_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page may leave memory when it is on disk; one that could not be saved leaves last."""
    harness = EngineHarness(tmp_path, num_pages=12)
    text = prompt(600)
    with monkeypatch.context() as patched:
        patched.setattr(Files, "append", full)
        assert not harness.ask(text, "unsaved").result().saved
    for i in range(6):
        talk(harness, f"a{i}", 600)
    assert harness.ask(text, "unsaved").match.computed_tokens == 1
    harness.close()


def full(*_: object) -> int:
    raise OSError(28, os.strerror(28))


class SlowFiles(Files):
    """A disk that takes its time."""

    read_seconds = 0.0

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        time.sleep(self.read_seconds)
        return super().read(path, offset, into)


def test_prompts_wait_for_a_slow_disk_and_tokens_do_not(tmp_path: Path) -> None:
    """Back-pressure: what waits to be written is bounded; who decodes goes on."""
    files, go = StoppedFiles(), threading.Event()
    files.go = go
    go.set()
    harness = EngineHarness(tmp_path, num_pages=40, files=files, chunk=PAGE_TOKENS)
    talker = harness.submit(prompt(20, seed=1), "talker", max_tokens=200)
    talker.first_token.wait(10)
    go.clear()
    most = 0

    def watch(batch: Any) -> None:
        nonlocal most
        assert harness.memory.ledger.writer is not None
        most = max(most, harness.memory.ledger.writer.waiting_bytes)

    harness.backend.before_step = watch
    readers = [harness.submit(prompt(6 * PAGE_TOKENS, seed=i), f"r{i}", max_tokens=1) for i in range(5)]
    wait_for_tokens(talker, 200)
    assert not all(r.first_token.is_set() for r in readers), "tokens went on while prompts waited"
    go.set()
    assert talker.result(30).num_generated == 200
    for i, reader in enumerate(readers):
        assert reader.result(30).saved and reader.tokens == expected_answer(prompt(6 * PAGE_TOKENS, seed=i), 1)
    assert most <= len(harness.memory.residency.arena) // 2 + 2 * FILE
    harness.close()


def test_a_disk_slower_than_computing_is_not_waited_for(tmp_path: Path) -> None:
    """R4: the gate. What is computed again is the same to everybody who shares it."""
    files = SlowFiles()
    harness = EngineHarness(tmp_path, files=files, always_load=False)
    texts = {name: talk(harness, name, 2000) for name in ("a", "b", "c")}
    files.read_seconds = 0.2
    harness.backend.before_step = lambda batch: time.sleep(0.0001 * len(batch.rows[0].tokens))
    harness.ask(prompt(600, seed=9))  # for a measure of computing
    matches = []
    for name, text in texts.items():
        harness.evict_all()
        pending = harness.ask([*text, 1], name)
        assert pending.tokens == expected_answer([*text, 1], 4)
        matches.append(pending.match.computed_tokens)
    assert matches[0] == 2, "the first read shows how slow it is"
    assert matches[-1] > 1900, "and then it is computed"
    files.read_seconds = 0.0
    harness.memory.residency.gate.always = True
    harness.restart(EchoBackend(64))
    for name, text in texts.items():
        pending = harness.ask([*text, 1], name)
        assert pending.match.computed_tokens == 1 and pending.tokens == expected_answer([*text, 1], 4)
    harness.close()


def test_a_page_that_cannot_be_written_anew_keeps_nothing_behind_it_from_being_saved(tmp_path: Path) -> None:
    """What was computed again is not equal to the byte: it takes the place of what is on disk. Until it does, that is there."""
    files = FullFiles()
    harness = EngineHarness(tmp_path, files=files, always_load=False, cipher=Cipher(bytes(32)))
    text = talk(harness, "a", 600)
    harness.evict_all()
    harness.memory.residency.gate.read_cost, harness.memory.residency.gate.compute_cost = 1.0, 1e-9
    files.is_full = True
    assert not harness.ask([*text, 1], "a").result().saved
    files.is_full = False
    harness.memory.residency.gate.always = True
    pending = harness.ask([*text, 2], "a")
    assert pending.result().saved and pending.match.computed_tokens < 10
    harness.restart()
    assert harness.ask([*text, 2], "a").match.computed_tokens == 1
    harness.close()


class FullFiles(Files):
    is_full = False

    def create(self, path: Path) -> int:
        if self.is_full:
            full()
        return super().create(path)


def test_what_is_held_and_not_in_memory_still_needs_room(tmp_path: Path) -> None:
    """An export needs its pages to stay as they are; they need not be in memory. Who wants them there needs slots for them."""
    files = WaitingFiles()
    harness = EngineHarness(tmp_path, num_pages=6, files=files)
    text = talk(harness, "a", 900)
    harness.restart(EchoBackend(6))
    files.go.clear()
    harness.backend.before_step = lambda batch: time.sleep(0.002)
    exported: Future[Any] = Future()
    harness.engine.call(lambda: harness.memory.agents.export("default", "a", tmp_path / "a.tar", exported.set_result)).result(10)
    other = harness.submit(prompt(500, seed=3), "b", max_tokens=500)
    assert other.first_token.wait(10)
    sharing = harness.submit([*text, 1], "c")
    time.sleep(0.1)
    harness.check()
    files.go.set()
    assert exported.result(10) is None
    assert sharing.result().match.computed_tokens == 2 and sharing.tokens == expected_answer([*text, 1], 4)
    assert other.tokens == expected_answer(prompt(500, seed=3), 500)
    harness.close()


def first_page(harness: EngineHarness, text: list[int]) -> str:
    """What its file's name begins with."""
    tree = harness.memory.tree
    return tree.key("default", tree.root("default"), to_tokens(text[:PAGE_TOKENS])).hex()


class NoFirstPage(Files):
    """A disk that does not take one page, and that can be stopped before it commits."""

    name = "none"
    begins_left = 2**63

    def __init__(self) -> None:
        self.stopped, self.go = threading.Event(), threading.Event()

    def create(self, path: Path) -> int:
        if path.name.startswith(self.name):
            full()
        return super().create(path)

    def begin(self, cursor: Any) -> None:
        self.begins_left -= 1
        if self.begins_left < 0:
            self.stopped.set()
            assert self.go.wait(30)
        super().begin(cursor)


def test_what_was_saved_behind_a_page_that_was_not_goes_with_it(tmp_path: Path) -> None:
    files = NoFirstPage()
    harness = EngineHarness(tmp_path, files=files)
    text = prompt(900)
    files.name = first_page(harness, text)
    assert not harness.ask(text, "a").result().saved
    settled(harness)
    harness.evict_all()
    settled(harness)
    assert on_disk(tmp_path) == harness.engine._store.used == 0  # type: ignore[union-attr]
    files.name = "none"
    assert harness.ask(text, "a").result().saved
    settled(harness)
    assert on_disk(tmp_path) == harness.engine._store.used  # type: ignore[union-attr]
    harness.close()


def test_rows_of_a_turn_that_is_lost_are_not_those_of_the_turn_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was not saved leaves memory while the turn behind it still waits for the disk: the agent is back at its last turn."""
    files = NoFirstPage()
    harness = EngineHarness(tmp_path, files=files)
    text = talk(harness, "a", 100)
    longer = [*text, *prompt(600, seed=7)]
    files.name = first_page(harness, longer)
    next_batch = Writer._next_batch

    def one_at_a_time(writer: Writer) -> Any:
        batch = next_batch(writer)
        with writer._waiting:
            writer._jobs.extendleft(reversed(batch[1:]))
        return batch[:1]

    monkeypatch.setattr(Writer, "_next_batch", one_at_a_time)

    def stop_the_disk(batch: Any) -> None:
        behind = batch.rows[0].end - len(longer)
        if behind > 0:
            time.sleep(0.3)  # all that was computed before is written by now, or could not be
        if behind == 2:
            files.begins_left = 1  # the page again, which fails; then the turn

    harness.backend.before_step = stop_the_disk
    pending = harness.submit(longer, "a", max_tokens=3)
    assert files.stopped.wait(10)
    harness.evict_all()
    harness.check()
    files.go.set()
    assert not pending.result().saved
    again = harness.ask([*text, 5], "a")
    assert again.tokens == expected_answer([*text, 5], 4) and harness.backend.num_wrong == 0
    harness.close()


class WaitingFiles(Files):
    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        assert self.go.wait(30)
        return super().read(path, offset, into)


def test_tokens_flow_while_the_disk_stands_still(tmp_path: Path) -> None:
    """D2: nothing that decodes waits for a write; only the end of an answer does."""
    files, go = StoppedFiles(), threading.Event()
    files.go = go
    harness = EngineHarness(tmp_path, files=files)
    pending = harness.submit(prompt(200), "a", max_tokens=700)
    wait_for_tokens(pending, 700)
    assert pending.tokens == expected_answer(prompt(200), 700)
    go.set()
    assert pending.result().saved
    harness.close()


def wait_for_tokens(pending: Pending, count: int) -> None:
    """All of an answer has come, saved or not."""
    for _ in range(400):
        if len(pending.tokens) == count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{len(pending.tokens)} tokens instead of {count}")


class StoppedFiles(Files):
    go: threading.Event

    def sync(self, fd: int) -> None:
        assert self.go.wait(30)


def test_bytes_written_grow_with_the_turn_and_not_with_the_context(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: each row is written with its turn, and once more with its page."""
    text = talk(harness, "a", 4096)
    write, rows = Directory.write, []
    monkeypatch.setattr(Directory, "write", lambda self, *args: (rows.append(args[3]), write(self, *args))[1])
    for turn in range(50):
        text += prompt(96, seed=turn)
        pending = harness.ask(text, "a", max_tokens=4)
        text += pending.tokens
    assert 5000 * 0.95 <= sum(rows) <= 5000 * 2


def test_nothing_of_a_page_is_read_to_be_ready(tmp_path: Path) -> None:
    """L6."""
    harness = EngineHarness(tmp_path)
    texts = {f"a{i}": talk(harness, f"a{i}", 300 + i) for i in range(30)}
    harness.files = unreadable = UnreadableFiles()
    harness.restart()
    listed = {a.agent: a.tokens for a in harness.engine.call(lambda: harness.memory.agents.list("default")).result(10)}
    assert listed == {name: len(text) for name, text in texts.items()}
    assert unreadable.num_reads == 0
    harness.close()


class UnreadableFiles(Files):
    num_reads = 0

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        self.num_reads += 1
        raise OSError(5, os.strerror(5))
