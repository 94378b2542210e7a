"""The engine and the memory on the fake backend, whose answers depend on every row it reads back from the pages."""

from __future__ import annotations

import random
import shutil
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rewake.backends.base import Batch, Output
from rewake.errors import ContextLengthExceeded, DeadlineExceeded, InternalError, InvalidRequest, Overloaded, RequestError, ShuttingDown
from rewake.quant import PAGE_TOKENS
from rewake.store.base import StoredFile
from rewake.store.crypto import Cipher
from rewake.store.directory import Directory
from rewake.store.files import Files
from tests.fakes import EchoBackend, EngineHarness, Pending, expected_answer

BOUNDARIES = (1, 2, 255, 256, 257, 511, 512, 513, 700)  # W5


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, 1000), k=length)


@pytest.mark.parametrize("length", BOUNDARIES)
def test_the_same_prompt_again_computes_one_token(harness: EngineHarness, length: int) -> None:
    """R1, R7: hot, evicted, and in a new process."""
    text = prompt(length)
    first = harness.ask(text, "a")
    assert (first.match.kind, first.match.computed_tokens) == ("miss", length)
    for how in (lambda: None, harness.evict_all, harness.restart):
        how()
        again = harness.ask(text, "a")
        assert again.tokens == first.tokens == expected_answer(text, 4)
        assert (again.match.kind, again.match.computed_tokens, again.match.reused_tokens) == ("exact", 1, length - 1)
        assert again.result().saved


@pytest.mark.parametrize("length", BOUNDARIES)
def test_a_next_turn_computes_only_what_is_new(harness: EngineHarness, length: int) -> None:
    text = prompt(length)
    for turn in range(4):
        if turn % 2:
            harness.evict_all()
        pending = harness.ask(text, "a", max_tokens=5)
        assert pending.tokens == expected_answer(text, 5)
        if turn:
            assert pending.match.kind == "extend"
            assert pending.match.computed_tokens == 1 + 7  # the last sampled token was never computed on (W6), and the new ones
        text = text + pending.tokens + prompt(7, seed=turn)
    harness.restart()
    assert harness.ask(text, "a").match.computed_tokens == 8


def test_an_edit_in_the_middle_reuses_all_before_it_and_says_where(harness: EngineHarness) -> None:
    """P7, R5: the older branch stays usable."""
    text = prompt(600)
    harness.ask(text, "a")
    edited = [*text[:400], 1, *text[401:]]
    pending = harness.ask(edited, "a")
    assert pending.tokens == expected_answer(edited, 4)
    assert (pending.match.kind, pending.match.reused_tokens) == ("diverge", 400)
    assert pending.match.first_difference == (400, tuple(text[400:408]), tuple(edited[400:408]))
    assert harness.ask(text, "a").match.computed_tokens == 1


def test_a_side_request_of_the_same_agent_does_not_disturb_its_conversation(harness: EngineHarness) -> None:
    """R5."""
    main = prompt(900)
    harness.ask(main, "a")
    harness.ask(prompt(40, seed=1), "a")
    harness.restart()
    assert harness.ask(main, "a").match.computed_tokens == 1


def test_agents_that_begin_alike_share_pages(harness: EngineHarness) -> None:
    system = prompt(2 * PAGE_TOKENS + 10)
    for i in range(10):
        pending = harness.ask([*system, 10 + i, *prompt(50, seed=i)], f"agent{i}")
        assert pending.tokens == expected_answer([*system, 10 + i, *prompt(50, seed=i)], 4)
        if i:
            assert pending.match.reused_tokens == len(system)
    used = harness.memory.residency.pool.num_slots - harness.memory.residency.pool.num_free
    assert used == 2 + 10  # two shared pages, and a tail each
    summary = harness.engine.call(lambda: harness.memory.agents.show("default", "agent3")).result()
    assert summary.tokens == len(system) + 51 + 4


