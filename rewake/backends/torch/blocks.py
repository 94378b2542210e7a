"""Blocks of quantised weights as GGUF files have them, taken apart into codes and terms; and weights coded on load.

A row of a matrix is a row of bytes. Q4_0 to Q8_0 are blocks of 32 weights with float16 terms; Q4_K to Q6_K of 256, whose
groups' terms are multiples of the block's. Nothing is rounded. Knows numpy arrays and the library; knows no file.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rewake.backends.torch.kernels.native import codes_of
from rewake.backends.torch.kernels.packing import GROUP, SUPER, Codes, SuperCodes

__all__ = ["BLOCKS", "quantise"]

U8 = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]


def halves(blocks: U8, at: int) -> F16:
    return np.ascontiguousarray(blocks.view(np.float16)[..., at // 2])


def of_groups(kind: str, rows: U8, size: int, bits: int, less: int = 0) -> Codes:
    """Blocks of 32 weights, `size` bytes each: a scale, then a minimum, if that is not `less` scales; then codes."""
    blocks = rows.reshape(len(rows), -1, size)
    scales = halves(blocks, 0)
    minima = scales * np.float16(-less) if less else halves(blocks, 2)
    return Codes(codes_of(kind, blocks, GROUP), scales, minima, bits)


def six_bit_terms(packed: U8) -> tuple[U8, U8]:
    """12 bytes to 8 scales and 8 minima of 6 bits. The last four of each have their upper two bits above the first four."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & np.uint8(63), third & np.uint8(15) | first >> np.uint8(6) << np.uint8(4)], -1)
    minima = np.concatenate([second & np.uint8(63), third >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4)], -1)
    return scales, minima


def with_minima(kind: str, rows: U8, size: int, bits: int) -> SuperCodes:
    """Blocks of 256 weights: the scale and the minimum of which those of 8 groups are multiples, these, then codes."""
    blocks = rows.reshape(len(rows), -1, size)
    scales, minima = (terms.reshape(len(rows), -1) for terms in six_bit_terms(blocks[..., 4:16]))
    return SuperCodes(codes_of(kind, blocks, SUPER), scales, minima, halves(blocks, 0), -halves(blocks, 2), bits)


def q6_k(rows: U8) -> SuperCodes:
    blocks = rows.reshape(len(rows), -1, 210)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(rows), -1)
    return SuperCodes(codes_of("Q6_K", blocks, SUPER), scales, None, halves(blocks, 208), None, 6)


BLOCKS: dict[str, Callable[[U8], Codes | SuperCodes]] = {
    "Q4_0": lambda rows: of_groups("Q4_0", rows, 18, 4, less=8),
    "Q4_1": lambda rows: of_groups("Q4_1", rows, 20, 4),
    "Q5_0": lambda rows: of_groups("Q5_0", rows, 22, 5, less=16),
    "Q5_1": lambda rows: of_groups("Q5_1", rows, 24, 5),
    "Q8_0": lambda rows: of_groups("Q8_0", rows, 34, 8, less=128),
    "Q4_K": lambda rows: with_minima("Q4_K", rows, 144, 4),
    "Q5_K": lambda rows: with_minima("Q5_K", rows, 176, 5),
    "Q6_K": q6_k,
}


def quantise(values: npt.NDArray[np.float32], bits: int) -> Codes:
    """Weights [outputs, inputs] in groups of 32 from each group's least to its greatest value."""
    groups = values.reshape(len(values), -1, GROUP)
    minima = groups.min(-1).astype(np.float16)
    levels = np.float32(2**bits - 1)
    scales = ((groups.max(-1) - minima) / levels).astype(np.float16)
    steps = np.where(scales > 0, scales, np.float16(np.inf)).astype(np.float32)  # a group of equal values: all codes are 0
    codes = np.clip(np.rint((groups - minima[..., None]) / steps[..., None]), 0, levels).astype(np.uint8)
    return Codes(codes.reshape(values.shape), scales, minima, bits)
