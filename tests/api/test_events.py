"""What a window is told: one snapshot for all who look, and none when nobody does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rewake.api.events import Snapshots
from rewake.api.recent import Recent
from tests.fakes import EngineHarness


def test_snapshots_are_shared_and_taken_only_while_somebody_looks(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, taken = harness.engine, []
    real = engine.call

    def call(function: Any) -> Any:
        taken.append(function)
        return real(function)

    monkeypatch.setattr(engine, "call", call)
    services = SimpleNamespace(loaded={"m": SimpleNamespace(engine=engine)}, why_not_ready=None)
    generator: Any = SimpleNamespace(services=services, recent={"m": Recent()})
    snapshots = Snapshots(generator)

    async def look() -> None:
        streams = [snapshots.events("m", "default") for _ in range(5)]
        first = await asyncio.gather(*(anext(stream) for stream in streams))
        assert len(set(first)) == 1 and len(taken) == 1
        for stream in streams:
            await stream.aclose()
        await asyncio.sleep(1.2)  # more than twice as long as between two snapshots
        assert len(taken) == 1

    asyncio.run(look())
    monkeypatch.undo()


def test_to_look_at_a_model_that_is_not_loaded_does_not_load_it(harness: EngineHarness) -> None:
    """It says so, and goes on when somebody else has it loaded; one that is unloaded while it is looked at ends no stream."""
    loaded: dict[str, Any] = {}
    generator: Any = SimpleNamespace(services=SimpleNamespace(loaded=loaded, why_not_ready=None), recent={"m": Recent()})

    async def look() -> None:
        stream = Snapshots(generator).events("m", "default")
        for state in ({}, {"m": SimpleNamespace(engine=harness.engine)}, {}):
            loaded.clear()
            loaded.update(state)
            assert (await anext(stream)).startswith("event: snapshot" if state else "event: unloaded")
        await stream.aclose()

    asyncio.run(look())
