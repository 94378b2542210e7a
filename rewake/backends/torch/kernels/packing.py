"""Matrices of weights as the native step multiplies them: tiles of 16 outputs, in the order of abi.h.

Coded ones are affine in groups of 32 columns, `code * scale + minimum` with float16 terms; plain ones are bfloat16. Knows
numpy arrays; knows no file, no model and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["GROUP", "Codes", "Matrix", "coded", "plain"]

GROUP = 32
TILE = 16
PLAIN = 2
KINDS = {4: 0, 8: 1}
BYTES = np.array([0, 1, 4, 5, 2, 3, 6, 7])  # 8 columns of bytes, as two dwords of the pairs (0,4) (1,5) and (2,6) (3,7)
WORDS = np.array([0, 4, 1, 5, 2, 6, 3, 7])

U8 = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]
Scalar = TypeVar("Scalar", np.uint8, np.uint16, np.float16)


@dataclass(frozen=True, eq=False)
class Codes:
    """Weights [outputs, inputs] as codes of 4 or 8 bits, scales and minima [outputs, inputs / 32]."""

    codes: U8
    scales: F16
    minima: F16
    bits: int


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


def coded(weights: Codes) -> Matrix:
    outputs, inputs = weights.codes.shape
    codes, groups, bits = whole_tiles(weights.codes), inputs // GROUP, weights.bits
    packed = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4) if bits == 4 else codes.reshape(len(codes), -1, 8)[..., BYTES]
    tiles = np.empty((len(codes) // TILE, groups, 4 * bits * TILE + 4 * TILE), np.uint8)
    split = 4 * bits * TILE, (4 * bits + 2) * TILE
    dwords = np.ascontiguousarray(packed).view(np.uint32).reshape(-1, TILE, groups, bits)
    tiles[..., : split[0]].view(np.uint32).reshape(-1, groups, bits, TILE)[:] = dwords.transpose(0, 2, 3, 1)
    for terms, part in ((weights.scales, slice(*split)), (weights.minima, slice(split[1], None))):
        tiles[..., part].view(np.float16)[:] = whole_tiles(terms).reshape(-1, TILE, groups).transpose(0, 2, 1)
    return Matrix(tiles.reshape(-1), outputs, inputs, KINDS[bits])


def plain(values: npt.NDArray[np.uint16]) -> Matrix:
    """Pack bfloat16 bits [outputs, inputs]."""
    outputs, inputs = values.shape
    values = whole_tiles(values)
    ordered = np.ascontiguousarray(values.reshape(len(values), -1, 8)[..., WORDS])
    pairs = ordered.view(np.uint32).reshape(-1, TILE, inputs // 2).transpose(0, 2, 1)
    return Matrix(np.ascontiguousarray(pairs).view(np.uint8).reshape(-1), outputs, inputs, PLAIN)


def whole_tiles(x: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:  # outputs behind the last are 0
    missing = -len(x) % TILE
    return np.pad(x, [(0, missing), (0, 0)]) if missing else x
