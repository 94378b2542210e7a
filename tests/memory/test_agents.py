"""What people do with agents. The fake backend's answers depend on every row it attends to, so a wrong one shows."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rewake.errors import Conflict, InternalError, InvalidRequest, NotFound, Overloaded, RequestError
from rewake.memory.agents import AgentSummary
from rewake.memory.portable import Portable, read_portable
from rewake.quant import PAGE_TOKENS
from tests.fakes import PLANES, EchoBackend, EngineHarness, expected_answer
from tests.test_engine import prompt

NS = "default"
LENGTHS = [3, 255, 256, 257, 511, 512, 513, 900]


def do(harness: EngineHarness, verb: str, *arguments: Any, **keywords: Any) -> Any:
    """Call a verb on the engine's thread and wait for its `done`; what it was told."""
    told: Future[Any] = Future()
    function: Callable[..., None] = getattr(harness.memory.agents, verb)
    harness.engine.call(lambda: function(NS, *arguments, done=told.set_result, **keywords)).result(10)
    result = told.result(10)
    if isinstance(result, Exception):
        raise result
    return result


def show(harness: EngineHarness, name: str) -> AgentSummary:
    return harness.engine.call(lambda: harness.memory.agents.show(NS, name)).result(10)


def talk(harness: EngineHarness, name: str, length: int, turns: int = 1) -> list[int]:
    """An agent that has read `length` tokens and answered `turns` times; its transcript."""
    text = prompt(length, seed=sum(name.encode()))
    for turn in range(turns):
        pending = harness.ask(text, name)
        text = [*text, *pending.tokens, *(prompt(9, seed=turn) if turn + 1 < turns else ())]
    return text


def test_an_agent_can_be_made_before_it_remembers_anything(harness: EngineHarness) -> None:
    do(harness, "create", "a", pinned=True, ttl=60.0)
    with pytest.raises(Conflict, match="already"):
        do(harness, "create", "a", pinned=False, ttl=None)
    harness.restart()
    made = show(harness, "a")
    assert (made.state, made.tokens, made.turns, made.pinned, made.ttl) == ("empty", 0, (), True, 60.0)
    text = talk(harness, "a", 300)
    assert show(harness, "a").pinned and show(harness, "a").tokens == len(text)
    do(harness, "update", "a", pinned=False, ttl=None)
    harness.restart()
    assert (show(harness, "a").pinned, show(harness, "a").ttl) == (False, None)


def test_turns_are_counted_and_cancelled_answers_are_not(harness: EngineHarness) -> None:
    text = talk(harness, "a", 300, turns=3)
    assert show(harness, "a").turns == (304, 317, 330) and len(text) == 330
    harness.restart()
    assert show(harness, "a").turns == (304, 317, 330)
    edited = [*text[:310], 1]
    harness.ask(edited, "a")
    assert show(harness, "a").turns == (304, 315)


def test_a_cancelled_prompt_takes_no_turn_from_those_before(harness: EngineHarness, tmp_path: Path) -> None:
    """The last token of the answer before is known from the prompt, computed or not."""
    text = talk(harness, "a", 300, turns=2)
    harness.backend.before_step = fail
    with pytest.raises(InternalError):
        harness.ask([*text, 5, 6, 7], "a")
    harness.backend.before_step = lambda batch: None
    assert (show(harness, "a").tokens, show(harness, "a").turns) == (len(text), (304, 317))
    do(harness, "rewind", "a", turn=2)
    do(harness, "export", "a", tmp_path / "a.tar")
    with open(tmp_path / "a.tar", "rb") as opened:
        assert read_portable(opened, PLANES)[0].turns.tolist() == [304, 317]


def fail(_: object) -> None:
    raise RuntimeError("the model has failed")


def test_turns_are_counted_where_computing_pays_more_than_loading(harness: EngineHarness) -> None:
    text = talk(harness, "a", 300, turns=3)
    harness.evict_all()
    harness.memory.residency.gate.always = False
    harness.memory.residency.gate.read_cost, harness.memory.residency.gate.compute_cost = 1.0, 1e-9
    assert harness.ask([*text, 5], "a").match.computed_tokens == len(text) + 1
    assert show(harness, "a").turns == (304, 317, 330, 335)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("when", ["hot", "evicted", "restarted"])
def test_a_fork_remembers_all_and_goes_its_own_way(harness: EngineHarness, length: int, when: str) -> None:
    text = talk(harness, "a", length)
    {"hot": lambda: None, "evicted": harness.evict_all, "restarted": harness.restart}[when]()
    do(harness, "fork", "a", "b")
    harness.check()
    assert show(harness, "b").tokens == len(text) and show(harness, "b").turns == show(harness, "a").turns
    for name, more in (("b", [7, 8]), ("a", [9])):
        pending = harness.ask([*text, *more], name)
        assert pending.tokens == expected_answer([*text, *more], 4)
        assert (pending.match.kind, pending.match.computed_tokens) == ("extend", 1 + len(more))  # the last sampled token, and the new ones


