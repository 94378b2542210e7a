"""What attention over coded pages must offer, whoever computes it.

Knows the data of one step and of one layer, and the protocol. Does not know how it is computed, who owns a page, or
what a model is. Where K, V and queries are torch's tensors, they lie on the CPU; a native step has none, and torch is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from rewake.quant import PageLayout

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["F32", "I32", "I64", "U8", "AttentionKernels", "LayerAttention", "RaggedBatch"]

U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """Which tokens of a step belong to which sequence, and where their K and V in one slot of each page lie. Arrays are contiguous.

    Query row i of a sequence with n rows stands at position `kv_length - n + i` and attends to positions up to its
    own (and beyond `position - window`, if a window is set).
    """

    block_table: I64  # [seqs, max_pages]: byte offset in the arena, for each page of 256 tokens; -1: no query attends to it
    page_codecs: U8  # [seqs, max_pages]: Codec.index of each page; bf16 never mixes with the others
    query_starts: I32  # [seqs + 1]: rows of the flattened batch of each sequence
    kv_lengths: I32  # [seqs]: tokens of each sequence, those this step appends included
    append_pages: I64  # [tokens]: byte offset of the page a row's K and V go to; -1: stored already
    append_rows: I32  # [tokens]: row in that page
    append_codecs: U8  # [tokens]: Codec.index of that page
    residual_table: I64 | None = None  # as block_table, for the residuals of codecs that have some
    append_residuals: I64 | None = None  # as append_pages
    derived: dict[str, object] = field(default_factory=dict, repr=False)  # what an implementation works out once per step


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """What is constant for one layer."""

    layer: int  # index of the layer inside its slot
    scale: float  # multiplies q.k
    window: int | None = None
    soft_cap: float | None = None  # s = cap * tanh(s / cap), after scaling
    sinks: F32 | None = None  # [q_heads]: one more logit per head, which takes probability and has no value
    k_mean: F32 | None = None  # [kv_heads, k_dim]: K is coded as rotate(k - mean); q.mean is added back to q.k
    v_is_k_prefix: bool = False  # latent: V is the first `v_dim` values of the decoded K row, rotated back and with its mean
    v_dim: int | None = None  # width of V where it is a prefix of K; the layout has v_dim = 0 then
    derived: dict[str, object] = field(default_factory=dict, repr=False)  # what an implementation works out once


class AttentionKernels(Protocol):
    """Append K and V of a step to their pages, and attend to them.

    `arena` is uint8 [bytes]. `layouts` maps Codec.index to the PageLayout (256 rows) of a slot. K is rotated
    (`quant.hadamard`), and centred by `k_mean`, wherever a page's `k_bits` is below 16; bf16 pages hold plain values. Where a codec has
    residuals, a query at position p sees page i with them if i is 0 or p < 256 (i + 1) + YOUNG_TOKENS, and without them otherwise.
    """

    @property
    def name(self) -> str: ...

    def append(self, arena: U8, layouts: Mapping[int, PageLayout], batch: RaggedBatch, layer: LayerAttention, k: Tensor, v: Tensor) -> None:
        """Code `k` [tokens, kv_heads, k_dim] and `v` [tokens, kv_heads, v_dim], bf16 or f32, last stride 1.

        Where V is a prefix of K, `v` is not read.
        """
        ...

    def attend(self, arena: U8, layouts: Mapping[int, PageLayout], batch: RaggedBatch, layer: LayerAttention, q: Tensor) -> Tensor:
        """[tokens, q_heads, v_dim] in the dtype of `q` [tokens, q_heads, k_dim] (RoPE done, not rotated)."""
        ...
