"""Models of the paper's sizes, with random weights of 4 bits, made in memory: `bench.ttft --geometry NAME`.

What a step costs does not depend on what the weights are, so a shape is enough to stand beside the tables of arXiv 2603.04428
(Apple M4 Pro, 273 GB/s, a GPU; ours is whatever processor this is). Weights are in groups of 32 with terms of 8 bits, as
GGUF's Q4_K (4.6 bits): 4.6 GB for Llama 3.1 8B, 6.8 GB for Gemma 3 12B. DeepSeek-V2-Lite runs through transformers, in the
precision that the processor multiplies fastest; as 16B weights would not fit then, 8 of its 64 routed experts are made, of which
a token takes 6 as it would of all: a token's products are the same, and what a decode step reads; a prompt's go to fewer experts.

  cold      nothing is known; 2 x parameters FLOP a token, and attention
  restored  the same prompt again when memory was given up: pages are read from disk, and one token is computed (the paper's "warm")
  hot       16 new tokens, all else in memory (the paper adds an answer and a question)
  decode    all weights are read once a token, and K and V of all that is before

Times are from handing the request to the engine to its first token; the paper's are over HTTP, and its contexts nominal.
"""

from __future__ import annotations

import queue
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.common import Bar, table
from rewake.backends.torch.dense import completed, plan_of, why_not_dense
from rewake.backends.torch.kernels import native
from rewake.backends.torch.kernels.packing import SUPER, SUPER_KINDS, TILE, Matrix
from rewake.backends.torch.kernels.step import Weights
from rewake.backends.torch.loader import LoadedModel, of_transformers
from rewake.backends.torch.model import TorchBackend
from rewake.engine import Engine
from rewake.errors import ModelError
from rewake.quant import CODINGS
from rewake.request import Done, Event, Failed, Generated, Request, Sampling
from rewake.service import signature
from rewake.spec import ModelCacheSpec
from rewake.store.directory import Directory

__all__ = ["CONTEXTS", "GEOMETRIES", "measure"]

CONTEXTS = (1024, 2048, 4096)
NEW_TOKENS, DECODED = 16, 17
MEMORY, DISK = 2**30, 8 * 2**30
Row = dict[str, Any]


@dataclass(frozen=True)
class Geometry:
    """A config, and the paper's medians in milliseconds by nominal context (tables 3 and 5; decode from its repository's report)."""

    config: Mapping[str, Any]
    cold: Mapping[int, float]
    warm: Mapping[int, float]
    hot: Mapping[int, float]
    decode: Mapping[int, float]


def by_context(*values: float) -> dict[int, float]:
    return dict(zip(CONTEXTS, values, strict=False))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEOMETRIES = {
    "llama-3.1-8b": Geometry(
        {
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA3,
        },
        by_context(2500, 4530, 10235),
        by_context(260, 274, 290),
        by_context(412, 420, 429),
        {},
    ),
    "gemma-3-12b": Geometry(
        {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "sliding_window": 1024,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}},
        },
        by_context(3964, 7119, 15736),
        by_context(475, 495, 577),
        by_context(683, 709, 719),
        by_context(26.1, 24.9, 23.2),
    ),
    "deepseek-v2-lite": Geometry(
        {
            "model_type": "deepseek_v2",
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "max_position_embeddings": 163840,
        },
        by_context(1043, 1737, 3970),
        by_context(234, 246, 271),
        by_context(345, 368, 366),
        {},
    ),
}


