"""The native step: as near to the exact model as stated, the same bits for a row in any company, and what takes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rewake.backends.base import Batch, Output, Row
from rewake.backends.torch.dense import CODED, frequencies, why_not_dense
from rewake.backends.torch.kernels import native
from rewake.backends.torch.kernels.packing import Codes, coded, plain
from rewake.backends.torch.loader import load_model
from rewake.backends.torch.measure import tables_of
from rewake.backends.torch.model import TorchBackend
from rewake.planes import PagePlanes
from rewake.quant import PAGE_TOKENS, f32_to_bf16
from rewake.request import Sampling
from tests.backends.test_torch import mean_kl, steps
from tests.test_wake import torch_backend

if native.why_unavailable():
    pytest.skip(f"no native kernels: {native.why_unavailable()}", allow_module_level=True)

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def ids(model_path: Path) -> list[int]:
    from rewake.text.tokenizer import Tokenizer

    return Tokenizer(model_path).encode((Path(__file__).parents[2] / "docs" / "architecture.md").read_text())[:300]


# ---- near the exact model


@pytest.fixture(scope="module")
def exact(model_path: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    """float32 logits of transformers with the default model's weights exactly as they are coded."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    weights = model.state_dict()
    with safe_open(model_path / "coded" / "weights.safetensors", framework="pt") as file:
        for name, kind in json.loads(file.metadata()["blocks"]).items():
            weights[name].copy_(torch.from_numpy(dequantize(file.get_tensor(name).numpy(), GGMLQuantizationType[kind])))
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()  # type: ignore[no-any-return]


CUTS = [1, 8, 9, *range(20, 255, 9), 255, 256, 257, 300]


@pytest.mark.parametrize("isa", native.isas())
def test_logits_are_those_of_the_weights_as_shipped(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, ids: list[int], exact: np.ndarray[Any, Any], isa: str
) -> None:
    """Mean KL, K and V in bf16. Products and activations in bfloat16 come to 1.3e-3."""
    monkeypatch.setenv("REWAKE_ISA", isa)
    loaded = load_model(model_path, threads=2)
    assert "native" in loaded.step_why and "shipped" in loaded.weights
    mine = steps(torch_backend(loaded, "bf16", 3), ids, CUTS)
    assert mean_kl(exact[[c - 1 for c in CUTS]], mine) < 2e-4


