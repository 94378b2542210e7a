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
    generator: Any = SimpleNamespace(service=SimpleNamespace(engine=engine), recent=Recent())
    snapshots = Snapshots(generator)

    async def look() -> None:
        streams = [snapshots.events("default") for _ in range(5)]
        first = await asyncio.gather(*(anext(stream) for stream in streams))
        assert len(set(first)) == 1 and len(taken) == 1
        for stream in streams:
            await stream.aclose()
        await asyncio.sleep(1.2)  # more than twice as long as between two snapshots
        assert len(taken) == 1

    asyncio.run(look())
    monkeypatch.undo()
