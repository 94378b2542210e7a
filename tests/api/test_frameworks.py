"""Agent frameworks on a real server: what they send is taken, and their agents remember."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rewake.client import Client
from tests.server import ServerProcess


def test_agents_of_pydantic_ai_remember(tmp_path: Path) -> None:
    pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim is not installed: the example with it is not tested")
    from examples.pydantic_ai_team import work

    with ServerProcess(tmp_path / "data", "--memory", "100MiB") as server:
        url = f"http://127.0.0.1:{server.port}"
        turns = asyncio.run(work(url))
        assert [name for name, _, _ in turns] == ["writer", "editor"] * 3
        for number, (_, prompt, remembered) in enumerate(turns):
            assert number < 2 or remembered >= turns[number - 2][1], turns
            assert prompt > remembered
        with Client(url) as client:
            assert [len(client.show(f"team/{name}")["turns"]) for name in ("writer", "editor")] == [3, 3]
