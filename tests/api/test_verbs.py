"""What a coroutine that goes away, or an engine that does, means for the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rewake.api.verbs import done, on_engine
from rewake.errors import Conflict, InternalError, ShuttingDown
from tests.fakes import EngineHarness

Told = Callable[[Exception | None], None]


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


@pytest.mark.parametrize(("reported", "raised"), [(Conflict("busy"), Conflict), (OSError(28, "no space left"), InternalError)])
def test_what_is_reported_is_raised(harness: EngineHarness, reported: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised, match=r"busy|no space"):
        asyncio.run(done(harness.engine, lambda told: told(reported)))
