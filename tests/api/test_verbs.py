"""What a coroutine that goes away, or an engine that does, means for the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rewake.api.agents import Verbs
from rewake.api.auth import EVERYBODY, Caller, caller
from rewake.api.recent import Recent
from rewake.api.verbs import done, on_engine
from rewake.errors import Conflict, InternalError, ShuttingDown
from rewake.memory.agents import Agents
from tests.fakes import EngineHarness

Told = Callable[[Exception | None], None]


@pytest.fixture(autouse=True)
def asked_by_somebody() -> None:
    caller.set(Caller(EVERYBODY, 0.0))


def test_a_client_that_leaves_does_not_end_the_engine(harness: EngineHarness) -> None:
    """What it asked for is done all the same, and reports to nobody."""
    waiting: list[Told] = []

    async def leave() -> None:
        asked = asyncio.create_task(done(harness.engine, waiting.append))
        while not waiting:
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(leave())
    harness.engine.call(lambda: waiting[0](None)).result(10)
    assert harness.engine.is_alive
    assert asyncio.run(on_engine(harness.engine, lambda: 7)) == 7


def test_what_a_stopped_engine_never_reports_is_not_waited_for() -> None:
    harness = EngineHarness(None)

    async def ask() -> None:
        asked = asyncio.create_task(done(harness.engine, lambda told: None))
        await asyncio.sleep(0.1)
        harness.engine.begin_stop()
        with pytest.raises(ShuttingDown):
            await asked

    asyncio.run(ask())
    with pytest.raises(ShuttingDown):
        asyncio.run(on_engine(harness.engine, lambda: 7))
    harness.engine.stop()


def test_what_an_engine_that_begins_again_never_reports_is_not_waited_for(harness: EngineHarness) -> None:
    async def ask() -> None:
        asked = asyncio.create_task(done(harness.engine, lambda told: None))
        await asyncio.sleep(0.1)
        harness.engine.post(explode)
        with pytest.raises(InternalError, match="has failed"):
            await asyncio.wait_for(asked, 10)

    asyncio.run(ask())


def explode() -> None:
    raise RuntimeError("the engine is made to fail")


def test_a_verb_is_one_of_the_memory_there_is_when_it_is_done(tmp_path: Path) -> None:
    """The one before the engine failed would hand out slots that are the new one's."""
    harness = EngineHarness(tmp_path)
    closing, go = threading.Event(), threading.Event()
    close = harness.memory.ledger.close

    def close_slowly() -> None:
        closing.set()
        assert go.wait(10)
        close()

    harness.memory.ledger.close = close_slowly  # type: ignore[method-assign]
    verbs = Verbs(SimpleNamespace(recent={"m": Recent()}), SimpleNamespace(engine=harness.engine), "m")  # type: ignore[arg-type]

    async def create() -> None:
        harness.engine.post(explode)
        while not closing.is_set():
            await asyncio.sleep(0.01)
        asked = asyncio.create_task(verbs.done(Agents.create, "a", pinned=False, ttl=None))
        await asyncio.sleep(0.1)
        go.set()
        await asked

    asyncio.run(create())
    assert [a.agent for a in asyncio.run(verbs.listed())] == ["a"]
    harness.memory = harness.engine.memory
    harness.close()


@pytest.mark.parametrize(("reported", "raised"), [(Conflict("busy"), Conflict), (OSError(28, "no space left"), InternalError)])
def test_what_is_reported_is_raised(harness: EngineHarness, reported: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised, match=r"busy|no space"):
        asyncio.run(done(harness.engine, lambda told: told(reported)))
