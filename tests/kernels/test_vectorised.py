"""The torch version, which stands in where nothing was compiled, against numpy in float64."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from rewake.backends.torch.kernels.vectorised import VectorisedKernels

from .strategies import TOLERANCE, bounded, latent_shapes, shapes
from .world import Shape, World, error_of, make, store_by_kernel, store_by_reference


def error(world: World) -> float:
    return error_of(world, VectorisedKernels().attend(world.arena, world.layouts, world.batch, world.layer, world.q))


@bounded(60)
@given(shape=shapes())
def test_attention_agrees_with_float64_over_the_decoded_values(shape: Shape) -> None:
    world = make(replace(shape, bf16=False))
    store_by_reference(world)
    assert error(world) < TOLERANCE


@bounded(10)
@given(shape=latent_shapes())
def test_attention_to_a_latent_agrees_with_float64(shape: Shape) -> None:
    world = make(replace(shape, bf16=False))
    store_by_reference(world)
    assert error(world) < TOLERANCE


@bounded(30)
@given(shape=shapes())
def test_what_it_appends_is_what_it_attends_to(shape: Shape) -> None:
    world = make(replace(shape, bf16=False))
    store_by_kernel(world, VectorisedKernels())
    assert error(world) < TOLERANCE