def test_a_fork_shares_whole_pages_in_memory_and_on_disk(harness: EngineHarness) -> None:
    talk(harness, "a", 3 * PAGE_TOKENS + 10)

    def pages() -> tuple[int, int]:
        files = list(Path(str(harness.data)).glob("pages/*/*"))
        return harness.memory.residency.pool.num_slots - harness.memory.residency.pool.num_free, len(files)

    assert pages() == (4, 3)
    for i in range(5):
        do(harness, "fork", "a", f"b{i}")
    assert pages() == (4 + 5, 3)  # the last, unfinished page is copied
    assert show(harness, "a").pages_shared == 1  # the third page: five branches and one hang from it


@pytest.mark.parametrize("num_pages", [3, 4])
def test_a_copy_does_not_take_the_room_of_the_pages_before_it(num_pages: int) -> None:
    """Without a directory, what leaves memory is forgotten, and all behind it."""
    harness = EngineHarness(None, num_pages=num_pages)
    text = talk(harness, "a", 600)
    if num_pages == 3:
        with pytest.raises(Overloaded, match="no room"):
            do(harness, "fork", "a", "b")
    else:
        do(harness, "fork", "a", "b")
    harness.check()
    assert harness.ask(text, "a", 1).match.computed_tokens <= 2
    harness.close()


def test_forgetting_the_one_that_was_forked_takes_nothing_from_the_fork(harness: EngineHarness) -> None:
    text = talk(harness, "a", 700)
    do(harness, "fork", "a", "b")
    do(harness, "forget", "a")
    harness.restart()
    assert harness.ask([*text, 5], "b").match.computed_tokens == 2
    do(harness, "forget", "b")
    assert not list(Path(str(harness.data)).glob("*/*/*.safetensors"))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_fork_of_the_first_tokens_and_a_rewind_to_them(harness: EngineHarness, length: int) -> None:
    text = talk(harness, "a", 1000, turns=2)
    do(harness, "fork", "a", "b", tokens=length)
    do(harness, "rewind", "a", tokens=length)
    harness.evict_all()
    for name in ("a", "b"):
        assert show(harness, name).tokens == length
        other = [*text[:length], ord(name), 2]
        pending = harness.ask(other, name)
        assert pending.tokens == expected_answer(other, 4) and pending.match.computed_tokens == 2
    harness.restart()
    assert harness.ask(text, "a").match.computed_tokens <= 2, "what came after is still there, as an older branch"


def test_rewinding_to_a_turn(harness: EngineHarness) -> None:
    text = talk(harness, "a", 300, turns=3)
    do(harness, "rewind", "a", turn=1)
    assert show(harness, "a").tokens == 304 and show(harness, "a").turns == (304,)
    do(harness, "rewind", "a", turn=0)
    assert show(harness, "a").tokens == 0
    assert harness.ask(text, "a").match.computed_tokens <= 2
    with pytest.raises(InvalidRequest, match="has had 4 turns"):
        do(harness, "rewind", "a", turn=9)
    with pytest.raises(InvalidRequest, match="tokens, not 99999"):
        do(harness, "rewind", "a", tokens=99_999)
    with pytest.raises(InvalidRequest, match="not both"):
        do(harness, "rewind", "a", tokens=1, turn=1)
    with pytest.raises(NotFound):
        do(harness, "rewind", "nobody", turn=0)


def test_verbs_refuse_an_agent_at_work(harness: EngineHarness) -> None:
    talk(harness, "a", 300)
    harness.backend.before_step = lambda batch: time.sleep(0.01)
    pending = harness.submit([*prompt(300, seed=97), 1], "a", max_tokens=60)
    pending.first_token.wait(10)
    for verb, arguments in (("fork", ("a", "b")), ("rewind", ("a",)), ("forget", ("a",)), ("export", ("a", Path("nowhere")))):
        with pytest.raises(Conflict, match="at work"):
            do(harness, verb, *arguments)
    pending.result()
    do(harness, "forget", "a")


def test_an_agent_whose_time_is_over_is_forgotten_unless_it_is_pinned(harness: EngineHarness) -> None:
    talk(harness, "short", 300)
    talk(harness, "kept", 300)
    do(harness, "update", "short", ttl=0.2)
    do(harness, "update", "kept", ttl=0.2, pinned=True)
    time.sleep(0.3)
    harness.engine.call(harness.memory.agents.expire).result(10)
    with pytest.raises(NotFound):
        show(harness, "short")
    harness.restart()
    assert [a.agent for a in harness.engine.call(lambda: harness.memory.agents.list(NS)).result(10)] == ["kept"]


def test_an_idle_engine_looks_for_agents_whose_time_is_over(harness: EngineHarness) -> None:
    talk(harness, "short", 30)
    do(harness, "update", "short", ttl=0.1)
    for _ in range(50):
        time.sleep(0.1)
        if not list(Path(str(harness.data)).glob("segments/*/*")):
            return
    raise AssertionError("it is still there")


def test_waking_brings_an_agent_into_memory_before_it_is_asked(harness: EngineHarness) -> None:
    text = talk(harness, "a", 900)
    harness.restart()
    assert show(harness, "a").state == "warm"
    assert do(harness, "wake", "a") == 4
    assert show(harness, "a").state == "hot"
    assert do(harness, "wake", "a") == 0
    pending = harness.ask([*text, 1], "a")
    assert pending.match.loaded_tokens == 0 and pending.match.computed_tokens == 2


