"""What is dropped first. Two shelves: slots of the arena, and branches on disk. Knows worth and order; drops nothing itself."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["ByValue", "worth"]

T = TypeVar("T")


class ByValue(Generic[T]):
    """Cached things in the order in which they should go: GreedyDual-Size (Cao and Irani, 1997), all of one size.

    A thing's priority is its cost when it was last used, plus the priority of what has gone last: so what is cheap to have
    back goes before what is dear, what was used long ago before what was used just now, and nothing stays for ever
    but what costs infinitely much: that goes when there is nothing else.
    """

    def __init__(self) -> None:
        self._entries: dict[T, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, T]] = []
        self._last_gone = 0.0
        self._count = 0

    def add(self, thing: T, cost: float) -> None:
        self._count += 1  # among equals, the least recently used goes first
        entry = (self._last_gone + cost, self._count)
        self._entries[thing] = entry
        heapq.heappush(self._heap, (*entry, thing))
        if len(self._heap) > 4 * len(self._entries) + 64:
            self._heap = [(*e, t) for t, e in self._entries.items()]
            heapq.heapify(self._heap)

    def remove(self, thing: T) -> None:
        """Take it off the shelf; nothing happens if it is not there."""
        self._entries.pop(thing, None)

    def first_to_go(self) -> T:
        """There must be one. The caller drops it."""
        while True:
            priority, count, thing = self._heap[0]
            if self._entries.get(thing) == (priority, count):
                if priority < math.inf:
                    self._last_gone = priority
                return thing
            heapq.heappop(self._heap)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, thing: object) -> bool:
        return thing in self._entries

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._entries))


def worth(tokens: int, own_bytes: int, idle_seconds: float, *, anonymous: bool, is_head: bool) -> float:
    """What keeping a branch on disk is worth for each byte: the work it saves, times how likely it is to be asked for.

    Work grows with the tokens, and with attention over them (at 8,000 tokens it has doubled); the chance to be used again
    falls with the time since the last use. Who does not say who they are seldom comes back; nor does an older branch.
    """
    work = tokens * (1 + tokens / 8000)
    chance = (0.1 if anonymous else 1.0) * (1.0 if is_head else 0.3) / (60 + idle_seconds)
    return work * chance / max(own_bytes, 1)
