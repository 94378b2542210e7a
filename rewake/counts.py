"""What the engine counts since its start, for a monitor. Knows numbers only; belongs to the engine's thread."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from rewake.request import Match

__all__ = ["Counts", "Histogram"]

TTFT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STEP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Histogram:
    """How often a value was at most each of `bounds`, how often at all, and the sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._in = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._in[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._in)

    def cumulative(self) -> list[int]:
        """One number for each bound, and the count."""
        total, sums = 0, []
        for number in self._in:
            total += number
            sums.append(total)
        return sums


@dataclass
class Counts:
    """Tokens of prompts are counted when a request is matched: reused includes loaded, and what is not reused is to be computed."""

    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_SECONDS))  # from a request's arrival to its first token
    steps: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    matches: Counter[str] = field(default_factory=Counter)  # by kind
    prompt_tokens: int = 0
    reused_tokens: int = 0
    loaded_tokens: int = 0
    step_tokens: int = 0  # rows that steps have computed, prompts' and answers'
    generated_tokens: int = 0

    def matched(self, match: Match) -> None:
        self.matches[match.kind] += 1
        self.prompt_tokens += match.prompt_tokens
        self.reused_tokens += match.reused_tokens
        self.loaded_tokens += match.loaded_tokens

    def computed(self, seconds: float, num_tokens: int, num_sampled: int) -> None:
        """A step is over."""
        self.steps.observe(seconds)
        self.step_tokens += num_tokens
        self.generated_tokens += num_sampled
