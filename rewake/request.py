"""What a request is once HTTP is behind it: plain frozen data that travels between the threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rewake.errors import RequestError

__all__ = ["Done", "Event", "Failed", "FinishReason", "Generated", "Match", "MatchKind", "Request", "Sampling"]

MatchKind = Literal["exact", "extend", "diverge", "miss"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True)
class Request:
    """One generation: `prompt` token ids in, at most `max_tokens` out, events to `emit` from the engine thread."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    emit: Callable[[Event], None] = field(repr=False)
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()
    namespace: str = "default"
    agent: str | None = None
    deadline: float | None = None  # time.monotonic() at which it is given up
    arrived: float = field(default_factory=time.perf_counter, compare=False)


@dataclass(frozen=True)
class Match:
    """What was remembered of a prompt. `reused_tokens` includes `loaded_tokens`; reused + computed = prompt."""

    kind: MatchKind
    prompt_tokens: int
    reused_tokens: int
    loaded_tokens: int = 0
    first_difference: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None  # token index, stored ids, given ids

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens


@dataclass(frozen=True)
class Generated:
    """One sampled token; a token that ends the answer is not among them."""

    token: int


@dataclass(frozen=True)
class Done:
    """The answer is complete and, where `saved`, committed to disk."""

    reason: FinishReason
    match: Match
    num_generated: int
    saved: bool


@dataclass(frozen=True)
class Failed:
    """The request got no (complete) answer."""

    error: RequestError


Event = Generated | Done | Failed
