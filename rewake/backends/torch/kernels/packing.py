"""Matrices of weights as the native step multiplies them: tiles of 16 outputs, in the order of abi.h.

Coded ones are affine in groups of 32 columns, `code * scale + minimum` with float16 terms; plain ones are bfloat16. Knows
numpy arrays; knows no file, no model and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["GROUP", "Matrix", "coded", "plain"]

GROUP = 32
TILE = 16
PLAIN = 2
KINDS = {4: 0, 8: 1}
BYTES = np.array([0, 1, 4, 5, 2, 3, 6, 7])  # 8 columns of bytes, as two dwords of the pairs (0,4) (1,5) and (2,6) (3,7)
WORDS = np.array([0, 4, 1, 5, 2, 6, 3, 7])

U8 = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]


@dataclass(frozen=True, eq=False)
class Matrix:
    """Packed weights [outputs, inputs]."""

    data: U8
    outputs: int
    inputs: int
    kind: int

    @property
    def is_plain(self) -> bool:
        return self.kind == PLAIN


def coded(codes: U8, scales: F16, minima: F16, bits: int) -> Matrix:
    """Pack codes [outputs, inputs] of 4 or 8 bits with scales and minima [outputs, inputs / 32]."""
    outputs, inputs = codes.shape
    codes, scales, minima = (whole_tiles(x) for x in (codes, scales, minima))
    if bits == 4:
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        packed = np.ascontiguousarray(codes.reshape(len(codes), -1, 8)[..., BYTES]).reshape(codes.shape)
    groups = inputs // GROUP
    dwords = np.ascontiguousarray(packed).view(np.uint32).reshape(-1, TILE, groups, bits).transpose(0, 2, 3, 1)
    terms = [x.astype(np.float16).reshape(-1, TILE, groups).transpose(0, 2, 1) for x in (scales, minima)]
    parts = [np.ascontiguousarray(x).view(np.uint8).reshape(len(dwords), groups, -1) for x in (dwords, *terms)]
    return Matrix(np.concatenate(parts, -1).reshape(-1), outputs, inputs, KINDS[bits])


def plain(values: npt.NDArray[np.uint16]) -> Matrix:
    """Pack bfloat16 bits [outputs, inputs]."""
    outputs, inputs = values.shape
    values = whole_tiles(values)
    ordered = np.ascontiguousarray(values.reshape(len(values), -1, 8)[..., WORDS])
    pairs = ordered.view(np.uint32).reshape(-1, TILE, inputs // 2).transpose(0, 2, 1)
    return Matrix(np.ascontiguousarray(pairs).view(np.uint8).reshape(-1), outputs, inputs, PLAIN)


def whole_tiles(x: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:  # outputs behind the last are 0
    missing = -len(x) % TILE
    return np.pad(x, [(0, missing), (0, 0)]) if missing else x
