"""Append and attention over coded pages in plain torch: the fallback where nothing native was compiled, and the
second opinion on what was. Decodes each sequence's pages whole, one layer at a time; that is its scratch:
kv_heads x context x (k_dim + v_dim) values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rewake.backends.torch.kernels.base import LayerAttention, RaggedBatch
from rewake.quant import PAGE_TOKENS, Field, PageLayout, hadamard

__all__ = ["VectorisedKernels", "decode", "encode"]


class VectorisedKernels:
    """See `base.AttentionKernels`."""

    name = "torch (vectorised)"

    def append(
        self, arena: Tensor, layouts: Mapping[int, PageLayout], batch: RaggedBatch, layer: LayerAttention, k: Tensor, v: Tensor
    ) -> None:
        codecs = batch.append_codecs
        for index, layout in layouts.items():
            rows = ((codecs == index) & (batch.append_pages >= 0)).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            where = Places(layout, layer.layer, batch.append_pages[rows], batch.append_rows[rows])
            for name, x in (("k", prepare_k(k[rows], layout, layer)), ("v", v[rows])):
                fields = [f for f in layout.fields if f.name.startswith(name)]
                if not fields:
                    continue
                if len(fields) == 1:
                    where.put(arena, fields[0], x.to(torch.bfloat16))
                    continue
                bits = layout.codec.k_bits if name == "k" else layout.codec.v_bits
                for field, coded in zip(fields, encode(x.float(), bits, layout.group_size), strict=True):
                    where.put(arena, field, coded)

    def attend(self, arena: Tensor, layouts: Mapping[int, PageLayout], batch: RaggedBatch, layer: LayerAttention, q: Tensor) -> Tensor:
        starts = batch.query_starts.tolist()
        outputs = [q.new_empty(0, q.shape[1], layer.v_dim or next(iter(layouts.values())).v_dim)]
        for i, length in enumerate(batch.kv_lengths.tolist()):
            mine = q[starts[i] : starts[i + 1]]
            if len(mine) == 0:
                continue
            oldest = max(0, length - len(mine) - layer.window + 1) // PAGE_TOKENS if layer.window else 0  # those before may be gone
            pages = batch.block_table[i, oldest : -(-length // PAGE_TOKENS)].tolist()
            codecs = batch.page_codecs[i, oldest : oldest + len(pages)].tolist()
            k, v = (x[:, : length - oldest * PAGE_TOKENS] for x in read_pages(arena, layouts, layer.layer, pages, codecs))
            rotated = layouts[codecs[0]].codec.k_bits < 16
            if layer.v_is_k_prefix:
                v = prefix_of(k, rotated, layer)
            outputs.append(attention(rotate(mine) if rotated else mine, mine, k.to(q.dtype), v.to(q.dtype), rotated, layer))
        return torch.cat(outputs)


def prefix_of(k: Tensor, rotated: bool, layer: LayerAttention) -> Tensor:
    """V of a latent cache: K rotated back (the rotation is its own inverse), with its mean, cut to `v_dim`."""
    plain = rotate(k) if rotated else k
    if rotated and layer.k_mean is not None:
        plain = plain + layer.k_mean[:, None]
    return plain[..., : layer.v_dim]


class Places:
    """Byte addresses in the arena of one layer's rows: page offset + layer + field + (head, row)."""

    def __init__(self, layout: PageLayout, layer: int, pages: Tensor, rows: Tensor) -> None:
        self.layout = layout
        self.rows = rows.to(torch.int64)
        self.layer_at = pages + layer * layout.layer_bytes
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
    return rotate(k if layer.k_mean is None else k - layer.k_mean)


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


def decode(codes: Tensor, scales: Tensor, biases: Tensor, bits: int, group_size: int, dim: int) -> Tensor:
    """The inverse: float32 [..., dim]."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    grouped = codes.reshape(*codes.shape[:-1], -1, group_size).float()
    x: Tensor = grouped * scales.float()[..., None] + biases.float()[..., None]
    return x.flatten(-2)[..., :dim]


def read_pages(arena: Tensor, layouts: Mapping[int, PageLayout], layer: int, pages: list[int], codecs: list[int]) -> tuple[Tensor, Tensor]:
    """Decoded K and V of whole pages: [kv_heads, pages * 256, dim] each; K still rotated."""
    if len(set(codecs)) > 1:
        parts = [read_pages(arena, layouts, layer, [page], [codec]) for page, codec in zip(pages, codecs, strict=True)]
        return torch.cat([k for k, _ in parts], 1), torch.cat([v for _, v in parts], 1)
    layout = layouts[codecs[0]]
    size = layout.layer_bytes
    raw = torch.stack([arena[page + layer * size : page + (layer + 1) * size] for page in pages])
    arrays, at = [], 0
    for field in layout.fields:
        part = raw[:, at : at + layout.field_bytes(field)].reshape(len(pages), layout.kv_heads, PAGE_TOKENS, -1)
        arrays.append(part if field.dtype == "U32" else part.contiguous().view(torch.bfloat16))
        at += layout.field_bytes(field)
    split = 1 if layout.codec.k_bits == 16 else 3
    k = unpack(arrays[:split], layout.codec.k_bits, layout.group_size, layout.k_dim)
    if layout.v_dim == 0:
        return k.transpose(0, 1).flatten(1, 2), k.new_empty(layout.kv_heads, len(pages) * PAGE_TOKENS, 0)
    v = unpack(arrays[split:], layout.codec.v_bits, layout.group_size, layout.v_dim)
    return k.transpose(0, 1).flatten(1, 2), v.transpose(0, 1).flatten(1, 2)


def unpack(arrays: list[Tensor], bits: int, group_size: int, dim: int) -> Tensor:
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
        logits = logits + (q_plain.float().transpose(0, 1) @ layer.k_mean.repeat_interleave(repeat, 0)[..., None])
    logits = logits * layer.scale
    if layer.soft_cap is not None:
        logits = layer.soft_cap * torch.tanh(logits / layer.soft_cap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    if layer.sinks is not None:
        logits = torch.cat([logits, layer.sinks[:, None, None].expand(-1, rows, 1)], -1)
    return (logits.softmax(-1)[..., :length] @ v).transpose(0, 1).to(q_plain.dtype)


def visible(rows: int, length: int, window: int | None) -> Tensor | None:
    """Which positions each row may attend to, bool [rows, length]; None if all."""
    if rows == 1 and (window is None or window >= length):
        return None
    position = torch.arange(length - rows, length)[:, None]
    other = torch.arange(length)[None]
    mask = other <= position
    return mask if window is None else mask & (other > position - window)
