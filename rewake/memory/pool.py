"""The arena's slots: which are free and which are taken. Knows byte offsets; nothing of what is in a slot."""

from __future__ import annotations

from rewake.planes import slot_bytes

__all__ = ["PagePool"]


class PagePool:
    """Fixed slots in an arena of `arena_bytes`, never more. A slot is named by its byte offset.

    arena   | slot 0 | slot 1 | slot 2 | ... | rest too small for a slot |
    """

    def __init__(self, arena_bytes: int, num_bytes: int) -> None:
        self.slot_bytes = slot_bytes(num_bytes)
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
