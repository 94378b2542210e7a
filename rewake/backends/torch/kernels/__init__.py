"""Append and attention over coded pages: a contract in `base`, one file for each implementation."""

from __future__ import annotations

from rewake.backends.torch.kernels.base import AttentionKernels

__all__ = ["load_kernels"]


def load_kernels() -> tuple[AttentionKernels, str]:
    """The fastest kernels that work here, and why these."""
    from rewake.backends.torch.kernels.vectorised import VectorisedKernels

    return VectorisedKernels(), "the only kernels there are"
