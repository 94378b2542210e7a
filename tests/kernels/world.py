"""Random steps over coded pages, and what attention over them is in float64.

The reference decodes a sequence's pages with `quant.decode` and attends row by row; it shares no code with a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from rewake.backends.torch.kernels.base import AttentionKernels, LayerAttention, RaggedBatch
from rewake.quant import (
    CODECS,
    PAGE_TOKENS,
    YOUNG_TOKENS,
    PageLayout,
    bf16_to_f32,
    decode,
    decode_refined,
    encode,
    encode_residual,
    f32_to_bf16,
    hadamard,
)


@dataclass(frozen=True)
class Shape:
    """One cache group, one layer's settings and the sequences of a step as (tokens, query rows of them)."""

    kv_heads: int = 2
    share: int = 3
    k_dim: int = 64
    v_dim: int = 64
    group: int = 64
    codecs: tuple[str, ...] = ("q4",)
    seqs: tuple[tuple[int, int], ...] = ((5, 1),)
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    mean: bool = True
    latent: bool = False
    bf16: bool = False
    layers: int = 2
    layer: int = 1
    seed: int = 0

    @property
    def raw(self) -> bool:
        return self.codecs == ("bf16",)

    @property
    def residuals(self) -> bool:
        return self.codecs == ("q4+",)


