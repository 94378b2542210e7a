"""What is read from configs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rewake.errors import ModelError
from rewake.quant import CODECS
from rewake.spec import ModelCacheSpec

LLAMA = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def test_a_llama_has_one_group() -> None:
    group = ModelCacheSpec.from_config(LLAMA).group
    assert (group.layers, group.q_heads, group.kv_heads, group.k_dim, group.v_dim) == ((0, 1, 2, 3), 8, 2, 64, 64)


def test_head_dim_wins_over_hidden_size() -> None:
    assert ModelCacheSpec.from_config({**LLAMA, "head_dim": 128}).group.k_dim == 128


def test_a_context_takes_whole_pages() -> None:
    spec = ModelCacheSpec.from_config(LLAMA)
    assert spec.context_bytes(257, CODECS["q4"], 64) == 2 * 256 * 4 * 2 * 2 * 36


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "of how many tokens"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
        ({"num_kv_shared_layers": 2}, "different shapes"),
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": None}, "dynamic"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_what_cannot_be_represented_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    config = {k: v for k, v in {**LLAMA, **change}.items() if v is not None}
    with pytest.raises(ModelError, match=reason):
        ModelCacheSpec.from_config(config)


def test_an_unused_sliding_window_is_none() -> None:
    assert ModelCacheSpec.from_config({**LLAMA, "sliding_window": 512, "use_sliding_window": False}).groups[0].kind == "full"


def test_layers_are_grouped_by_what_they_see() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    spec = ModelCacheSpec.from_config({**LLAMA, "sliding_window": 512, "layer_types": kinds, "attn_logit_softcapping": 50.0})
    assert [(g.kind, g.layers, g.window) for g in spec.groups] == [("full", (1,), None), ("sliding", (0, 2, 3), 512)]
    assert spec.group.layers == (0, 1, 2, 3) and [spec.window(i) for i in range(4)] == [512, None, 512, 512]
    assert spec.soft_cap == 50.0


def test_an_mla_model_caches_latents_or_its_heads() -> None:
    mla = {**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    latent, heads = ModelCacheSpec.from_config(mla).group, ModelCacheSpec.from_config(mla, latent=False).group
    assert (latent.kind, latent.kv_heads, latent.k_dim, latent.v_dim, latent.latent_dim) == ("latent", 1, 576, 0, 512)
    assert (heads.kind, heads.kv_heads, heads.k_dim, heads.v_dim, heads.latent_dim) == ("full", 8, 192, 128, 0)
