"""A request at work: its tokens, the pages it holds, and how far it has come. Belongs to the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from rewake.memory.tree import Branch, Page
from rewake.quant import PAGE_TOKENS
from rewake.request import Match, Request

__all__ = ["Sequence"]


@dataclass(eq=False)
class Sequence:
    """`tokens` are the prompt and what was generated; K/V of the first `num_stored` of them lie in pages.

    | page | page | page | branch page | spare slot ...          (slots)
    |<--- pages (full) --->|<- branch.num_rows ->|
    """

    request: Request
    match: Match
    branch: Branch
    pages: list[Page]
    tokens: list[int]
    num_stored: int
    num_reserved: int
    spare_slots: list[int] = field(default_factory=list)
    num_generated: int = 0
    rank: int = 0  # see scheduler.Need

    @property
    def next_position(self) -> int:
        """The first position to compute. The last token is always computed, even if its K/V is stored."""
        return min(self.num_stored, len(self.tokens) - 1)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.next_position

    @property
    def is_prefilling(self) -> bool:
        """Whether no token has been generated yet."""
        return self.num_generated == 0

    @property
    def page_start(self) -> int:
        """The position of the first row of the branch's page."""
        return len(self.pages) * PAGE_TOKENS

    def slots(self) -> list[int]:
        """The slots of all its pages, in order."""
        own = [] if self.branch.slot is None else [self.branch.slot, *self.spare_slots]
        return [page.slot for page in self.pages if page.slot is not None] + own

    def page_names(self) -> list[str]:
        """Names of the same pages that hold across eviction, restart and replay."""
        first = len(self.pages)
        own = 0 if self.branch.slot is None else 1 + len(self.spare_slots)
        return [page.key.hex() for page in self.pages] + [f"{self.branch.id}:{first + i}" for i in range(own)]
