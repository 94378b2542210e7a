"""Fixtures shared by all tests. Real weights are fetched once, into the user's model cache."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rewake.models import DEFAULT_MODEL, resolve
from tests.fakes import EngineHarness

SLOW = "test_wake test_native_step test_concurrency test_gemma test_tools test_several_models test_play".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: of two processes, neither has one left when the other is done."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


@pytest.fixture(scope="module")
def short_collections() -> Iterator[None]:
    """For files whose tests have garbage collected often: what others have left in the process is not looked through each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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
    return random_llama(tmp_path_factory.mktemp("tiny"), model_path)


@pytest.fixture(scope="session")
def tiny_eager(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Path:
    """The same with an activation that the native step does not have: transformers runs it."""
    return random_llama(tmp_path_factory.mktemp("eager"), model_path, hidden_act="relu")


def random_llama(folder: Path, tokenizer: Path, **changes: Any) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        **changes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder)
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
