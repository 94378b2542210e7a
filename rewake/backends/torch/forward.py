"""What computes a step: the native one for models it knows (`NativeForward`), transformers for all others (`eager`)."""

from __future__ import annotations

from typing import Protocol

from rewake.backends.torch.batch import Flat
from rewake.backends.torch.kernels.base import F32, U8
from rewake.backends.torch.kernels.native import NativeKernels
from rewake.backends.torch.kernels.step import DensePlan, DenseStep
from rewake.planes import PagePlanes
from rewake.spec import ModelCacheSpec

__all__ = ["Forward", "NativeForward"]


class Forward(Protocol):
    """A model over the pages of one arena."""

    def logits(self, flat: Flat) -> F32:
        """Append K and V of all rows; float32 logits [wanted, vocab]."""
        ...

    def check(self) -> None:
        """After a first step. Raises ModelError if not all of the model attends through pages: it would answer, and remember nothing."""
        ...


class NativeForward:
    """Whole steps in one call of the kernel library."""

    def __init__(
        self, plan: DensePlan, kernels: NativeKernels, arena: U8, planes: PagePlanes, spec: ModelCacheSpec, k_mean: F32 | None
    ) -> None:
        windows = [spec.window(layer) for layer in spec.group.layers]
        places = [place for _, place in sorted(planes.layer_places().items())]
        self._step = DenseStep(plan, kernels, arena, {planes.codec.index: planes.planes[0].slot}, windows, k_mean, places)

    def logits(self, flat: Flat) -> F32:
        return self._step.run(flat.ragged, flat.tokens, flat.positions, flat.wanted)

    def check(self) -> None:
        """All layers do, by construction."""
