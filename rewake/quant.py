"""The 4-bit page format: codecs, the byte layout of a page, and the numpy reference coder.

Decoding follows MLX's affine quantisation (`x = code * scale + bias`, bfloat16 scale and bias, little-endian
codes packed into uint32), so that backends can share files. The encoder is ours. Knows arrays and bytes; knows
nothing of models, torch, files or who owns a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

__all__ = [
    "AUTO_ORDER",
    "CODECS",
    "CODINGS",
    "PAGE_TOKENS",
    "YOUNG_TOKENS",
    "Codec",
    "PageLayout",
    "bf16_to_f32",
    "decode",
    "decode_refined",
    "encode",
    "encode_residual",
    "f32_to_bf16",
    "hadamard",
]

PAGE_TOKENS = 256

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Codec:
    """How many bits a value of K and of V takes; 16 is plain bfloat16 without scales.

    `residual_bits`: how many more a value has while it is young (see `encode_residual`).
    """

    name: str
    k_bits: int
    v_bits: int
    index: int  # what native kernels call it; part of no file
    residual_bits: int = 0


ALL_CODECS = (Codec("q4", 4, 4, 0), Codec("q4+", 4, 4, 4, 4), Codec("k8v4", 8, 4, 1), Codec("q8", 8, 8, 2), Codec("bf16", 16, 16, 3))
CODECS = {c.name: c for c in ALL_CODECS}
YOUNG_TOKENS = 64  # how far behind its end a page is read with its residual; page 0 always is
# What `--kv` names: a codec with groups of 64 values, or of 32 (more scales: q4 takes 5.0 bits a value instead of 4.5).
CODINGS = {name: (c, 64) for name, c in CODECS.items()} | {f"{name}:32": (c, 32) for name, c in CODECS.items() if c.v_bits < 16}
AUTO_ORDER = ("q4", "q4+", "k8v4", "q8", "bf16")  # what `--kv auto` chooses from, smallest first


@dataclass(frozen=True)
class Field:
    """One array of one layer inside a page: `[kv_heads, rows, width]` of `dtype` (a safetensors name)."""

    name: str
    dtype: str
    width: int

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "U32" else 2


@dataclass(frozen=True)
class PageLayout:
    """Where each array of a page lies. A page is contiguous, layer by layer:

        layer 0                                                    layer 1 ...
        | K codes | K scales | K biases | V codes | V scales | V biases | K codes | ...
          each [kv_heads, rows, width]; bf16 has "values" in place of codes, scales and biases

    With `residuals` it is what such layers have beside that while they are young: K residuals, V residuals. `rows` is 256 for pages
    and fewer for the segments of a page that is not full yet.
    """

    layers: int
    kv_heads: int
    k_dim: int
    v_dim: int
    codec: Codec
    group_size: int = 64
    rows: int = PAGE_TOKENS
    residuals: bool = False

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        return (*self._fields("k", self.k_dim, self.codec.k_bits), *self._fields("v", self.v_dim, self.codec.v_bits))

    def _fields(self, name: str, dim: int, bits: int) -> Iterator[Field]:
        if dim == 0:  # a latent cache: V is a prefix of K
            return
        if bits == 16:
            yield Field(f"{name}.values", "BF16", dim)
            return
        groups = -(-dim // self.group_size)
        if self.residuals:
            yield Field(f"{name}.residuals", "U32", groups * self.group_size * self.codec.residual_bits // 32)
            return
        yield Field(f"{name}.codes", "U32", groups * self.group_size * bits // 32)
        yield Field(f"{name}.scales", "BF16", groups)
        yield Field(f"{name}.biases", "BF16", groups)

    def field_bytes(self, field: Field) -> int:
        return self.kv_heads * self.rows * field.width * field.itemsize

    @cached_property
    def layer_bytes(self) -> int:
        return sum(self.field_bytes(f) for f in self.fields)

    @cached_property
    def page_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes, all layers."""
        return self.page_bytes // self.rows

    def with_rows(self, rows: int) -> PageLayout:
        return replace(self, rows=rows)

    def arrays(self) -> Iterator[tuple[int, Field, int]]:
        """Every array of the page in the order of its bytes: (layer, field, byte offset)."""
        offset = 0
        for layer in range(self.layers):
            for field in self.fields:
                yield layer, field, offset
                offset += self.field_bytes(field)

    def copy_rows(self, page: npt.NDArray[np.uint8], first: int, segment: npt.NDArray[np.uint8], rows: int, *, out: bool) -> None:
        """Move rows [first, first + rows) between a page and a segment of `rows` rows: out of the page, or into it."""
        part = self.with_rows(rows)
        for (_, field, at), (_, _, seg_at) in zip(self.arrays(), part.arrays(), strict=True):
            row_bytes = field.width * field.itemsize
            in_page = page[at : at + self.field_bytes(field)].reshape(self.kv_heads, self.rows, row_bytes)
            in_segment = segment[seg_at : seg_at + part.field_bytes(field)].reshape(self.kv_heads, rows, row_bytes)
            window = in_page[:, first : first + rows]
            if out:
                in_segment[:] = window
            else:
                window[:] = in_segment


