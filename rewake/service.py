"""Puts a configuration's parts together for one model: model, tokenizer, memory, engine. Knows what depends on what."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewake.backends.base import Backend
from rewake.calibration import Calibration, choose, find
from rewake.config import AUTO, KEY_FILE, Config
from rewake.engine import Engine
from rewake.errors import ConfigError
from rewake.models import label, resolve
from rewake.planes import PagePlanes
from rewake.quant import CODINGS, PAGE_TOKENS
from rewake.replay import Recorder
from rewake.spec import ModelCacheSpec
from rewake.store.base import Store
from rewake.store.crypto import Cipher, find_key
from rewake.store.directory import FORMAT, MANIFEST, Directory
from rewake.store.shared import Shared
from rewake.text.grammar import Grammars
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
    grammars: Grammars

    def close(self) -> None:
        self.engine.stop()


def signature(facts: Mapping[str, Any]) -> bytes:
    """What pages must agree on to be exchangeable: a hash of content facts only, never of sizes, places or times."""
    stable = json.dumps({**facts, "page_tokens": PAGE_TOKENS, "format": FORMAT}, sort_keys=True, default=str)
    return hashlib.sha256(stable.encode()).digest()


def load_backend(config: Config, path: Path) -> Backend:
    """Raises ModelError, and ConfigError for `--kv auto` where nothing was measured."""
    from rewake.backends.torch.loader import load_model
    from rewake.backends.torch.model import TorchBackend

    loaded = load_model(path, config.threads, config.weights)
    calibration = find(loaded.fingerprint)
    coding, why = choose_coding(config, calibration)
    codec, group = CODINGS[coding]
    notes = {"kv": f"{coding}, {bits(loaded.spec.planes(codec, group), loaded.spec)} bits a value: {why}"}
    if codec.k_bits < 16:
        notes["centring"] = f"on {calibration.text}" if calibration else "none (`rewake calibrate` makes K and V lose less)"
    return TorchBackend(loaded, codec.name, config.memory, group, calibration.k_mean if calibration else None, notes)


def choose_coding(config: Config, calibration: Calibration | None) -> tuple[str, str]:
    if config.kv != AUTO:
        loss = calibration.losses.get(config.kv) if calibration else None
        return config.kv, "as asked for" + (f"; loses {loss.perplexity:.2%} of perplexity on the calibration text" if loss else "")
    if calibration is None:
        raise ConfigError(f"--kv auto needs to know what each codec loses: run `rewake calibrate --model {config.model}` first")
    return choose(calibration.losses, config.kv_loss)


def bits(planes: PagePlanes, spec: ModelCacheSpec) -> str:
    group = spec.group
    each = planes.token_bytes * 8 / (len(group.layers) * group.kv_heads * (group.k_dim + group.v_dim))
    young = planes.codec.residual_bits
    return f"{each:.3g}" + (f" (while it is young, {each + young:.3g})" if young else "")


def open_store(config: Config, sign: bytes, planes: PagePlanes, shared: Shared | None = None) -> Store | None:
    if not config.persist:
        return None
    cipher = None
    if config.encrypt:
        # a new key could not open memories that are there already
        cipher = Cipher(find_key(os.environ, KEY_FILE, create=not (config.data / MANIFEST).exists()))
    return Directory(config.data, sign, planes, budget=config.disk, cipher=cipher, shared=shared, model=label(config.model))


def open_service(config: Config, shared: Shared | None = None) -> Service:
    """Load everything and start the engine. `shared` is for several models on one directory.

    Raises ModelError, StoreError, or ConfigError for a wrong key or recording.
    """
    recorder = Recorder(Path(config.record)) if config.record else None
    path = resolve(config.model)
    tokenizer = Tokenizer(path)
    backend = load_backend(config, path)
    sign = signature({**backend.facts(), "tokenizer": tokenizer.digest()})
    backend.warm_up()
    with ExitStack() as stack:
        store = open_store(config, sign, backend.planes, shared)
        if store is not None:
            stack.callback(store.close)
        engine = Engine(
            backend,
            sign,
            store,
            context=config.context,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            chunk=config.chunk,
            trace=recorder.event if recorder else None,
            step_trace=recorder.step if recorder else None,
        ).start()
        stack.pop_all()
    stops = tokenizer.stop_ids(path)
    grammars = Grammars(tokenizer, backend.spec.vocab_size, stops)
    return Service(config, path, backend, tokenizer, Transcripts(tokenizer), engine, stops, grammars)
