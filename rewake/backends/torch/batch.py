"""A step's rows as the arrays that kernels read. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rewake.backends.base import NOWHERE, Batch
from rewake.backends.torch.kernels.base import I32, RaggedBatch
from rewake.quant import PAGE_TOKENS, Codec

__all__ = ["Flat", "flatten"]


@dataclass(frozen=True, eq=False)
class Flat:
    """All sequences' tokens in one row after another; `wanted` are the rows whose logits are.

    `ragged` has the step as layers see it: one batch for each slot of a page, which differ in where pages lie.
    """

    tokens: I32
    positions: I32
    wanted: I32
    ragged: tuple[RaggedBatch, ...]


def flatten(batch: Batch, codec: Codec) -> Flat:
    """Token ids, positions, block tables, query ranges, lengths, and the place of each new K/V row. `codec` is that of all pages."""
    rows = batch.rows
    counts = [len(r.tokens) for r in rows]
    ends = np.cumsum(counts)
    tables = np.full((len(rows[0].tables), len(rows), max(len(r.names) for r in rows)), NOWHERE, np.int64)
    for i, row in enumerate(rows):
        tables[:, i, : len(row.names)] = row.tables
    positions = np.concatenate([np.arange(r.start, r.end, dtype=np.int32) for r in rows])
    of_row = np.repeat(np.arange(len(rows)), counts)
    is_new = positions >= np.repeat([r.first_append for r in rows], counts)
    same: dict[str, Any] = {
        "page_codecs": np.full(tables.shape[1:], codec.index, np.uint8),
        "query_starts": np.concatenate([[0], ends]).astype(np.int32),
        "kv_lengths": np.array([r.end for r in rows], np.int32),
        "append_rows": positions % PAGE_TOKENS,
        "append_codecs": np.full(positions.shape, codec.index, np.uint8),
    }
    places = [np.where(is_new, table[of_row, positions // PAGE_TOKENS], -1) for table in tables]
    count = len(tables) // 2 if codec.residual_bits else len(tables)  # of residuals there are as many slots as of codes, behind those
    ragged = tuple(
        RaggedBatch(
            block_table=tables[i],
            append_pages=places[i],
            residual_table=tables[count + i] if codec.residual_bits else None,
            append_residuals=places[count + i] if codec.residual_bits else None,
            **same,
        )
        for i in range(count)
    )
    wanted = [int(end) - 1 for end, row in zip(ends, rows, strict=True) if row.sampling is not None]
    tokens = np.fromiter(chain.from_iterable(r.tokens for r in rows), np.int32, int(ends[-1]))
    return Flat(tokens, positions, np.array(wanted, np.int32), ragged)
