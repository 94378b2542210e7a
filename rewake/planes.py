"""What a page consists of: planes, each with a rule for how long it is needed. Knows bytes and positions; no tensors, no arena.

    page    | plane "full": 3 layers | plane "sliding": 15 layers, needed up to a window behind the page     |
    slots   | 3 layers               | 3 layers | 3 layers | 3 layers | 3 layers | 3 layers                 |

A plane takes whole slots of the arena, which are all of one size: as many layers as the numbers of layers of all planes have
as their greatest common divisor. On disk it is a file of its own, so that what is needed of a page can be read and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rewake.quant import PAGE_TOKENS, Codec, PageLayout

__all__ = ["PagePlanes", "Plane", "slot_bytes"]

ALIGNMENT = 4096  # a slot starts on a memory page, as its data do in their file

Bytes = npt.NDArray[np.uint8]


def slot_bytes(num_bytes: int) -> int:
    """What a slot for so many bytes takes of the arena."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Plane:
    """Some layers of every page. `slot` is what one slot holds of it.

    `reach`: queries at positions below the page's end + `reach` attend to it; None: all later ones do. `reach_of_first`: the same
    for a transcript's first page. `keeps_segments`: rows that were saved before a page was full stay in the files they are in.
    """

    kind: str
    layers: tuple[int, ...]
    slot: PageLayout
    reach: int | None
    reach_of_first: int | None
    keeps_segments: bool = False

    @property
    def num_slots(self) -> int:
        return len(self.layers) // self.slot.layers

    def num_bytes(self, rows: int = PAGE_TOKENS) -> int:
        return self.num_slots * self.slot.with_rows(rows).page_bytes

    def is_needed(self, page: int, position: int) -> bool:
        """Whether a query at `position`, or a later one, attends to this plane of page number `page`."""
        reach = self.reach_in(page)
        return reach is None or position < (page + 1) * PAGE_TOKENS + reach

    def reach_in(self, page: int) -> int | None:
        return self.reach if page else self.reach_of_first

    def first_needed(self, position: int) -> int:
        """The first page of which this is needed by queries from `position` on, whatever holds for page 0."""
        return 0 if self.reach is None else max(0, (position - self.reach) // PAGE_TOKENS)

    def num_needed(self, first: int, end: int, position: int) -> int:
        """Of how many of the pages [first, end) it is needed by queries from `position` on."""
        first_needed = self.first_needed(position)
        return max(0, end - max(first, first_needed)) + (first == 0 < min(end, first_needed) and self.is_needed(0, position))

    def most_pages(self, step: int) -> float:
        """How many pages a sequence ever needs this of at once, where a step computes up to `step` tokens."""
        if self.reach is None:
            return float("inf")
        return -(-(self.reach + step) // PAGE_TOKENS) + 1 + (self.reach_of_first != self.reach)

    def copy_rows(self, slots: list[Bytes], first: int, segment: Bytes, rows: int, *, out: bool) -> None:
        """Move rows [first, first + rows) between the plane's slots and a segment of `rows` rows: out of the slots, or into them."""
        for slot, part in zip(slots, self.split(segment, rows), strict=True):
            self.slot.copy_rows(slot, first, part, rows, out=out)

    def split(self, data: Bytes, rows: int = PAGE_TOKENS) -> Iterator[Bytes]:
        """What of the plane's bytes each slot holds."""
        size = self.slot.with_rows(rows).page_bytes
        return (data[i * size : (i + 1) * size] for i in range(self.num_slots))


@dataclass(frozen=True)
class PagePlanes:
    """All planes of a page; those that are needed for ever come first. The first one is there whenever the page is remembered."""

    planes: tuple[Plane, ...]

    @classmethod
    def single(cls, layout: PageLayout) -> PagePlanes:
        """A page that is one plane, needed for ever."""
        return cls((Plane("full", tuple(range(layout.layers)), layout, None, None),))

    @property
    def codec(self) -> Codec:
        return self.planes[0].slot.codec

    @property
    def group_size(self) -> int:
        return self.planes[0].slot.group_size

    @cached_property
    def all(self) -> tuple[int, ...]:
        """The numbers of all planes."""
        return tuple(range(len(self.planes)))

    @cached_property
    def fleeting(self) -> tuple[int, ...]:
        """The numbers of those that are not needed for ever, at least of later pages."""
        return tuple(i for i in self.all if self.planes[i].reach is not None)

    @cached_property
    def num_slots(self) -> int:
        return sum(plane.num_slots for plane in self.planes)

    @cached_property
    def slot_bytes(self) -> int:
        """What a slot takes of the arena, rounded up as its pool does."""
        return slot_bytes(max(plane.slot.page_bytes for plane in self.planes))

    @cached_property
    def page_bytes(self) -> int:
        return sum(plane.num_bytes() for plane in self.planes)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers; without its residuals, if it has some while it is young."""
        return sum(plane.num_bytes() for plane in self.base) // PAGE_TOKENS

    @property
    def base(self) -> tuple[Plane, ...]:
        """Those that hold codes; the others hold residuals, slot by slot for the same layers."""
        return tuple(plane for plane in self.planes if not plane.slot.residuals)

    def needed(self, page: int, position: int) -> tuple[int, ...]:
        """The planes of page number `page` that queries from `position` on attend to."""
        return tuple(i for i in self.all if self.planes[i].is_needed(page, position))

    def slots_of(self, planes: tuple[int, ...]) -> int:
        return sum(self.planes[i].num_slots for i in planes)

    def slots_held(self, tokens: int) -> int:
        """Slots that an agent of `tokens` tokens needs to go on with the next one."""
        position = max(0, tokens - 1)  # the last token is computed again, over its stored row
        return sum(self.slots_of(self.needed(page, position)) for page in range(-(-tokens // PAGE_TOKENS)))

    def residual_of(self, plane: int) -> int | None:
        """The number of the plane that has the residuals of the codes in this one."""
        base = len(self.base)
        return base + plane if plane < base < len(self.planes) else None

    def codes_of(self, plane: int) -> int | None:
        """The number of the plane whose codes the residuals in this one refine."""
        base = len(self.base)
        return plane - base if plane >= base else None

    def layer_places(self) -> dict[int, tuple[int, int]]:
        """Where each of the model's layers lies: the number of its slot in the page, and its place in there."""
        places, first = {}, 0
        for plane in self.base:
            for i, layer in enumerate(plane.layers):
                places[layer] = first + i // plane.slot.layers, i % plane.slot.layers
            first += plane.num_slots
        return places
