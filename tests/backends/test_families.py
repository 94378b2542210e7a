"""Models of many families over our pages, against transformers' own attention; see docs/models.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from rewake.backends.base import Batch, Row
from rewake.backends.torch.loader import load_model
from rewake.backends.torch.model import TorchBackend
from rewake.errors import ModelError
from tests.backends.families import FAMILIES, LATENT, SHAPE, Family, compare, save

DOCS = Path(__file__).parents[2] / "docs/models.md"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_logits_over_pages_are_those_of_transformers(family: Family, tmp_path: Path) -> None:
    """As far as bfloat16 allows: transformers itself parts from float32 by about as much."""
    result = compare(family, tmp_path)
    assert result.mean_kl < 3e-4 + 2 * result.own_kl
    assert f"| {family.name} | `{family.config}` |" in DOCS.read_text(), "run python -m tests.backends.families"


def test_a_latent_is_cached_and_not_the_heads_made_from_it(tmp_path: Path) -> None:
    save(next(f for f in FAMILIES if f.name == "DeepSeek V2"), tmp_path)
    group = load_model(tmp_path, threads=2).spec.group
    assert (group.kind, group.kv_heads, group.k_dim, group.v_dim, group.latent_dim) == ("latent", 1, 64 + 16, 0, 64)


def test_without_a_place_for_latents_the_heads_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decompressed form: K and V of different widths."""
    monkeypatch.delattr(transformers.models.deepseek_v2.modeling_deepseek_v2.DeepseekV2Attention, "expand_kv")
    save(next(f for f in FAMILIES if f.name == "DeepSeek V2"), tmp_path)
    group = load_model(tmp_path, threads=2).spec.group
    assert (group.kind, group.kv_heads, group.k_dim, group.v_dim) == ("full", 4, LATENT["qk_nope_head_dim"] + 16, LATENT["v_head_dim"])


@pytest.mark.parametrize(
    ("config", "fields", "reason"),
    [
        ("MambaConfig", {}, "could not be resumed"),
        ("Qwen3NextConfig", {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2}, "linear_attention"),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "depends on the longest"),
        ("StableLmConfig", {}, "does not hand on"),
    ],
)
def test_what_cannot_be_served_is_refused_at_load_with_the_reason(
    tmp_path: Path, config: str, fields: dict[str, object], reason: str
) -> None:
    model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**SHAPE, **fields}))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason):
        TorchBackend(load_model(tmp_path, threads=2), "bf16", 2**24).warm_up()


def test_a_window_that_the_code_does_not_know_of_is_noticed(tmp_path: Path) -> None:
    """Config and code must agree on what is attended to: else pages would hold what nobody can say."""
    save(next(f for f in FAMILIES if f.name == "Gemma 3"), tmp_path)
    loaded = load_model(tmp_path, threads=2, prefer_native=False)
    loaded.eager.model.layers[0].self_attn.sliding_window = 64
    with pytest.raises(ModelError, match="its config says"):
        TorchBackend(loaded, "bf16", 2**24).forward(Batch((Row((1, 2, 3), 0, 0, (0,), ("p",), "s"),)))
