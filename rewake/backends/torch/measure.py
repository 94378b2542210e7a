"""What a codec changes in a model's answers, measured by teacher forcing through the pages that serving uses.

A text goes through several backends of one loaded model side by side, in steps of a chunk as a prompt would, and each
backend's logits are compared with the first one's. Knows tokens and logits; nothing of where texts come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rewake.backends.base import Batch, Row
from rewake.backends.torch.model import TorchBackend
from rewake.quant import PAGE_TOKENS, Codec
from rewake.spec import ModelCacheSpec

__all__ = ["Scores", "arena_bytes", "compare", "prompt_row", "read_k", "tables_of"]

CHUNK = 512
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """Of each scored token: its negative log-likelihood, the KL divergence from the reference, and whether the best token is the same."""

    nll: F64
    kl: F64
    agree: npt.NDArray[np.bool_]

    @property
    def perplexity(self) -> float:
        return exp(self.nll.mean())

    @staticmethod
    def join(parts: Sequence[Scores]) -> Scores:
        return Scores(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("nll", "kl", "agree")))

    def loss(self, reference: Scores) -> float:
        """By how much perplexity is above the reference's: 0.01 is 1 %."""
        return exp((self.nll - reference.nll).mean()) - 1


def prompt_row(backend: TorchBackend, tokens: Sequence[int], start: int, sampler: str = "", first_page: int = 0) -> Row:
    """A row that appends `tokens` from position `start` on, in pages that lie one behind the other."""
    pages = range(first_page, first_page - (-(start + len(tokens)) // PAGE_TOKENS))
    return Row(tuple(tokens), start, start, tables_of(backend, pages), tuple(map(str, pages)), sampler)


def tables_of(backend: TorchBackend, pages: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Block tables of pages that lie one behind the other in the arena, by their numbers there."""
    planes = backend.planes
    return tuple(tuple((page * planes.num_slots + slot) * planes.slot_bytes for page in pages) for slot in range(planes.num_slots))


def arena_bytes(spec: ModelCacheSpec, codec: Codec, group: int, pages: int) -> int:
    """What an arena for so many pages takes."""
    planes = spec.planes(codec, group)
    return pages * planes.num_slots * planes.slot_bytes


def compare(backends: Mapping[str, TorchBackend], window: Sequence[int], chunk: int = CHUNK) -> dict[str, Scores]:
    """Score every token of `window` but its first under each backend; the first backend is the reference."""
    parts: dict[str, list[Scores]] = {name: [] for name in backends}
    for start in range(0, len(window) - 1, chunk):
        end = min(start + chunk, len(window) - 1)
        targets = torch.tensor(window[start + 1 : end + 1])
        reference = None
        for name, logits in forced(backends, window[start:end], start):
            reference = logits if reference is None else reference
            parts[name].append(score(logits, reference, targets))
    return {name: Scores.join(p) for name, p in parts.items()}


def forced(backends: Mapping[str, TorchBackend], tokens: Sequence[int], start: int) -> Iterator[tuple[str, Tensor]]:
    """Log-probabilities behind each of `tokens` under each backend."""
    for name, backend in backends.items():
        yield name, torch.from_numpy(backend.score(Batch((prompt_row(backend, tokens, start),)))).log_softmax(-1)


def score(logs: Tensor, reference: Tensor, targets: Tensor) -> Scores:
    """From log-probabilities [tokens, vocab]."""
    nll = -logs.gather(1, targets[:, None])[:, 0]
    kl = torch.zeros_like(nll) if logs is reference else divergence(reference, logs)
    agree = logs.argmax(-1) == reference.argmax(-1)
    return Scores(nll.double().numpy(), kl.double().numpy(), agree.numpy())


def divergence(reference: Tensor, logs: Tensor) -> Tensor:
    """Row by row: of a large vocabulary, one row is what caches hold."""
    return torch.stack([torch.dot(row.exp(), row - other) for row, other in zip(reference, logs, strict=True)])


def read_k(backend: TorchBackend, tokens: int, first_page: int = 0) -> npt.NDArray[np.float32]:
    """K of the first `tokens` positions that `backend`, of the codec bf16, has appended: [layers, kv_heads, tokens, k_dim]."""
    layout = backend.planes.planes[0].slot
    assert layout.codec.k_bits == 16
    num_pages = -(-tokens // PAGE_TOKENS)
    tables = tables_of(backend, range(first_page, first_page + num_pages))
    layers = []
    for _, (slot, place) in sorted(backend.planes.layer_places().items()):
        starts = [at + place * layout.layer_bytes for at in tables[slot]]
        pages = [backend.arena[at : at + layout.field_bytes(layout.fields[0])] for at in starts]
        bits = np.stack(pages).view(np.uint16).reshape(num_pages, layout.kv_heads, PAGE_TOKENS, layout.k_dim)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        layers.append(values.transpose(1, 0, 2, 3).reshape(layout.kv_heads, -1, layout.k_dim)[:, :tokens])
    return np.stack(layers)
