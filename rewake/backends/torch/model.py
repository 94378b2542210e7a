"""TorchBackend: a model over pages in an arena, and the sampling of what it computes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from rewake.backends.base import Batch, Output, Row
from rewake.backends.torch.batch import flatten
from rewake.backends.torch.kernels import load_kernels
from rewake.backends.torch.kernels.base import F32
from rewake.backends.torch.loader import LoadedModel
from rewake.backends.torch.sampler import Sampler, logprobs_of
from rewake.errors import ModelError
from rewake.quant import CODECS

__all__ = ["TorchBackend"]


class TorchBackend:
    """One loaded model, and an arena of `memory` bytes for its pages. See `rewake.backends.base.Backend`."""

    def __init__(
        self,
        loaded: LoadedModel,
        codec: str,
        memory: int,
        group_size: int = 64,
        k_mean: F32 | None = None,
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`k_mean` [layers, kv_heads, k_dim] is what K is centred by before it is coded; `notes` are for `describe`.

        Raises ModelError if the arena does not hold one page.
        """
        self.loaded = loaded
        self._notes = notes
        self.spec = loaded.spec
        self.planes = self.spec.planes(CODECS[codec], group_size)
        if memory < (needed := self.planes.num_slots * self.planes.slot_bytes):
            raise ModelError(f"a memory budget of {memory} bytes does not hold one page of this model ({needed} bytes)")
        self.kernels, self.kernels_why = load_kernels(loaded.threads)
        self.arena = np.zeros(memory, np.uint8)  # zeros: the memory is taken page by page, as it is used
        self._k_mean = k_mean if self.planes.codec.k_bits < 16 else None  # plain values are kept as they are
        self._forward = loaded.forward(self.kernels, self.arena, self.planes, self._k_mean)
        self._sampler = Sampler()

    def forward(self, batch: Batch) -> Output:
        logits = self._forward.logits(flatten(batch, self.planes.codec))
        sampled = [row for row in batch.rows if row.sampling is not None]
        with np.errstate(invalid="ignore", over="ignore"):
            are_finite = np.isfinite(logits.sum(-1))
        if not are_finite.all():  # argmax over NaN gives a token, too: never a silent wrong answer
            broken = [row.sampler for is_finite, row in zip(are_finite, sampled, strict=True) if not is_finite]
            raise ArithmeticError(f"the logits of {', '.join(broken)} are not finite")
        wanted = [(row.sampling, row.sampler) for row in sampled if row.sampling is not None]
        tokens = self._sampler.sample(logits, wanted)
        return Output(tuple(tokens), logits, logprobs_of(logits, tokens, [sampling.logprobs for sampling, _ in wanted]))

    def score(self, batch: Batch) -> F32:
        """Float32 logits behind every token of the step, [tokens, vocab]: what measuring needs, and serving never does."""
        flat = flatten(batch, self.planes.codec)
        return self._forward.logits(replace(flat, wanted=np.arange(len(flat.tokens), dtype=np.int32)))

    def warm_up(self) -> None:
        """Run one small step in the empty arena, so that the first request does not wait for what is set up then.

        Raises ModelError if not all of the model attends through pages: it would answer, and remember nothing.
        """
        tables = tuple((i * self.planes.slot_bytes,) for i in range(self.planes.num_slots))
        self.forward(Batch((Row((0,) * 16, 0, 0, tables, ("warm-up",), "warm-up"),)))
        self._forward.check()

    def forget_sampler(self, sampler: str) -> None:
        self._sampler.forget(sampler)

    def facts(self) -> dict[str, Any]:
        codec = self.planes.codec
        facts = {
            **self.loaded.facts,
            "kv": codec.name,
            "group_size": self.planes.group_size,
            "rotation": "hadamard" if codec.k_bits < 16 else None,
        }
        # absent where a page is in one piece, as it was before there were planes
        if len(self.planes.planes) > 1:
            facts["planes"] = [[plane.kind, plane.layers] for plane in self.planes.planes]
        # absent, not null, where there is none: so what was remembered before there was a vector is still found without one
        return facts if self._k_mean is None else {**facts, "centring": hashlib.sha256(self._k_mean.tobytes()).hexdigest()}

    def describe(self) -> dict[str, str]:
        return {
            "backend": f"cpu, {self.loaded.threads} threads",
            "kernels": f"{self.kernels.name}: {self.kernels_why}",
            "step": self.loaded.step_why,
            "weights": self.loaded.weights,
            **self._notes,
        }
