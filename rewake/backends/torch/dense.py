"""Dense decoders of the Llama family, from their weights as shipped to the native step's plan. See kernels.step.

Weights come from the folder's safetensors, as bfloat16; or, where the model was shipped as GGUF, from `coded/`, which has
them in the blocks they have there (convert.py writes it). Knows configs, names and blocks; knows no arithmetic, and
nothing of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rewake.backends.torch.kernels.packing import Codes, coded, plain
from rewake.backends.torch.kernels.step import DenseLayer, DensePlan, Weights, why_unfit
from rewake.errors import ModelError

__all__ = ["BLOCKS", "CODED", "OF_LAYER", "TOP", "load_dense", "why_not_dense"]

CODED = "coded/weights.safetensors"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROTARY = ("default", "linear", "llama3")
F32 = npt.NDArray[np.float32]

# Names of weights: as in the Hub's folders, and as in GGUF files.
TOP = {"embedding": ("model.embed_tokens", "token_embd"), "head": ("lm_head", "output"), "norm": ("model.norm", "output_norm")}
OF_LAYER = {
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
    "attention_norm": ("input_layernorm", "attn_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "k_norm": ("self_attn.k_norm", "attn_k_norm"),
}


def why_not_dense(config: Mapping[str, Any]) -> str | None:
    """Why a model of this `config.json` does not take the native step; None if it does."""
    if config.get("model_type") not in FAMILIES:
        return f"models of type {config.get('model_type')!r} are not in its family"
    if config.get("hidden_act") != "silu":
        return f"it has no {config.get('hidden_act')!r} activation"
    if rope_type(config) not in ROTARY:
        return f"it does not know rotary positions of type {rope_type(config)!r}"
    if "quantization_config" in config:
        return "its safetensors are quantised"
    heads = int(config["num_attention_heads"])
    return why_unfit(int(config["hidden_size"]), int(config["intermediate_size"]), heads, head_dim(config))


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}


def rope_type(config: Mapping[str, Any]) -> str:
    rope = rope_of(config)
    return str(rope.get("rope_type", rope.get("type", "default")))


def head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def frequencies(config: Mapping[str, Any]) -> F32:
    """Radians a position for each plane of a head (arXiv 2104.09864); "llama3" slows those down that turn too slowly to be known."""
    rope, dim = rope_of(config), head_dim(config)
    theta = np.float32(rope.get("rope_theta", 10000.0))
    found: F32 = (1 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))).astype(np.float32)
    if rope_type(config) == "linear":
        found = found / np.float32(rope["factor"])
    elif rope_type(config) == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * found / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        found = (found * kept + found / rope["factor"] * (1 - kept)).astype(np.float32)
    return found


def load_dense(path: Path, config: Mapping[str, Any]) -> DensePlan:
    """Raises ModelError if weights are missing."""
    source = Source(path)

    def layer(i: int) -> DenseLayer:
        q, k, v, o, gate, up, down = (source.weights(name, i) for name in ("q", "k", "v", "o", "gate", "up", "down"))
        norms = source.norm("attention_norm", i), source.norm("mlp_norm", i)
        return DenseLayer(q, k, v, o, gate, up, down, *norms, source.vector("q_norm", i), source.vector("k_norm", i))

    embedding = source.weights("embedding")
    return DensePlan(
        layers=[layer(i) for i in range(int(config["num_hidden_layers"]))],
        embedding=embedding,
        head=embedding if config.get("tie_word_embeddings") else source.weights("head"),
        norm=source.norm("norm"),
        frequencies=frequencies(config),
        q_heads=int(config["num_attention_heads"]),
        kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
        head_dim=head_dim(config),
        eps=float(config["rms_norm_eps"]),
    )


class Source:
    """The weights of a folder, by our names."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        coded_file = path / CODED
        self._path = coded_file.parent if coded_file.is_file() else path
        files: list[Any] = [safe_open(file, framework="pt") for file in sorted(self._path.glob("*.safetensors"))]
        if not files:
            raise ModelError(f"{path} has no safetensors files: other formats of weights are not read")
        self._blocks = {name: kind for file in files for name, kind in json.loads((file.metadata() or {}).get("blocks", "{}")).items()}
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)

    def weights(self, name: str, layer: int | None = None) -> Weights:
        """A matrix as it is coded in the file, or as bfloat16 whatever float it is there; with its bias, if it has one."""
        full = hub_name(name, layer)
        x = self._tensor(full)
        if x is None:
            raise ModelError(f"{self._path} has no weights {full}")
        kind = self._blocks.get(full)
        matrix = coded(BLOCKS[kind](x.numpy())) if kind in BLOCKS else plain(x.bfloat16().view(torch.uint16).numpy())
        return Weights(matrix, self.vector(name, layer, "bias"))

    def norm(self, name: str, layer: int | None = None) -> F32:
        found = self.vector(name, layer)
        if found is None:
            raise ModelError(f"{self._path} has no weights {hub_name(name, layer)}")
        return found

    def vector(self, name: str, layer: int | None = None, suffix: str = "weight") -> F32 | None:
        x = self._tensor(hub_name(name, layer, suffix))
        return None if x is None else x.float().numpy()

    def _tensor(self, name: str) -> Tensor | None:
        return self._files[name].get_tensor(name) if name in self._files else None


def hub_name(name: str, layer: int | None, suffix: str = "weight") -> str:
    stem = TOP[name][0] if layer is None else f"model.layers.{layer}.{OF_LAYER[name][0]}"
    return f"{stem}.{suffix}"


# Rows [outputs, bytes] of blocks of 32 weights, as GGUF has them, taken apart.


def halves(blocks: npt.NDArray[np.uint8], at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], -1).reshape(len(packed), -1)


def q4_0(rows: npt.NDArray[np.uint8]) -> Codes:
    blocks = rows.reshape(len(rows), -1, 18)
    scales = halves(blocks, 0)
    return Codes(nibbles(blocks[..., 2:]), scales, scales * np.float16(-8), 4)


def q4_1(rows: npt.NDArray[np.uint8]) -> Codes:
    blocks = rows.reshape(len(rows), -1, 20)
    return Codes(nibbles(blocks[..., 4:]), halves(blocks, 0), halves(blocks, 2), 4)


def q8_0(rows: npt.NDArray[np.uint8]) -> Codes:
    blocks = rows.reshape(len(rows), -1, 34)
    scales = halves(blocks, 0)
    return Codes((blocks[..., 2:] ^ np.uint8(0x80)).reshape(len(rows), -1), scales, scales * np.float16(-128), 8)


BLOCKS: dict[str, Callable[[npt.NDArray[np.uint8]], Codes]] = {"Q4_0": q4_0, "Q4_1": q4_1, "Q8_0": q8_0}
