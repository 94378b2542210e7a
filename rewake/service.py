"""Puts a configuration's parts together: model, tokenizer, memory, engine. Knows what depends on what."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewake.backends.base import Backend
from rewake.config import Config
from rewake.engine import Engine
from rewake.models import resolve
from rewake.quant import PAGE_TOKENS
from rewake.replay import Recorder
from rewake.store.base import Store
from rewake.store.directory import FORMAT, Directory
from rewake.text.tokenizer import Tokenizer
from rewake.text.transcripts import Transcripts

__all__ = ["Service", "load_backend", "open_service", "signature"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """A running engine and what the API needs beside it."""

    config: Config
    path: Path
    backend: Backend
    tokenizer: Tokenizer
    transcripts: Transcripts
    engine: Engine
    stop_tokens: frozenset[int]

    def close(self) -> None:
        self.engine.stop()


def signature(facts: Mapping[str, Any]) -> bytes:
    """What pages must agree on to be exchangeable: a hash of content facts only, never of sizes, places or times."""
    stable = json.dumps({**facts, "page_tokens": PAGE_TOKENS, "format": FORMAT}, sort_keys=True, default=str)
    return hashlib.sha256(stable.encode()).digest()


def load_backend(config: Config, path: Path) -> Backend:
    from rewake.backends.torch.loader import load_model
    from rewake.backends.torch.model import TorchBackend

    return TorchBackend(load_model(path, config.threads), config.kv, config.memory)


def open_service(config: Config) -> Service:
    """Load everything and start the engine. Raises ConfigError, ModelError or StoreError."""
    recorder = Recorder(Path(config.record)) if config.record else None
    path = resolve(config.model)
    tokenizer = Tokenizer(path)
    backend = load_backend(config, path)
    sign = signature({**backend.facts(), "tokenizer": tokenizer.digest()})
    store: Store | None = Directory(config.data, sign, backend.layout, budget=config.disk) if config.persist else None
    backend.warm_up()
    engine = Engine(
        backend,
        sign,
        store,
        context=config.context,
        max_running=config.max_running,
        chunk=config.chunk,
        trace=recorder.event if recorder else None,
        step_trace=recorder.step if recorder else None,
    ).start()
    return Service(config, path, backend, tokenizer, Transcripts(tokenizer), engine, tokenizer.stop_ids(path))
