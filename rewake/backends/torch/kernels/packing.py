"""Matrices of weights as the native step multiplies them: tiles of 16 outputs, in the order of abi.h.

Coded ones are affine in groups of columns, with the scales' own precision; plain ones are bfloat16. Knows numpy arrays
and the library; knows no file, no model and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from rewake.backends.torch.kernels import native

__all__ = ["GROUP", "SUPER", "SUPER_KINDS", "TILE", "Codes", "Matrix", "Room", "SuperCodes", "coded", "plain"]

GROUP = 32
SUPER = 256
TILE = 16
PLAIN = 2
KINDS = {4: 0, 8: 1, 5: 3}
SUPER_KINDS = {4: 4, 5: 5, 6: 6}
LINE = 64  # bytes of memory that the processor fetches together
PIECE = 32 * 2**20

U8 = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]


@dataclass(frozen=True, eq=False)
class Codes:
    """Weights [outputs, inputs] as codes of 4, 5 or 8 bits, scales and minima [outputs, inputs / 32]."""

    codes: U8
    scales: F16
    minima: F16
    bits: int


@dataclass(frozen=True, eq=False)
class SuperCodes:
    """Weights [outputs, inputs] whose groups' terms are small multiples of those of 256 columns.

    Codes of 4 or 5 bits are `code * scales * scale + minima * minimum`, terms unsigned [outputs, inputs / 32]; codes of 6 bits
    `(code - 32) * scales * scale`, scales signed [outputs, inputs / 16]. `scale` and `minimum` are [outputs, inputs / 256].
    """

    codes: U8
    scales: U8 | npt.NDArray[np.int8]
    minima: U8 | None
    scale: F16
    minimum: F16 | None
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


class Room:
    """Memory in which matrices lie one behind the other, each from the start of a cache line. Threads may share it.

    It is taken in large pieces, for which numpy asks for huge pages: those of a small model, each on pages of its own, would
    cost a decode step a tenth of its time in looking up addresses. Large matrices have pieces of their own.
    """

    def __init__(self) -> None:
        self._lock, self._rest = Lock(), np.empty(0, np.uint8)

    def place(self, matrix: Matrix) -> Matrix:
        """A copy in here."""
        data = self._take(matrix.data.nbytes)
        data[:] = matrix.data
        return replace(matrix, data=data)

    def _take(self, size: int) -> U8:
        whole = -(-size // LINE) * LINE
        if whole > PIECE // 4:
            return aligned(size)
        with self._lock:
            if whole > self._rest.nbytes:
                self._rest = aligned(PIECE)
            taken, self._rest = self._rest[:size], self._rest[whole:]
        return taken


def aligned(size: int) -> U8:
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size]


def coded(weights: Codes | SuperCodes) -> Matrix:
    """Pack codes and terms."""
    inputs = weights.codes.shape[1]
    arrays = {name: x for name, x in vars(weights).items() if isinstance(x, np.ndarray)}
    if isinstance(weights, Codes):
        return tiled(arrays, weights.bits, KINDS[weights.bits], inputs // GROUP * 4 * TILE)
    return tiled(arrays, weights.bits, SUPER_KINDS[weights.bits], inputs // SUPER * (SUPER + 4 * TILE))


def plain(values: npt.NDArray[np.uint16]) -> Matrix:
    """Pack bfloat16 bits [outputs, inputs]."""
    return tiled({"codes": values}, 16, PLAIN, 0)


def tiled(arrays: Mapping[str, npt.NDArray[Any]], bits: int, kind: int, term_bytes: int) -> Matrix:
    """`term_bytes`: what scales and minima take in a tile."""
    outputs, inputs = arrays["codes"].shape
    tiles = np.zeros((-(-outputs // TILE), inputs * bits * TILE // 8 + term_bytes), np.uint8)
    native.pack(arrays, bits, tiles)
    return Matrix(tiles.reshape(-1), outputs, inputs, kind)
