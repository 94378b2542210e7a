"""What a request is once HTTP is behind it: plain frozen data that travels between the threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from rewake.errors import RequestError

__all__ = [
    "Constraint",
    "Done",
    "Event",
    "Failed",
    "FinishReason",
    "Generated",
    "Logprobs",
    "Match",
    "MatchKind",
    "Request",
    "Sampling",
]

MatchKind = Literal["exact", "extend", "diverge", "miss"]
FinishReason = Literal["stop", "length", "cancelled"]


class Constraint(Protocol):
    """Which tokens may come next in one answer. It has a state: each request needs its own."""

    def allow(self, mask: npt.NDArray[np.int32]) -> None:
        """Write a bit for each token of the vocabulary, the first token's the lowest of the first word; set if it may come.

        Raises ArithmeticError if none may: the grammar has led into a dead end.
        """
        ...

    def take(self, token: int) -> None:
        """It has come."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 are off.

    `presence_penalty` is taken from the logits of tokens that the answer has already, `frequency_penalty` once for each time; `logit_bias`
    is added to those of (token, bias). `logprobs` is how many alternatives are reported beside the chosen token; None: nothing is.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    constraint: Constraint | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Request:
    """One generation: `prompt` token ids in, at most `max_tokens` out, events to `emit` from the engine thread.

    `watch` is told of each token there, too; once the answer is over with it, it says how many tokens of the answer are to be remembered.
    """

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
    watch: Callable[[int], int | None] | None = field(default=None, repr=False)


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
class Logprobs:
    """Natural logarithms of what the model gave: to the token that was chosen, and to the likeliest (token, logprob), best first.

    Of the model's own distribution, before temperature, penalties, bias and constraint.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Generated:
    """One sampled token; a token that ends the answer is not among them."""

    token: int
    logprobs: Logprobs | None = None


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
