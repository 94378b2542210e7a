"""Tiny random models of many families, and how far their logits over bf16 pages are from transformers' in float32.

`python -m tests.backends.families` writes docs/models.md.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from rewake.backends.base import Batch, Row
from rewake.backends.torch.loader import load_model
from rewake.backends.torch.measure import arena_bytes, tables_of
from rewake.backends.torch.model import TorchBackend
from rewake.quant import CODECS, PAGE_TOKENS
from rewake.request import Sampling
from rewake.spec import ModelCacheSpec

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0 + 0.01 * i for i in range(16)],
    "long_factor": [1.0 + 0.5 * i for i in range(16)],
    "original_max_position_embeddings": 256,
}
CUTS = (255, 256, 300, 513, 514, 700)  # around page edges, single tokens, and beyond the windows


@dataclass(frozen=True)
class Family:
    name: str
    config: str  # a class of transformers
    fields: dict[str, Any]
    note: str = ""


FAMILIES = (
    Family("Llama 2, SmolLM2", "LlamaConfig", {}),
    Family("Llama 3", "LlamaConfig", {"rope_parameters": LLAMA_3}, "scaled rotary frequencies"),
    Family("Mistral", "MistralConfig", {"sliding_window": 128}, "sliding window in every layer"),
    Family("Mixtral", "MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, "experts"),
    Family("Qwen2, Qwen2.5", "Qwen2Config", {"use_sliding_window": False}, "biases"),
    Family("Qwen3", "Qwen3Config", {"head_dim": 32, "use_sliding_window": False}, "q and k are normalised"),
    Family("Qwen3 MoE", "Qwen3MoeConfig", {"head_dim": 32, **SMALL_MOE}, "experts"),
    Family("Phi-3", "Phi3Config", {"sliding_window": 128, "original_max_position_embeddings": 4096}, "sliding window"),
    Family(
        "Phi-3 long",
        "Phi3Config",
        {"original_max_position_embeddings": 256, "rope_parameters": LONGROPE},
        "LongRoPE, always by its long factors",
    ),
    Family("Gemma 2", "Gemma2Config", {"head_dim": 32, "sliding_window": 128, "query_pre_attn_scalar": 32}, "windows, soft caps"),
    Family(
        "Gemma 3",
        "Gemma3TextConfig",
        {"head_dim": 32, "num_hidden_layers": 6, "sliding_window": 128, "query_pre_attn_scalar": 32},
        "windows, two rotations",
    ),
    Family(
        "gpt-oss",
        "GptOssConfig",
        {"head_dim": 32, "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
        "windows, sinks",
    ),
    Family("DeepSeek V2", "DeepseekV2Config", {**LATENT, **EXPERTS, "num_key_value_heads": 4}, "latents"),
    Family("DeepSeek V3", "DeepseekV3Config", {**LATENT, **EXPERTS, "num_key_value_heads": 4}, "latents"),
    Family("OLMo 2", "Olmo2Config", {}),
    Family("Granite", "GraniteConfig", {"attention_multiplier": 0.2}, "its own scale of scores"),
    Family("Cohere Command R7B", "Cohere2Config", {"sliding_window": 128}, "windows; no rotation in some layers"),
    Family("StarCoder2", "Starcoder2Config", {"sliding_window": None}, "layer norm"),
    Family("SmolLM3", "SmolLM3Config", {}, "no rotation in some layers"),
    Family("GLM-4", "Glm4Config", {"head_dim": 32}, "partial rotation"),
    Family("Exaone 4", "Exaone4Config", {"sliding_window": 128}, "windows"),
    Family("Seed-OSS", "SeedOssConfig", {"head_dim": 32}),
    Family("Ernie 4.5", "Ernie4_5Config", {"head_dim": 32}),
)


@dataclass(frozen=True)
class Result:
    family: Family
    spec: ModelCacheSpec
    mean_kl: float
    own_kl: float  # of transformers' logits in bfloat16 from those in float32: what the numbers' width alone does


def save(family: Family, folder: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**{**SHAPE, **family.fields})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
            elif weight.ndim >= 2:
                weight.mul_(4)  # freshly made models have flat logits: nothing would show
    model.to(torch.bfloat16).save_pretrained(folder)


def compare(family: Family, folder: Path) -> Result:
    """Prefill and single tokens, cut at `CUTS`, against one forward of transformers' own attention in float32."""
    save(family, folder)
    loaded = load_model(folder, threads=2)
    backend = TorchBackend(loaded, "bf16", arena_bytes(loaded.spec, CODECS["bf16"], 64, 3))
    tokens = torch.randint(3, 500, (CUTS[-1],), generator=torch.Generator().manual_seed(1)).tolist()
    exact, own = (logits_of_transformers(folder, tokens, dtype) for dtype in (torch.float32, torch.bfloat16))
    found, start = [], 0
    for end in CUTS:
        pages = range(-(-end // PAGE_TOKENS))
        row = Row(tuple(tokens[start:end]), start, start, tables_of(backend, pages), tuple(map(str, pages)), "s", Sampling(temperature=0))
        found.append(torch.from_numpy(backend.forward(Batch((row,))).logits[0]))
        start = end
    return Result(family, loaded.spec, mean_kl(exact, torch.stack(found)), mean_kl(exact, own))


def logits_of_transformers(folder: Path, tokens: list[int], dtype: torch.dtype) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, [c - 1 for c in CUTS]].float()  # type: ignore[no-any-return]


def mean_kl(p_logits: Tensor, q_logits: Tensor) -> float:
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def row_of(result: Result) -> str:
    groups = ", ".join(f"{len(g.layers)} {g.kind}" for g in result.spec.groups)
    family = result.family
    return f"| {family.name} | `{family.config}` | {family.note} | {groups} | {result.mean_kl:.1e} | {result.own_kl:.1e} |"


def main() -> None:
    rows = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(compare(family, Path(folder))))
    text = (Path(__file__).parents[2] / "docs/models.md").read_text().split("| family")[0]
    head = "| family | config | what is special | layers of the tiny model | mean KL | transformers' own |\n" + "|---" * 6 + "|\n"
    (Path(__file__).parents[2] / "docs/models.md").write_text(text + head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
