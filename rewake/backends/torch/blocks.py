"""Blocks of quantised weights as GGUF files have them, taken apart into codes and terms; and weights coded on load.

A row of a matrix is a row of bytes. Q4_0 to Q8_0 are blocks of 32 weights with float16 terms; Q4_K to Q6_K of 256, whose
groups' terms are multiples of the block's. Nothing is rounded. Knows numpy arrays; knows no file and no kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rewake.backends.torch.kernels.packing import GROUP, Codes, SuperCodes

__all__ = ["BLOCKS", "quantise"]

U8 = npt.NDArray[np.uint8]
F16 = npt.NDArray[np.float16]


def halves(blocks: U8, at: int) -> F16:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def nibbles(packed: U8) -> U8:
    """[..., n] bytes to 2n codes: all low nibbles, then all high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], -1)


def q4_0(rows: U8) -> Codes:
    blocks = rows.reshape(len(rows), -1, 18)
    scales = halves(blocks, 0)
    return Codes(nibbles(blocks[..., 2:]).reshape(len(rows), -1), scales, scales * np.float16(-8), 4)


def q4_1(rows: U8) -> Codes:
    blocks = rows.reshape(len(rows), -1, 20)
    return Codes(nibbles(blocks[..., 4:]).reshape(len(rows), -1), halves(blocks, 0), halves(blocks, 2), 4)


def five_bits(blocks: U8, at: int) -> U8:
    """32 bits, then 32 nibbles."""
    high = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    return (nibbles(blocks[..., at + 4 :]) | high << np.uint8(4)).reshape(len(blocks), -1)


def q5_0(rows: U8) -> Codes:
    blocks = rows.reshape(len(rows), -1, 22)
    scales = halves(blocks, 0)
    return Codes(five_bits(blocks, 2), scales, scales * np.float16(-16), 5)


def q5_1(rows: U8) -> Codes:
    blocks = rows.reshape(len(rows), -1, 24)
    return Codes(five_bits(blocks, 4), halves(blocks, 0), halves(blocks, 2), 5)


def q8_0(rows: U8) -> Codes:
    blocks = rows.reshape(len(rows), -1, 34)
    scales = halves(blocks, 0)
    return Codes((blocks[..., 2:] ^ np.uint8(0x80)).reshape(len(rows), -1), scales, scales * np.float16(-128), 8)


def six_bit_terms(packed: U8) -> tuple[U8, U8]:
    """12 bytes to 8 scales and 8 minima of 6 bits. The last four of each have their upper two bits above the first four."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & np.uint8(63), third & np.uint8(15) | first >> np.uint8(6) << np.uint8(4)], -1)
    minima = np.concatenate([second & np.uint8(63), third >> np.uint8(4) | second >> np.uint8(6) << np.uint8(4)], -1)
    return scales, minima


def with_minima(blocks: U8, codes: U8, bits: int) -> SuperCodes:
    count = len(blocks)
    scales, minima = (terms.reshape(count, -1) for terms in six_bit_terms(blocks[..., 4:16]))
    return SuperCodes(codes.reshape(count, -1), scales, minima, halves(blocks, 0), -halves(blocks, 2), bits)


def q4_k(rows: U8) -> SuperCodes:
    blocks = rows.reshape(len(rows), -1, 144)
    return with_minima(blocks, nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)), 4)


def q5_k(rows: U8) -> SuperCodes:
    blocks = rows.reshape(len(rows), -1, 176)
    low = nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # bit g of byte i: code i of group g
    return with_minima(blocks, low | high << np.uint8(4), 5)


def q6_k(rows: U8) -> SuperCodes:
    blocks = rows.reshape(len(rows), -1, 210)
    low = nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64))
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> shifts & np.uint8(3)).reshape(low.shape)
    codes = (low | high << np.uint8(4)).reshape(len(rows), -1)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).reshape(len(rows), -1)
    return SuperCodes(codes, scales, None, halves(blocks, 208), None, 6)


BLOCKS: dict[str, Callable[[U8], Codes | SuperCodes]] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
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
