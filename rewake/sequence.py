"""A request at work: its tokens, the pages it holds, and how far it has come. Belongs to the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from rewake.backends.base import NOWHERE
from rewake.memory.tree import Branch, Page
from rewake.planes import PagePlanes
from rewake.quant import PAGE_TOKENS
from rewake.request import Match, Request

__all__ = ["Sequence"]


@dataclass(eq=False)
class Sequence:
    """`tokens` are the prompt and what was generated; K/V of the first `num_stored` of them lie in pages.

    | page | page | page | branch page | spare page ...          each a list of slots; some planes of early pages are let go
    |<--- pages (full) --->|<- branch.num_rows ->|

    Of its pages it holds what queries from `held_from` on need. It has grown all those from number `first_grown` on; `num_to_grow`
    are still reserved for it. `lent` are planes of pages it has grown and let go that others held then.
    """

    request: Request
    match: Match
    branch: Branch
    pages: list[Page]
    tokens: list[int]
    num_stored: int
    held_from: int
    first_grown: int
    num_to_grow: int
    spare: list[dict[int, tuple[int, ...]]] = field(default_factory=list)
    lent: list[tuple[Page, int]] = field(default_factory=list)
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

    @property
    def num_pages(self) -> int:
        return len(self.pages) + (1 + len(self.spare) if self.branch.slots else 0)

    def tables(self, planes: PagePlanes) -> tuple[tuple[int, ...], ...]:
        """For each slot of a page, where it is of each of its pages, in order; NOWHERE for what no query needs."""
        own = [self.branch.slots, *self.spare] if self.branch.slots else []
        columns: list[tuple[int, ...]] = []
        for number, plane in enumerate(planes.planes):
            nowhere = (NOWHERE,) * plane.num_slots
            columns += zip(*(slots.get(number, nowhere) for slots in (*(page.slots for page in self.pages), *own)), strict=True)
        return tuple(columns)

    def page_names(self) -> list[str]:
        """Names of the same pages that hold across eviction, restart and replay."""
        first = len(self.pages)
        return [page.key.hex() for page in self.pages] + [f"{self.branch.id}:{i}" for i in range(first, self.num_pages)]
