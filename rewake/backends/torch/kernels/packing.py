"""Matrices of weights as the native step multiplies them: tiles of 16 outputs, in the order of abi.h.

Coded ones are affine in groups of columns, with the scales' own precision; plain ones are bfloat16. Knows numpy arrays;
knows no file, no model and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["GROUP", "SUPER", "SUPER_KINDS", "TILE", "Codes", "Matrix", "Room", "SuperCodes", "coded", "plain"]

GROUP = 32
SUPER = 256
TILE = 16
PLAIN = 2
KINDS = {4: 0, 8: 1, 5: 3}
SUPER_KINDS = {4: 4, 5: 5, 6: 6}
LINE = 64  # bytes of memory that the processor fetches together
ROOM = 32 * 2**20
BYTES = np.array([0, 1, 4, 5, 2, 3, 6, 7])  # 8 columns of bytes, as two dwords of the pairs (0,4) (1,5) and (2,6) (3,7)
WORDS = np.array([0, 4, 1, 5, 2, 6, 3, 7])
FIRSTS = np.array([pair // 4 * 8 + pair % 4 for pair in range(GROUP // 2)])  # columns of a group's pairs; 4 behind are the second ones

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
F16 = npt.NDArray[np.float16]
Scalar = TypeVar("Scalar", np.uint8, np.uint16, np.float16)


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
    cost a decode step a tenth of its time in looking up addresses.
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
        with self._lock:
            if whole > self._rest.nbytes:
                piece = np.empty(max(whole, ROOM) + LINE, np.uint8)
                self._rest = piece[-piece.ctypes.data % LINE :]
            taken, self._rest = self._rest[:size], self._rest[whole:]
        return taken


def coded(weights: Codes | SuperCodes) -> Matrix:
    outputs, inputs = weights.codes.shape
    if isinstance(weights, Codes):
        return Matrix(grouped(weights).reshape(-1), outputs, inputs, KINDS[weights.bits])
    return Matrix(supers(weights).reshape(-1), outputs, inputs, SUPER_KINDS[weights.bits])


def grouped(weights: Codes) -> U8:
    dwords = planes(whole_tiles(weights.codes), weights.bits)
    num_tiles, groups, bits = len(dwords) // TILE, dwords.shape[1], weights.bits
    tiles = np.empty((num_tiles, groups, 4 * bits * TILE + 4 * TILE), np.uint8)
    split = 4 * bits * TILE, (4 * bits + 2) * TILE
    tiles[..., : split[0]].view(np.uint32).reshape(-1, groups, bits, TILE)[:] = lanes_last(dwords)
    for terms, part in ((weights.scales, slice(*split)), (weights.minima, slice(split[1], None))):
        tiles[..., part].view(np.float16)[:] = lanes_last(whole_tiles(terms))
    return tiles


def supers(weights: SuperCodes) -> U8:
    dwords = planes(whole_tiles(weights.codes), weights.bits)
    count, codes = dwords.shape[1] * GROUP // SUPER, SUPER * weights.bits * TILE // 8
    tiles = np.zeros((len(dwords) // TILE, count, codes + SUPER + 4 * TILE), np.uint8)
    tiles[..., :codes].view(np.uint32).reshape(-1, count, codes // 4 // TILE, TILE)[:] = lanes_last(dwords.reshape(len(dwords), count, -1))
    terms = whole_tiles(weights.scales.view(np.uint8)).reshape(len(dwords), count, -1, 1)
    if weights.minima is not None:
        terms = np.concatenate([terms, whole_tiles(weights.minima).reshape(terms.shape)], -1)
    tiles[..., codes : codes + SUPER].reshape(-1, count, SUPER // TILE, TILE)[:] = lanes_last(terms.reshape(len(dwords), count, -1))
    for shared, at in ((weights.scale, codes + SUPER), (weights.minimum, codes + SUPER + 2 * TILE)):
        if shared is not None:
            tiles[..., at : at + 2 * TILE].view(np.float16)[:] = lanes_last(whole_tiles(shared))
    return tiles


def planes(codes: U8, bits: int) -> U32:
    """Codes [outputs, inputs] as dwords [outputs, inputs / 32, bits]: of their low 4 bits, then of what is above; or of whole bytes."""
    outputs, inputs = codes.shape
    if bits == 8:
        ordered = codes.reshape(outputs, -1, 8)[..., BYTES]
        return np.ascontiguousarray(ordered).view(np.uint32).reshape(outputs, -1, 8)
    low = packed(codes & np.uint8(15), 4).view(np.uint32).reshape(outputs, -1, 4)
    if bits == 4:
        return low
    more = bits - 4
    firsts = FIRSTS.reshape(more, -1)
    order = np.concatenate([firsts, firsts + 4], 1).reshape(-1)
    high = (codes >> np.uint8(4)).reshape(outputs, inputs // GROUP, GROUP)[..., order]
    return np.concatenate([low, packed(high, more).view(np.uint32)], -1)


def packed(values: U8, bits: int) -> U8:
    """Values of 1, 2 or 4 bits, the first in the lowest bits of a byte."""
    count = 8 // bits
    out = values[..., 0::count].copy()
    for i in range(1, count):
        out |= values[..., i::count] << np.uint8(bits * i)
    return out


def lanes_last(x: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """[outputs, ...] to [tiles, ..., 16]."""
    return np.moveaxis(x.reshape(-1, TILE, *x.shape[1:]), 1, -1)


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
