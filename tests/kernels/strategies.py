"""Random shapes of steps, around page and window edges."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from .world import Shape

TOLERANCE = 2e-3  # of the output's largest value
LENGTHS = (1, 2, 31, 63, 64, 65, 100, 255, 256, 257, 511, 512, 513, 600, 1025)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """(tokens, query rows): decode steps, next turns, whole prompts, and sequences that take no part."""
    seqs = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.sampled_from(LENGTHS))
        rows = draw(st.sampled_from((0, 1, 1, 1, 2, 7, 16, 64, length)))
        seqs.append((length, min(rows, length)))
    return tuple(seqs) if draw(st.booleans()) else (*seqs, (0, 0))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    k_dim, v_dim = draw(st.sampled_from(((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (8, 8), (24, 40))))
    return Shape(
        kv_heads=draw(st.integers(1, 3)),
        share=draw(st.integers(1, 16)),
        k_dim=k_dim,
        v_dim=v_dim,
        group=draw(st.sampled_from((64, 32))),
        codecs=draw(st.sampled_from((("q4",), ("q4+",), ("q4+",), ("k8v4",), ("q8",), ("q4", "q8"), ("q4", "k8v4", "q8"), ("bf16",)))),
        seqs=draw(sequences()),
        window=draw(st.sampled_from((None, None, 1, 63, 64, 255, 256, 257, 512))),
        soft_cap=draw(st.sampled_from((None, None, 2.0, 50.0))),
        sinks=draw(st.booleans()),
        mean=draw(st.booleans()),
        bf16=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def latent_shapes(draw: st.DrawFn) -> Shape:
    k_dim, v_dim = draw(st.sampled_from(((576, 512), (576, 512), (80, 64), (48, 33))))
    return replace(draw(shapes()), kv_heads=1, k_dim=k_dim, v_dim=v_dim, latent=True)


def bounded(examples: int) -> settings:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)
