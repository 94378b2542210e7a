"""The page format: exact bytes, exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from rewake.quant import (
    CODECS,
    PAGE_TOKENS,
    PageLayout,
    bf16_to_f32,
    decode,
    decode_refined,
    encode,
    encode_residual,
    f32_to_bf16,
    hadamard,
)

DIMS = (64, 80, 96, 128, 192, 256, 576)


def test_known_bytes() -> None:
    """0..15 with step 1 and bias 0: element i in bits 4 * (i % 8) of word i // 8."""
    x = np.tile(np.arange(16, dtype=np.float32), 4)
    codes, scales, biases = encode(x, 4, 64)
    assert codes.tolist() == [0x76543210, 0xFEDCBA98] * 4
    assert bf16_to_f32(scales).tolist() == [1.0] and bf16_to_f32(biases).tolist() == [0.0]
    codes, _, _ = encode(np.tile(np.array([0, 255, 1, 2], np.float32), 16), 8, 64)
    assert codes.tolist() == [0x0201FF00] * 16


def test_decoding_is_mlx_affine_dequantisation() -> None:
    """`code * scale + bias`, computed by hand from the packed words."""
    codes, scales, biases = encode(np.random.default_rng(0).normal(size=(5, 128)).astype(np.float32), 4, 64)
    decoded = decode(codes, scales, biases, 4, 64, 128)
    for row in range(5):
        for i in range(128):
            code = (int(codes[row, i // 8]) >> (4 * (i % 8))) & 15
            group = i // 64
            expected = np.float32(code) * bf16_to_f32(scales)[row, group] + bf16_to_f32(biases)[row, group]
            assert decoded[row, i] == expected


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_a_value_is_off_by_half_a_step_at_most(dim: int, bits: int, group_size: int) -> None:
    x = np.random.default_rng(dim).normal(size=(50, dim)).astype(np.float32)
    codes, scales, biases = encode(x, bits, group_size)
    step = np.repeat(bf16_to_f32(scales), group_size, -1)[:, :dim]
    slack = np.abs(x).max() * 2.0**-8  # the range's ends move when scale and bias are rounded to bfloat16
    assert (np.abs(decode(codes, scales, biases, bits, group_size, dim) - x) <= step / 2 + slack).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("group_size", [32, 64])
def test_a_residual_brings_a_value_within_a_thirty_second_of_a_step(dim: int, group_size: int) -> None:
    """And the codes are those of `q4`: a page settles by dropping its residuals."""
    x = np.random.default_rng(dim).normal(size=(50, dim)).astype(np.float32)
    codes, scales, biases = encode(x, 4, group_size)
    residuals = encode_residual(x, codes, scales, biases, group_size)
    assert residuals.shape == codes.shape
    step = np.repeat(bf16_to_f32(scales), group_size, -1)[:, :dim]
    off = np.abs(decode_refined(codes, residuals, scales, biases, group_size, dim) - x)
    inside = np.abs(decode(codes, scales, biases, 4, group_size, dim) - x) <= step / 2  # the range's ends move when they are rounded
    assert inside.mean() > 0.97 and (off[inside] <= (step / 32 * 1.001)[inside]).all()
    assert off.mean() < np.abs(decode(codes, scales, biases, 4, group_size, dim) - x).mean() / 12


def test_constant_groups_have_no_step() -> None:
    x = np.full((1, 64), 3.0, np.float32)
    codes, scales, biases = encode(x, 4, 64)
    assert not codes.any() and not scales.any()
    assert (decode(codes, scales, biases, 4, 64, 64) == 3.0).all()


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_is_orthonormal_and_its_own_inverse(dim: int) -> None:
    h = hadamard(dim)
    assert np.allclose(h @ h, np.eye(dim), atol=1e-6) and (h == h.T).all()


def test_bfloat16_rounds_to_nearest_even() -> None:
    assert f32_to_bf16(np.array([1.0, 1.00390625, 1.01171875], np.float32)).tolist() == [0x3F80, 0x3F80, 0x3F82]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_arrays_tile_the_page(codec: object) -> None:
    layout = PageLayout(3, 2, 96, 64, codec)  # type: ignore[arg-type]
    end = 0
    for _, field, at in layout.arrays():
        assert at == end
        end = at + layout.field_bytes(field)
    assert end == layout.page_bytes == layout.token_bytes * PAGE_TOKENS


def test_rows_move_out_of_a_page_and_back() -> None:
    layout = PageLayout(2, 3, 64, 64, CODECS["k8v4"])
    rng = np.random.default_rng(0)
    page = rng.integers(0, 256, layout.page_bytes).astype(np.uint8)
    rebuilt = np.zeros_like(page)
    for first, rows in ((0, 1), (1, 99), (100, 156)):
        segment = np.empty(layout.with_rows(rows).page_bytes, np.uint8)
        layout.copy_rows(page, first, segment, rows, out=True)
        layout.copy_rows(rebuilt, first, segment, rows, out=False)
    assert (rebuilt == page).all()


def test_smollm2_pages_have_the_size_the_design_says() -> None:
    q4 = PageLayout(30, 3, 64, 64, CODECS["q4"])
    assert q4.page_bytes == 405 * 4096
    assert q4.page_bytes / PageLayout(30, 3, 64, 64, CODECS["bf16"]).page_bytes == 0.28125
