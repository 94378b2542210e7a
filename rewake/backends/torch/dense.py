"""Dense decoders of the Llama family, from their weights as shipped to the native step's plan. See kernels.step.

Weights come from `weights.gguf` if the folder has one, and stay as they are coded there; else from its safetensors, as
bfloat16. Knows configs and names of weights; knows no arithmetic, and nothing of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rewake.backends.torch.kernels.packing import GROUP, Matrix, coded, plain
from rewake.backends.torch.kernels.step import DenseLayer, DensePlan, Weights, why_unfit
from rewake.errors import ModelError
from rewake.quant import f32_to_bf16

__all__ = ["GGUF", "load_dense", "why_not_dense"]

GGUF = "weights.gguf"
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
    found = (1 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))).astype(np.float32)
    if rope_type(config) == "linear":
        return (found / np.float32(rope["factor"])).astype(np.float32)
    if rope_type(config) == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * found / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return (found * kept + found / rope["factor"] * (1 - kept)).astype(np.float32)
    return found


class Source(Protocol):
    """The weights of a folder, by our names."""

    def matrix(self, name: str, layer: int | None = None) -> Matrix: ...

    def vector(self, name: str, layer: int | None = None, suffix: str = "weight") -> F32 | None: ...


def load_dense(path: Path, config: Mapping[str, Any]) -> DensePlan:
    """Raises ModelError if weights are missing or of a kind that is not known."""
    source: Source = GgufSource(path / GGUF, config) if (path / GGUF).is_file() else SafetensorsSource(path)

    def weights(name: str, layer: int | None = None) -> Weights:
        return Weights(source.matrix(name, layer), source.vector(name, layer, "bias"))

    def norm(name: str, layer: int | None = None) -> F32:
        found = source.vector(name, layer)
        if found is None:
            raise ModelError(f"{path} has no weights for {name}")
        return found

    def layer(i: int) -> DenseLayer:
        q, k, v, o, gate, up, down = (weights(name, i) for name in ("q", "k", "v", "o", "gate", "up", "down"))
        norms = norm("attention_norm", i), norm("mlp_norm", i)
        return DenseLayer(q, k, v, o, gate, up, down, *norms, source.vector("q_norm", i), source.vector("k_norm", i))

    embedding = weights("embedding")
    return DensePlan(
        layers=[layer(i) for i in range(int(config["num_hidden_layers"]))],
        embedding=embedding,
        head=embedding if config.get("tie_word_embeddings") else weights("head"),
        norm=norm("norm"),
        frequencies=frequencies(config),
        q_heads=int(config["num_attention_heads"]),
        kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
        head_dim=head_dim(config),
        eps=float(config["rms_norm_eps"]),
    )


class SafetensorsSource:
    """The `*.safetensors` of a folder: matrices as bfloat16, whatever float they are."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        files = [safe_open(file, framework="pt") for file in sorted(path.glob("*.safetensors"))]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)
        self._path = path

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        import torch

        full = self._name(name, layer, "weight")
        if full not in self._files:
            raise ModelError(f"{self._path} has no weights {full}")
        return plain(self._files[full].get_tensor(full).to(torch.bfloat16).view(torch.uint16).numpy())

    def vector(self, name: str, layer: int | None = None, suffix: str = "weight") -> F32 | None:
        full = self._name(name, layer, suffix)
        return self._files[full].get_tensor(full).float().numpy() if full in self._files else None

    def _name(self, name: str, layer: int | None, suffix: str) -> str:
        stem = TOP[name][0] if layer is None else f"model.layers.{layer}.{OF_LAYER[name][0]}"
        return f"{stem}.{suffix}"


class GgufSource:
    """A GGUF file: matrices keep the codes they have there where the step knows them, and are bfloat16 where not."""

    def __init__(self, file: Path, config: Mapping[str, Any]) -> None:
        from gguf import GGUFReader

        self._file = file
        self._tensors = {t.name: t for t in GGUFReader(file).tensors}
        heads = int(config["num_attention_heads"])
        interleaved = config["model_type"] in ("llama", "mistral")  # GGUF has the planes of their heads side by side
        self._heads = {"q": heads, "k": int(config.get("num_key_value_heads") or heads)} if interleaved else {}

    def matrix(self, name: str, layer: int | None = None) -> Matrix:
        from gguf.quants import dequantize

        tensor = self._tensors.get(self._name(name, layer, "weight"))
        if tensor is None:
            raise ModelError(f"{self._file} has no weights {self._name(name, layer, 'weight')}")
        kind = tensor.tensor_type.name
        inputs, outputs = (int(n) for n in tensor.shape)
        if kind not in BLOCKS or inputs % GROUP:
            return plain(self._planes(name, f32_to_bf16(dequantize(tensor.data, tensor.tensor_type).reshape(outputs, inputs))))
        codes, scales, minima, bits = BLOCKS[kind](np.ascontiguousarray(tensor.data).view(np.uint8).reshape(outputs, -1))
        return coded(*(self._planes(name, x.reshape(outputs, -1)) for x in (codes, scales, minima)), bits)

    def vector(self, name: str, layer: int | None = None, suffix: str = "weight") -> F32 | None:
        tensor = self._tensors.get(self._name(name, layer, suffix))
        return None if tensor is None else self._planes(name, np.array(tensor.data, np.float32))

    def _planes(self, name: str, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rows of q and k in the order of the Hub's weights: first halves of a head's planes, then second ones."""
        if name not in self._heads:
            return x
        return x.reshape(self._heads[name], -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    def _name(self, name: str, layer: int | None, suffix: str) -> str:
        stem = TOP[name][1] if layer is None else f"blk.{layer}.{OF_LAYER[name][1]}"
        return f"{stem}.{suffix}"


# Blocks of 32 weights [outputs, blocks * bytes] -> codes [outputs, blocks, 32], scales and minima [outputs, blocks], bits of a code.
Unpacked = tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16], npt.NDArray[np.float16], int]


def halves(blocks: npt.NDArray[np.uint8], at: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.concatenate([packed & 15, packed >> 4], -1)


def q4_0(rows: npt.NDArray[np.uint8]) -> Unpacked:
    blocks = rows.reshape(len(rows), -1, 18)
    scales = halves(blocks, 0)
    return nibbles(blocks[..., 2:]), scales, scales * np.float16(-8), 4


def q4_1(rows: npt.NDArray[np.uint8]) -> Unpacked:
    blocks = rows.reshape(len(rows), -1, 20)
    return nibbles(blocks[..., 4:]), halves(blocks, 0), halves(blocks, 2), 4


def q8_0(rows: npt.NDArray[np.uint8]) -> Unpacked:
    blocks = rows.reshape(len(rows), -1, 34)
    scales = halves(blocks, 0)
    return blocks[..., 2:] ^ 0x80, scales, scales * np.float16(-128), 8


BLOCKS: dict[str, Callable[[npt.NDArray[np.uint8]], Unpacked]] = {"Q4_0": q4_0, "Q4_1": q4_1, "Q8_0": q8_0}
