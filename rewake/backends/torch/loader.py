"""Loading a model from a folder with transformers, and naming everything its K/V depend on."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from rewake.backends.torch.cache import ATTENTION, register_attention
from rewake.backends.torch.latent import absorb
from rewake.errors import ModelError
from rewake.spec import ModelCacheSpec

__all__ = ["LoadedModel", "load_model"]

# Of the config: what is not what the network computes.
NOT_CONTENT = ("_name_or_path", "transformers_version", "max_position_embeddings", "dtype", "torch_dtype", "use_cache", "architectures")


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model whose attention is ours; `facts` are its part of the signature."""

    model: Any
    spec: ModelCacheSpec
    dtype: torch.dtype
    dtype_why: str
    facts: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Names what K depends on, but not how it is coded, nor what a newer version says of a model in its config."""
        config, group = self.facts["config"], self.spec.group
        rope = config.get("text_config", config).get("rope_parameters")
        shape = (len(group.layers), group.kv_heads, group.k_dim, group.latent_dim)
        return hashlib.sha256(json.dumps([self.facts["weights"], shape, rope], sort_keys=True).encode()).hexdigest()[:32]


def load_model(path: Path, threads: int = 0) -> LoadedModel:
    """Load the model in the folder `path`. Raises ModelError if it is none, or has a cache we cannot represent."""
    torch.set_num_threads(threads or os.cpu_count() or 1)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    register_attention()
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} holds no model that transformers can load: {error}") from error
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no safetensors files: other formats of weights are not read")
    text_config = config.get_text_config().to_dict()
    spec = ModelCacheSpec.from_config(text_config)
    dtype, why = working_dtype()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=ATTENTION, use_safetensors=True).eval()
    if spec.group.kind == "latent" and not absorb(model):
        spec = ModelCacheSpec.from_config(text_config, latent=False)
    content = {k: v for k, v in config.to_dict().items() if k not in NOT_CONTENT}
    return LoadedModel(
        model, spec, dtype, why, {"weights": weights_digest(path), "dtype": str(dtype), "config": content, **cache_facts(spec)}
    )


def cache_facts(spec: ModelCacheSpec) -> dict[str, Any]:
    """What of a model's cache its config does not say: with other code, an MLA model's heads are cached instead of its latents."""
    return {"latent_dim": spec.group.latent_dim} if spec.group.latent_dim else {}


def working_dtype() -> tuple[torch.dtype, str]:
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16, "the processor multiplies bfloat16"
    return torch.float32, "the processor has no fast bfloat16"


def weights_digest(path: Path) -> str:
    """SHA-256 over the weight files, by name and content."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        with open(file, "rb") as opened:
            digest.update(file.name.encode() + b"\0" + hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
