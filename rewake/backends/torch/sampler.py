"""Drawing the next token. Each sequence has a random stream of its own, so that its draws do not depend on others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rewake.request import Sampling

__all__ = ["Sampler"]


COLDEST = 1e-5  # below, the best token is all there is, and quotients overflow
LEAST_TOP_P = 1e-9  # the best token is always in
LIKELY = 256  # so many best tokens hold the nucleus nearly always: sorting a whole vocabulary takes as long as a step


class Sampler:
    """The random streams of all running sequences, by name."""

    def __init__(self) -> None:
        self._streams: dict[str, torch.Generator] = {}

    def sample(self, logits: Tensor, rows: Sequence[tuple[Sampling, str]]) -> list[int]:
        """A token for each row of float32 logits [rows, vocab], by its `Sampling` and the stream it draws from.

        Order: temperature, top-k, top-p (nucleus, arXiv 1904.09751).
        """
        tokens: list[int] = logits.argmax(-1).tolist()
        warm = [i for i, (sampling, _) in enumerate(rows) if sampling.temperature >= COLDEST]
        if warm:
            temperatures = torch.tensor([[rows[i][0].temperature] for i in warm], dtype=torch.float32)
            for i, probabilities in zip(warm, (logits[warm] / temperatures).softmax(-1), strict=True):
                tokens[i] = self._draw(probabilities, *rows[i])
        return tokens

    def _draw(self, probabilities: Tensor, sampling: Sampling, stream: str) -> int:
        weights, tokens = candidates(probabilities, sampling)
        sums = weights.cumsum(-1, dtype=torch.float64)
        drawn = torch.rand(1, generator=self._stream(stream, sampling.seed), dtype=torch.float64) * sums[-1]
        at = min(int(torch.searchsorted(sums, drawn, right=True)), len(sums) - 1)
        return int(tokens[at]) if tokens is not None else at

    def _stream(self, name: str, seed: int | None) -> torch.Generator:
        if name not in self._streams:
            generator = torch.Generator()
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
            self._streams[name] = generator
        return self._streams[name]

    def forget(self, name: str) -> None:
        self._streams.pop(name, None)


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
