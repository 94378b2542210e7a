"""The native kernels against numpy in float64, on every instruction set this machine has, each forced in turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

from rewake.backends.torch.kernels import native
from rewake.backends.torch.kernels.native import NativeKernels
from rewake.quant import PAGE_TOKENS, bf16_to_f32, f32_to_bf16, hadamard

from .strategies import TOLERANCE, bounded, latent_shapes, shapes
from .world import Shape, World, append_step, attend_by_reference, error_of, make, store_by_kernel, store_by_reference

if native.why_unavailable():
    pytest.skip(f"no native kernels: {native.why_unavailable()}", allow_module_level=True)


@pytest.fixture(params=native.isas(), scope="module")
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(request.param, 2)


def in_tiles(kernels: NativeKernels, shape: Shape) -> bool:
    """Whether a sequence of it is a prompt that tile registers take: queries, keys, weights and values are rounded to bfloat16."""
    return kernels.isa == "amx" and not shape.raw and shape.group == 64 and any(rows > 32 for _, rows in shape.seqs)


def tolerance(kernels: NativeKernels, shape: Shape) -> float:
    """Of the output's largest value."""
    return 2**-5 if in_tiles(kernels, shape) else TOLERANCE


def attend(world: World, kernels: NativeKernels) -> torch.Tensor:
    return kernels.attend(world.arena, world.layouts, world.batch, world.layer, world.q)


@bounded(100)
@given(shape=shapes())
def test_attention_agrees_with_float64_over_the_decoded_values(kernels: NativeKernels, shape: Shape) -> None:
    world = make(shape)
    store_by_reference(world)
    assert error_of(world, attend(world, kernels)) < tolerance(kernels, shape)


@pytest.mark.skipif("amx" not in native.isas(), reason="no tile registers here")
@bounded(60)
@given(shape=shapes())
def test_tile_registers_leave_sequences_of_few_rows_as_they_are(shape: Shape) -> None:
    """Bit for bit, also beside prompts."""
    world = make(shape)
    store_by_reference(world)
    tiled, others = (attend(world, NativeKernels(isa, 2)) for isa in ("amx", "avx512"))
    starts = world.batch.query_starts
    for seq, (_, rows) in enumerate(shape.seqs):
        if rows <= 32:
            assert torch.equal(tiled[starts[seq] : starts[seq + 1]], others[starts[seq] : starts[seq + 1]])


@pytest.mark.parametrize("codec", ["q4", "q8", "q4+"])
def test_values_far_from_zero_lose_no_more_than_others(kernels: NativeKernels, codec: str) -> None:
    """A prompt's values are rounded to bfloat16 in tile registers: not what they all have in common."""

    def error(offset: float) -> float:
        world = make(Shape(codecs=(codec,), seqs=((300, 300),)))
        world.v[0] += offset
        store_by_reference(world)
        return float(np.abs(attend(world, kernels).numpy() - attend_by_reference(world)).max())

    assert error(100) < 1.5 * error(0) + 1e-3


@pytest.mark.parametrize("codec", ["q4+", "q8"])
def test_keys_far_from_zero_lose_less_than_when_they_were_coded(kernels: NativeKernels, codec: str) -> None:
    """Without their mean, the rotation gathers what they have in common in one value, beside which the others' codes lie at an edge."""
    world = make(Shape(kv_heads=2, share=2, k_dim=128, v_dim=128, codecs=(codec,), mean=False, seqs=((600, 200),), seed=5))
    world.k[0] += 100
    store_by_reference(world)
    error = np.sqrt(np.mean((attend(world, kernels).numpy() - attend_by_reference(world)) ** 2))
    assert error < (0.04 if kernels.isa == "amx" else 1e-3)  # the codes err by 0.11 and 0.19


def test_weights_beside_a_sink_have_no_bias(kernels: NativeKernels) -> None:
    """A sink takes its share of the softmax unrounded: what tokens have in sum must not be smaller for being rounded."""
    world = make(Shape(kv_heads=2, share=2, codecs=("q8",), seqs=((600, 200),), sinks=True, seed=5))
    assert world.layer.sinks is not None
    world.layer.sinks[:] = 6.5
    world.v[0] += 3
    store_by_reference(world)
    want = attend_by_reference(world)
    assert abs((attend(world, kernels).numpy() * want).sum() / (want * want).sum() - 1) < 2e-4


@bounded(12)
@given(shape=latent_shapes())
def test_attention_to_a_latent_agrees_with_float64(kernels: NativeKernels, shape: Shape) -> None:
    world = make(shape)
    store_by_reference(world)
    assert error_of(world, attend(world, kernels)) < tolerance(kernels, shape)


