"""A step's rows as the arrays that kernels read. Knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from rewake.backends.base import NOWHERE, Batch, Row
from rewake.backends.torch.kernels.base import I32, I64, RaggedBatch
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
    ends = list(accumulate(len(row.tokens) for row in rows))
    positions = np.array([position for row in rows for position in range(row.start, row.end)], np.int32)
    num_pages = max(len(row.names) for row in rows)
    same: dict[str, Any] = {
        "page_codecs": np.full((len(rows), num_pages), codec.index, np.uint8),
        "query_starts": np.array([0, *ends], np.int32),
        "kv_lengths": np.array([row.end for row in rows], np.int32),
        "append_rows": positions % PAGE_TOKENS,
        "append_codecs": np.full(len(positions), codec.index, np.uint8),
    }
    tables = [table_of(rows, slot, num_pages) for slot in range(len(rows[0].tables))]
    places = [places_of(rows, slot) for slot in range(len(tables))]
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
    wanted = [end - 1 for end, row in zip(ends, rows, strict=True) if row.sampling is not None]
    tokens = [token for row in rows for token in row.tokens]
    return Flat(np.array(tokens, np.int32), positions, np.array(wanted, np.int32), ragged)


def table_of(rows: Sequence[Row], slot: int, num_pages: int) -> I64:
    """Where a slot of each row's pages is: [rows, pages]."""
    table = np.full((len(rows), num_pages), NOWHERE, np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row.names)] = row.tables[slot]
    return table


def places_of(rows: Sequence[Row], slot: int) -> I64:
    """The page to which each token's K and V are appended; -1 for those that are stored already."""
    places: list[int] = []
    for row in rows:
        new = min(row.end, max(row.start, row.first_append))
        places += [-1] * (new - row.start)
        places += [row.tables[slot][position // PAGE_TOKENS] for position in range(new, row.end)]
    return np.array(places, np.int64)
