"""The kernels of the C++ library in this folder, called through ctypes.

Checks shapes and types, hands over addresses, and knows nothing of arithmetic. The library has threads of its own
(pool.h), and keeps scratch for each: under 1 MiB for heads up to 256 values (1.5 MiB for 576), plus the queries of a step
in fixed point and at most 16 MiB of sums to be merged.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rewake.backends.torch.kernels.base import F32, U8, LayerAttention, RaggedBatch
from rewake.quant import CODECS, PAGE_TOKENS, PageLayout

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ISAS", "Layer", "NativeKernels", "codes_of", "isas", "layer_of", "load", "pack", "why_unavailable"]

ISAS = {"amx": 0, "avx512": 1, "avx2": 2, "portable": 3}  # best first, by the library's numbers
VERSION = 6  # of the interface to the library
IS_BF16 = {"torch.bfloat16": 1, "torch.float32": 0}  # by name: nobody imports torch for this
BLOCK_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")  # by the library's numbers
SUFFIXES = (".so", ".pyd", ".dylib")
REFUSALS = (
    "",
    "instruction set",
    "layout or heads",
    "lengths",
    "page outside the arena",
    "codec without layout",
    "row outside its page",
    "token or row",
)


class _Layout(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kv_heads", "k_dim", "v_dim", "group", "k_bits", "v_bits")),
        *((name, c_int64) for name in ("page_bytes", "layer_bytes", "k_scales", "k_biases", "v_codes", "v_scales", "v_biases")),
        *((name, c_int64) for name in ("residual_layer_bytes", "v_residuals")),
    )


class _Batch(Structure):
    _fields_ = (
        *((n, c_void_p) for n in ("block_table", "page_codecs", "query_starts", "kv_lengths")),
        *((n, c_void_p) for n in ("append_pages", "append_rows", "append_codecs")),
        *((name, c_int32) for name in ("seqs", "max_pages", "tokens")),
        ("residuals", c_void_p),
        ("append_residuals", c_void_p),
    )


class Layer(Structure):
    _fields_ = (
        ("sinks", c_void_p),
        ("k_mean", c_void_p),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("layer", c_int32),
        ("window", c_int32),
        ("k_prefix", c_int32),
    )


class _Codes(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "minima", "scale", "minimum")),
        *((name, c_int32) for name in ("outputs", "inputs", "bits")),
    )


@cache
def _library() -> ctypes.CDLL:
    found = sorted(p for p in Path(__file__).parent.glob("_native*") if p.suffix in SUFFIXES)
    if not found:
        raise OSError("the native kernels were not compiled (python -m rewake.backends.torch.kernels.build compiles them)")
    newest = max(found, key=lambda p: p.stat().st_mtime)  # an install and `build` may both have left one
    library = ctypes.CDLL(str(newest))
    if library.rw_version() != VERSION:
        raise OSError(f"{newest.name} was compiled from other sources (python -m rewake.backends.torch.kernels.build compiles them anew)")
    shared = (c_int32, c_void_p, c_int64, POINTER(_Layout), POINTER(_Batch), POINTER(Layer), c_int32)
    rows = (c_void_p, c_int64, c_int64, c_int32)
    library.rw_supported.argtypes = (c_int32,)
    library.rw_append.argtypes = (*shared, *rows, *rows, c_int32)
    library.rw_attend.argtypes = (*shared, *rows, c_void_p, c_int32)
    library.rw_step.argtypes = (*shared[:5], *(c_void_p,) * 4, c_int32, c_void_p, c_int32)
    library.rw_codes.argtypes = (c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    library.rw_pack.argtypes = (POINTER(_Codes), c_int64, c_void_p)
    return library


def why_unavailable() -> str | None:
    """Why there are no native kernels here; None if there are."""
    try:
        _library()
    except (OSError, AttributeError) as error:  # no file, not loadable, or of another version
        return str(error)
    forced = os.environ.get("REWAKE_ISA")
    if forced and forced not in isas():
        return f"REWAKE_ISA={forced} is not one of {', '.join(isas())}"
    return None


def isas() -> list[str]:
    """The instruction sets this machine can run, best first."""
    return [name for name, number in ISAS.items() if _library().rw_supported(number)]


def load(threads: int) -> NativeKernels | None:
    """The kernels for the best instruction set, or the one $REWAKE_ISA names; None where `why_unavailable` has a reason."""
    return None if why_unavailable() else NativeKernels(os.environ.get("REWAKE_ISA") or isas()[0], threads)


def codes_of(kind: str, blocks: U8, num_codes: int) -> U8:
    """The codes of blocks [rows, blocks, bytes] of a kind of GGUF's, `num_codes` each: [rows, codes]."""
    whole = np.ascontiguousarray(blocks)
    rows, count, size = whole.shape
    codes = np.empty((rows, count * num_codes), np.uint8)
    _library().rw_codes(BLOCK_KINDS.index(kind), whole.ctypes.data, rows * count, size, num_codes, codes.ctypes.data)
    return codes


