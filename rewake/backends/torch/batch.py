"""A step's rows as the arrays that kernels read. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from rewake.backends.base import Batch
from rewake.backends.torch.kernels.base import RaggedBatch
from rewake.quant import PAGE_TOKENS, PageLayout

__all__ = ["Flat", "flatten"]

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Flat:
    """All sequences' tokens in one row after another; `wanted` are the rows whose logits are."""

    tokens: I32
    positions: I32
    wanted: I32
    ragged: RaggedBatch


def flatten(batch: Batch, layout: PageLayout) -> Flat:
    """Token ids, positions, block table, query ranges, lengths, and the place of each new K/V row."""
    rows = batch.rows
    counts = [len(r.tokens) for r in rows]
    ends = np.cumsum(counts)
    table = np.zeros((len(rows), max(len(r.slots) for r in rows)), np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row.slots)] = row.slots
    positions = np.concatenate([np.arange(r.start, r.end, dtype=np.int32) for r in rows])
    of_row = np.repeat(np.arange(len(rows)), counts)
    is_new = positions >= np.repeat([r.first_append for r in rows], counts)
    codec = layout.codec.index
    ragged = RaggedBatch(
        block_table=torch.from_numpy(table),
        page_codecs=torch.full(table.shape, codec, dtype=torch.uint8),
        query_starts=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
        kv_lengths=torch.tensor([r.end for r in rows], dtype=torch.int32),
        append_pages=torch.from_numpy(np.where(is_new, table[of_row, positions // PAGE_TOKENS], -1)),
        append_rows=torch.from_numpy(positions % PAGE_TOKENS),
        append_codecs=torch.full(positions.shape, codec, dtype=torch.uint8),
    )
    wanted = [int(end) - 1 for end, row in zip(ends, rows, strict=True) if row.sampling is not None]
    tokens = np.fromiter(chain.from_iterable(r.tokens for r in rows), np.int32, int(ends[-1]))
    return Flat(tokens, positions, np.array(wanted, np.int32), ragged)