def test_whoever_does_not_say_who_they_are_gets_the_longest_remembered_prefix(harness: EngineHarness) -> None:
    text = prompt(300)
    first = harness.ask(text)
    longer = [*text, *first.tokens, *prompt(20, seed=2)]
    assert harness.ask(longer).match.kind == "extend"
    assert harness.ask(text).match.kind == "exact"


def test_what_is_in_memory_hides_nothing_longer_on_disk(harness: EngineHarness) -> None:
    """R6: a beginning was read again, and goes on another way; all of the longer text is still found."""
    text = prompt(900)
    longer = [*text, *harness.ask(text, "a").tokens, 5]
    harness.restart()
    assert harness.ask([*text[:600], 7], "b").match.reused_tokens == 600
    pending = harness.ask(longer, "c")
    assert pending.match.computed_tokens == 2 and pending.match.loaded_tokens > 0, "the last token of an answer, and the new one"
    assert pending.tokens == expected_answer(longer, 4)


def test_agents_are_served_in_order_one_request_at_a_time(harness: EngineHarness) -> None:
    """W8."""
    text = prompt(40)
    running: list[int] = []
    harness.backend.before_step = lambda batch: running.append(len(batch.rows))
    pendings = [harness.submit([*text, i], "a", max_tokens=6) for i in range(2, 8)]
    for i, pending in enumerate(pendings, start=2):
        pending.result()
        assert pending.tokens == expected_answer([*text, i], 6)
    assert max(running) == 1


def test_forty_agents_under_a_budget_for_four_are_all_answered(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path, num_pages=20)
    prompts = {f"a{i}": prompt(1000, seed=i) for i in range(40)}
    for again in range(2):
        pendings = {name: harness.submit(text, name) for name, text in prompts.items()}
        for name, pending in pendings.items():
            computed = pending.result().match.computed_tokens
            assert computed == 1 if again else computed > 990  # a first token or two may be another's
            assert pending.tokens == expected_answer(prompts[name], 4)
        harness.check()
    harness.close()