def pack(arrays: Mapping[str, npt.NDArray[Any]], bits: int, tiles: U8) -> None:
    """Weights [outputs, inputs] as codes and terms, by the names of abi.h's RwCodes, into `tiles` [tiles, bytes], which are all 0."""
    outputs, inputs = arrays["codes"].shape
    is_super = "scale" in arrays
    term_bytes = 1 if is_super else 2
    expected = {  # columns, and bytes of each value
        "codes": (inputs, 2 if bits == 16 else 1),
        "scales": (inputs // (16 if bits == 6 else 32), term_bytes),
        "minima": (inputs // 32, term_bytes),
        "scale": (inputs // 256, 2),
        "minimum": (inputs // 256, 2),
    }
    assert inputs % (256 if is_super else 32) == 0 and tiles.flags.c_contiguous and len(tiles) == -(-outputs // 16)
    for name, x in arrays.items():
        assert (x.shape, x.itemsize) == ((outputs, expected[name][0]), expected[name][1]), name
    whole = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    places = (whole[name].ctypes.data if name in whole else None for name in expected)
    _library().rw_pack(_Codes(*places, outputs, inputs, bits), tiles.shape[1], tiles.ctypes.data)


class NativeKernels:
    """AttentionKernels on one instruction set, and so many threads."""

    def __init__(self, isa: str, threads: int) -> None:
        self.isa, self.threads = isa, threads
        assert self.isa in isas(), f"{self.isa} does not run here; {isas()} do"
        self._library = _library()
        self.name = f"native ({self.isa})"
        self._isa = ISAS[self.isa]
        self._layouts: dict[int, tuple[Mapping[int, PageLayout], object, PageLayout]] = {}

    def append(self, arena: U8, layouts: Mapping[int, PageLayout], batch: RaggedBatch, layer: LayerAttention, k: Tensor, v: Tensor) -> None:
        native_layouts, layout = self.layouts_of(layouts)
        v = k if layer.v_is_k_prefix else v
        tokens = batch.append_pages.shape[0]
        assert k.shape == (tokens, layout.kv_heads, layout.k_dim)
        assert layer.v_is_k_prefix or v.shape == (tokens, layout.kv_heads, layout.v_dim)
        assert k.stride(2) == v.stride(2) == 1 or not tokens
        refused = self._library.rw_append(
            self._isa,
            arena.ctypes.data,
            arena.size,
            native_layouts,
            _batch_of(batch),
            layer_of(layer, layout),
            layout.kv_heads,
            *_rows_of(k),
            *_rows_of(v),
            self.threads,
        )
        assert not refused, f"append: bad {REFUSALS[refused]}"

    def attend(self, arena: U8, layouts: Mapping[int, PageLayout], batch: RaggedBatch, layer: LayerAttention, q: Tensor) -> Tensor:
        native_layouts, layout = self.layouts_of(layouts)
        tokens, heads, dim = q.shape
        assert tokens == batch.append_pages.shape[0] and dim == layout.k_dim and heads % layout.kv_heads == 0
        assert q.stride(2) == 1 or not tokens
        assert layer.sinks is None or layer.sinks.shape == (heads,)
        out = q.new_empty((tokens, heads, layer.v_dim or layout.v_dim))
        refused = self._library.rw_attend(
            self._isa,
            arena.ctypes.data,
            arena.size,
            native_layouts,
            _batch_of(batch),
            layer_of(layer, layout),
            heads,
            *_rows_of(q),
            out.data_ptr(),
            self.threads,
        )
        assert not refused, f"attend: bad {REFUSALS[refused]}"
        return out

    def step(
        self,
        arena: U8,
        layouts: object,
        batches: Sequence[RaggedBatch],
        plan: Structure,
        tokens: int,
        positions: int,
        wanted: int,
        num_wanted: int,
        logits: F32,
    ) -> None:
        """The whole step of `plan` (kernels.step), with addresses of its int32 arrays; `layouts` are `layouts_of` them.

        `batches` are the step's as each slot of a page sees it.
        """
        refused = self._library.rw_step(
            self._isa,
            arena.ctypes.data,
            arena.size,
            layouts,
            (_Batch * len(batches))(*map(_batch_of, batches)),
            ctypes.addressof(plan),
            tokens,
            positions,
            wanted,
            num_wanted,
            logits.ctypes.data,
            self.threads,
        )
        assert not refused, f"step: bad {REFUSALS[refused]}"

    def layouts_of(self, layouts: Mapping[int, PageLayout]) -> tuple[object, PageLayout]:
        known = self._layouts.get(id(layouts))
        if known is None or known[0] is not layouts:  # the mapping is kept, so that its id stays its own
            if len(self._layouts) >= 64:  # far more than there are cache groups: somebody makes new ones for each call
                self._layouts.clear()
            known = (layouts, _native_layouts(layouts), next(iter(layouts.values())))
            self._layouts[id(layouts)] = known
        return known[1], known[2]


def _rows_of(x: Tensor) -> tuple[int, int, int, int]:
    token, head, _ = x.stride()
    return x.data_ptr(), token, head, IS_BF16[str(x.dtype)]


def _native_layouts(layouts: Mapping[int, PageLayout]) -> ctypes.Array[_Layout]:
    table = (_Layout * len(CODECS))()
    first = next(iter(layouts.values()))
    for index, layout in layouts.items():
        assert layout.rows == PAGE_TOKENS and layout.codec.index == index
        assert (layout.kv_heads, layout.k_dim, layout.v_dim, layout.layers) == (first.kv_heads, first.k_dim, first.v_dim, first.layers)
        assert layout.k_dim <= 1024 and layout.v_dim <= 1024 and layout.group_size in (32, 64) and layout.group_size == first.group_size
        offsets = {field.name: at for layer, field, at in layout.arrays() if layer == 0}
        table[index] = _Layout(
            layout.kv_heads,
            layout.k_dim,
            layout.v_dim,
            layout.group_size,
            layout.codec.k_bits,
            layout.codec.v_bits,
            layout.page_bytes,
            layout.layer_bytes,
            offsets.get("k.scales", 0),
            offsets.get("k.biases", 0),
            offsets.get("v.codes", offsets.get("v.values", 0)),
            offsets.get("v.scales", 0),
            offsets.get("v.biases", 0),
            *residual_places(layout),
        )
    return table


def residual_places(layout: PageLayout) -> tuple[int, int]:
    """Bytes of a layer's residuals, and where V's are among them."""
    if not layout.codec.residual_bits:
        return 0, 0
    residuals = replace(layout, residuals=True)
    return residuals.layer_bytes, next((at for layer, field, at in residuals.arrays() if field.name == "v.residuals"), 0)


def _batch_of(batch: RaggedBatch) -> _Batch:
    native = batch.derived.get("native")
    if native is None:
        native = batch.derived["native"] = _native_batch(batch)
    assert isinstance(native, _Batch)
    return native


def _native_batch(batch: RaggedBatch) -> _Batch:
    seqs, max_pages = batch.block_table.shape
    (tokens,) = batch.append_pages.shape
    expected = {
        "block_table": ((seqs, max_pages), np.int64),
        "page_codecs": ((seqs, max_pages), np.uint8),
        "query_starts": ((seqs + 1,), np.int32),
        "kv_lengths": ((seqs,), np.int32),
        "append_pages": ((tokens,), np.int64),
        "append_rows": ((tokens,), np.int32),
        "append_codecs": ((tokens,), np.uint8),
    }
    if batch.residual_table is not None:
        expected |= {"residual_table": ((seqs, max_pages), np.int64), "append_residuals": ((tokens,), np.int64)}
    for name, (shape, dtype) in expected.items():
        x = getattr(batch, name)
        assert x.shape == shape and x.dtype == dtype and x.flags.c_contiguous, name
    addresses = [getattr(batch, name).ctypes.data for name in expected]
    return _Batch(*addresses[:7], seqs, max_pages, tokens, *addresses[7:])


def layer_of(layer: LayerAttention, layout: PageLayout) -> Layer:
    native = layer.derived.get("native")
    if native is None:
        native = layer.derived["native"] = _native_layer(layer, layout)
    assert isinstance(native, Layer)
    return native


def _native_layer(layer: LayerAttention, layout: PageLayout) -> Layer:
    assert 0 <= layer.layer < layout.layers
    assert layer.v_is_k_prefix == (layout.v_dim == 0)
    assert not layer.v_is_k_prefix or (layer.v_dim is not None and 0 < layer.v_dim <= layout.k_dim)
    for x, shape in ((layer.sinks, None), (layer.k_mean, (layout.kv_heads, layout.k_dim))):
        assert x is None or (x.dtype == np.float32 and x.flags.c_contiguous and (shape is None or x.shape == shape))
    return Layer(
        None if layer.sinks is None else layer.sinks.ctypes.data,
        None if layer.k_mean is None else layer.k_mean.ctypes.data,
        layer.scale,
        layer.soft_cap or 0.0,
        layer.layer,
        layer.window or 0,
        (layer.v_dim or 0) if layer.v_is_k_prefix else 0,
    )
