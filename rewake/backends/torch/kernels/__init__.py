"""Append and attention over coded pages: a contract in `base`, one file for each implementation."""

from __future__ import annotations

from rewake.backends.torch.kernels.base import AttentionKernels

__all__ = ["load_kernels"]


def load_kernels(threads: int) -> tuple[AttentionKernels, str]:
    """The fastest kernels that work here, and why these. Those in torch use as many threads as it has."""
    from rewake.backends.torch.kernels import native

    if kernels := native.load(threads):
        return kernels, f"the best of {', '.join(native.isas())} here"
    from rewake.backends.torch.kernels.vectorised import VectorisedKernels

    return VectorisedKernels(), native.why_unavailable() or ""