@bounded(40)
@given(shape=shapes())
def test_appended_values_are_what_the_reference_codes(kernels: NativeKernels, shape: Shape) -> None:
    ours, reference = make(shape), make(shape)
    store_by_kernel(ours, kernels)
    store_by_reference(reference)
    for seq, (length, _) in enumerate(shape.seqs):
        for page in range(-(-length // PAGE_TOKENS)):
            got, want = ours.fields(seq, page), reference.fields(seq, page)
            rows = min(PAGE_TOKENS, length - page * PAGE_TOKENS)
            for name in got:
                if not name.startswith("k.") or shape.raw:
                    np.testing.assert_array_equal(got[name], want[name], name)  # not rotated, so bit for bit; nothing beside it touched
                else:
                    np.testing.assert_array_equal(got[name][:, rows:], want[name][:, rows:], name)
        if length and not shape.raw:
            # the rotations round differently, which can move a value across the border of two codes
            step = bf16_to_f32(
                np.max([reference.fields(seq, p)["k.scales"][:, : length - 256 * p].max() for p in range(-(-length // 256))])
            )
            off = np.abs(ours.decoded(seq, "k") - reference.decoded(seq, "k"))
            assert off.max() <= step * 1.02
            assert (off > step * 0.02).mean() < 2e-3


@pytest.mark.parametrize("codecs", [("q4", "q8"), ("q4+",)])
def test_coding_is_bit_equal_to_numpys_where_the_rotation_is_exact(kernels: NativeKernels, codecs: tuple[str, ...]) -> None:
    world = make(Shape(kv_heads=3, share=1, k_dim=64, codecs=codecs, seqs=((300, 1),), mean=False))
    rng = np.random.default_rng(1)
    world.k[0] = rng.integers(-40, 40, world.k[0].shape).astype(np.float32)  # sums of integers, and 64 is a square
    reference = replace(world, arena=world.arena.copy())
    store_by_kernel(world, kernels)
    store_by_reference(reference)
    assert np.array_equal(world.arena, reference.arena)


@pytest.mark.parametrize("codecs", [("q4", "q8"), ("q4+",)])
def test_coding_survives_constant_tiny_huge_and_short_groups(kernels: NativeKernels, codecs: tuple[str, ...]) -> None:
    world = make(Shape(kv_heads=1, k_dim=64, v_dim=80, codecs=codecs, seqs=((300, 1),)))
    rng = np.random.default_rng(2)
    size = 10.0 ** rng.integers(-30, 30, (300, 1, 1))
    world.v[0] = (rng.normal(size=(300, 1, 80)) * size).astype(np.float32)
    world.v[0][::7] = 0
    world.v[0][1::7] = 3.14159
    world.v[0][2::7, :, :79] = -1
    reference = replace(world, arena=world.arena.copy())
    store_by_kernel(world, kernels)
    store_by_reference(reference)
    for page in range(2):
        for name, want in reference.fields(0, page).items():
            if name.startswith("v."):
                np.testing.assert_array_equal(world.fields(0, page)[name], want, name)


def test_rows_marked_as_stored_are_not_appended(kernels: NativeKernels) -> None:
    world = make(Shape(seqs=((300, 1),)))
    batch, k, v = append_step(world)
    batch.append_pages[100:] = -1
    kernels.append(world.arena, world.layouts, batch, world.layer, k, v)
    reference = make(Shape(seqs=((100, 1),)))
    untouched = world.fields(0, 0)["v.codes"][:, 100:]
    assert (untouched == 0xFFFFFFFF).all() and (world.fields(0, 1)["k.codes"] == 0xFFFFFFFF).all()
    assert reference.k[0].shape[0] == 100 and not (world.fields(0, 0)["v.codes"][:, :100] == 0xFFFFFFFF).all()


def test_only_its_own_layer_is_written(kernels: NativeKernels) -> None:
    world = make(Shape(layers=3, layer=1, seqs=((256, 1),)))
    store_by_kernel(world, kernels)
    page, layout = world.page_of(0, 0)
    written = page.reshape(3, -1) != 0xFF
    assert not written[0].any() and not written[2].any() and written[1].mean() > 0.8
    assert layout.layer_bytes * 3 == page.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_k_v_and_q_are_read_in_place(kernels: NativeKernels, dtype: torch.dtype) -> None:
    shape = Shape(seqs=((70, 70),), codecs=("q8",))
    plain, strided = make(shape), make(shape)
    for world in (plain, strided):
        batch, k, v = append_step(world)
        q, k, v = world.q.to(dtype), k.to(dtype), v.to(dtype)
        if world is strided:
            both = torch.cat([k, v, q], 1).transpose(0, 1).contiguous().transpose(0, 1)
            k, v, q = both[:, :2], both[:, 2:4], both[:, 4:]
            assert not q.is_contiguous()
        kernels.append(world.arena, world.layouts, batch, world.layer, k, v)
        world.q = q
    assert np.array_equal(plain.arena, strided.arena)
    assert torch.equal(attend(plain, kernels), attend(strided, kernels))


MANY = Shape(
    share=4, codecs=("q4", "k8v4", "q8"), seqs=((1300, 1), (5, 5), (700, 90), (0, 0), (257, 1), (1, 1), (513, 16)), window=900, sinks=True
)


@pytest.mark.parametrize("shape", [MANY, replace(MANY, codecs=("bf16",)), replace(MANY, group=32, k_dim=96, v_dim=80, soft_cap=20.0)])
def test_a_rows_bits_do_not_depend_on_the_number_of_threads(kernels: NativeKernels, shape: Shape) -> None:
    world = make(shape)
    store_by_reference(world)
    results = [attend(world, NativeKernels(kernels.isa, n)) for n in (1, 2, 3, 8)]
    assert all(torch.equal(results[0], r) for r in results)


@pytest.mark.parametrize(
    "shape",
    [
        MANY,
        replace(MANY, codecs=("bf16",)),
        replace(MANY, codecs=("q4+",)),
        replace(MANY, kv_heads=1, k_dim=80, v_dim=64, latent=True),
        replace(MANY, codecs=("q4+",), kv_heads=1, k_dim=80, v_dim=64, latent=True),
    ],
)
def test_a_rows_bits_do_not_depend_on_other_sequences(kernels: NativeKernels, shape: Shape) -> None:
    world = make(shape)
    store_by_reference(world)
    together, starts = attend(world, kernels), world.batch.query_starts.tolist()
    for seq in range(len(shape.seqs)):
        rows = slice(starts[seq], starts[seq + 1])
        b = world.batch
        alone = replace(
            b,
            **{name: getattr(b, name)[seq : seq + 1] for name in ("block_table", "page_codecs", "kv_lengths")},
            residual_table=None if b.residual_table is None else b.residual_table[seq : seq + 1],
            append_residuals=None if b.append_residuals is None else b.append_residuals[rows],
            query_starts=np.array([0, starts[seq + 1] - starts[seq]], np.int32),
            **{name: getattr(b, name)[rows] for name in ("append_pages", "append_rows", "append_codecs")},
            derived={},
        )
        out = kernels.attend(world.arena, world.layouts, alone, world.layer, world.q[rows])
        assert torch.equal(out, together[rows])


@pytest.mark.parametrize(
    "shape",
    [
        Shape(seqs=((600, 600),), window=300),
        Shape(seqs=((600, 600),), codecs=("bf16",), sinks=True),
        Shape(seqs=((600, 600),), codecs=("q4+",)),
    ],
)
def test_a_rows_bits_do_not_depend_on_how_many_rows_a_step_has(kernels: NativeKernels, shape: Shape) -> None:
    """One prompt in one step, and its last rows as steps of their own before later tokens existed: equal bits. With tile registers
    sequences with many rows in a step are of one kind, and those with few of another."""
    world = make(replace(shape, seqs=((600, 600),)))
    store_by_reference(world)
    whole = attend(world, kernels)
    few = ((0, 1), (255, 1), (256, 1), (599, 1)) if kernels.isa != "amx" else ()
    for position, rows in (*few, (300, 40), (520, 200), (599, 33)):
        part = replace(
            world, batch=replace(world.batch, **_step(position + 1, rows), derived={}), q=world.q[position + 1 - rows : position + 1]
        )
        assert torch.equal(attend(part, kernels), whole[position + 1 - rows : position + 1])


def _step(length: int, rows: int) -> dict[str, np.ndarray]:
    return {
        "query_starts": np.array([0, rows], np.int32),
        "kv_lengths": np.array([length], np.int32),
        "append_pages": -np.ones(rows, np.int64),
        "append_rows": np.zeros(rows, np.int32),
        "append_codecs": np.zeros(rows, np.uint8),
        "append_residuals": -np.ones(rows, np.int64),
    }


def test_pages_behind_the_window_are_not_touched(kernels: NativeKernels) -> None:
    world = make(Shape(seqs=((1300, 3),), window=200))
    store_by_reference(world)
    before = attend(world, kernels)
    world.batch.block_table[0, :4] = -(10**15)  # (1300 - 3 - 200 + 1) / 256 = 4: dropped long ago
    assert torch.equal(attend(world, kernels), before)


def test_residuals_behind_the_youngest_page_are_not_touched(kernels: NativeKernels) -> None:
    """A page settles for queries 64 tokens behind its end; page 0 never does."""
    world = make(Shape(seqs=((1300, 3),), codecs=("q4+",)))
    store_by_reference(world)
    before, over = attend(world, kernels), world.batch.residual_table
    assert over is not None
    over[0, 1:4] = -(10**15)  # 1297 >= 1024 + 64: page 3 has settled
    assert torch.equal(attend(world, kernels), before)
    over[0, 0] = -(10**15)
    with pytest.raises(AssertionError, match="page outside the arena"):
        attend(world, kernels)


def test_a_page_settles_at_a_position_whatever_the_step(kernels: NativeKernels) -> None:
    """One chunk has queries that see a page with its residuals and some that do not."""
    world = make(Shape(seqs=((600, 600),), codecs=("q4+",)))
    store_by_reference(world)
    whole = attend(world, kernels)
    world.views(*world.residuals_of(0, 0))["v.residuals"][:] ^= 0xFFFFFFFF
    assert not torch.equal(attend(world, kernels)[599], whole[599]), "page 0 keeps its residuals"
    world.views(*world.residuals_of(0, 0))["v.residuals"][:] ^= 0xFFFFFFFF
    world.views(*world.residuals_of(0, 1))["v.residuals"][:] ^= 0xFFFFFFFF
    changed = attend(world, kernels)
    assert torch.equal(changed[576:], whole[576:]) and not torch.equal(changed[575], whole[575])


def test_a_single_token_gives_back_its_value(kernels: NativeKernels) -> None:
    world = make(Shape(seqs=((1, 1),), codecs=("q8",)))
    store_by_reference(world)
    np.testing.assert_allclose(attend(world, kernels)[0].view(2, 3, 64)[:, 1], world.decoded(0, "v")[0], rtol=1e-4, atol=1e-4)


def test_a_strong_sink_token_does_not_swallow_the_others(kernels: NativeKernels) -> None:
    """Weights are fixed-point within 64 tokens; a weight of nearly 1 must not push hundreds of small ones to 0."""
    world = make(Shape(kv_heads=1, share=1, seqs=((256, 1),), codecs=("q8",), mean=False))
    world.q[:] = 0
    world.q[0, 0, 0] = 8.0  # times scale 1/8
    world.k[0][:] = 0
    world.k[0][0, 0, 0] = 15.0  # e^15 against 255 others
    world.v[0][:] = 1.0
    world.v[0][0] = 0.0
    store_by_reference(world)
    got = attend(world, kernels)[0, 0].numpy()
    k = world.decoded(0, "k") @ hadamard(64)
    p = np.exp(k[:, 0, 0])
    np.testing.assert_allclose(got, p[1:].sum() / p.sum(), atol=2e-4)


def test_requests_outside_the_arena_are_refused(kernels: NativeKernels) -> None:
    world = make(Shape(seqs=((300, 1),)))
    store_by_reference(world)
    world.batch.block_table[0, 1] = world.arena.size - 1
    with pytest.raises(AssertionError, match="page outside the arena"):
        attend(world, kernels)
    batch, k, v = append_step(world)
    with pytest.raises(AssertionError, match="page outside the arena"):
        kernels.append(world.arena, world.layouts, batch, world.layer, k, v)
    batch.append_pages[:] = 0
    batch.append_rows[3] = PAGE_TOKENS
    with pytest.raises(AssertionError, match="row outside its page"):
        kernels.append(world.arena, world.layouts, batch, world.layer, k, v)


def test_the_forced_instruction_set_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in native.isas():
        monkeypatch.setenv("REWAKE_ISA", isa)
        loaded = native.load(2)
        assert loaded is not None and loaded.isa == isa and isa in loaded.name
    monkeypatch.setenv("REWAKE_ISA", "mmx")
    assert native.load(2) is None and "mmx" in str(native.why_unavailable())


def test_bf16_rounding_matches_the_formats() -> None:
    x = torch.tensor([1.00390625, 1.01171875, -3.1415926, 1e-40])
    assert (f32_to_bf16(x.numpy()) == x.bfloat16().view(torch.uint16).numpy()).all()


def test_logits_may_lie_far_apart(kernels: NativeKernels) -> None:
    """Attention sinks do: weights below 2^-126 are 0, not NaN. Logits of queries in bfloat16 err in proportion to their size."""
    for factor in (5.0, 20.0, 60.0, 300.0):
        world = make(Shape(kv_heads=2, share=3, seqs=((700, 1), (300, 40)), mean=False, seed=int(factor)))
        world.q *= factor
        store_by_reference(world)
        out = attend(world, kernels)
        assert torch.isfinite(out).all()
        assert error_of(world, out) < (max(2**-5, TOLERANCE * factor) if kernels.isa == "amx" else 10 * TOLERANCE)
