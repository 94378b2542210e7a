"""Whether pages are read back or computed again, by what both have taken here so far. Knows rates; reads nothing."""

from __future__ import annotations

from collections import deque

__all__ = ["LoadGate"]

WEIGHT = 0.2  # of the latest measurement
RECENT = 8  # reads, of which the fastest is what one takes that has the machine for itself
FORGET = 0.9  # a disk that was too slow is tried again, after some refusals: it may have been asleep


class LoadGate:
    """Seconds a byte to read, seconds a token to compute: moving averages. None until measured, and then reading is tried.

    `always` reads whatever it takes: for a backend that computes nothing.
    """

    def __init__(self) -> None:
        self.always = False
        self.read_cost: float | None = None
        self.compute_cost: float | None = None
        self._recent: deque[float] = deque(maxlen=RECENT)

    def note_read(self, num_bytes: int, seconds: float) -> None:
        if num_bytes:  # else its files were found damaged while it was read
            self.read_cost = average(self.read_cost, seconds / num_bytes)
            self._recent.append(seconds / num_bytes)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        self.compute_cost = average(self.compute_cost, seconds / num_tokens)

    def soonest(self, num_bytes: int) -> float:
        """Seconds that reading takes while nothing is computed. Reads beside a step take longer; they do not say how much."""
        return num_bytes * min(self._recent, default=0.0)

    def pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether reading `num_bytes` takes less time than computing the `num_tokens` that are in them."""
        if (
            self.always
            or self.read_cost is None
            or self.compute_cost is None
            or num_bytes * self.read_cost <= num_tokens * self.compute_cost
        ):
            return True
        self.read_cost *= FORGET
        return False


def average(so_far: float | None, latest: float) -> float:
    return latest if so_far is None else so_far + WEIGHT * (latest - so_far)