def test_plain_weights_are_as_near(model_path: Path, tmp_path: Path, ids: list[int]) -> None:
    """bfloat16 safetensors, against transformers in float32 with the same weights."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "plain"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(model_path / name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        want = model(torch.tensor([ids[:200]])).logits[0].numpy()
    loaded = load_model(folder, threads=2)
    assert loaded.plan is not None and loaded.weights == "bfloat16"
    cuts = [1, 9, 150, 160, 195, 200]
    assert mean_kl(want[[c - 1 for c in cuts]], steps(torch_backend(loaded, "bf16", 2), ids, cuts)) < 2e-4


def tiny(kind: str, folder: Path, **changes: Any) -> Path:
    """A random model of two layers."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=200,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.3,
        **changes,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, weights in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weights, 1.0 if "norm" in name else 0.0, 0.3)
    model.bfloat16().save_pretrained(folder)
    return folder


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True}),
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
        ("Qwen2", {}),
        ("Qwen3", {}),
    ],
)
def test_random_models_agree_with_transformers_in_float32(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny(kind, tmp_path, **changes)
    loaded = load_model(folder, threads=2)
    assert loaded.plan is not None, loaded.step_why
    tokens = np.random.default_rng(0).integers(0, 200, 300).tolist()
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        want = model(torch.tensor([tokens])).logits[0].numpy()
    cuts = [1, 2, 30, 257, 300]
    got = steps(torch_backend(loaded, "bf16", 2), tokens, cuts)
    error = np.abs(got - want[[c - 1 for c in cuts]]).max() / np.abs(want).max()
    assert error < 0.02  # K and V are bfloat16; a wrong plane, norm or bias gives 0.3 and more


# ---- the same bits in any company


class Pages:
    """Rows of steps over one arena, each sequence with slots of its own."""

    def __init__(self, backend: TorchBackend) -> None:
        self.backend = backend
        self.size = backend.planes.num_slots * backend.planes.slot_bytes

    def row(self, seq: int, tokens: list[int], start: int, end: int) -> Row:
        pages = range(2 * seq, 2 * seq - (-end // PAGE_TOKENS))
        return Row(tuple(tokens[start:end]), start, start, tables_of(self.backend, pages), tuple(map(str, pages)), str(seq), GREEDY)

    def run(self, *rows: Row) -> Output:
        return self.backend.forward(Batch(rows))

    def pages(self, seq: int) -> np.ndarray[Any, Any]:
        at = 2 * seq * self.size
        return self.backend.arena[at : at + 2 * self.size].copy()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_rows_bits_are_the_same_alone_and_among_32(real_model: Any, ids: list[int], kv: str, threads: int) -> None:
    texts = [ids[i : i + 50] for i in range(32)]  # that end at 50 tokens and before
    pages = Pages(torch_backend(real_model, kv, 68))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        pages.run(*(pages.row(i, t, 0, 49 - i) for i, t in enumerate(texts)))
        together = pages.run(*(pages.row(i, t, 49 - i, 50 - i) for i, t in enumerate(texts))).logits
        for i in (0, 8, 31):
            pages.run(pages.row(32, texts[i], 0, 49 - i))
            alone = pages.run(pages.row(32, texts[i], 49 - i, 50 - i)).logits[0]
            assert np.array_equal(alone, together[i])
            planes = pages.backend.planes
            for a, b in zip(rows_of(pages.pages(32), planes, 50 - i), rows_of(pages.pages(i), planes, 50 - i), strict=True):
                assert np.array_equal(a, b)
    finally:
        torch.set_num_threads(before)


def rows_of(pages: np.ndarray[Any, Any], planes: PagePlanes, rows: int) -> list[np.ndarray[Any, Any]]:
    """The stored rows [0, rows) of one page, array by array."""
    out = []
    for number, plane in enumerate(planes.planes):  # each in one slot
        for _, field, at in plane.slot.arrays():
            begin = number * planes.slot_bytes + at
            whole = pages[begin : begin + plane.slot.field_bytes(field)].reshape(plane.slot.kv_heads, PAGE_TOKENS, -1)
            out.append(whole[:, :rows])
    return out


def test_how_a_prompt_is_cut_changes_no_bit(real_model: Any, ids: list[int], kv: str) -> None:
    results = []
    for cuts in ([280], [1, 2, 30, 256, 279, 280], [*range(7, 280, 7), 280]):
        backend = torch_backend(real_model, kv, 2)
        logits = steps(backend, ids, cuts)[-1]
        results.append((logits, backend.arena.copy()))
    assert all(np.array_equal(results[0][0], r[0]) and np.array_equal(results[0][1], r[1]) for r in results)


# ---- what takes it


def test_a_model_that_does_not_fit_runs_through_transformers_and_says_why(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "olmo2"}, "olmo2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"head_dim": 24}, "24"),
        ({"hidden_size": 100}, "32"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        ({"quantization_config": {}}, "quantised"),
    ]
    config = json.loads((tiny("Llama", tmp_path) / "config.json").read_text())
    assert why_not_dense(config) is None
    for changes, named in cases:
        assert named in str(why_not_dense({**config, **changes}))
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(tmp_path, threads=1)
    assert loaded.plan is None and "yarn" in loaded.step_why
    assert "step" not in loaded.facts


def test_the_signature_names_the_way_that_was_taken(model_path: Path) -> None:
    ours, theirs = load_model(model_path, threads=1), load_model(model_path, threads=1, prefer_native=False)
    assert ours.facts["step"] == "native" and ours.facts["weights"] != theirs.facts["weights"]


def test_both_ways_agree_on_what_is_likely(model_path: Path, ids: list[int], exact: np.ndarray[Any, Any]) -> None:
    """They differ by what bfloat16 costs transformers, and ours is the nearer one to the exact model."""
    theirs = steps(torch_backend(load_model(model_path, threads=2, prefer_native=False), "bf16", 2), ids, CUTS)
    ours = steps(torch_backend(load_model(model_path, threads=2), "bf16", 2), ids, CUTS)
    want = exact[[c - 1 for c in CUTS]]
    assert mean_kl(want, ours) < mean_kl(want, theirs) / 5
    assert mean_kl(theirs, ours) < 0.005


# ---- weights


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_codes_are_in_the_order_of_the_kernels(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (20, 64)).astype(np.uint8)
    scales, minima = (rng.normal(size=(20, 2)).astype(np.float16) for _ in range(2))
    tiles = coded(Codes(codes, scales, minima, bits)).data.reshape(2, 2, -1)
    dwords = tiles[..., : 64 * bits].copy().view(np.uint32).reshape(2, 2, bits, 16)
    terms = tiles[..., 64 * bits :].copy().view(np.float16).reshape(2, 2, 2, 16)
    for output, column in ((0, 0), (3, 5), (15, 31), (16, 32), (19, 63), (7, 12)):
        tile, lane, group = output // 16, output % 16, column // 32
        pair, half = column % 32 // 8 * 4 + column % 4, column % 8 // 4  # of every 8 columns (0,4) (1,5) (2,6) (3,7)
        per_dword = 16 // bits
        dword = int(dwords[tile, group, pair // per_dword, lane])
        assert dword >> (bits * (pair % per_dword) + 16 * half) & (2**bits - 1) == codes[output, column]
        assert (terms[tile, group, :, lane] == (scales[output, group], minima[output, group])).all()


def test_packed_plain_weights_are_pairs_of_columns() -> None:
    values = f32_to_bf16(np.random.default_rng(0).normal(size=(18, 32)).astype(np.float32))
    pairs = plain(values).data.view(np.uint16).reshape(2, 16, 16, 2)
    for output, column in ((0, 0), (17, 31), (5, 6), (16, 12)):
        pair, half = column // 8 * 4 + column % 4, column % 8 // 4
        assert pairs[output // 16, pair, output % 16, half] == values[output, column]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_read_as_gguf_reads_them(kind: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    from rewake.backends.torch.dense import BLOCKS

    x = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    blocks = quantize(x, GGMLQuantizationType[kind])
    found = BLOCKS[kind](blocks)
    values = found.codes.reshape(6, 3, 32).astype(np.float32) * found.scales[..., None] + found.minima[..., None].astype(np.float32)
    np.testing.assert_allclose(values.reshape(6, 96), dequantize(blocks, GGMLQuantizationType[kind]), rtol=1e-6, atol=1e-6)


def test_rotary_frequencies_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=64, rope_parameters=LLAMA3, max_position_embeddings=1024)
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    np.testing.assert_allclose(frequencies(config.to_dict()), want.numpy(), rtol=1e-6)


def test_conversion_writes_the_same_bytes_each_time(model_path: Path) -> None:
    """Their digest is part of the signature. Entries of a file's metadata are written in no certain order: there is one."""
    with open(model_path / CODED, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert list(header["__metadata__"]) == ["blocks"]
    kinds = json.loads(header["__metadata__"]["blocks"])
    assert list(kinds) == sorted(kinds) and set(kinds.values()) == {"Q4_1", "Q8_0"}