def f32_to_bf16(x: F32) -> U16:
    """Round to nearest even; finite values only."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_to_f32(x: U16) -> F32:
    return (x.astype(np.uint32) << 16).view(np.float32)


def encode(x: F32, bits: int, group_size: int) -> tuple[U32, U16, U16]:
    """Code `x` [..., dim] to (codes [..., padded * bits / 32], scales and biases [..., groups] as bfloat16 bits).

    Per group: bias = bf16(min); scale = bf16((max - bias) / levels); code = clip(rint((x - bias) / scale)). Codes
    are taken against the *rounded* scale and bias, so that rounding those costs nothing. A short last group has its
    range from its real values; the padding is coded 0.
    """
    *lead, dim = x.shape
    groups = -(-dim // group_size)
    padded = np.pad(x, [(0, 0)] * len(lead) + [(0, groups * group_size - dim)], mode="edge")
    grouped = padded.reshape(*lead, groups, group_size)
    levels = np.float32(2**bits - 1)
    biases = f32_to_bf16(grouped.min(-1))
    low = bf16_to_f32(biases)
    scales = f32_to_bf16(np.maximum((grouped.max(-1) - low) / levels, np.float32(0)))
    step = bf16_to_f32(scales)[..., None]
    steps = np.rint((grouped - low[..., None]) / np.where(step > 0, step, np.float32(np.inf)))
    codes = np.clip(steps, 0, levels).astype(np.uint32).reshape(*lead, -1)
    codes[..., dim:] = 0
    per_word = 32 // bits
    words = codes.reshape(*lead, -1, per_word) << (np.arange(per_word, dtype=np.uint32) * np.uint32(bits))
    return np.bitwise_or.reduce(words, axis=-1), scales, biases


def decode(codes: U32, scales: U16, biases: U16, bits: int, group_size: int, dim: int) -> F32:
    """The inverse of `encode`: float32 [..., dim], exactly `code * scale + bias`."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    values = (codes[..., None] >> shifts) & np.uint32(2**bits - 1)
    grouped = values.reshape(*codes.shape[:-1], -1, group_size).astype(np.float32)
    x = grouped * bf16_to_f32(scales)[..., None] + bf16_to_f32(biases)[..., None]
    return x.reshape(*codes.shape[:-1], -1)[..., :dim]


RESIDUAL_LEVELS = 16


def encode_residual(x: F32, codes: U32, scales: U16, biases: U16, group_size: int) -> U32:
    """What 4-bit `codes` of `x` (see `encode`) leave over, in 4 bits more: [..., padded / 8], packed like the codes.

    Where a code is q, the residual is clip(floor(((x - bias) / scale - q + 1/2) * 16)): the place inside the step that q stands for.
    Dropping residuals leaves the very codes there were (successive refinement: Equitz and Cover, 1991).
    """
    dim = x.shape[-1]
    x = np.concatenate([x, np.zeros((*x.shape[:-1], scales.shape[-1] * group_size - dim), np.float32)], -1)
    grouped = x.reshape(*x.shape[:-1], -1, group_size)
    step = bf16_to_f32(scales)[..., None]
    steps = (grouped - bf16_to_f32(biases)[..., None]) / np.where(step > 0, step, np.float32(np.inf))
    over = (steps - unpacked(codes).reshape(grouped.shape).astype(np.float32)) + np.float32(0.5)
    found = np.clip(np.floor(over * np.float32(RESIDUAL_LEVELS)), 0, RESIDUAL_LEVELS - 1).astype(np.uint32).reshape(x.shape)
    found[..., dim:] = 0
    return packed(found)


def decode_refined(codes: U32, residuals: U32, scales: U16, biases: U16, group_size: int, dim: int) -> F32:
    """Codes with their residuals: an affine code of 8 bits, c = 16 q + r, whose step is scale / 16.

    A residual stands for the middle of its place: x = bias + scale * (q + (r + 1/2) / 16 - 1/2).
    """
    grouped = (unpacked(codes) * np.uint32(RESIDUAL_LEVELS) + unpacked(residuals)).reshape(*codes.shape[:-1], -1, group_size)
    scale = bf16_to_f32(scales)[..., None]
    x = grouped.astype(np.float32) * (scale / RESIDUAL_LEVELS) + (bf16_to_f32(biases)[..., None] - scale * np.float32(0.46875))
    return x.reshape(*codes.shape[:-1], -1)[..., :dim].astype(np.float32)


def packed(codes: U32) -> U32:
    """4-bit codes [..., n] in words [..., n / 8]."""
    words = codes.reshape(*codes.shape[:-1], -1, 8) << (np.arange(8, dtype=np.uint32) * np.uint32(4))
    joined: U32 = np.bitwise_or.reduce(words, axis=-1)
    return joined


def unpacked(words: U32) -> U32:
    values = (words[..., None] >> (np.arange(8, dtype=np.uint32) * np.uint32(4))) & np.uint32(15)
    return values.reshape(*words.shape[:-1], -1)


@cache
def hadamard(dim: int) -> F32:
    """The orthonormal, symmetric rotation for heads of `dim`: Sylvester blocks, largest power of two first.

    192 = 128 + 64 and 576 = 512 + 64, as rotating to spread outliers before low-bit coding is done in QuaRot
    (arXiv 2404.00456); K and q are both multiplied by it, so that their products stay.
    """
    rotation = np.zeros((dim, dim), np.float32)
    start = 0
    while start < dim:
        size = 1 << ((dim - start).bit_length() - 1)
        block = np.ones((1, 1), np.float64)
        while len(block) < size:
            block = np.block([[block, block], [block, -block]])
        rotation[start : start + size, start : start + size] = block / np.sqrt(size)
        start += size
    return rotation
