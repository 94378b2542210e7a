"""Fixtures shared by all tests. Real weights are fetched once, into the user's model cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rewake.models import DEFAULT_MODEL, resolve
from tests.fakes import EngineHarness


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def real_model(model_path: Path) -> Any:
    from rewake.backends.torch.loader import load_model

    return load_model(model_path, threads=2)


@pytest.fixture(params=["q4", "bf16"])
def kv(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[EngineHarness]:
    """An engine on the fake backend, with a directory; every test ends with the books balanced."""
    made = EngineHarness(tmp_path / "data")
    yield made
    made.close()
