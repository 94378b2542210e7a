"""Fixtures shared by all tests. Real weights are fetched once, into the user's model cache."""

from __future__ import annotations

import shutil
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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    """A random Llama of two layers, with the real tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_path / name, folder)
    return folder


@pytest.fixture(params=["q4", "q4+", "bf16"])
def kv(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[EngineHarness]:
    """An engine on the fake backend, with a directory; every test ends with the books balanced."""
    made = EngineHarness(tmp_path / "data")
    yield made
    made.close()
