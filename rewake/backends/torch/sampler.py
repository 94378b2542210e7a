"""Drawing the next token. Each sequence has a random stream of its own, so that its draws do not depend on others."""

from __future__ import annotations

import torch
from torch import Tensor

from rewake.request import Sampling

__all__ = ["Sampler"]


COLDEST = 1e-5  # below, the best token is all there is, and quotients overflow
LEAST_TOP_P = 1e-9  # the best token is always in


class Sampler:
    """The random streams of all running sequences, by name."""

    def __init__(self) -> None:
        self._streams: dict[str, torch.Generator] = {}

    def sample(self, logits: Tensor, sampling: Sampling, stream: str) -> int:
        """One token from float32 logits [vocab]. Order: temperature, top-k, top-p (nucleus, arXiv 1904.09751)."""
        if sampling.temperature < COLDEST:
            return int(logits.argmax())
        scores, tokens = (logits / sampling.temperature).sort(descending=True, stable=True)
        if sampling.top_k:
            scores, tokens = scores[: sampling.top_k], tokens[: sampling.top_k]
        probabilities = scores.softmax(-1)
        if sampling.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.where(before < max(sampling.top_p, LEAST_TOP_P), 0)
        drawn = torch.multinomial(probabilities, 1, generator=self._stream(stream, sampling.seed))
        return int(tokens[drawn])

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
