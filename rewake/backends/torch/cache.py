"""BatchQuantizedKVCache: the paged, coded KV cache of one step's batch, and the attention function that uses it.

transformers calls the function below with q, k and v of all sequences, flattened to one, after RoPE. K and V are
coded into pages; attention reads the pages. The names follow arXiv 2603.04428; the cache is a view of the arena.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rewake.backends.base import Batch
from rewake.backends.torch.kernels.base import AttentionKernels, LayerAttention, RaggedBatch
from rewake.backends.torch.latent import Absorbed
from rewake.errors import ModelError
from rewake.quant import PAGE_TOKENS, PageLayout
from rewake.spec import ModelCacheSpec

__all__ = ["ATTENTION", "BatchQuantizedKVCache", "ModelPages", "ragged", "register_attention"]

ATTENTION = "rewake"


class ModelPages:
    """What does not change from step to step: the arena, how pages lie in it, and each layer's constants."""

    def __init__(
        self, arena: Tensor, layout: PageLayout, kernels: AttentionKernels, spec: ModelCacheSpec, k_mean: Tensor | None = None
    ) -> None:
        self.arena = arena
        self.layout = layout
        self.spec = spec
        self.layouts = {layout.codec.index: layout}
        self.kernels = kernels
        self.k_mean = k_mean  # f32 [layers, kv_heads, k_dim]: what K is centred by before it is coded
        self._layers: dict[int, LayerAttention] = {}

    def layer(self, layer: int, scale: float, window: int | None, soft_cap: float | None, sinks: Tensor | None) -> LayerAttention:
        """The constants of a layer, as the model's code hands them over. Raises ModelError if they are not what its config says."""
        if layer not in self._layers:
            told, expected = (window, soft_cap, sinks is not None), (self.spec.window(layer), self.spec.soft_cap, self.spec.has_sinks)
            if told != expected:
                raise ModelError(f"layer {layer} attends with (window, soft cap, sinks) {told}, and its config says {expected}")
            latent_dim = self.spec.group.latent_dim
            self._layers[layer] = LayerAttention(
                layer,
                scale,
                window=window,
                soft_cap=soft_cap,
                sinks=None if sinks is None else sinks.detach().float().contiguous(),
                v_is_k_prefix=latent_dim > 0,
                v_dim=latent_dim or None,
                k_mean=None if self.k_mean is None else self.k_mean[layer],
            )
        assert self._layers[layer].scale == scale
        return self._layers[layer]

    def layers_without_attention(self) -> list[int]:
        """Those that have not attended to anything yet."""
        return [i for i in self.spec.group.layers if i not in self._layers]


class BatchQuantizedKVCache:
    """K and V of the sequences of one step: where they lie, and how to append and attend to them."""

    def __init__(self, pages: ModelPages, batch: Batch) -> None:
        self.pages = pages
        self.batch = ragged(batch, pages.layout)

    def append_and_attend(self, constant: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, q_heads, k_dim], k and v [tokens, kv_heads, dim] to [tokens, q_heads, v_dim]."""
        pages = self.pages
        pages.kernels.append(pages.arena, pages.layouts, self.batch, constant, k, v)
        return pages.kernels.attend(pages.arena, pages.layouts, self.batch, constant, q)


def ragged(batch: Batch, layout: PageLayout) -> RaggedBatch:
    """The step's rows as tensors: block table, query ranges, lengths, and the place of each new K/V row."""
    rows = batch.rows
    table = torch.zeros(len(rows), max(len(r.slots) for r in rows), dtype=torch.int64)
    for i, row in enumerate(rows):
        table[i, : len(row.slots)] = torch.tensor(row.slots, dtype=torch.int64)
    places = [(r.slots[p // PAGE_TOKENS] if p >= r.first_append else -1, p % PAGE_TOKENS) for r in rows for p in range(r.start, r.end)]
    counts = torch.tensor([len(r.tokens) for r in rows], dtype=torch.int32)
    codec = layout.codec.index
    return RaggedBatch(
        block_table=table,
        page_codecs=torch.full(table.shape, codec, dtype=torch.uint8),
        query_starts=torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0, dtype=torch.int32)]),
        kv_lengths=torch.tensor([r.end for r in rows], dtype=torch.int32),
        append_pages=torch.tensor([page for page, _ in places], dtype=torch.int64),
        append_rows=torch.tensor([row for _, row in places], dtype=torch.int32),
        append_codecs=torch.full((len(places),), codec, dtype=torch.uint8),
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv: BatchQuantizedKVCache | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    if kv is None:
        raise ModelError(f"transformers' {type(module).__name__} does not hand on what attention over pages needs: it cannot be served")
    constant = kv.pages.layer(int(module.layer_idx), scaling, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    absorbed: Absorbed | None = getattr(module, "absorbed", None)
    if absorbed is None:
        return kv.append_and_attend(constant, q, k, v)[None], None
    return absorbed.project_output(kv.append_and_attend(constant, absorbed.project_query(q), k, v))[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """Who sees whom follows from the block tables: no mask is built."""


def register_attention() -> None:
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, no_mask)
