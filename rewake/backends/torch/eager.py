"""transformers' models, whose attention is ours: BatchQuantizedKVCache is the paged, coded KV cache of one step's batch.

transformers calls `attend` with q, k and v of all sequences, flattened to one, after RoPE. K and V are coded into pages;
attention reads the pages. The names follow arXiv 2603.04428; the cache is a view of the arena.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from rewake.backends.torch.batch import Flat
from rewake.backends.torch.kernels.base import F32, U8, AttentionKernels, LayerAttention, RaggedBatch
from rewake.backends.torch.latent import Absorbed
from rewake.errors import ModelError
from rewake.planes import PagePlanes
from rewake.spec import ModelCacheSpec

__all__ = ["BatchQuantizedKVCache", "EagerForward", "load_eager", "working_dtype"]

ATTENTION = "rewake"
# transformers loads a model with torch's default dtype set to its own, in the whole process: no step is computed meanwhile.
LOADING = threading.RLock()


class EagerForward:
    """A transformers model over the pages of one arena. See `forward.Forward`."""

    def __init__(
        self, model: Any, kernels: AttentionKernels, arena: U8, planes: PagePlanes, spec: ModelCacheSpec, k_mean: F32 | None
    ) -> None:
        self._model = model
        self._pages = ModelPages(arena, planes, kernels, spec, k_mean)

    def logits(self, flat: Flat) -> F32:
        tokens, positions = (torch.from_numpy(x).long()[None] for x in (flat.tokens, flat.positions))
        keep = torch.from_numpy(flat.wanted).long() if len(flat.wanted) else torch.zeros(1, dtype=torch.int64)  # none is not possible
        with LOADING, torch.inference_mode():
            kv = BatchQuantizedKVCache(self._pages, flat.ragged)
            out = self._model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep, kv=kv)
        return out.logits[0, : len(flat.wanted)].float().numpy()  # type: ignore[no-any-return]

    def check(self) -> None:
        if elsewhere := self._pages.layers_without_attention():
            raise ModelError(f"layers {elsewhere} do not keep what they have seen in a KV cache of ours: they could not be resumed")


class ModelPages:
    """What does not change from step to step: the arena, how pages lie in it, and each layer's constants."""

    def __init__(self, arena: U8, planes: PagePlanes, kernels: AttentionKernels, spec: ModelCacheSpec, k_mean: F32 | None = None) -> None:
        self.arena = arena
        self.layouts = {planes.codec.index: planes.planes[0].slot}
        self.places = planes.layer_places()  # of each layer: its slot of a page, its index in there
        self.kernels = kernels
        self.spec = spec
        self.k_mean = k_mean  # [layers, kv_heads, k_dim]: what K is centred by before it is coded
        self._layers: dict[int, LayerAttention] = {}

    def layer(self, layer: int, scale: float, window: int | None, soft_cap: float | None, sinks: Tensor | None) -> LayerAttention:
        """The constants of a layer, as the model's code hands them over. Raises ModelError if they are not what its config says."""
        if layer not in self._layers:
            told, expected = (window, soft_cap, sinks is not None), (self.spec.window(layer), self.spec.soft_cap, self.spec.has_sinks)
            if told != expected:
                raise ModelError(f"layer {layer} attends with (window, soft cap, sinks) {told}, and its config says {expected}")
            latent_dim = self.spec.group.latent_dim
            self._layers[layer] = LayerAttention(
                self.places[layer][1],
                scale,
                window=window,
                soft_cap=soft_cap,
                sinks=None if sinks is None else sinks.detach().float().contiguous().numpy(),
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

    def __init__(self, pages: ModelPages, batches: Sequence[RaggedBatch]) -> None:
        self.pages = pages
        self.batches = batches

    def append_and_attend(self, layer: int, constant: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, q_heads, k_dim], k and v [tokens, kv_heads, dim] to [tokens, q_heads, v_dim]."""
        pages, batch = self.pages, self.batches[self.pages.places[layer][0]]
        pages.kernels.append(pages.arena, pages.layouts, batch, constant, k, v)
        return pages.kernels.attend(pages.arena, pages.layouts, batch, constant, q)


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
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    constant = kv.pages.layer(layer, scaling, sliding_window, softcap, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    absorbed: Absorbed | None = getattr(module, "absorbed", None)
    if absorbed is None:
        return kv.append_and_attend(layer, constant, q, k, v)[None], None
    return absorbed.project_output(kv.append_and_attend(layer, constant, absorbed.project_query(q), k, v))[None], None


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
    with LOADING:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=ATTENTION, use_safetensors=True).eval()


def working_dtype() -> tuple[torch.dtype, str]:
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16, "the processor multiplies bfloat16"
    return torch.float32, "the processor has no fast bfloat16"