class RandomWeights:
    """Takes the place of a file: matrices of the shapes that a config asks for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._rng = np.random.default_rng(0)
        hidden, inner, vocabulary = (int(config[name]) for name in ("hidden_size", "intermediate_size", "vocab_size"))
        heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        dim = int(config.get("head_dim") or hidden // heads)
        self._shapes = {
            "embedding": (vocabulary, hidden),
            "head": (vocabulary, hidden),
            "q": (heads * dim, hidden),
            "k": (kv_heads * dim, hidden),
            "v": (kv_heads * dim, hidden),
            "o": (hidden, heads * dim),
            "gate": (inner, hidden),
            "up": (inner, hidden),
            "down": (hidden, inner),
        }
        widths = dict.fromkeys(("norm", "attention_norm", "mlp_norm"), hidden)
        if config["model_type"] == "gemma3_text":
            widths |= {"attention_out_norm": hidden, "mlp_out_norm": hidden, "q_norm": dim, "k_norm": dim}
        self._widths = widths

    def weights(self, name: str, layer: int | None = None) -> Weights:
        return Weights(self._matrix(*self._shapes[name]))

    def norm(self, name: str, layer: int | None = None) -> npt.NDArray[np.float32] | None:
        return np.ones(self._widths[name], np.float32) if name in self._widths else None

    def _matrix(self, outputs: int, inputs: int) -> Matrix:
        """Codes are random, terms such that a product with a row of the matrix is about as large as its other factor."""
        if inputs % SUPER:
            raise ModelError(f"a matrix of {inputs} columns has no whole groups of {SUPER}")
        codes, term = SUPER * 4 * TILE // 8, 32
        scale = 0.2 / term / inputs**0.5
        tiles = np.empty((-(-outputs // TILE), inputs // SUPER, codes + SUPER + 4 * TILE), np.uint8)
        for tile in tiles:
            tile[:] = np.frombuffer(self._rng.bytes(tile.nbytes), np.uint8).reshape(tile.shape)
        tiles[..., codes : codes + SUPER] = term
        tiles[..., codes + SUPER :].view(np.float16)[:] = np.repeat([scale, -7.5 * scale], TILE).astype(np.float16)
        return Matrix(tiles.reshape(-1), outputs, inputs, SUPER_KINDS[4])


def measure(name: str, contexts: Sequence[int], kv: str, threads: int) -> tuple[list[Row], list[Bar]]:
    """Raises ModelError if there are no native kernels."""
    geometry = GEOMETRIES[name]
    if reason := native.why_unavailable():
        raise ModelError(f"{name} needs the native kernels: {reason}")
    started = time.perf_counter()
    reason = why_not_dense(geometry.config)
    loaded = through_transformers(name, geometry.config, reason, threads) if reason else natively(name, geometry.config, threads)
    print(f"{loaded.weights} made in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    codec, group = CODINGS[kv]
    backend = TorchBackend(loaded, codec.name, MEMORY, group)
    rows, bars = [], []
    with tempfile.TemporaryDirectory() as data:
        sign = signature(backend.facts())
        engine = Engine(backend, sign, Directory(Path(data), sign, backend.planes, budget=DISK)).start()
        try:
            ask(engine, tokens("warm-up", 64), "warm-up", 2)
            for size in contexts:
                row = of_size(engine, geometry, size)
                rows.append({"geometry": name, "kv": kv, **row})
                print(f"{size}: {row}", file=sys.stderr)
        finally:
            engine.stop()
    table(rows)
    for row in rows:
        if row["paper cold/restored"]:
            bars.append(Bar("geometry", f"{row['context']}: cold / restored", row["cold/restored"], row["paper cold/restored"]))
    return rows, bars


def natively(name: str, geometry: Mapping[str, Any], threads: int) -> LoadedModel:
    config = completed(geometry)
    plan = plan_of(config, RandomWeights(config), threads)
    facts = {"weights": f"random {name}", "step": "native", "config": config}
    weights = f"random weights of {plan.weight_bits:.2f} bits"
    return LoadedModel(plan, None, ModelCacheSpec.from_config(config), facts, "native", weights, threads)


def through_transformers(name: str, geometry: Mapping[str, Any], reason: str, threads: int) -> LoadedModel:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rewake.backends.torch.eager import ATTENTION, register_attention, working_dtype

    torch.set_num_threads(threads)
    register_attention()
    config = AutoConfig.for_model(**geometry)
    dtype, _ = working_dtype()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION).eval()
    return of_transformers(model, config, dtype, f"random {name}", f"random weights, {dtype}", reason, threads)


def of_size(engine: Engine, geometry: Geometry, size: int) -> Row:
    prompt, agent = tokens(f"context of {size}", size), f"agent-{size}"
    cold, done = ask(engine, prompt, agent, DECODED)
    assert done.match.computed_tokens == size, done.match
    evict(engine)
    restored, done = ask(engine, prompt, agent, 1)
    assert done.match.loaded_tokens == size - 1 and done.match.computed_tokens == 1, done.match
    hot, done = ask(engine, prompt + tokens("new", NEW_TOKENS), agent, 1)
    assert done.match.computed_tokens == NEW_TOKENS, done.match
    paper_cold, paper_warm = geometry.cold.get(size, 0), geometry.warm.get(size, 0)
    return {
        "context": size,
        "cold ms": cold[0],
        "paper's": paper_cold,
        "restored ms": restored[0],
        "paper's warm": paper_warm,
        "hot ms": hot[0],
        "paper's hot": geometry.hot.get(size, 0),
        "decode tok/s": (DECODED - 1) / (cold[-1] - cold[0]) * 1000,
        "paper's decode": geometry.decode.get(size, 0),
        "cold/restored": cold[0] / restored[0],
        "paper cold/restored": paper_cold / paper_warm if paper_warm else 0,
    }


def tokens(name: str, size: int) -> list[int]:
    return random.Random(name).choices(range(1000, 100_000), k=size)


def ask(engine: Engine, prompt: list[int], agent: str, new: int) -> tuple[list[float], Done]:
    """Milliseconds to each token, and how the request ended."""
    events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
    started = time.perf_counter()
    emit = lambda event: events.put((time.perf_counter(), event))  # noqa: E731
    engine.submit(Request(f"{agent}-{started}", tuple(prompt), new, emit, Sampling(temperature=0), agent=agent))
    times = []
    while True:
        at, event = events.get()
        if isinstance(event, Generated):
            times.append((at - started) * 1000)
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            return times, event


def evict(engine: Engine) -> None:
    """Drop every page nobody holds, as memory pressure would."""
    residency = engine.memory.residency

    def drop() -> None:
        for piece in list(residency.cached):
            if piece in residency.cached:  # it may have gone with another
                residency.drop(piece)

    engine.call(drop).result()
