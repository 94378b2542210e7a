"""What the next step computes. A pure function of how far each sequence is; knows no pages, models or clocks."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

__all__ = ["Need", "Part", "plan"]


@dataclass(frozen=True)
class Need:
    """A running sequence: `num_pending` tokens to compute, the first at `position`. One is a decode step."""

    position: int
    num_pending: int


@dataclass(frozen=True)
class Part:
    """`num_tokens` of sequence number `index` are computed in this step."""

    index: int
    num_tokens: int


def plan(needs: Seq[Need], chunk: int) -> tuple[Part, ...]:
    """Every decode token, then prompts in order of arrival, until `chunk` prompt tokens are in the step.

    A prompt that must be cut is cut at absolute multiples of `chunk` where that is possible, so that equal prompts are
    computed in equal pieces and their pages come out the same.
    """
    parts = [Part(i, 1) for i, need in enumerate(needs) if need.num_pending == 1]
    left = chunk
    for i, need in enumerate(needs):
        if need.num_pending > 1 and left > 0:
            to_boundary = chunk - need.position % chunk
            num_tokens = need.num_pending if need.num_pending <= left else min(to_boundary, left)
            parts.append(Part(i, num_tokens))
            left -= num_tokens
    return tuple(parts)
