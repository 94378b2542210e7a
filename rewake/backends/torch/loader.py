"""Loading a model from a folder: which way its steps take, and naming everything its K/V depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewake.backends.torch.dense import CODED, completed, load_dense, why_not_dense
from rewake.backends.torch.forward import Forward, NativeForward
from rewake.backends.torch.kernels import native
from rewake.backends.torch.kernels.base import F32, U8, AttentionKernels
from rewake.backends.torch.kernels.native import NativeKernels
from rewake.backends.torch.kernels.step import DensePlan
from rewake.cache import file_digest
from rewake.config import SHIPPED, WEIGHTS
from rewake.errors import ModelError
from rewake.planes import PagePlanes
from rewake.spec import ModelCacheSpec

if TYPE_CHECKING:
    import torch

__all__ = ["LoadedModel", "load_model", "of_transformers"]

WEIGHT_BITS = {SHIPPED: 0, "q8": 8, "q4": 4}
assert set(WEIGHT_BITS) == set(WEIGHTS)

# Of the config: what is not what the network computes.
NOT_CONTENT = ("_name_or_path", "transformers_version", "max_position_embeddings", "dtype", "torch_dtype", "use_cache", "architectures")


@dataclass(frozen=True)
class LoadedModel:
    """A plan of the native step, or a transformers model whose attention is ours; `facts` are its part of the signature.

    `threads` are for the kernels. transformers' part is computed by torch's, of which a process has one number.
    """

    plan: DensePlan | None
    eager: Any
    spec: ModelCacheSpec
    facts: dict[str, Any]
    step_why: str
    weights: str
    threads: int

    def forward(self, kernels: AttentionKernels, arena: U8, planes: PagePlanes, k_mean: F32 | None) -> Forward:
        if self.plan is not None:
            assert isinstance(kernels, NativeKernels)
            return NativeForward(self.plan, kernels, arena, planes, self.spec, k_mean)
        from rewake.backends.torch.eager import EagerForward

        return EagerForward(self.eager, kernels, arena, planes, self.spec, k_mean)

    @property
    def first_token(self) -> int | None:
        """What texts begin with, if the model's config says so."""
        config = self.facts["config"]
        first = config.get("text_config", config).get("bos_token_id")
        return first if isinstance(first, int) else None

    @property
    def fingerprint(self) -> str:
        """Names what K depends on, but not how it is coded, nor what a newer version says of a model in its config."""
        config, group = self.facts["config"], self.spec.group
        rope = config.get("text_config", config).get("rope_parameters")
        shape = (len(group.layers), group.kv_heads, group.k_dim, group.latent_dim)
        return hashlib.sha256(json.dumps([self.facts["weights"], shape, rope], sort_keys=True).encode()).hexdigest()[:32]


def load_model(path: Path, threads: int = 0, weights: str = SHIPPED, *, prefer_native: bool = True) -> LoadedModel:
    """Load the model in the folder `path`; `weights` is how to keep them, one of rewake.config.WEIGHTS.

    Raises ModelError if it is none, has a cache we cannot represent, or weights that cannot be kept so.
    """
    threads = threads or os.cpu_count() or 1
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} holds no model: {error}") from error
    reason = (native.why_unavailable() or why_not_dense(config)) if prefer_native else "asked for"
    if reason is None:
        return load_for_native(path, config, weights, threads)
    if weights != SHIPPED:
        raise ModelError(
            f"weights cannot be kept as {weights}: only the native step multiplies them, and this model does not take it: {reason}"
        )
    return load_for_transformers(path, reason, threads)


def load_for_native(path: Path, config: Mapping[str, Any], weights: str, threads: int) -> LoadedModel:
    shipped = (path / CODED).is_file()
    if shipped and weights != SHIPPED:
        raise ModelError(f"weights cannot be kept as {weights}: this model is shipped in quantised blocks, which are used as they are")
    spec = ModelCacheSpec.from_config(completed(config))
    plan = load_dense(path, config, WEIGHT_BITS[weights], threads)
    digest = weights_digest(path, CODED if shipped else "*.safetensors")
    name = digest if weights == SHIPPED else f"{digest} in {weights}"
    facts = {"weights": name, "step": "native", "config": content(config)}
    how = f"{'in the blocks they are shipped in' if shipped else f'{weights}, coded on load'}: {plan.weight_bits:.2f} bits each"
    kept = how if shipped or WEIGHT_BITS[weights] else "bfloat16"
    return LoadedModel(plan, None, spec, facts, "native: it is of the Llama family", kept, threads)


def load_for_transformers(path: Path, reason: str, threads: int) -> LoadedModel:
    import torch
    from transformers import AutoConfig

    from rewake.backends.torch.eager import load_eager, working_dtype

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} holds no model that transformers can load: {error}") from error
    ModelCacheSpec.from_config(config.get_text_config().to_dict())  # what cannot be cached is refused before its weights are read
    torch.set_num_threads(threads)
    dtype, why = working_dtype()
    weights = f"{str(dtype).removeprefix('torch.')}: {why}"
    return of_transformers(load_eager(path, dtype), config, dtype, weights_digest(path, "*.safetensors"), weights, reason, threads)


def of_transformers(model: Any, config: Any, dtype: torch.dtype, name: str, weights: str, reason: str, threads: int) -> LoadedModel:
    """A transformers model whose attention is ours. `name` is its weights', `weights` says how they are kept. Raises ModelError."""
    from rewake.backends.torch.latent import absorb
    from rewake.backends.torch.longrope import freeze_longrope

    text_config = config.get_text_config().to_dict()
    spec = ModelCacheSpec.from_config(text_config)
    if spec.group.kind == "latent" and not absorb(model):
        spec = ModelCacheSpec.from_config(text_config, latent=False)
    facts: dict[str, Any] = {"weights": name, "dtype": str(dtype), "config": content(config.to_dict())}
    if (frozen := freeze_longrope(model)) is not None:
        facts["longrope"] = frozen
    if spec.group.latent_dim:  # which the config does not say: with other code, heads are cached instead
        facts["latent_dim"] = spec.group.latent_dim
    return LoadedModel(None, model, spec, facts, f"transformers, not the native step: {reason}", weights, threads)


def content(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in NOT_CONTENT}


def weights_digest(path: Path, pattern: str) -> str:
    """SHA-256 over the weight files, by name and content. Of a file that has not changed, it is known from before."""
    digest = hashlib.sha256()
    for file in sorted(path.glob(pattern)):
        digest.update(file.name.encode() + b"\0" + bytes.fromhex(file_digest(file)))
    return digest.hexdigest()
