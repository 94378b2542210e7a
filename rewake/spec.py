"""ModelCacheSpec: what a network's KV cache looks like, read from its config alone. Knows no tensors and no names.

After the paper's `ModelCacheSpec` (arXiv 2603.04428, section 3): the one description that page layout, budgets and
signature are derived from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from rewake.errors import ModelError
from rewake.planes import PagePlanes, Plane
from rewake.quant import YOUNG_TOKENS, Codec, PageLayout

__all__ = ["CacheGroup", "Kind", "ModelCacheSpec"]

Kind = Literal["full", "sliding", "latent"]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache alike: `layers` are indices into the model, widths are values per head.

    `window`: tokens that a sliding layer sees, its own included. A latent group caches one vector of `k_dim` values a
    token, whose first `latent_dim` are V as well; `v_dim`, what is stored of V, is 0 then.
    """

    kind: Kind
    layers: tuple[int, ...]
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None
    latent_dim: int = 0

    def layout(self, codec: Codec, group_size: int, layers: int | None = None) -> PageLayout:
        """How `layers` of them (all) lie in a page."""
        return PageLayout(layers or len(self.layers), self.kv_heads, self.k_dim, self.v_dim, codec, group_size)


@dataclass(frozen=True)
class ModelCacheSpec:
    """The cache groups of a model, and what all its layers have in common.

    `soft_cap`: scores are `cap * tanh(score / cap)`; `has_sinks`: each head has one more logit, which takes probability only.
    """

    groups: tuple[CacheGroup, ...]
    vocab_size: int
    max_positions: int
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def group(self) -> CacheGroup:
        """All layers, whatever they see: what of each is cached has one shape."""
        layers = tuple(sorted(layer for group in self.groups for layer in group.layers))
        return replace(self.groups[0], layers=layers, window=None)

    def window(self, layer: int) -> int | None:
        return next(group.window for group in self.groups if layer in group.layers)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, latent: bool = True) -> ModelCacheSpec:
        """Read a Hugging Face `config.json`. With `latent`, an MLA model's latents are cached; without, its decompressed heads.

        Raises ModelError, with the reason, for a cache it cannot represent.
        """
        refuse_unsupported(config)
        try:
            num_layers, q_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
            vocab_size, positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
            shape = latent_shape(config, latent) if config.get("kv_lora_rank") else plain_shape(config)
        except KeyError as missing:
            raise ModelError(f"the model's config has no {missing}: it is not a decoder whose KV cache we can represent") from None
        windows = windows_of(config, num_layers)
        groups = []
        for window in sorted(set(windows), key=lambda w: (w is not None, w)):
            kind: Kind = "latent" if shape[3] else "full" if window is None else "sliding"
            layers = tuple(i for i, w in enumerate(windows) if w == window)
            groups.append(CacheGroup(kind, layers, q_heads, *shape[:3], window, shape[3]))
        cap = config.get("attn_logit_softcapping")
        return cls(tuple(groups), vocab_size, positions, float(cap) if cap else None, config.get("model_type") == "gpt_oss")

    def planes(self, codec: Codec, group_size: int) -> PagePlanes:
        """What a page of this model consists of: a plane for each group, in slots of equally many layers."""
        layers = gcd(*(len(group.layers) for group in self.groups))
        base, residuals = [], []
        for group in self.groups:
            slot = group.layout(codec, group_size, layers)
            reach = group.window and group.window - 1  # a query sees its own token and `window - 1` before it
            young = YOUNG_TOKENS if reach is None else min(YOUNG_TOKENS, reach)
            base.append(Plane(group.kind, group.layers, slot, reach, reach))
            residuals.append(Plane(f"{group.kind}, young", group.layers, replace(slot, residuals=True), young, reach, keeps_segments=True))
        return PagePlanes((*base, *(residuals if codec.residual_bits else ())))

    def context_bytes(self, tokens: int, codec: Codec, group_size: int) -> int:
        """Bytes of memory an agent of `tokens` tokens takes that is to go on with the next one, in whole slots."""
        planes = self.planes(codec, group_size)
        return planes.slots_held(tokens) * planes.slot_bytes


def plain_shape(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """kv_heads, k_dim, v_dim, latent_dim."""
    q_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or config["hidden_size"] // q_heads)
    return int(config.get("num_key_value_heads") or q_heads), head_dim, int(config.get("v_head_dim") or head_dim), 0


def latent_shape(config: Mapping[str, Any], latent: bool) -> tuple[int, int, int, int]:
    rank, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    if latent:
        return 1, rank + rope, 0, rank
    return int(config["num_attention_heads"]), int(config["qk_nope_head_dim"]) + rope, int(config["v_head_dim"]), 0


def windows_of(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """Each layer's window; None for full attention. Without a list of layer types, a window is every layer's."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * num_layers
    if "sliding_attention" in kinds and not window:
        raise ModelError("some layers have sliding windows, but the config does not say of how many tokens")
    return [int(window) if kind == "sliding_attention" and window else None for kind in kinds[:num_layers]]


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ModelError for what pages cannot hold."""
    strange = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if strange:
        raise ModelError(
            f"layers of the kind {', '.join(sorted(strange))} keep a state that is no KV cache: they cannot be resumed from pages"
        )
    for key in ("global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers"):
        if config.get(key):
            raise ModelError(f"{key}: layers whose caches have different shapes, or share one, are not supported yet")
    if config.get("use_bidirectional_attention"):
        raise ModelError("attention to later tokens: what is cached would change with what follows")
    if config.get("is_encoder_decoder"):
        raise ModelError("encoder-decoder models are not supported")
    for rope_type in rope_types(config.get("rope_parameters") or config.get("rope_scaling") or {}):
        if rope_type == "dynamic":
            raise ModelError(
                f"rope type {rope_type!r} depends on the longest sequence in the batch: an agent's cache would depend on strangers"
            )


def rope_types(rope: Mapping[str, Any]) -> set[Any]:
    """Of all layers: some models have one set of parameters for each kind of layer."""
    nested = [r for r in rope.values() if isinstance(r, Mapping)]
    return {r.get("rope_type", r.get("type")) for r in (rope, *nested)}
