"""Measures a model: the mean of K, which it is centred by, and what each codec loses on a text.

The text is the model's own by default: what it writes is what its cache will hold, and nobody has to supply it (as in
LLM-QAT, arXiv 2305.17888). It costs one bf16 pass for the mean, and one pass for each codec.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from rewake.backends.base import Batch, Row
from rewake.backends.torch.loader import LoadedModel
from rewake.backends.torch.measure import CHUNK, Scores, arena_bytes, compare, prompt_row, read_k, tables_of
from rewake.backends.torch.model import TorchBackend
from rewake.calibration import Calibration, Loss
from rewake.errors import ModelError
from rewake.quant import CODINGS, PAGE_TOKENS, decode, encode, hadamard
from rewake.request import Sampling

__all__ = ["calibrate", "cut", "k_mean", "write_documents"]

DOCUMENTS, LENGTH = 16, PAGE_TOKENS  # of the model's own writing: a page each, and all of them a step of 16 rows
TOKENS = DOCUMENTS * LENGTH  # of a given text, too
WINDOW = 2048  # tokens that are measured as one context
LEAST = 256  # tokens: fewer say nothing
TEMPERATURE, TOP_P, SEED = 1.0, 0.95, 7
MEASURED = ("q4", "q4+", "q4:32", "k8v4", "q8")

Say = Callable[[str], None]


def calibrate(loaded: LoadedModel, text: Sequence[int] | None, name: str, say: Say) -> Calibration:
    """Measure `loaded` on the token ids of a text called `name`, or on its own writing. Raises ModelError for a text that is too short."""
    torch.set_num_threads(loaded.threads)
    if text is None:
        say(f"{DOCUMENTS} documents of {LENGTH} tokens are written by the model ...")
        text, name = write_documents(loaded, DOCUMENTS, LENGTH), f"{TOKENS} tokens of its own writing"
        first: list[int] = []  # each document has it
    elif len(text) < LEAST:
        raise ModelError(f"{name} has {len(text)} tokens: at least {LEAST} are needed, and {TOKENS} are used")
    else:
        text, name, first = text[:TOKENS], f"{min(len(text), TOKENS)} tokens of {name}", begin(loaded)
    windows = list(cut(text, min(WINDOW, loaded.spec.max_positions - 1), first))
    say(f"The mean of K, and what {', '.join(MEASURED)} lose on {name} ...")
    mean = fit_sink(k_mean(loaded, windows), first_k(loaded, windows[0]))
    return Calibration(loaded.fingerprint, mean, losses(loaded, mean, windows), name)


def cut(text: Sequence[int], window: int, first: Sequence[int]) -> Iterator[Sequence[int]]:
    """Windows of one token more than are computed, as the last one's successor is scored, too; each begins with `first`."""
    for start in range(0, len(text) - 1, window):
        part = [*first, *text[start : start + window + 1 - len(first)]]
        if len(part) > LEAST or start == 0:
            yield part


def write_documents(loaded: LoadedModel, documents: int, length: int) -> list[int]:
    """Texts by the model, one behind the other: each begins with its first token, if it has one, and a random one."""
    backend = plain(loaded, documents)
    rng = random.Random(SEED)
    texts = [[*begin(loaded), rng.randrange(loaded.spec.vocab_size)] for _ in range(documents)]
    start = 0
    while len(texts[0]) < length:
        rows = tuple(own_row(backend, i, text[start:], start) for i, text in enumerate(texts))
        start = len(texts[0])
        for text, token in zip(texts, backend.forward(Batch(rows)).tokens, strict=True):
            text.append(token)
    return [token for text in texts for token in text]


def begin(loaded: LoadedModel) -> list[int]:
    return [] if loaded.first_token is None else [loaded.first_token]


def own_row(backend: TorchBackend, number: int, tokens: Sequence[int], start: int) -> Row:
    sampling = Sampling(temperature=TEMPERATURE, top_p=TOP_P, seed=SEED + number)
    return Row(tuple(tokens), start, start, tables_of(backend, [number]), (str(number),), str(number), sampling)


def k_mean(loaded: LoadedModel, windows: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
    """The mean over all tokens of K as it is cached, after RoPE: [layers, kv_heads, k_dim]."""
    backend = plain(loaded, num_pages(windows))
    total, tokens = np.zeros((0,)), 0
    for window in windows:
        computed = window[:-1]
        for start in range(0, len(computed), CHUNK):
            backend.forward(Batch((prompt_row(backend, computed[start : start + CHUNK], start),)))
        total = read_k(backend, len(computed)).sum(2, dtype=np.float64) + (total if tokens else 0)
        tokens += len(computed)
    return np.ascontiguousarray(total / tokens, np.float32)


def first_k(loaded: LoadedModel, window: Sequence[int]) -> npt.NDArray[np.float32]:
    """K of a prompt's first token, [layers, kv_heads, k_dim]: the model's own first token, if it has one, else the window's."""
    backend = plain(loaded, 1)
    backend.forward(Batch((prompt_row(backend, (begin(loaded) or window)[:1], 0),)))
    return read_k(backend, 1)[:, :, 0]


def fit_sink(mean: npt.NDArray[np.float32], first: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Move `mean` by less than a step of 4 bits, so that `first` lies on the very values its code stands for.

    Every query attends to the first token, and much (an attention sink, arXiv 2309.17453), so that the error of its one row of K
    shifts all of them; and behind the first layers that row is nearly the same whatever the text. What coding it loses is
    put into the mean instead: the other rows do not notice. Four bits in groups of 64 are what this is for.
    """
    codec, group = CODINGS["q4"]
    dim = mean.shape[-1]
    rotation = hadamard(dim)
    moved = mean.astype(np.float64)
    for _ in range(3):  # the second round is for what rounding the first one's scale and bias has left
        rotated = np.asarray((first - moved) @ rotation, np.float32)
        moved += (rotated - decode(*encode(rotated, codec.k_bits, group), codec.k_bits, group, dim)) @ rotation
    return np.ascontiguousarray(moved, np.float32)


def losses(loaded: LoadedModel, mean: npt.NDArray[np.float32], windows: Sequence[Sequence[int]]) -> dict[str, Loss]:
    backends = {"bf16": plain(loaded, num_pages(windows))}
    for coding in MEASURED:
        codec, group = CODINGS[coding]
        memory = arena_bytes(loaded.spec, codec, group, num_pages(windows))
        backends[coding] = TorchBackend(loaded, codec.name, memory, group, mean)
    scores: dict[str, list[Scores]] = {name: [] for name in backends}
    for window in windows:
        for name, part in compare(backends, window).items():
            scores[name].append(part)
    joined = {name: Scores.join(parts) for name, parts in scores.items()}
    return {name: loss(joined[name], joined["bf16"]) for name in MEASURED}


def loss(scores: Scores, reference: Scores) -> Loss:
    differences = scores.nll - reference.nll
    error = 1.96 * float(differences.std()) / len(differences) ** 0.5
    return Loss(scores.loss(reference), error, float(scores.kl.mean()), float(scores.agree.mean()))


def plain(loaded: LoadedModel, pages: int) -> TorchBackend:
    codec, group = CODINGS["bf16"]
    return TorchBackend(loaded, codec.name, arena_bytes(loaded.spec, codec, group, pages), group)


def num_pages(windows: Sequence[Sequence[int]]) -> int:
    return -(-max(map(len, windows)) // PAGE_TOKENS)
