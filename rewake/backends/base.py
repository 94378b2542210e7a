"""What the engine needs of a backend: plain data in, token ids and logits out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rewake.planes import PagePlanes
from rewake.request import Logprobs, Sampling
from rewake.spec import ModelCacheSpec

__all__ = ["NOWHERE", "Backend", "Batch", "Output", "Row"]

NOWHERE = -1  # in a block table: no query of this step attends to it


@dataclass(frozen=True)
class Row:
    """One sequence's part of a step: `tokens` at positions `start`, `start + 1`, ...

    K/V of positions from `first_append` on are appended; those before are stored already. `tables` has, for each slot of
    a page (`PagePlanes`), its arena offsets in all pages of the sequence; `names` are what to call the pages in a trace. With
    `sampling`, the logits behind the last token are computed, and a token is drawn from the random stream `sampler` (the sequence's).
    """

    tokens: tuple[int, ...]
    start: int
    first_append: int
    tables: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    sampler: str
    sampling: Sampling | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Batch:
    """One step: all its rows go through the model in one forward."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Output:
    """A token for each row with `sampling`, in order, and the logits [rows with sampling, vocab] it was drawn from.

    `logprobs` are those of the rows that ask for them, by the number of the token.
    """

    tokens: tuple[int, ...]
    logits: npt.NDArray[np.float32]
    logprobs: Mapping[int, Logprobs] = field(default_factory=dict)


class Backend(Protocol):
    """A loaded model and the arena its pages lie in."""

    spec: ModelCacheSpec
    planes: PagePlanes
    arena: npt.NDArray[np.uint8]

    def forward(self, batch: Batch) -> Output: ...

    def warm_up(self) -> None:
        """Called once, while no page is in use."""
        ...

    def forget_sampler(self, sampler: str) -> None:
        """The sequence is over: its random stream is no longer needed."""
        ...

    def facts(self) -> dict[str, Any]:
        """All that the content of a page depends on, for the signature."""
        ...

    def describe(self) -> dict[str, str]:
        """For people: what runs, and why."""
        ...
