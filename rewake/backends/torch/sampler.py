"""Drawing the next token. Each sequence has a random stream of its own, so that its draws do not depend on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, default_rng

from rewake.backends.torch.kernels.base import F32, I64
from rewake.request import Constraint, Logprobs, Sampling

__all__ = ["Sampler", "logprobs_of"]

COLDEST = 1e-5  # below, the best token is all there is, and quotients overflow
LEAST_TOP_P = 1e-9  # the best token is always in


@dataclass
class Stream:
    """What one sequence's draws depend on beside the logits: its random numbers, and the tokens drawn before."""

    random: Generator
    seen: Counter[int] = field(default_factory=Counter)


class Sampler:
    """The streams of all running sequences, by name."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def sample(self, logits: F32, rows: Sequence[tuple[Sampling, str]]) -> list[int]:
        """A token for each row of float32 logits [rows, vocab], by its `Sampling` and the stream it draws from.

        Order: bias, penalties, constraint, temperature, top-k, top-p (nucleus, arXiv 1904.09751). Raises ArithmeticError if a constraint
        allows nothing; no stream has moved then.
        """
        scores = self._adjust(logits, rows)
        tokens: list[int] = scores.argmax(-1).tolist()
        for i, (sampling, name) in enumerate(rows):
            if sampling.temperature >= COLDEST:
                tokens[i] = self._draw(softmax(scores[i] / np.float32(sampling.temperature)), sampling, name)
        for token, (sampling, name) in zip(tokens, rows, strict=True):
            self._take(token, sampling, name)
        return tokens

    def _adjust(self, logits: F32, rows: Sequence[tuple[Sampling, str]]) -> F32:
        """The logits with bias, penalties and constraints; the given ones stay what they are."""
        bound = [i for i, (sampling, _) in enumerate(rows) if sampling.constraint is not None]
        changed = [i for i, (sampling, _) in enumerate(rows) if sampling.logit_bias or has_penalties(sampling)]
        if not bound and not changed:
            return logits
        scores = logits.copy()
        for i in changed:
            sampling, name = rows[i]
            self._shift(scores[i], sampling, name)
        if bound:
            allowed = masks([c for i in bound if (c := rows[i][0].constraint) is not None], logits.shape[-1])
            scores[bound] = np.where(allowed, scores[bound], np.float32(-np.inf))
        return scores

    def _shift(self, scores: F32, sampling: Sampling, name: str) -> None:
        """Bias and penalties (as OpenAI documents them), in place."""
        if sampling.logit_bias:
            biased, biases = zip(*sampling.logit_bias, strict=True)
            scores[list(biased)] += np.array(biases, np.float32)
        stream = self._streams.get(name)
        if stream is not None and stream.seen and has_penalties(sampling):
            counts = np.array(list(stream.seen.values()), np.float32)
            scores[list(stream.seen)] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * counts

    def _draw(self, probabilities: F32, sampling: Sampling, stream: str) -> int:
        weights, tokens = candidates(probabilities, sampling)
        sums = weights.cumsum(dtype=np.float64)
        drawn = self._stream(stream, sampling.seed).random.random() * sums[-1]
        at = int(sums.searchsorted(drawn, side="right"))
        if at == len(sums):  # rounded up to the sum: the last token that may be drawn, not one behind it that may not
            at = int(sums.searchsorted(sums[-1]))
        return int(tokens[at]) if tokens is not None else at

    def _take(self, token: int, sampling: Sampling, name: str) -> None:
        """It was drawn."""
        if has_penalties(sampling):
            self._stream(name, sampling.seed).seen[token] += 1
        if sampling.constraint is not None:
            sampling.constraint.take(token)

    def _stream(self, name: str, seed: int | None) -> Stream:
        if name not in self._streams:
            self._streams[name] = Stream(default_rng(None if seed is None else seed % 2**64))  # seeds may be negative
        return self._streams[name]

    def forget(self, name: str) -> None:
        self._streams.pop(name, None)


def has_penalties(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty)


def softmax(scores: F32) -> F32:
    powers = np.exp(scores - scores.max())
    probabilities: F32 = powers / powers.sum()
    return probabilities


def masks(constraints: Sequence[Constraint], vocab: int) -> npt.NDArray[np.bool_]:
    """Which tokens each of them allows: [constraints, vocab]. Raises ArithmeticError."""
    bits = np.zeros((len(constraints), -(-vocab // 32)), np.int32)
    for constraint, row in zip(constraints, bits, strict=True):
        constraint.allow(row)
    return np.unpackbits(bits.view(np.uint8), axis=1, count=vocab, bitorder="little").astype(bool)


def logprobs_of(logits: F32, tokens: Sequence[int], wanted: Sequence[int | None]) -> dict[int, Logprobs]:
    """For the rows of `logits` [rows, vocab] that want some: of the token chosen, and of so many of the likeliest."""
    found = {}
    for i, (token, count) in enumerate(zip(tokens, wanted, strict=True)):
        if count is not None:
            scores = logits[i].astype(np.float64)
            scores -= scores.max()
            scores -= np.log(np.exp(scores).sum())
            best = likeliest(scores, count)
            found[i] = Logprobs(float(scores[token]), tuple(zip(best.tolist(), scores[best].tolist(), strict=True)))
    return found


def candidates(probabilities: F32, sampling: Sampling) -> tuple[F32, I64 | None]:
    """Weights of the tokens that may be drawn, and which they are, best first; None: all of them in their order."""
    if sampling.top_k:
        tokens = likeliest(probabilities, sampling.top_k)
        return nucleus(probabilities[tokens], sampling.top_p), tokens
    if sampling.top_p >= 1:
        return probabilities, None
    # all those that are less likely than this are together less than top-p leaves out; twice that, for what rounding does
    enough = np.flatnonzero(probabilities >= (1 - sampling.top_p) / (2 * len(probabilities)))
    tokens = enough[np.argsort(-probabilities[enough], kind="stable")]
    return nucleus(probabilities[tokens], sampling.top_p, total=1.0), tokens


def likeliest(values: npt.NDArray[np.floating], count: int) -> I64:
    """Where the `count` greatest are, best first; of equal ones, the first."""
    found = np.sort(np.argpartition(-values, min(count, len(values)) - 1)[:count])
    return found[np.argsort(-values[found], kind="stable")]


def nucleus(weights: F32, top_p: float, total: float | None = None) -> F32:
    """Weights, best first, without those behind `top_p` of the `total`."""
    before = (weights.cumsum(dtype=np.float64) - weights) / (weights.sum() if total is None else total)
    return np.where(before < max(top_p, LEAST_TOP_P), weights, np.float32(0))
