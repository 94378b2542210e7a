"""transformers' models, whose attention is ours: BatchQuantizedKVCache is the paged, coded KV cache of one step's batch.

transformers calls `attend` with q, k and v of all sequences, flattened to one, after RoPE. K and V are coded into pages;
attention reads the pages. The names follow arXiv 2603.04428; the cache is a view of the arena.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from rewake.backends.torch.batch import Flat
from rewake.backends.torch.kernels.base import AttentionKernels, LayerAttention, RaggedBatch
from rewake.errors import ModelError
from rewake.quant import PageLayout

__all__ = ["BatchQuantizedKVCache", "EagerForward", "load_eager", "working_dtype"]

ATTENTION = "rewake"


class EagerForward:
    """A transformers model over the pages of one arena. See `forward.Forward`."""

    def __init__(self, model: Any, kernels: AttentionKernels, arena: Tensor, layout: PageLayout) -> None:
        self._model = model
        self._pages = ModelPages(arena, layout, kernels)

    def logits(self, flat: Flat) -> Tensor:
        tokens, positions = (torch.from_numpy(x).long()[None] for x in (flat.tokens, flat.positions))
        keep = torch.from_numpy(flat.wanted).long() if len(flat.wanted) else torch.zeros(1, dtype=torch.int64)  # none is not possible
        with torch.inference_mode():
            kv = BatchQuantizedKVCache(self._pages, flat.ragged)
            out = self._model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, kv=kv)
        return out.logits[0, : len(flat.wanted)].float()  # type: ignore[no-any-return]


class ModelPages:
    """What does not change from step to step: the arena, how pages lie in it, and each layer's constants."""

    def __init__(self, arena: Tensor, layout: PageLayout, kernels: AttentionKernels) -> None:
        self.arena = arena
        self.layout = layout
        self.layouts = {layout.codec.index: layout}
        self.kernels = kernels
        self._layers: dict[int, LayerAttention] = {}

    def layer(self, layer: int, scale: float) -> LayerAttention:
        if layer not in self._layers:
            self._layers[layer] = LayerAttention(layer, scale)
        assert self._layers[layer].scale == scale
        return self._layers[layer]


class BatchQuantizedKVCache:
    """K and V of the sequences of one step: where they lie, and how to append and attend to them."""

    def __init__(self, pages: ModelPages, batch: RaggedBatch) -> None:
        self.pages = pages
        self.batch = batch

    def append_and_attend(self, layer: int, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, q_heads, k_dim], k and v [tokens, kv_heads, dim] to [tokens, q_heads, v_dim]."""
        pages, constant = self.pages, self.pages.layer(layer, scale)
        pages.kernels.append(pages.arena, pages.layouts, self.batch, constant, k, v)
        return pages.kernels.attend(pages.arena, pages.layouts, self.batch, constant, q)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv: BatchQuantizedKVCache,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [1, heads, tokens, dim] in, [1, tokens, heads, dim] out."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = kv.append_and_attend(layer, scaling, *(x[0].transpose(0, 1) for x in (query, key, value)))
    return out[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """Who sees whom follows from the block tables: no mask is built."""


def register_attention() -> None:
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, no_mask)


def load_eager(path: Path, dtype: torch.dtype) -> Any:
    """The transformers model in the folder `path`. Raises ModelError if there is none."""
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no safetensors files: other formats of weights are not read")
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    register_attention()
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=ATTENTION, use_safetensors=True).eval()


def working_dtype() -> tuple[torch.dtype, str]:
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16, "the processor multiplies bfloat16"
    return torch.float32, "the processor has no fast bfloat16"
