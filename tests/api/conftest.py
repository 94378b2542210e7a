"""Servers with real weights that the tests of protocols share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from tests.server import ServerProcess
from tests.templates import HERMES, with_template


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The default model."""
    with ServerProcess(tmp_path_factory.mktemp("live") / "data", "--context", "2048", "--memory", "200MiB") as running:
        yield running


@pytest.fixture(scope="session")
def tooled(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[ServerProcess]:
    """Its weights behind a template that has tools. The model is called `hermes`."""
    folder = tmp_path_factory.mktemp("tooled")
    model = with_template(model_path, HERMES, folder / "hermes")
    with ServerProcess(folder / "data", "--model", str(model), "--context", "2048", "--memory", "200MiB") as running:
        yield running


def openai_client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def anthropic_client(server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def chat_client(live: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai_client(live) as made:
        yield made


@pytest.fixture(scope="session")
def tool_client(tooled: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai_client(tooled) as made:
        yield made


@pytest.fixture(scope="session")
def claude(live: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(live) as made:
        yield made


@pytest.fixture(scope="session")
def tool_claude(tooled: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic_client(tooled) as made:
        yield made