@dataclass
class World:
    shape: Shape
    arena: np.ndarray
    layouts: dict[int, PageLayout]
    batch: RaggedBatch
    layer: LayerAttention
    q: torch.Tensor
    k: list[np.ndarray] = field(default_factory=list)  # of each sequence: float32 [tokens, kv_heads, k_dim]
    v: list[np.ndarray] = field(default_factory=list)

    def page_of(self, seq: int, page: int) -> tuple[np.ndarray, PageLayout]:
        layout = self.layouts[int(self.batch.page_codecs[seq, page])]
        at = int(self.batch.block_table[seq, page])
        return self.arena[at : at + layout.page_bytes], layout

    def residuals_of(self, seq: int, page: int) -> tuple[np.ndarray, PageLayout]:
        assert self.batch.residual_table is not None
        layout = replace(self.page_of(seq, page)[1], residuals=True)
        at = int(self.batch.residual_table[seq, page])
        return self.arena[at : at + layout.page_bytes], layout

    def fields(self, seq: int, page: int) -> dict[str, np.ndarray]:
        """The layer's arrays of a page, as views of the arena."""
        return self.views(*self.page_of(seq, page)) | (self.views(*self.residuals_of(seq, page)) if self.shape.residuals else {})

    def views(self, page_bytes: np.ndarray, layout: PageLayout) -> dict[str, np.ndarray]:
        views = {}
        for layer, f, at in layout.arrays():
            if layer == self.layer.layer and f.width:
                part = page_bytes[at : at + layout.field_bytes(f)]
                views[f.name] = part.view(np.uint32 if f.itemsize == 4 else np.uint16).reshape(layout.kv_heads, layout.rows, f.width)
        return views

    def decoded(self, seq: int, side: str, position: int | None = None) -> np.ndarray:
        """[tokens, kv_heads, dim] float64 as a query at `position` sees it: K still rotated and centred."""
        length, parts = int(self.batch.kv_lengths[seq]), []
        for page in range(-(-length // PAGE_TOKENS)):
            layout, f = self.page_of(seq, page)[1], self.fields(seq, page)
            bits, dim = (layout.codec.k_bits, layout.k_dim) if side == "k" else (layout.codec.v_bits, layout.v_dim)
            rows = min(length - page * PAGE_TOKENS, PAGE_TOKENS)  # what was never written may be anything
            f = {name: x[:, :rows] for name, x in f.items()}
            if bits == 16:
                parts.append(bf16_to_f32(f[f"{side}.values"]))
            elif self.shape.residuals and (page == 0 or position is None or position < (page + 1) * PAGE_TOKENS + YOUNG_TOKENS):
                arrays = (f[f"{side}.{name}"] for name in ("codes", "residuals", "scales", "biases"))
                parts.append(decode_refined(*arrays, layout.group_size, dim))
            else:
                parts.append(decode(f[f"{side}.codes"], f[f"{side}.scales"], f[f"{side}.biases"], bits, layout.group_size, dim))
        return np.concatenate(parts, 1).transpose(1, 0, 2).astype(np.float64)


def make(shape: Shape) -> World:
    """Lay out pages at random places of an arena full of NaN bytes. Stores nothing yet."""
    rng = np.random.default_rng(shape.seed)
    v_dim = 0 if shape.latent else shape.v_dim
    layouts = {
        CODECS[c].index: PageLayout(shape.layers, shape.kv_heads, shape.k_dim, v_dim, CODECS[c], shape.group) for c in sorted(shape.codecs)
    }
    max_pages = max(1, *(-(-n // PAGE_TOKENS) for n, _ in shape.seqs)) + 1
    codecs = rng.choice(list(layouts), (len(shape.seqs), max_pages)).astype(np.uint8)
    order = rng.permutation((1 + shape.residuals) * len(shape.seqs) * max_pages)
    size = max(layout.page_bytes for layout in layouts.values())
    arena = np.full(size * len(order), 0xFF, np.uint8)
    table, *residuals = (order * size).reshape(-1, len(shape.seqs), max_pages)
    rows = np.array([n for _, n in shape.seqs])
    tokens = int(rows.sum())
    heads = shape.kv_heads * shape.share
    append = -np.ones(tokens, np.int64)
    batch = RaggedBatch(
        table.astype(np.int64),
        codecs,
        np.concatenate([[0], rows.cumsum()]).astype(np.int32),
        np.array([n for n, _ in shape.seqs], np.int32),
        append,
        np.zeros(tokens, np.int32),
        np.zeros(tokens, np.uint8),
        residuals[0].astype(np.int64) if residuals else None,
        append if residuals else None,
    )
    mean = rng.normal(size=(shape.kv_heads, shape.k_dim)).astype(np.float32)
    layer = LayerAttention(
        layer=shape.layer,
        scale=shape.k_dim**-0.5,
        window=shape.window,
        soft_cap=shape.soft_cap,
        sinks=rng.normal(size=heads).astype(np.float32) if shape.sinks else None,
        k_mean=mean if shape.mean else None,
        v_is_k_prefix=shape.latent,
        v_dim=shape.v_dim if shape.latent else None,
    )
    q = torch.from_numpy(rng.normal(size=(tokens, heads, shape.k_dim)).astype(np.float32))
    world = World(shape, arena, layouts, batch, layer, q.bfloat16() if shape.bf16 else q)
    for length, _ in shape.seqs:
        k = rng.normal(size=(length, shape.kv_heads, shape.k_dim)) + (mean if shape.mean else 0)
        v = rng.normal(size=(length, shape.kv_heads, shape.v_dim)) * rng.choice([0.3, 1.0, 3.0], (length, 1, 1))
        world.k.append(bf16_to_f32(f32_to_bf16(k.astype(np.float32))))
        world.v.append(bf16_to_f32(f32_to_bf16(v.astype(np.float32))))
    return world


def store_by_reference(world: World) -> None:
    """Code every sequence's K and V with numpy."""
    for seq in range(len(world.shape.seqs)):
        for page in range(-(-len(world.k[seq]) // PAGE_TOKENS)):
            layout, views = world.page_of(seq, page)[1], world.fields(seq, page)
            part = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
            k, v = world.k[seq][part], world.v[seq][part]
            if layout.codec.k_bits < 16:
                k = (k - (world.layer.k_mean if world.layer.k_mean is not None else 0)) @ hadamard(layout.k_dim)
            for side, x, bits in (("k", k, layout.codec.k_bits), ("v", v, layout.codec.v_bits)):
                if side == "v" and not layout.v_dim:
                    continue
                x = np.ascontiguousarray(x.transpose(1, 0, 2), np.float32)
                coded = (f32_to_bf16(x),) if bits == 16 else encode(x, bits, layout.group_size)
                names = ("values",) if bits == 16 else ("codes", "scales", "biases")
                if layout.codec.residual_bits:
                    coded, names = (*coded, encode_residual(x, *coded, layout.group_size)), (*names, "residuals")
                for name, array in zip(names, coded, strict=True):
                    views[f"{side}.{name}"][:, : len(k)] = array


def append_step(world: World, seqs: Sequence[int] | None = None) -> tuple[RaggedBatch, torch.Tensor, torch.Tensor]:
    """A step that appends every token of the given sequences (all of them): its batch, K and V."""
    seqs = range(len(world.shape.seqs)) if seqs is None else seqs
    at = [(s, i) for s in seqs for i in range(len(world.k[s]))]
    table, codecs, over = world.batch.block_table, world.batch.page_codecs, world.batch.residual_table
    batch = replace(
        world.batch,
        query_starts=np.array([0, *np.cumsum([len(k) for k in world.k])], np.int32),
        append_pages=np.array([int(table[s, i // PAGE_TOKENS]) for s, i in at], np.int64),
        append_rows=np.array([i % PAGE_TOKENS for _, i in at], np.int32),
        append_codecs=np.array([int(codecs[s, i // PAGE_TOKENS]) for s, i in at], np.uint8),
        append_residuals=None if over is None else np.array([int(over[s, i // PAGE_TOKENS]) for s, i in at], np.int64),
        derived={},
    )
    k = torch.from_numpy(np.concatenate([world.k[s] for s in seqs]))
    v = torch.from_numpy(np.concatenate([world.v[s] for s in seqs]))
    return batch, k, v


def store_by_kernel(world: World, kernels: AttentionKernels) -> None:
    batch, k, v = append_step(world)
    kernels.append(world.arena, world.layouts, batch, world.layer, k, v)


def attend_by_reference(world: World) -> np.ndarray:
    shape, outputs = world.shape, []
    starts = world.batch.query_starts.tolist()
    for seq, (length, rows) in enumerate(shape.seqs):
        q = world.q[starts[seq] : starts[seq + 1]].float().numpy().astype(np.float64)
        first = length - rows
        # rows that see the same pages with their residuals
        cuts = [p for p in range(YOUNG_TOKENS, length, PAGE_TOKENS) if p > first] if shape.residuals else []
        for start, end in pairwise([first, *cuts, length]):
            outputs.append(attend_alike(world, seq, q[start - first : end - first], start, end))
    return np.concatenate(outputs)


def attend_alike(world: World, seq: int, q: np.ndarray, start: int, end: int) -> np.ndarray:
    """Queries at positions [start, end)."""
    shape, layer, rows = world.shape, world.layer, end - start
    if not rows:
        return np.zeros((0, shape.kv_heads * shape.share, shape.v_dim))
    k = world.decoded(seq, "k", start)[:end]
    if not shape.raw:
        k = k @ hadamard(shape.k_dim).astype(np.float64)
        if layer.k_mean is not None:
            k = k + layer.k_mean
    v = k[..., : shape.v_dim] if shape.latent else world.decoded(seq, "v", start)[:end]
    q = q.reshape(rows, shape.kv_heads, shape.share, shape.k_dim)
    s = np.einsum("rhgd,thd->rhgt", q, k) * layer.scale
    if layer.soft_cap:
        s = layer.soft_cap * np.tanh(s / layer.soft_cap)
    at, own = np.arange(end), np.arange(start, end)[:, None]
    hidden = (at > own) | ((at <= own - layer.window) if layer.window else False)
    s = np.where(hidden[:, None, None], -np.inf, s)
    if layer.sinks is not None:
        sinks = layer.sinks.reshape(1, shape.kv_heads, shape.share, 1)
        s = np.concatenate([s, np.broadcast_to(sinks, (*s.shape[:3], 1))], -1)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True))[..., :end]
    return np.einsum("rhgt,thd->rhgd", p, v).reshape(rows, -1, shape.v_dim)


def error_of(world: World, out: torch.Tensor) -> float:
    """The largest error relative to the output's largest value, rounding to the output's dtype allowed for."""
    want = attend_by_reference(world)
    if not want.size:
        return 0.0
    got = out.float().numpy().astype(np.float64)
    assert got.shape == want.shape
    excess = np.abs(got - want) - (np.abs(want) * 2**-8 if world.shape.bf16 else 0)
    return float(excess.max() / np.abs(want).max())
