"""Drawing the next token. Each sequence has a random stream of its own, so that its draws do not depend on others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rewake.request import Constraint, Logprobs, Sampling

__all__ = ["Sampler", "logprobs_of"]


COLDEST = 1e-5  # below, the best token is all there is, and quotients overflow
LEAST_TOP_P = 1e-9  # the best token is always in
LIKELY = 256  # so many best tokens hold the nucleus nearly always: sorting a whole vocabulary takes as long as a step


@dataclass
class Stream:
    """What one sequence's draws depend on beside the logits: its random numbers, and the tokens drawn before."""

    random: torch.Generator
    seen: Counter[int] = field(default_factory=Counter)


class Sampler:
    """The streams of all running sequences, by name."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def sample(self, logits: Tensor, rows: Sequence[tuple[Sampling, str]]) -> list[int]:
        """A token for each row of float32 logits [rows, vocab], by its `Sampling` and the stream it draws from.

        Order: bias, penalties, constraint, temperature, top-k, top-p (nucleus, arXiv 1904.09751). Raises ArithmeticError if a constraint
        allows nothing; no stream has moved then.
        """
        scores = self._adjust(logits, rows)
        tokens: list[int] = scores.argmax(-1).tolist()
        warm = [i for i, (sampling, _) in enumerate(rows) if sampling.temperature >= COLDEST]
        if warm:
            temperatures = torch.tensor([[rows[i][0].temperature] for i in warm], dtype=torch.float32)
            for i, probabilities in zip(warm, (scores[warm] / temperatures).softmax(-1), strict=True):
                tokens[i] = self._draw(probabilities, *rows[i])
        for token, (sampling, name) in zip(tokens, rows, strict=True):
            self._take(token, sampling, name)
        return tokens

    def _adjust(self, logits: Tensor, rows: Sequence[tuple[Sampling, str]]) -> Tensor:
        """The logits with bias, penalties and constraints; the given ones stay what they are."""
        bound = [i for i, (sampling, _) in enumerate(rows) if sampling.constraint is not None]
        changed = [i for i, (sampling, _) in enumerate(rows) if sampling.logit_bias or has_penalties(sampling)]
        if not bound and not changed:
            return logits
        scores = logits.clone()
        for i in changed:
            sampling, name = rows[i]
            self._shift(scores[i], sampling, name)
        if bound:
            allowed = masks([c for i in bound if (c := rows[i][0].constraint) is not None], logits.shape[-1])
            scores[bound] = scores[bound].where(allowed, -torch.inf)
        return scores

    def _shift(self, scores: Tensor, sampling: Sampling, name: str) -> None:
        """Bias and penalties (as OpenAI documents them), in place."""
        if sampling.logit_bias:
            biased, biases = zip(*sampling.logit_bias, strict=True)
            scores[list(biased)] += torch.tensor(biases, dtype=torch.float32)
        stream = self._streams.get(name)
        if stream is not None and stream.seen and has_penalties(sampling):
            counts = torch.tensor(list(stream.seen.values()), dtype=torch.float32)
            scores[list(stream.seen)] -= sampling.presence_penalty + sampling.frequency_penalty * counts

    def _draw(self, probabilities: Tensor, sampling: Sampling, stream: str) -> int:
        weights, tokens = candidates(probabilities, sampling)
        sums = weights.cumsum(-1, dtype=torch.float64)
        drawn = torch.rand(1, generator=self._stream(stream, sampling.seed).random, dtype=torch.float64) * sums[-1]
        at = int(torch.searchsorted(sums, drawn, right=True))
        if at == len(sums):  # rounded up to the sum: the last token that may be drawn, not one behind it that may not
            at = int(torch.searchsorted(sums, sums[-1]))
        return int(tokens[at]) if tokens is not None else at

    def _take(self, token: int, sampling: Sampling, name: str) -> None:
        """It was drawn."""
        if has_penalties(sampling):
            self._stream(name, sampling.seed).seen[token] += 1
        if sampling.constraint is not None:
            sampling.constraint.take(token)

    def _stream(self, name: str, seed: int | None) -> Stream:
        if name not in self._streams:
            generator = torch.Generator()
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
            self._streams[name] = Stream(generator)
        return self._streams[name]

    def forget(self, name: str) -> None:
        self._streams.pop(name, None)


def has_penalties(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty)


def masks(constraints: Sequence[Constraint], vocab: int) -> Tensor:
    """Which tokens each of them allows: bool [constraints, vocab]. Raises ArithmeticError."""
    bits = np.zeros((len(constraints), -(-vocab // 32)), np.int32)
    for constraint, row in zip(constraints, bits, strict=True):
        constraint.allow(row)
    return torch.from_numpy(np.unpackbits(bits.view(np.uint8), axis=1, count=vocab, bitorder="little").astype(bool))


def logprobs_of(logits: Tensor, tokens: Sequence[int], wanted: Sequence[int | None]) -> dict[int, Logprobs]:
    """For the rows of `logits` [rows, vocab] that want some: of the token chosen, and of so many of the likeliest."""
    found = {}
    for i, (token, count) in enumerate(zip(tokens, wanted, strict=True)):
        if count is not None:
            logprobs = logits[i].log_softmax(-1)
            values, ids = logprobs.topk(count)
            found[i] = Logprobs(float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
    return found


def candidates(probabilities: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Weights of the tokens that may be drawn, and which they are, best first; None: all of them in their order."""
    if sampling.top_k:
        weights, tokens = probabilities.topk(min(sampling.top_k, len(probabilities)))
        return nucleus(weights, sampling.top_p), tokens
    if sampling.top_p >= 1:
        return probabilities, None
    weights, tokens = probabilities.topk(min(LIKELY, len(probabilities)))
    if weights.sum() < sampling.top_p:
        weights, tokens = probabilities.sort(descending=True, stable=True)
    return nucleus(weights, sampling.top_p, total=1.0), tokens


def nucleus(weights: Tensor, top_p: float, total: float | None = None) -> Tensor:
    """Weights, best first, without those behind `top_p` of the `total`."""
    before = (weights.cumsum(-1) - weights) / (weights.sum() if total is None else total)
    return weights.where(before < max(top_p, LEAST_TOP_P), 0)
