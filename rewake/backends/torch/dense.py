"""Dense decoders of the Llama family, from their weights as shipped to the native step's plan. See kernels.step.

Weights come from the folder's safetensors, as bfloat16 or coded on load; or, where the model was shipped as GGUF, from
`coded/`, which has them in the blocks they have there (convert.py writes it). What differs between families is data: names,
norms, activations, scales, windows, rotations. Knows configs, names and files; knows no arithmetic, and nothing of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from rewake.backends.torch.blocks import BLOCKS, quantise
from rewake.backends.torch.kernels.base import F32
from rewake.backends.torch.kernels.packing import Matrix, Room, coded, plain
from rewake.backends.torch.kernels.step import ACTIVATIONS, DenseLayer, DensePlan, Weights, why_unfit
from rewake.errors import ModelError
from rewake.quant import f32_to_bf16

__all__ = ["CODED", "TOP", "completed", "frequencies", "is_gemma", "load_dense", "of_layer", "plan_of", "why_not_dense"]

CODED = "coded/weights.safetensors"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
ROTARY = ("default", "linear", "llama3")
ROUNDED = 256  # rows at a time: rounding a whole vocabulary at once would take ten times the memory of the result
NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "rms_norm_eps", "vocab_size")

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
OF_GEMMA_LAYER = {
    **OF_LAYER,
    "mlp_norm": ("pre_feedforward_layernorm", "ffn_norm"),
    "attention_out_norm": ("post_attention_layernorm", "post_attention_norm"),
    "mlp_out_norm": ("post_feedforward_layernorm", "post_ffw_norm"),
}
# What transformers' classes say where a config does not.
GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
GEMMA2_DEFAULTS = {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA3_DEFAULTS = {"sliding_window_pattern": 6}


def is_gemma(config: Mapping[str, Any]) -> bool:
    """Norms by 1 + weight, and behind attention and MLP, too; embeddings times the root of their width."""
    return config.get("model_type") in ("gemma2", "gemma3_text")


def of_layer(config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Our names of a layer's weights, and theirs."""
    return OF_GEMMA_LAYER if is_gemma(config) else OF_LAYER


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` with what some on the Hub leave out, or say in older words: each layer's kind, each kind's rotation."""
    if not is_gemma(config):
        return dict(config)
    third = config["model_type"] == "gemma3_text"
    full = {**GEMMA_DEFAULTS, **(GEMMA3_DEFAULTS if third else GEMMA2_DEFAULTS), **config}
    every, layers = int(full["sliding_window_pattern"]), int(full.get("num_hidden_layers", 0))
    kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    full["layer_types"] = full.get("layer_types") or kinds
    if third:
        of_kind = config.get("rope_parameters") or {"full_attention": config.get("rope_scaling") or {}}
        old = {"full_attention": config.get("rope_theta", 1e6), "sliding_attention": config.get("rope_local_base_freq", 1e4)}
        full["rope_parameters"] = {kind: {"rope_theta": theta, **(of_kind.get(kind) or {})} for kind, theta in old.items()}
    return full


def why_not_dense(config: Mapping[str, Any]) -> str | None:
    """Why a model of this `config.json` does not take the native step; None if it does."""
    config = completed(config)
    if config.get("model_type") not in FAMILIES:
        return f"models of type {config.get('model_type')!r} are not in its family"
    if missing := [name for name in NEEDED if name not in config]:
        return f"its config leaves out {', '.join(missing)}"
    if activation(config) not in ACTIVATIONS:
        return f"it has no {activation(config)!r} activation"
    for rope in rotations(config).values():
        if rope_type(rope) not in ROTARY:
            return f"it does not know rotary positions of type {rope_type(rope)!r}"
    if "quantization_config" in config:
        return "its safetensors are quantised"
    heads = int(config["num_attention_heads"])
    return why_unfit(int(config["hidden_size"]), int(config["intermediate_size"]), heads, head_dim(config))


def activation(config: Mapping[str, Any]) -> str:
    return str(config.get("hidden_activation") if is_gemma(config) else config.get("hidden_act"))


def rotations(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Rotary parameters by the kind of layer they are for; "" where all have the same."""
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    of_kind = {kind: of for kind, of in rope.items() if isinstance(of, Mapping)}
    return of_kind or {"": rope}


def rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def frequencies(rope: Mapping[str, Any], dim: int) -> F32:
    """Radians a position for each plane of a head (arXiv 2104.09864); "llama3" slows those down that turn too slowly to be known."""
    theta = np.float32(rope.get("rope_theta", 10000.0))
    found: F32 = (1 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))).astype(np.float32)
    if rope_type(rope) == "linear":
        found = found / np.float32(rope["factor"])
    elif rope_type(rope) == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * found / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        found = (found * kept + found / rope["factor"] * (1 - kept)).astype(np.float32)
    return found


def load_dense(path: Path, config: Mapping[str, Any], bits: int = 0, threads: int = 1) -> DensePlan:
    """The plan of the model in `path`; safetensors are coded in `bits` bits, if that is not 0. Raises ModelError if weights are missing."""
    config = completed(config)
    return plan_of(config, Source(path, config, bits, threads), threads)


class NamedWeights(Protocol):
    """A model's weights by our names: matrices with their biases, and what norms multiply by (None if there is none)."""

    def weights(self, name: str, layer: int | None = None) -> Weights: ...

    def norm(self, name: str, layer: int | None = None) -> F32 | None: ...


def plan_of(config: Mapping[str, Any], source: NamedWeights, threads: int = 1) -> DensePlan:
    """A `completed` config and its weights as a plan, packed by so many threads."""
    ropes, kinds = rotations(config), config.get("layer_types") or []
    names, room = list(ropes), Room()

    def weights(name: str, layer: int | None = None) -> Weights:
        found = source.weights(name, layer)
        return replace(found, matrix=room.place(found.matrix))

    def layer(i: int) -> DenseLayer:
        q, k, v, o, gate, up, down = (weights(name, i) for name in ("q", "k", "v", "o", "gate", "up", "down"))
        return DenseLayer(
            *(q, k, v, o, gate, up, down),
            attention_norm=required(source.norm("attention_norm", i), f"attention_norm of layer {i}"),
            mlp_norm=required(source.norm("mlp_norm", i), f"mlp_norm of layer {i}"),
            q_norm=source.norm("q_norm", i),
            k_norm=source.norm("k_norm", i),
            attention_out_norm=source.norm("attention_out_norm", i),
            mlp_out_norm=source.norm("mlp_out_norm", i),
            rotation=names.index(kinds[i]) if len(names) > 1 else 0,
        )

    embedding, dim = weights("embedding"), head_dim(config)
    with ThreadPoolExecutor(threads) as pool:  # the library and numpy let others work while they pack
        layers = list(pool.map(layer, range(int(config["num_hidden_layers"]))))
    return DensePlan(
        layers=layers,
        embedding=embedding,
        head=embedding if config.get("tie_word_embeddings") else weights("head"),
        norm=required(source.norm("norm"), "norm"),
        frequencies=np.stack([frequencies(rope, dim) for rope in ropes.values()]),
        q_heads=int(config["num_attention_heads"]),
        kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
        head_dim=dim,
        eps=float(config["rms_norm_eps"]),
        scale=float(config["query_pre_attn_scalar"] if is_gemma(config) else dim) ** -0.5,
        activation=activation(config),
        embedding_scale=math.sqrt(config["hidden_size"]) if is_gemma(config) else 1.0,
        soft_cap=config.get("attn_logit_softcapping") if is_gemma(config) else None,
        logit_cap=config.get("final_logit_softcapping") if is_gemma(config) else None,
    )


def required(x: F32 | None, what: str) -> F32:
    if x is None:
        raise ModelError(f"the model has no weights of its {what}")
    return x


def open_weights(file: Path, threads: int) -> Any:
    """A safetensors file, through numpy if it can: floats it does not have are for torch, whose import takes a second or two."""
    opened: Any = safe_open(file, framework="numpy")
    if not any(opened.get_slice(name).get_dtype().startswith(("BF16", "F8")) for name in opened.keys()):  # noqa: SIM118 (not a mapping)
        return opened
    import torch

    torch.set_num_threads(threads)
    return safe_open(file, framework="pt")


def floats(x: Any) -> F32:
    """An array or a tensor as float32."""
    found: F32 = x.astype(np.float32, copy=False) if isinstance(x, np.ndarray) else x.float().numpy()
    return found


def bfloat16_bits(x: Any) -> npt.NDArray[np.uint16]:
    """An array or a tensor, rounded to bfloat16 if it is not that."""
    found: npt.NDArray[np.uint16]
    if isinstance(x, np.ndarray):
        found = np.empty(x.shape, np.uint16)
        for row in range(0, len(x), ROUNDED):
            found[row : row + ROUNDED] = f32_to_bf16(floats(x[row : row + ROUNDED]))
        return found
    import torch

    found = x.bfloat16().view(torch.uint16).numpy()
    return found


class Source:
    """The weights of a folder, by our names."""

    def __init__(self, path: Path, config: Mapping[str, Any], bits: int, threads: int) -> None:
        coded_file = path / CODED
        self._path = coded_file.parent if coded_file.is_file() else path
        files: list[Any] = [open_weights(file, threads) for file in sorted(self._path.glob("*.safetensors"))]
        if not files:
            raise ModelError(f"{path} has no safetensors files: other formats of weights are not read")
        self._blocks = {name: kind for file in files for name, kind in json.loads((file.metadata() or {}).get("blocks", "{}")).items()}
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)
        self._names, self._more, self._bits = of_layer(config), 1 if is_gemma(config) else 0, bits

    def weights(self, name: str, layer: int | None = None) -> Weights:
        """A matrix as it is coded in the file, or in `bits`, or as bfloat16 whatever float it is there; with its bias, if it has one."""
        full = self._name(name, layer)
        x = self._tensor(full)
        if x is None:
            raise ModelError(f"{self._path} has no weights {full}")
        return Weights(self._matrix(x, self._blocks.get(full), layer is None), self._vector(name, layer, "bias"))

    def _matrix(self, x: Any, kind: str | None, is_vocabulary: bool) -> Matrix:
        if kind is not None:
            return coded(BLOCKS[kind](np.asarray(x)))
        if self._bits:  # a token's few bits of embedding and head cost more than a layer's
            return coded(quantise(floats(x), 8 if is_vocabulary else self._bits))
        return plain(bfloat16_bits(x))

    def norm(self, name: str, layer: int | None = None) -> F32 | None:
        found = self._vector(name, layer) if layer is None or name in self._names else None
        return None if found is None else found + np.float32(self._more)

    def _vector(self, name: str, layer: int | None = None, suffix: str = "weight") -> F32 | None:
        x = self._tensor(self._name(name, layer, suffix))
        return None if x is None else floats(x)

    def _tensor(self, name: str) -> Any:
        return self._files[name].get_tensor(name) if name in self._files else None

    def _name(self, name: str, layer: int | None, suffix: str = "weight") -> str:
        stem = TOP[name][0] if layer is None else f"model.layers.{layer}.{self._names[name][0]}"
        return f"{stem}.{suffix}"
