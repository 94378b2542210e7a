"""TorchBackend: a model over pages in an arena, and the sampling of what it computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rewake.backends.base import Batch, Output, Row
from rewake.backends.torch.batch import flatten
from rewake.backends.torch.kernels import load_kernels
from rewake.backends.torch.loader import LoadedModel
from rewake.backends.torch.sampler import Sampler
from rewake.errors import ModelError
from rewake.quant import CODECS

__all__ = ["TorchBackend"]


class TorchBackend:
    """One loaded model, and an arena of `memory` bytes for its pages. See `rewake.backends.base.Backend`."""

    def __init__(self, loaded: LoadedModel, codec: str, memory: int, group_size: int = 64) -> None:
        """Raises ModelError if the arena does not hold one page."""
        self.loaded = loaded
        self.spec = loaded.spec
        self.layout = self.spec.group.layout(CODECS[codec], group_size)
        if memory < self.layout.page_bytes:
            raise ModelError(f"a memory budget of {memory} bytes does not hold one page of this model ({self.layout.page_bytes} bytes)")
        self.kernels, self.kernels_why = load_kernels()
        self.arena = np.zeros(memory, np.uint8)  # zeros: the memory is taken page by page, as it is used
        self._forward = loaded.forward(self.kernels, torch.from_numpy(self.arena), self.layout)
        self._sampler = Sampler()

    def forward(self, batch: Batch) -> Output:
        logits = self._forward.logits(flatten(batch, self.layout))
        sampled = [row for row in batch.rows if row.sampling is not None]
        if not torch.isfinite(logits.sum(-1)).all():  # argmax over NaN gives a token, too: never a silent wrong answer
            broken = [row.sampler for scores, row in zip(logits, sampled, strict=True) if not scores.isfinite().all()]
            raise ArithmeticError(f"the logits of {', '.join(broken)} are not finite")
        tokens = self._sampler.sample(logits, [(row.sampling, row.sampler) for row in sampled if row.sampling is not None])
        return Output(tuple(tokens), logits.numpy())

    def warm_up(self) -> None:
        """Run one small step in the empty arena, so that the first request does not wait for what torch sets up."""
        self.forward(Batch((Row((0,) * 16, 0, 0, (0,), ("warm-up",), "warm-up"),)))

    def forget_sampler(self, sampler: str) -> None:
        self._sampler.forget(sampler)

    def facts(self) -> dict[str, Any]:
        return {
            **self.loaded.facts,
            "kv": self.layout.codec.name,
            "group_size": self.layout.group_size,
            "rotation": "hadamard" if self.layout.codec.k_bits < 16 else None,
        }

    def describe(self) -> dict[str, str]:
        group = self.spec.group
        return {
            "backend": f"torch {torch.__version__} on cpu, {torch.get_num_threads()} threads",
            "kernels": f"{self.kernels.name}: {self.kernels_why}",
            "step": self.loaded.step_why,
            "weights": self.loaded.weights,
            "cache": f"{len(group.layers)} layers x {group.kv_heads} KV heads x {group.k_dim}, {group.kind} attention",
        }
