"""One call of the library for a whole step of a dense decoder: ids in, logits out. The plan is made once.

Fills in the structures of abi.h and hands over addresses. Knows the shape of the Llama family, of which Gemma is a part; knows
no file and no config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_void_p
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rewake.backends.torch.kernels import native
from rewake.backends.torch.kernels.base import F32, U8, LayerAttention, RaggedBatch
from rewake.backends.torch.kernels.native import NativeKernels
from rewake.backends.torch.kernels.packing import GROUP, Matrix
from rewake.quant import PageLayout

__all__ = ["ACTIVATIONS", "DenseLayer", "DensePlan", "DenseStep", "Weights"]

FIXED_INPUTS, PLAIN_INPUTS = 1, 2
LANES = 16  # of the widest vectors: half a head fills whole ones
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}


@dataclass(frozen=True, eq=False)
class Weights:
    """A matrix and what is added to its products."""

    matrix: Matrix
    bias: F32 | None = None


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """RMSNorm, grouped-query attention, RMSNorm, gated MLP.

    Where there are some: norms of each head of q and k, and of what attention and MLP add to the stream. `rotation` is the row of
    the plan's frequencies by which q and k are turned.
    """

    q: Weights
    k: Weights
    v: Weights
    o: Weights
    gate: Weights
    up: Weights
    down: Weights
    attention_norm: F32
    mlp_norm: F32
    q_norm: F32 | None = None
    k_norm: F32 | None = None
    attention_out_norm: F32 | None = None
    mlp_out_norm: F32 | None = None
    rotation: int = 0


@dataclass(frozen=True, eq=False)
class DensePlan:
    """A whole decoder.

    `frequencies` [rotations, head_dim / 2]: radians a position, for each plane of a head. `scale` multiplies q.k, and `soft_cap`
    bounds that; `logit_cap` bounds logits; None: nothing does.
    """

    layers: Sequence[DenseLayer]
    embedding: Weights
    head: Weights
    norm: F32
    frequencies: F32
    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    activation: str = "silu"
    embedding_scale: float = 1.0
    soft_cap: float | None = None
    logit_cap: float | None = None

    @property
    def hidden(self) -> int:
        return self.embedding.matrix.inputs

    @property
    def intermediate(self) -> int:
        return self.layers[0].down.matrix.inputs

    @property
    def matrices(self) -> list[Matrix]:
        """All that are multiplied by."""
        layers = [w.matrix for layer in self.layers for w in (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)]
        return [*layers, self.head.matrix]

    @property
    def weight_bits(self) -> float:
        """Of memory for each weight, on average."""
        matrices = self.matrices if self.head is self.embedding else [*self.matrices, self.embedding.matrix]
        return 8 * sum(m.data.nbytes for m in matrices) / sum(m.outputs * m.inputs for m in matrices)


def why_unfit(hidden: int, intermediate: int, q_heads: int, head_dim: int) -> str | None:
    """Why a decoder of these widths does not fit the kernels; None if it does."""
    if hidden % GROUP or intermediate % GROUP or q_heads * head_dim % GROUP:
        return f"a width of it is no multiple of {GROUP}"
    if head_dim % (2 * LANES):
        return f"heads of {head_dim} values are no multiple of {2 * LANES}"
    return None


class _Linear(Structure):
    _fields_ = (("data", c_void_p), ("bias", c_void_p), ("outputs", c_int32), ("inputs", c_int32), ("kind", c_int32))


NORMS = ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm", "q_norm", "k_norm")


class _Layer(Structure):
    _fields_ = (
        *((name, _Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, c_void_p) for name in NORMS),
        ("attention", native.Layer),
        ("slot", c_int32),
        ("rotation", c_int32),
    )


class _Dense(Structure):
    _fields_ = (
        ("layers", POINTER(_Layer)),
        ("embedding", _Linear),
        ("head", _Linear),
        ("norm", c_void_p),
        ("frequencies", c_void_p),
        *((name, c_int32) for name in ("num_layers", "hidden", "intermediate", "q_heads", "kv_heads", "head_dim")),
        ("eps", c_float),
        *((name, c_int32) for name in ("input_kinds", "rotations", "activation")),
        *((name, c_float) for name in ("embedding_scale", "logit_cap")),
    )


class DenseStep:
    """A plan in the library's structures, on one instruction set and over one arena."""

    def __init__(
        self,
        plan: DensePlan,
        kernels: NativeKernels,
        arena: U8,
        layouts: Mapping[int, PageLayout],
        windows: Sequence[int | None] = (),
        k_mean: F32 | None = None,
        places: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`windows` is each layer's, none being full attention; `k_mean` [layers, kv_heads, head_dim] what K is centred by.

        `places`: each layer's slot of a page, and its index in there; none being one slot for all.
        """
        assert why_unfit(plan.hidden, plan.intermediate, plan.q_heads, plan.head_dim) is None
        self._kept: list[object] = [plan, arena]  # addresses of these are in the structures
        self._kernels, self._arena, self._layouts = kernels, arena, kernels.layouts_of(layouts)[0]
        layout = next(iter(layouts.values()))
        self._places = places or [(0, i) for i in range(len(plan.layers))]
        self._num_slots = 1 + max(slot for slot, _ in self._places)
        self._attention = [
            LayerAttention(
                self._places[i][1],
                plan.scale,
                window=windows[i] if windows else None,
                soft_cap=plan.soft_cap,
                k_mean=None if k_mean is None else np.ascontiguousarray(k_mean[i]),
            )
            for i in range(len(plan.layers))
        ]
        assert layout.layers * self._num_slots == len(plan.layers)
        assert (layout.kv_heads, layout.k_dim, layout.v_dim) == (plan.kv_heads, plan.head_dim, plan.head_dim)
        layers = (_Layer * len(plan.layers))(*(self._layer(i, layer, plan, layout) for i, layer in enumerate(plan.layers)))
        rotations = len(plan.frequencies)
        assert all(0 <= layer.rotation < rotations for layer in plan.layers) and plan.frequencies.shape == (rotations, plan.head_dim // 2)
        kinds = {PLAIN_INPUTS if m.is_plain else FIXED_INPUTS for m in plan.matrices}
        self._plan = _Dense(
            layers,
            self._linear(plan.embedding),
            self._linear(plan.head),
            self._vector(plan.norm, plan.hidden),
            self._vector(plan.frequencies.reshape(-1), rotations * plan.head_dim // 2),
            len(plan.layers),
            plan.hidden,
            plan.intermediate,
            plan.q_heads,
            plan.kv_heads,
            plan.head_dim,
            plan.eps,
            sum(kinds),
            rotations,
            ACTIVATIONS[plan.activation],
            plan.embedding_scale,
            plan.logit_cap or 0,
        )
        self.vocab_size = plan.head.matrix.outputs

    def run(
        self, batches: Sequence[RaggedBatch], tokens: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], wanted: npt.NDArray[np.int32]
    ) -> F32:
        """Append all K and V, and return the logits [wanted, vocab] of the rows `wanted`. `batches` are those of each slot of a page."""
        (rows,) = batches[0].append_pages.shape
        assert len(batches) == self._num_slots
        assert all(x.dtype == np.int32 and x.flags.c_contiguous for x in (tokens, positions, wanted))
        assert tokens.shape == positions.shape == (rows,)
        logits = np.empty((len(wanted), self.vocab_size), np.float32)
        self._kernels.step(
            self._arena,
            self._layouts,
            batches,
            self._plan,
            tokens.ctypes.data,
            positions.ctypes.data,
            wanted.ctypes.data,
            len(wanted),
            logits,
        )
        return logits

    def _layer(self, index: int, layer: DenseLayer, plan: DensePlan, layout: PageLayout) -> _Layer:
        q_width, kv_width = plan.q_heads * plan.head_dim, plan.kv_heads * plan.head_dim
        shapes = {
            "q": (q_width, plan.hidden),
            "k": (kv_width, plan.hidden),
            "v": (kv_width, plan.hidden),
            "o": (plan.hidden, q_width),
            "gate": (plan.intermediate, plan.hidden),
            "up": (plan.intermediate, plan.hidden),
            "down": (plan.hidden, plan.intermediate),
        }
        for name, shape in shapes.items():
            matrix = getattr(layer, name).matrix
            assert (matrix.outputs, matrix.inputs) == shape, f"{name} of layer {index} is {(matrix.outputs, matrix.inputs)}, not {shape}"
        return _Layer(
            *(self._linear(getattr(layer, name)) for name in shapes),
            *(self._vector(getattr(layer, name), plan.head_dim if name in ("q_norm", "k_norm") else plan.hidden) for name in NORMS),
            native.layer_of(self._attention[index], layout),
            self._places[index][0],
            layer.rotation,
        )

    def _linear(self, weights: Weights) -> _Linear:
        matrix = weights.matrix
        assert matrix.data.dtype == np.uint8 and matrix.data.flags.c_contiguous
        return _Linear(matrix.data.ctypes.data, self._vector(weights.bias, matrix.outputs), matrix.outputs, matrix.inputs, matrix.kind)

    def _vector(self, x: F32 | None, size: int) -> int | None:
        if x is None:
            return None
        assert x.shape == (size,) and x.dtype == np.float32
        kept = np.ascontiguousarray(np.pad(x, (0, -size % LANES)))  # whole vectors of a bias are read
        self._kept.append(kept)
        return int(kept.ctypes.data)
