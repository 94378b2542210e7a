"""Append and attention over coded pages in plain torch: the fallback where nothing native was compiled, and the
second opinion on what was. Decodes each sequence's pages whole, one layer at a time; that is its scratch:
kv_heads x context x (k_dim + v_dim) values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rewake.backends.torch.kernels.base import I32, I64, U8, LayerAttention, RaggedBatch
from rewake.quant import PAGE_TOKENS, YOUNG_TOKENS, Field, PageLayout, hadamard

__all__ = ["VectorisedKernels", "decode", "decode_refined", "encode", "encode_residual"]


class VectorisedKernels:
    """See `base.AttentionKernels`."""

    name = "torch (vectorised)"

    def append(self, arena: U8, layouts: Mapping[int, PageLayout], batch: RaggedBatch, layer: LayerAttention, k: Tensor, v: Tensor) -> None:
        into = torch.from_numpy(arena)
        for index, layout in layouts.items():
            rows = np.flatnonzero((batch.append_codecs == index) & (batch.append_pages >= 0))
            if len(rows) == 0:
                continue
            where = Places(layout, layer.layer, batch.append_pages[rows], batch.append_rows[rows])
            for name, x in (("k", prepare_k(k[rows], layout, layer)), ("v", v[rows])):
                fields = [f for f in layout.fields if f.name.startswith(name)]
                if not fields:
                    continue
                if len(fields) == 1:
                    where.put(into, fields[0], x.to(torch.bfloat16))
                    continue
                bits = layout.codec.k_bits if name == "k" else layout.codec.v_bits
                arrays = encode(x.float(), bits, layout.group_size)
                for field, coded in zip(fields, arrays, strict=True):
                    where.put(into, field, coded)
                if layout.codec.residual_bits:
                    assert batch.append_residuals is not None
                    refined = replace(layout, residuals=True)
                    over = Places(refined, layer.layer, batch.append_residuals[rows], batch.append_rows[rows])
                    field = next(f for f in refined.fields if f.name.startswith(name))
                    over.put(into, field, encode_residual(x.float(), *arrays, layout.group_size))

    def attend(self, arena: U8, layouts: Mapping[int, PageLayout], batch: RaggedBatch, layer: LayerAttention, q: Tensor) -> Tensor:
        starts = batch.query_starts.tolist()
        outputs = [q.new_empty(0, q.shape[1], layer.v_dim or next(iter(layouts.values())).v_dim)]
        for i, length in enumerate(batch.kv_lengths.tolist()):
            mine = q[starts[i] : starts[i + 1]]
            first = length - len(mine)
            for start, end in seeing_alike(first, length, layouts):
                oldest = max(0, start - layer.window + 1) // PAGE_TOKENS if layer.window else 0  # those before may be gone
                numbers = range(oldest, -(-end // PAGE_TOKENS))
                pages = [self._page(batch, i, page, start) for page in numbers]
                k, v = (x[:, : end - oldest * PAGE_TOKENS] for x in read_pages(torch.from_numpy(arena), layouts, layer.layer, pages))
                rotated = layouts[pages[0][1]].codec.k_bits < 16
                if layer.v_is_k_prefix:
                    v = prefix_of(k, rotated, layer)
                part = mine[start - first : end - first]
                outputs.append(attention(rotate(part) if rotated else part, part, k.to(q.dtype), v.to(q.dtype), rotated, layer))
        return torch.cat(outputs)

    def _page(self, batch: RaggedBatch, seq: int, page: int, position: int) -> tuple[int, int, int | None]:
        """Where a page is, its codec, and where its residuals are if a query at `position` sees them."""
        table, is_young = batch.residual_table, page == 0 or position < (page + 1) * PAGE_TOKENS + YOUNG_TOKENS
        residuals = int(table[seq, page]) if table is not None and is_young else None
        return int(batch.block_table[seq, page]), int(batch.page_codecs[seq, page]), residuals


def seeing_alike(start: int, end: int, layouts: Mapping[int, PageLayout]) -> Iterator[tuple[int, int]]:
    """Runs of positions that see the same pages with their residuals."""
    settling: Iterable[int] = ()
    if any(layout.codec.residual_bits for layout in layouts.values()):
        settling = (p for p in range(YOUNG_TOKENS, end, PAGE_TOKENS) if p > start)
    for at in (*settling, end):
        if at > start:
            yield start, at
        start = at


def prefix_of(k: Tensor, rotated: bool, layer: LayerAttention) -> Tensor:
    """V of a latent cache: K rotated back (the rotation is its own inverse), with its mean, cut to `v_dim`."""
    plain = rotate(k) if rotated else k
    if rotated and layer.k_mean is not None:
        plain = plain + torch.from_numpy(layer.k_mean)[:, None]
    return plain[..., : layer.v_dim]


class Places:
    """Byte addresses in the arena of one layer's rows: page offset + layer + field + (head, row)."""

    def __init__(self, layout: PageLayout, layer: int, pages: I64, rows: I32) -> None:
        self.layout = layout
        self.rows = torch.from_numpy(rows).to(torch.int64)
        self.layer_at = torch.from_numpy(pages) + layer * layout.layer_bytes
        self.field_at = {}
        at = 0
        for field in layout.fields:
            self.field_at[field.name] = at
            at += layout.field_bytes(field)

    def put(self, arena: Tensor, field: Field, x: Tensor) -> None:
        """Write `x` [rows, kv_heads, width] to its places."""
        row_bytes = field.width * field.itemsize
        heads = torch.arange(self.layout.kv_heads) * (PAGE_TOKENS * row_bytes)
        start = (self.layer_at + self.field_at[field.name] + self.rows * row_bytes)[:, None] + heads
        arena[start[..., None] + torch.arange(row_bytes)] = x.contiguous().view(torch.uint8)


