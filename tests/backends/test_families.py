"""Models of many families over our pages, against transformers' own attention; see docs/models.md."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from rewake.backends.base import Batch, Row
from rewake.backends.torch.eager import LOADING
from rewake.backends.torch.loader import load_model
from rewake.backends.torch.model import TorchBackend
from rewake.errors import ModelError
from rewake.request import Sampling
from tests.backends.families import FAMILIES, LATENT, LONGROPE, SHAPE, Family, compare, save

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


def test_a_short_sequence_is_turned_as_it_will_be_when_it_is_long(tmp_path: Path) -> None:
    """LongRoPE: K does not depend on who else is in the batch, nor on how long the sequence gets."""
    save(next(f for f in FAMILIES if f.name == "Phi-3 long"), tmp_path)
    loaded = load_model(tmp_path, threads=2)
    assert loaded.facts["longrope"]["factors"] == "long" and loaded.facts["longrope"]["attention_scaling"] > 1
    backend = TorchBackend(loaded, "bf16", 2**24)
    page = backend.planes.page_bytes

    def row(start: int, slots: tuple[int, ...]) -> Row:
        return Row(tuple(range(3, 103)), start, start, (slots,), tuple(map(str, slots)), "s", Sampling(temperature=0))

    def kv_of(*rows: Row) -> torch.Tensor:
        backend.forward(Batch(rows))
        return torch.from_numpy(backend.arena[:page].copy()).view(torch.bfloat16).float()

    alone = kv_of(row(0, (0,)))
    beside = kv_of(row(0, (0,)), row(900, tuple(i * page for i in range(1, 5))))
    assert alone.norm() > 0 and (alone - beside).norm() < 0.02 * alone.norm()


def test_no_step_is_computed_while_transformers_loads_another_model(tmp_path: Path) -> None:
    """It sets torch's default dtype, for all threads."""
    save(FAMILIES[0], tmp_path)
    backend = TorchBackend(load_model(tmp_path, threads=2, prefer_native=False), "bf16", 2**24)
    with ThreadPoolExecutor(1) as pool:
        with LOADING:
            step = pool.submit(backend.warm_up)
            assert not wait([step], 0.2).done
        step.result(60)


def test_longrope_in_code_that_looks_at_the_batch_is_refused(tmp_path: Path) -> None:
    fields = {"num_local_experts": 4, "rope_parameters": {**LONGROPE, "long_mscale": 1.2, "short_mscale": 1.0}, "head_dim": 32}
    save(Family("Phi-3.5 MoE", "PhimoeConfig", {"original_max_position_embeddings": 256, **fields}), tmp_path)
    with pytest.raises(ModelError, match="depends on the longest sequence"):
        load_model(tmp_path, threads=2)


def test_a_window_that_the_code_does_not_know_of_is_noticed(tmp_path: Path) -> None:
    """Config and code must agree on what is attended to: else pages would hold what nobody can say."""
    save(next(f for f in FAMILIES if f.name == "Gemma 3"), tmp_path)
    loaded = load_model(tmp_path, threads=2, prefer_native=False)
    loaded.eager.model.layers[0].self_attn.sliding_window = 64
    with pytest.raises(ModelError, match="its config says"):
        TorchBackend(loaded, "bf16", 2**24).forward(Batch((Row((1, 2, 3), 0, 0, ((0,),), ("p",), "s"),)))