def test_waking_takes_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path, num_pages=6)
    text = talk(harness, "a", 1200)
    harness.restart(EchoBackend(6))
    harness.backend.before_step = lambda batch: time.sleep(0.01)
    other = harness.submit(prompt(500, seed=3), "b", max_tokens=40)
    other.first_token.wait(10)
    assert 0 < do(harness, "wake", "a") <= 3
    harness.check()
    other.result()
    assert harness.ask(text, "a").match.computed_tokens <= 2
    harness.close()


# ---- from machine to machine


def exported(harness: EngineHarness, file: Path) -> tuple[Portable, Callable[[int], bytes]]:
    """Agent "a" by way of a file."""
    do(harness, "export", "a", file)
    with open(file, "rb") as opened:
        return read_portable(opened, PLANES)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("cold", [True, False])
def test_an_exported_agent_goes_on_in_another_directory(harness: EngineHarness, tmp_path: Path, length: int, cold: bool) -> None:
    text = talk(harness, "a", length, turns=2)
    if cold:
        harness.evict_all()
    about, pages = exported(harness, tmp_path / "a.tar")
    harness.check()
    for other in (EngineHarness(tmp_path / "other"), EngineHarness(None)):
        do(other, "take_in", "b", about, pages)
        assert show(other, "b").tokens == len(text) and show(other, "b").turns == show(harness, "a").turns
        if other.data is not None:
            other.restart()
        pending = other.ask([*text, 1], "b")
        assert pending.tokens == expected_answer([*text, 1], 4) and pending.match.computed_tokens == 2
        with pytest.raises(Conflict, match="already"):
            do(other, "take_in", "b", about, pages)
        other.close()


def test_an_import_is_larger_than_the_arena(tmp_path: Path, harness: EngineHarness) -> None:
    text = talk(harness, "a", 5000)
    about, pages = exported(harness, tmp_path / "a.tar")
    small = EngineHarness(tmp_path / "small", num_pages=4)
    do(small, "take_in", "a", about, pages)
    small.restart(EchoBackend(64))
    assert small.ask(text, "a").match.computed_tokens <= 2
    small.close()


def test_an_import_of_what_is_known_shares_its_pages(tmp_path: Path, harness: EngineHarness) -> None:
    text = talk(harness, "a", 900)
    about, pages = exported(harness, tmp_path / "a.tar")
    do(harness, "take_in", "b", about, pages)
    assert len(list(Path(str(harness.data)).glob("pages/*/*"))) == 3
    assert harness.ask([*text, 3], "b").tokens == expected_answer([*text, 3], 4)


def test_an_import_for_another_model_is_refused(tmp_path: Path, harness: EngineHarness) -> None:
    talk(harness, "a", 900)
    about, pages = exported(harness, tmp_path / "a.tar")
    other = EngineHarness(tmp_path / "other", signature=b"finetune")
    with pytest.raises(InvalidRequest, match="another model"):
        do(other, "take_in", "a", about, pages)
    other.close()


def rewritten(file: Path, change: Callable[[str, bytes], bytes]) -> io.BytesIO:
    """The export with each member's content changed."""
    out = io.BytesIO()
    with tarfile.open(file) as old, tarfile.open(fileobj=out, mode="w") as new:
        for member in old:
            opened = old.extractfile(member)
            assert opened is not None
            content = change(member.name, opened.read())
            member.size = len(content)
            new.addfile(member, io.BytesIO(content))
    out.seek(0)
    return out


def lie(**fields: Any) -> Callable[[str, bytes], bytes]:
    return lambda name, content: json.dumps({**json.loads(content), **fields}).encode() if name == "agent.json" else content


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda name, content: content[:-1] + b"\x55" if name == "0001.safetensors" else content, "page 1 is damaged"),
        (lambda name, content: content[:-9] if name == "0001.safetensors" else content, "not of the shape"),
        (lambda name, content: b"" if name == "0001.safetensors" else content, "not of the shape"),
        (lambda name, content: b"{" if name == "agent.json" else content, "not a file that"),
        (lie(format="other"), "format is 'other'"),
        (lie(num_computed=100_000), "do not agree"),
        (lie(num_computed=600), "do not agree"),
        (lie(turns=[4000]), "do not agree"),
        (lie(tokens=[2**40]), "not a file that"),
        (lie(xxh3_128=[]), "has 4"),
    ],
)
def test_an_import_that_is_not_what_was_exported_is_refused(
    tmp_path: Path, harness: EngineHarness, change: Callable[[str, bytes], bytes], reason: str
) -> None:
    talk(harness, "a", 900)
    do(harness, "export", "a", tmp_path / "a.tar")
    with pytest.raises(InvalidRequest, match=reason):
        read_portable(rewritten(tmp_path / "a.tar", change), PLANES)
    with pytest.raises(RequestError, match="not a file that"):
        read_portable(io.BytesIO(b"no tar at all" * 100), PLANES)