def prepare_k(k: Tensor, layout: PageLayout, layer: LayerAttention) -> Tensor:
    """Centre and rotate, as K is coded; plain bfloat16 pages keep it as it is."""
    if layout.codec.k_bits == 16:
        return k
    k = k.float()
    return rotate(k if layer.k_mean is None else k - torch.from_numpy(layer.k_mean))


def rotate(x: Tensor) -> Tensor:
    return (x.float() @ torch.from_numpy(hadamard(x.shape[-1]))).to(x.dtype)


def encode(x: Tensor, bits: int, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `rewake.quant.encode`, bit for bit: float32 [..., dim] to (code bytes, bfloat16 scales, bfloat16 biases)."""
    dim = x.shape[-1]
    groups = -(-dim // group_size)
    padding = groups * group_size - dim
    padded = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], padding)], -1) if padding else x
    grouped = padded.reshape(*x.shape[:-1], groups, group_size)
    levels = 2**bits - 1
    biases = grouped.amin(-1).bfloat16()
    scales = ((grouped.amax(-1) - biases.float()) / levels).clamp_min(0).bfloat16()
    steps = torch.where(scales > 0, scales.float(), math.inf)[..., None]
    codes = ((grouped - biases.float()[..., None]) / steps).round().clamp(0, levels).to(torch.uint8).flatten(-2)
    codes[..., dim:] = 0
    return (codes[..., 0::2] | (codes[..., 1::2] << 4) if bits == 4 else codes), scales, biases


def encode_residual(x: Tensor, codes: Tensor, scales: Tensor, biases: Tensor, group_size: int) -> Tensor:
    """As `rewake.quant.encode_residual`, bit for bit: bytes [..., padded / 2]."""
    dim = x.shape[-1]
    padding = scales.shape[-1] * group_size - dim
    grouped = torch.cat([x, x.new_zeros(*x.shape[:-1], padding)], -1).reshape(*x.shape[:-1], -1, group_size)
    step = torch.where(scales > 0, scales.float(), math.inf)[..., None]
    steps = (grouped - biases.float()[..., None]) / step
    over = (steps - nibbles(codes).reshape(grouped.shape).float()) + 0.5
    found = (over * 16).floor().clamp(0, 15).to(torch.uint8).flatten(-2)
    found[..., dim:] = 0
    return found[..., 0::2] | (found[..., 1::2] << 4)


def decode_refined(codes: Tensor, residuals: Tensor, scales: Tensor, biases: Tensor, group_size: int, dim: int) -> Tensor:
    """As `rewake.quant.decode_refined`."""
    whole = (nibbles(codes).int() * 16 + nibbles(residuals)).reshape(*codes.shape[:-1], -1, group_size)
    scale = scales.float()[..., None]
    x: Tensor = whole.float() * (scale / 16) + (biases.float()[..., None] - scale * 0.46875)
    return x.flatten(-2)[..., :dim]


def nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def decode(codes: Tensor, scales: Tensor, biases: Tensor, bits: int, group_size: int, dim: int) -> Tensor:
    """The inverse: float32 [..., dim]."""
    if bits == 4:
        codes = nibbles(codes)
    grouped = codes.reshape(*codes.shape[:-1], -1, group_size).float()
    x: Tensor = grouped * scales.float()[..., None] + biases.float()[..., None]
    return x.flatten(-2)[..., :dim]


def read_pages(
    arena: Tensor, layouts: Mapping[int, PageLayout], layer: int, pages: list[tuple[int, int, int | None]]
) -> tuple[Tensor, Tensor]:
    """Decoded K and V of whole pages: [kv_heads, pages * 256, dim] each; K still rotated."""
    if len({(codec, residuals is None) for _, codec, residuals in pages}) > 1:
        parts = [read_pages(arena, layouts, layer, [page]) for page in pages]
        return torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 1)
    layout = layouts[pages[0][1]]
    arrays = read_fields(arena, layout, layer, [at for at, _, _ in pages])
    over: list[Tensor | None] = [None, None]
    if pages[0][2] is not None:
        over[: len(arrays) // 3] = read_fields(arena, replace(layout, residuals=True), layer, [at for _, _, at in pages if at is not None])
    split = 1 if layout.codec.k_bits == 16 else 3
    k = unpack(arrays[:split], over[0], layout.codec.k_bits, layout.group_size, layout.k_dim)
    if layout.v_dim == 0:
        return k.transpose(0, 1).flatten(1, 2), k.new_empty(layout.kv_heads, len(pages) * PAGE_TOKENS, 0)
    v = unpack(arrays[split:], over[1], layout.codec.v_bits, layout.group_size, layout.v_dim)
    return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)


def read_fields(arena: Tensor, layout: PageLayout, layer: int, pages: list[int]) -> list[Tensor]:
    """The layer's arrays, [pages, kv_heads, 256, bytes or bfloat16 values] each."""
    size = layout.layer_bytes
    raw = torch.stack([arena[page + layer * size : page + (layer + 1) * size] for page in pages])
    arrays, at = [], 0
    for field in layout.fields:
        part = raw[:, at : at + layout.field_bytes(field)].reshape(len(pages), layout.kv_heads, PAGE_TOKENS, -1)
        arrays.append(part if field.dtype == "U32" else part.contiguous().view(torch.bfloat16))
        at += layout.field_bytes(field)
    return arrays


def unpack(arrays: list[Tensor], residuals: Tensor | None, bits: int, group_size: int, dim: int) -> Tensor:
    if residuals is not None:
        return decode_refined(arrays[0], residuals, arrays[1], arrays[2], group_size, dim)
    return arrays[0] if bits == 16 else decode(arrays[0], arrays[1], arrays[2], bits, group_size, dim)


def attention(q: Tensor, q_plain: Tensor, k: Tensor, v: Tensor, rotated: bool, layer: LayerAttention) -> Tensor:
    """`q` [rows, q_heads, k_dim] (rotated as `k` is) over `k`, `v` [kv_heads, length, dim]: [rows, q_heads, v_dim].

    The last row stands at the last position. `q_plain` is q before rotation, for the mean that `k` was centred by.
    """
    rows, length = len(q), k.shape[1]
    mask = visible(rows, length, layer.window)
    if layer.sinks is None and layer.soft_cap is None:  # a shift of all logits of a row changes nothing: no mean needed
        out = scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], mask, scale=layer.scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    repeat = q.shape[1] // k.shape[0]
    k, v = k.float().repeat_interleave(repeat, 0), v.float().repeat_interleave(repeat, 0)
    logits = q.float().transpose(0, 1) @ k.transpose(1, 2)
    if rotated and layer.k_mean is not None:
        logits = logits + (q_plain.float().transpose(0, 1) @ torch.from_numpy(layer.k_mean).repeat_interleave(repeat, 0)[..., None])
    logits = logits * layer.scale
    if layer.soft_cap is not None:
        logits = layer.soft_cap * torch.tanh(logits / layer.soft_cap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    if layer.sinks is not None:
        logits = torch.cat([logits, torch.from_numpy(layer.sinks)[:, None, None].expand(-1, rows, 1)], -1)
    return (logits.softmax(-1)[..., :length] @ v).transpose(0, 1).to(q_plain.dtype)


def visible(rows: int, length: int, window: int | None) -> Tensor | None:
    """Which positions each row may attend to, bool [rows, length]; None if all."""
    if rows == 1 and (window is None or window >= length):
        return None
    position = torch.arange(length - rows, length)[:, None]
    other = torch.arange(length)[None]
    mask = other <= position
    return mask if window is None else mask & (other > position - window)