def test_a_read_that_breaks_is_answered_all_the_same(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """W3: whatever goes wrong, what it held is computed again."""
    text = prompt(600)
    harness.ask(text, "a")
    harness.evict_all()
    with monkeypatch.context() as patched:
        patched.setattr(Directory, "read", failing)
        again = harness.ask(text, "a")
    assert again.tokens == expected_answer(text, 4) and again.match.computed_tokens == 600


def test_a_call_that_fails_fails_its_caller_only(harness: EngineHarness) -> None:
    with pytest.raises(ZeroDivisionError):
        harness.engine.call(lambda: 1 // 0).result(10)
    cancelled: Future[int] = harness.engine.call(lambda: 1)
    cancelled.cancel()
    assert harness.ask(prompt(5)).tokens == expected_answer(prompt(5), 4)


def test_an_engine_that_fails_answers_everybody_and_goes_on_with_what_is_on_disk(harness: EngineHarness) -> None:
    text = prompt(600)
    harness.ask(text, "a")
    ahead = harness.submit(prompt(700, seed=5), "b", max_tokens=500)
    ahead.first_token.wait(10)
    harness.backend.before_step = lambda batch: (_ for _ in ()).throw(SystemExit)
    pendings = [harness.submit(prompt(10, seed=i), f"a{i % 2}") for i in range(4)]
    for pending in (ahead, *pendings):
        with suppress(InternalError):
            pending.result(10)
    harness.backend.before_step = lambda batch: None
    again = harness.ask([*text, 7], "a")
    assert again.tokens == expected_answer([*text, 7], 4)
    assert again.match.computed_tokens == 1 and again.match.loaded_tokens == 600
    assert harness.ask(prompt(700, seed=5), "b").match.reused_tokens == 512, "what it had computed is still there"


def test_an_engine_that_keeps_failing_stays_down_and_says_so(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path)
    harness.backend.before_step = lambda batch: (_ for _ in ()).throw(SystemExit)
    for i in range(4):
        assert harness.engine.why_not_ready is None
        with pytest.raises(InternalError):
            harness.submit(prompt(10, seed=i)).result(10)
        time.sleep(0.2)
    assert harness.engine.why_not_ready == "the engine has failed: see the log"
    with pytest.raises(ShuttingDown):
        harness.submit(prompt(5))
    harness.engine.stop()


def test_one_bad_request_in_a_batch_fails_alone(harness: EngineHarness) -> None:
    """Also when the whole forward fails: the batch is bisected."""
    bad = prompt(40, seed=6)

    def refuse(batch: Batch) -> None:
        if any(row.tokens[:5] == tuple(bad[:5]) for row in batch.rows):
            raise RuntimeError("no")

    others = [harness.submit(prompt(300, seed=i), f"a{i}", max_tokens=300) for i in range(5)]
    for pending in others:
        pending.first_token.wait(10)
    harness.backend.before_step = refuse
    with pytest.raises(InternalError, match="the step that computed this request"):
        harness.submit(bad, "bad").result(20)
    for i, pending in enumerate(others):
        assert pending.result(30).reason == "length"
        assert pending.tokens == expected_answer(prompt(300, seed=i), 300)


def test_a_deadline_ends_a_request_and_keeps_what_it_has_computed(harness: EngineHarness) -> None:
    harness.backend.before_step = lambda batch: time.sleep(0.02)
    text = prompt(300)
    pending = harness.submit(text, "a", max_tokens=2000, deadline=time.monotonic() + 0.5)
    queued = harness.submit([*text, 1], "a", deadline=time.monotonic() + 0.2)
    for late in (queued, pending):
        with pytest.raises(DeadlineExceeded):
            late.result(10)
    done = pending.tokens
    assert len(done) > 5
    harness.backend.before_step = lambda batch: None
    assert harness.ask([*text, *done], "a").match.computed_tokens <= 2


def test_a_full_queue_turns_requests_away_and_says_when_to_come_back(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path, max_waiting=3, max_running=1)
    go = threading.Event()
    harness.backend.before_step = lambda batch: go.wait(10)
    pendings = []
    with pytest.raises(Overloaded) as refused:
        for i in range(9):
            pendings.append(harness.submit(prompt(9, seed=i), f"a{i}"))
    assert refused.value.retry_after >= 1
    go.set()
    for i, pending in enumerate(pendings):
        pending.result(10)
        assert pending.tokens == expected_answer(prompt(9, seed=i), 4)
    harness.close()


def test_who_fills_the_queue_fills_nobody_elses(tmp_path: Path) -> None:
    """Another namespace has its part of the queue, whoever was there before; in the end all that were taken are answered."""
    harness = EngineHarness(tmp_path, max_waiting=8, max_running=1)
    go = threading.Event()
    harness.backend.before_step = lambda batch: go.wait(10)
    pendings: list[tuple[int, Pending]] = []

    def ask_for(namespace: str, most: int) -> int:
        """How many of `most` are taken."""
        before = len(pendings)
        with suppress(Overloaded):
            for _ in range(most):
                seed = len(pendings)
                pendings.append((seed, harness.submit(prompt(9, seed=seed), f"a{seed}", namespace=namespace)))
        return len(pendings) - before

    assert ask_for("floods", 30) in (8, 9), "one may be at work already"
    assert ask_for("late", 30) == 4
    assert ask_for("later", 30) == 2
    assert ask_for("floods", 1) == ask_for("late", 1) == 0
    with pytest.raises(Overloaded, match=r"^4 requests are waiting already"):
        harness.submit(prompt(9), namespace="late")
    go.set()
    for seed, pending in pendings:
        pending.result(10)
        assert pending.tokens == expected_answer(prompt(9, seed=seed), 4)
    assert ask_for("floods", 8) == 8, "all of it again"
    for _, pending in pendings:
        pending.result(10)
    harness.close()


def test_ten_agents_with_one_system_prompt_prefill_it_once(harness: EngineHarness) -> None:
    system = prompt(2000)
    pendings = [harness.submit([*system, 10 + i, *prompt(20, seed=i)], f"a{i}") for i in range(10)]
    for i, pending in enumerate(pendings):
        pending.result(20)
        assert pending.tokens == expected_answer([*system, 10 + i, *prompt(20, seed=i)], 4)
    assert sum(p.match.computed_tokens for p in pendings) <= 2021 + 9 * (21 + 64)


def test_a_small_request_does_not_wait_behind_one_there_is_no_room_for(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path, num_pages=10)
    harness.backend.before_step = lambda batch: time.sleep(0.005)
    running = harness.submit(prompt(1000, seed=1), "a", max_tokens=200)
    running.first_token.wait(10)
    large = harness.submit(prompt(1800, seed=2), "b", max_tokens=4)
    small = harness.submit(prompt(30, seed=3), "c", max_tokens=4)
    small.result(10)
    assert not large.first_token.is_set() and len(running.tokens) < 200
    for pending, text in ((running, prompt(1000, seed=1)), (large, prompt(1800, seed=2)), (small, prompt(30, seed=3))):
        pending.result(20)
        assert pending.tokens == expected_answer(text, len(pending.tokens))
    harness.close()


def steps_without(harness: EngineHarness, text: list[int], seconds: float) -> int:
    """How many steps of `seconds` are computed without an agent that comes in the middle of one and is remembered on disk."""
    steps: list[int] = []
    arrived: list[Pending] = []

    def before_step(batch: Batch) -> None:
        if harness.memory.residency.pool.num_free >= 60 and not arrived:  # of 64: what it needs was evicted
            steps.clear()
            arrived.append(harness.submit([*text, 7], "b", max_tokens=1))
        steps.append(len(batch.rows))
        time.sleep(seconds)

    running = harness.submit(prompt(20, seed=1), "a", max_tokens=1000)
    running.first_token.wait(10)
    harness.backend.before_step = before_step
    harness.evict_all()
    while not arrived:
        time.sleep(0.001)
    assert arrived[0].result().match.loaded_tokens == 1000 and arrived[0].tokens == expected_answer([*text, 7], 1)
    harness.engine.cancel(running.id)  # type: ignore[attr-defined]
    running.result()
    harness.backend.before_step = lambda batch: None
    return steps.index(2)


def read_slowly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    read = Directory.read
    monkeypatch.setattr(Directory, "read", lambda self, *args: (time.sleep(seconds), read(self, *args)))


def test_pages_that_are_there_before_another_step_would_be_are_waited_for(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes back from disk while others decode waits for the step under way and the read, and for no other step."""
    text = prompt(1000)
    harness.ask(text, "b")
    read_slowly(monkeypatch, 0.03)
    for _ in range(2):  # first, nothing is known of how long reading takes
        assert steps_without(harness, text, seconds=0.15) == 1


def test_pages_that_take_longer_than_a_step_hold_up_nobody(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    text = prompt(1000)
    harness.ask(text, "b")
    read_slowly(monkeypatch, 0.1)
    harness.evict_all()
    harness.ask(text, "b")  # reading is known to be slow from here on
    assert steps_without(harness, text, seconds=0.005) > 5


def test_a_namespace_that_floods_the_queue_does_not_keep_others_waiting(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path, max_running=2)
    harness.backend.before_step = lambda batch: time.sleep(0.002)
    flood = [harness.submit(prompt(100, seed=i), f"a{i}", max_tokens=20, namespace="loud") for i in range(40)]
    quiet = harness.submit(prompt(100, seed=99), "q", max_tokens=20, namespace="quiet")
    quiet.result(10)
    assert sum(p.first_token.is_set() for p in flood) < 10
    for pending in flood:
        pending.result(30)
    harness.close()


def test_stopping_lets_answers_end_if_there_is_time(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path)
    harness.backend.before_step = lambda batch: time.sleep(0.005)
    short = harness.submit(prompt(30, seed=1), "a", max_tokens=40)
    long = harness.submit(prompt(30, seed=2), "b", max_tokens=5000)
    short.first_token.wait(10)
    long.first_token.wait(10)
    harness.engine.begin_stop(drain_seconds=1.0)
    time.sleep(0.05)
    with pytest.raises(ShuttingDown, match="shutting down"):
        harness.submit(prompt(5))
    assert short.result(10).reason == "length" and short.result().saved
    assert long.result(10).reason == "cancelled" and long.result().saved and len(long.tokens) > 50
    harness.engine.stop()


def test_what_can_never_fit_is_refused_before_any_work(tmp_path: Path) -> None:
    """L4."""
    harness = EngineHarness(tmp_path, num_pages=4)
    with pytest.raises(ContextLengthExceeded, match=r"need 5 pages .* holds 4"):
        harness.submit(prompt(1024), max_tokens=1)
    with pytest.raises(InvalidRequest, match="empty"):
        harness.submit([])
    assert harness.backend.num_computed == 0
    harness.ask(prompt(1020), max_tokens=4)
    harness.ask(prompt(1020), max_tokens=4)  # a full arena, and no room for a copy of the shared page
    harness.close()


def test_a_cancelled_request_keeps_what_it_has_computed(harness: EngineHarness) -> None:
    """A5."""
    text = prompt(2000)
    entered, go = threading.Event(), threading.Event()

    def hold(batch: Batch) -> None:
        if batch.rows[0].start >= 512:
            entered.set()
            go.wait(10)

    harness.backend.before_step = hold
    pending = harness.submit(text, "a")
    entered.wait(10)
    harness.engine.cancel(pending.id)  # type: ignore[attr-defined]
    go.set()
    assert pending.result().reason == "cancelled"
    harness.restart()
    again = harness.ask(text, "a")
    assert again.match.reused_tokens == 1024
    assert again.tokens == expected_answer(text, 4)


def test_a_step_that_fails_fails_its_requests_and_nobody_elses(harness: EngineHarness) -> None:
    """W7: rows that were written, but not recorded, are never attended to."""
    text = prompt(700)
    forward = harness.backend.forward

    def half_way(batch: Batch) -> Output:
        output = forward(batch)
        if batch.rows[0].start >= 512:
            raise RuntimeError("no")
        return output  # type: ignore[no-any-return]

    harness.backend.forward = half_way
    with pytest.raises(InternalError, match="has failed"):
        harness.ask(text, "a")
    harness.backend.forward = forward
    again = harness.ask(text, "a")
    assert again.match.reused_tokens == 512
    assert again.tokens == expected_answer(text, 4)


def test_without_a_store_memories_last_as_long_as_the_arena(tmp_path: Path) -> None:
    harness = EngineHarness(None, num_pages=8)
    text = prompt(600)
    assert not harness.ask(text, "a").result().saved
    assert harness.ask(text, "a").match.kind == "exact"
    harness.ask(prompt(1500, seed=1), "b")
    again = harness.ask(text, "a")
    assert again.match.kind == "miss" or again.match.reused_tokens < 600
    assert again.tokens == expected_answer(text, 4)
    harness.close()


def test_forgetting_an_agent_frees_its_files_but_not_those_of_others(harness: EngineHarness) -> None:
    shared = prompt(PAGE_TOKENS)
    for name in ("a", "b"):
        harness.ask([*shared, *prompt(300, seed=ord(name))], name)

    def files() -> int:
        return len(list(Path(str(harness.data)).glob("*/*/*.safetensors")))

    assert files() == 1 + 2 * 2
    forget(harness, "a")
    assert files() == 3
    harness.restart()
    with pytest.raises(RequestError, match="no agent 'a'"):
        harness.engine.call(lambda: harness.memory.agents.show("default", "a")).result()
    assert harness.ask([*shared, *prompt(300, seed=ord("b"))], "b").match.computed_tokens == 1


def forget(harness: EngineHarness, agent: str) -> None:
    gone: Future[Exception | None] = Future()
    harness.engine.call(lambda: harness.memory.agents.forget("default", agent, gone.set_result)).result(10)
    if error := gone.result(10):
        raise error


def test_forgetting_says_so_if_it_could_not(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.ask(prompt(300), "a")
    monkeypatch.setattr(Directory, "commit", failing)
    with pytest.raises(OSError, match="full"):
        forget(harness, "a")


def failing(*_: object) -> None:
    raise OSError("the disk is full")


def test_a_page_that_was_saved_late_is_found_again(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """L3: the first turn's pages could not be written; the next turn's could, before them."""
    text = prompt(600)
    write, names = Directory.write, []

    def all_but_the_first(self: Directory, name: str, *arguments: Any) -> StoredFile:
        names.append(name)
        if name == names[0]:
            raise OSError("the disk is full")
        return write(self, name, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Directory, "write", all_but_the_first)
        assert not harness.ask(text, "a").result().saved
    longer = [*text, *expected_answer(text, 4), *prompt(300, seed=1)]
    harness.ask(longer, "a")
    assert harness.ask(longer, "a").result().saved
    harness.restart()
    again = harness.ask(longer, "a")
    assert again.match.computed_tokens == 1 and again.tokens == expected_answer(longer, 4)


def test_a_turn_that_could_not_be_saved_does_not_take_the_one_before_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page is lost with the arena; the agent is back at its last saved turn, in memory and on disk."""
    harness = EngineHarness(tmp_path, num_pages=6)
    text = prompt(100)
    assert harness.ask(text, "a").result().saved
    with monkeypatch.context() as patched:
        patched.setattr(Directory, "write", failing)
        assert not harness.ask([*text, *expected_answer(text, 4), *prompt(400, seed=1)], "a").result().saved
    for seed in (2, 3):
        harness.ask(prompt(1200, seed=seed))  # evicts all of it
    assert harness.ask(text, "a").match.computed_tokens == 1
    other = prompt(90, seed=4)
    assert harness.ask(other, "a").result().saved
    harness.restart(EchoBackend(6))
    for known in (text, other):
        again = harness.ask(known, "a")
        assert again.match.computed_tokens == 1 and again.tokens == expected_answer(known, 4)
    harness.close()


def test_saving_goes_on_after_a_full_disk_and_leaves_no_litter(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """L3."""
    text = prompt(600)
    with monkeypatch.context() as patched:
        patched.setattr(Files, "append", failing)
        pending = harness.ask(text, "a")
        assert pending.tokens == expected_answer(text, 4) and not pending.result().saved
    assert not list(Path(str(harness.data)).glob("*/*/*.tmp"))
    assert harness.ask([*text, 1], "a").result().saved
    harness.restart()
    assert harness.ask([*text, 1], "a").match.kind == "exact"


@pytest.mark.parametrize("what", [".", "manifest.sqlite", "pages", "segments"])
def test_a_deleted_directory_is_begun_anew_and_loses_only_what_was_deleted(harness: EngineHarness, what: str) -> None:
    """L5: what is in memory is saved again; what is said to be saved is."""
    cold, hot = prompt(600, seed=1), prompt(300)
    harness.ask(cold, "cold")
    harness.evict_all()
    assert harness.ask(hot, "hot").result().saved
    gone = Path(str(harness.data)) / what
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    again = harness.ask([*hot, 5], "hot")
    assert again.tokens == expected_answer([*hot, 5], 4)
    third = harness.ask([*hot, 5, 6], "hot")
    assert third.tokens == expected_answer([*hot, 5, 6], 4) and third.result().saved
    harness.restart()
    assert harness.ask([*hot, 5, 6], "hot").match.computed_tokens <= (1 if what in (".", "manifest.sqlite") else 303)
    lost = harness.ask(cold, "cold")
    assert lost.tokens == expected_answer(cold, 4)
    assert lost.match.computed_tokens == {".": 600, "manifest.sqlite": 1, "pages": 600, "segments": 88}[what]


def test_a_prompt_that_a_kill_has_cut_off_is_found_as_far_as_it_was_computed(tmp_path: Path) -> None:
    """A5: full pages are saved as they come, and are the agent's: a client that asks again finds the work done so far."""
    harness = EngineHarness(tmp_path / "data")
    text, seen, go = prompt(1500), threading.Event(), threading.Event()

    def hold(batch: Batch) -> None:
        if batch.rows[0].start >= 1024:
            seen.set()
            go.wait(10)

    harness.backend.before_step = hold
    pending = harness.submit(text, "a", max_tokens=4)
    assert seen.wait(20)
    while len(list((tmp_path / "data").glob("pages/*/*.safetensors"))) < 4:
        time.sleep(0.01)
    time.sleep(0.1)  # for the commit behind them
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    go.set()
    pending.result()
    harness.close()
    killed = EngineHarness(tmp_path / "killed")
    assert killed.engine.call(lambda: killed.memory.agents.show("default", "a")).result().tokens == 1024
    again = killed.ask(text, "a")
    assert again.match.reused_tokens == 1024 and again.tokens == expected_answer(text, 4)
    killed.close()


def test_a_second_request_waits_until_the_first_turn_is_saved(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch whose rows are being written is not appended to, evicted or interned meanwhile."""
    commit = Directory.commit
    monkeypatch.setattr(Directory, "commit", lambda self, c: (time.sleep(0.05), commit(self, c)))
    text = prompt(PAGE_TOKENS)
    other = harness.submit(prompt(5, seed=9), "other", max_tokens=60)
    first = harness.submit(text, "a", max_tokens=1)
    more = [*text, *expected_answer(text, 1), *prompt(40, seed=1)]
    second = harness.submit(more, "a", max_tokens=30)
    for pending in (first, second, other):
        pending.result()
    assert second.tokens == expected_answer(more, 30) and second.match.kind == "extend"


@pytest.mark.parametrize("options", [{}, {"max_running": 1}, {"num_pages": 2}], ids=str)
def test_without_a_store_a_waiting_request_is_answered_when_its_turn_comes(options: dict[str, int]) -> None:
    harness = EngineHarness(None, **options)  # type: ignore[arg-type]
    gate = threading.Event()
    harness.backend.before_step = lambda batch: gate.wait(5)
    pendings = [harness.submit(prompt(300, seed=i), "a", max_tokens=5) for i in range(3)]
    gate.set()
    for pending in pendings:
        pending.result(10)
    harness.close()


def test_without_a_store_what_was_evicted_leaves_no_record() -> None:
    harness = EngineHarness(None, num_pages=4)
    for i in range(30):
        harness.ask(prompt(300, seed=i))
    assert len(harness.engine.call(lambda: list(harness.memory.tree.residents())).result()) <= 4
    harness.close()


def test_another_signature_never_sees_the_pages(harness: EngineHarness) -> None:
    """A base model and its finetune have equal shapes."""
    text = prompt(600)
    harness.ask(text, "a")
    harness.signature = b"finetune"
    harness.restart()
    assert harness.ask(text, "a").match.kind == "miss"
    harness.signature = b"echo"
    harness.restart()
    assert harness.ask(text, "a").match.kind == "exact"


@pytest.mark.parametrize("cipher", [None, Cipher(bytes(32))], ids=["clear", "encrypted"])
def test_a_random_day_is_answered_exactly(tmp_path: Path, cipher: Cipher | None) -> None:
    """W1, W2 and the books: agents extend, edit, regenerate, go, come back, and lose pages, under pressure."""
    rng = random.Random(7)
    harness = EngineHarness(tmp_path, num_pages=24, cipher=cipher)
    talks: dict[str, list[int]] = {f"a{i}": prompt(rng.randrange(1, 900), seed=i % 3) for i in range(8)}
    for _ in range(60):
        names = rng.sample(sorted(talks), k=4)
        pendings = [(name, harness.submit(talks[name], name, max_tokens=rng.randrange(1, 30))) for name in names]
        for name, pending in pendings:
            pending.result()
            assert pending.tokens == expected_answer(talks[name], len(pending.tokens))
            talks[name] = next_prompt(rng, talks[name], pending.tokens)
        harness.check()
        what = rng.random()
        if what < 0.2:
            harness.evict_all()
        elif what < 0.3:
            harness.restart(EchoBackend(24))
        elif what < 0.5:
            with suppress(FileNotFoundError):  # the writer removes what a turn has made obsolete
                damage_a_file(rng, tmp_path)
    harness.close()


def next_prompt(rng: random.Random, talk: list[int], answer: list[int]) -> list[int]:
    if rng.random() < 0.2 or len(talk) > 1500:
        cut = rng.randrange(1, len(talk) + 1)
        return [*talk[:cut], *prompt(rng.randrange(1, 50), seed=rng.randrange(10))]
    return talk if rng.random() < 0.2 else [*talk, *answer, *prompt(rng.randrange(1, 300), seed=rng.randrange(10))]


def damage_a_file(rng: random.Random, data: Path) -> None:
    files = sorted(data.glob("*/??/*.safetensors"))
    if not files:
        return
    victim = rng.choice(files)
    content = bytearray(victim.read_bytes())
    kind = rng.randrange(4) if len(content) > 4096 else 3
    if kind == 0:
        content[rng.randrange(4096, len(content))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del content[rng.randrange(len(content)) :]
    elif kind == 2:
        content = bytearray(rng.choice(files).read_bytes())
    if kind == 3:
        victim.unlink()
    else:
        victim.write_bytes(content)


def test_what_waits_to_be_written_when_the_directory_is_deleted_is_not_called_saved(tmp_path: Path) -> None:
    """It goes on from rows that were deleted."""

    class Stopped(Files):
        go, stopped = threading.Event(), threading.Event()

        def create(self, path: Path) -> int:
            self.stopped.set()
            assert self.go.wait(30)
            return super().create(path)

    files = Stopped()
    files.go.set()
    harness = EngineHarness(tmp_path / "data", files=files)
    text = [*prompt(100), *harness.ask(prompt(100), "a").tokens]
    files.stopped.clear()
    files.go.clear()
    other = harness.submit(prompt(100, seed=1), "b")
    assert files.stopped.wait(10)
    pending = harness.submit([*text, 1], "a")
    while len(pending.tokens) < 4:
        time.sleep(0.01)
    time.sleep(0.1)
    shutil.rmtree(tmp_path / "data")
    files.go.set()
    assert not other.result().saved
    saved = pending.result().saved
    again = harness.ask([*text, 1, *pending.tokens, 2], "a")
    assert again.result().saved and again.match.computed_tokens == 2
    harness.restart()
    assert harness.ask([*text, 1, *pending.tokens, 2], "a").match.computed_tokens == 1
    assert not saved
    harness.close()


@pytest.mark.parametrize("fails", [True, False])
def test_a_request_that_comes_at_the_very_last_moment_is_answered(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Between the look whether the engine runs and the request's place in the queue, it may have ended."""
    harness = EngineHarness(None)
    check = harness.engine._check

    def end_behind(request: Any) -> None:
        check(request)
        if fails:
            monkeypatch.setattr(harness.engine, "_begin_again", lambda: False)
            harness.engine.post(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        else:
            harness.engine.begin_stop()
        harness.engine._thread.join(10)

    monkeypatch.setattr(harness.engine, "_check", end_behind)
    with pytest.raises(ShuttingDown):
        harness.ask(prompt(5))
    harness.engine.stop()
