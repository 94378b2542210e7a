"""ModelCacheSpec: what a network's KV cache looks like, read from its config alone. Knows no tensors and no names.

After the paper's `ModelCacheSpec` (arXiv 2603.04428, section 3): the one description that page layout, budgets and
signature are derived from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewake.errors import ModelError
from rewake.quant import PAGE_TOKENS, Codec, PageLayout

__all__ = ["CacheGroup", "ModelCacheSpec"]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that cache alike: `layers` are indices into the model, widths are values per head."""

    kind: str
    layers: tuple[int, ...]
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int

    def layout(self, codec: Codec, group_size: int) -> PageLayout:
        return PageLayout(len(self.layers), self.kv_heads, self.k_dim, self.v_dim, codec, group_size)


@dataclass(frozen=True)
class ModelCacheSpec:
    """The cache groups of a model. `group` is the only one so far: full attention in every layer."""

    groups: tuple[CacheGroup, ...]
    vocab_size: int
    max_positions: int
    rope: tuple[tuple[str, str], ...]

    @property
    def group(self) -> CacheGroup:
        (group,) = self.groups
        return group

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelCacheSpec:
        """Read a Hugging Face `config.json`. Raises ModelError, with the reason, for a cache it cannot represent."""
        refuse_unsupported(config)
        try:
            layers, q_heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
            kv_heads = int(config.get("num_key_value_heads") or q_heads)
            head_dim = int(config.get("head_dim") or config["hidden_size"] // q_heads)
            vocab_size, positions = int(config["vocab_size"]), int(config["max_position_embeddings"])
        except KeyError as missing:
            raise ModelError(f"the model's config has no {missing}: it is not a decoder whose KV cache we can represent") from None
        group = CacheGroup("full", tuple(range(layers)), q_heads, kv_heads, head_dim, head_dim)
        rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
        return cls((group,), vocab_size, positions, tuple(sorted((str(k), str(v)) for k, v in rope.items())))

    def context_bytes(self, tokens: int, codec: Codec, group_size: int) -> int:
        """Bytes of memory a context of `tokens` takes, in whole pages."""
        pages = -(-tokens // PAGE_TOKENS)
        return sum(pages * g.layout(codec, group_size).page_bytes for g in self.groups)


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise ModelError for what pages of one full-attention group cannot hold (yet)."""
    kinds = set(config.get("layer_types") or ())
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    if kinds - {"full_attention"} or (sliding and "full_attention" not in kinds):
        raise ModelError("layers with a sliding window or of a recurrent kind are not supported yet")
    if config.get("kv_lora_rank"):
        raise ModelError("latent (MLA) caches are not supported yet")
    if config.get("attn_logit_softcapping") or config.get("model_type") == "gpt_oss":
        raise ModelError("soft-capped logits and attention sinks are not supported yet")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type"))
    if rope_type in ("dynamic", "longrope"):
        raise ModelError(
            f"rope type {rope_type!r} depends on the longest sequence in the batch: an agent's cache would depend on strangers"
        )
    if config.get("is_encoder_decoder"):
        raise ModelError("encoder-decoder models are not supported")
