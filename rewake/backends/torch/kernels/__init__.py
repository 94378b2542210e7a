"""Append and attention over coded pages: a contract in `base`, one file for each implementation."""

from __future__ import annotations

from rewake.backends.torch.kernels.base import AttentionKernels

__all__ = ["load_kernels"]


def load_kernels() -> tuple[AttentionKernels, str]:
    """The fastest kernels that work here, and why these."""
    from rewake.backends.torch.kernels import native
    from rewake.backends.torch.kernels.vectorised import VectorisedKernels

    if kernels := native.load():
        return kernels, f"the best of {', '.join(native.isas())} here"
    return VectorisedKernels(), native.why_unavailable() or ""
