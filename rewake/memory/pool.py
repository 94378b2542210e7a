"""The arena's page slots: which are free and which are taken. Knows byte offsets; nothing of what is in a slot."""

from __future__ import annotations

__all__ = ["PagePool", "slot_bytes"]

ALIGNMENT = 4096  # a page starts on a memory page, as its data does in its file


def slot_bytes(page_bytes: int) -> int:
    return -(-page_bytes // ALIGNMENT) * ALIGNMENT


class PagePool:
    """Fixed slots in an arena of `arena_bytes`, never more. A slot is named by its byte offset.

    arena   | slot 0 | slot 1 | slot 2 | ... | rest too small for a page |
    """

    def __init__(self, arena_bytes: int, page_bytes: int) -> None:
        self.slot_bytes = slot_bytes(page_bytes)
        self.num_slots = arena_bytes // self.slot_bytes
        self._free = [i * self.slot_bytes for i in reversed(range(self.num_slots))]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give(self, slot: int) -> None:
        assert slot % self.slot_bytes == 0 and slot not in self._free[-8:], f"slot {slot} given back twice"
        self._free.append(slot)

    def free_slots(self) -> frozenset[int]:
        return frozenset(self._free)
