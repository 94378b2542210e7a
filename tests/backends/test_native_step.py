"""The native step: as near to the exact model as stated, the same bits for a row in any company, and what takes it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from rewake.backends.base import Batch, Output, Row
from rewake.backends.torch.blocks import BLOCKS, quantise
from rewake.backends.torch.dense import CODED, completed, frequencies, why_not_dense
from rewake.backends.torch.eager import working_dtype
from rewake.backends.torch.kernels import native
from rewake.backends.torch.kernels.packing import LINE, PIECE, Codes, Matrix, Room, coded, plain
from rewake.backends.torch.loader import load_model
from rewake.backends.torch.measure import tables_of
from rewake.backends.torch.model import TorchBackend
from rewake.cli import main
from rewake.config import Config
from rewake.errors import ConfigError, ModelError
from rewake.models import resolve
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


def exact_logits(path: Path, ids: list[int], rows: slice | list[int] = slice(None)) -> np.ndarray[Any, Any]:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    weights = model.state_dict()
    with safe_open(path / CODED, framework="pt") as file:
        for name, kind in json.loads(file.metadata()["blocks"]).items():
            weights[name].copy_(torch.from_numpy(dequantize(file.get_tensor(name).numpy(), GGMLQuantizationType[kind])))
    with torch.inference_mode():
        return model.lm_head(model.model(torch.tensor([ids])).last_hidden_state[0, rows]).numpy()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def exact(model_path: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    """float32 logits of transformers with the default model's weights exactly as they are coded."""
    return exact_logits(model_path, ids)


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


PROMPTS = [40, 100, 190, 256, 300]  # more rows at a time than are exact sums where there are tile registers


@pytest.mark.parametrize("isa", native.isas())
def test_a_prompts_logits_are_those_of_the_weights_as_shipped(
    monkeypatch: pytest.MonkeyPatch, model_path: Path, ids: list[int], exact: np.ndarray[Any, Any], isa: str
) -> None:
    """Mean KL, K and V in bf16. Tile registers multiply in bfloat16: they come to 2e-4."""
    monkeypatch.setenv("REWAKE_ISA", isa)
    mine = steps(torch_backend(load_model(model_path, threads=2), "bf16", 3), ids, PROMPTS)
    assert mean_kl(exact[[c - 1 for c in PROMPTS]], mine) < (1e-3 if isa == "amx" else 2e-4)


GEMMA_CUTS = [1, 8, 9, *range(20, 255, 25), 255, 256, 257, 300, 511, 512, 513, 514, 600]  # around pages, and the window's edge


@pytest.fixture(scope="module")
def gemma_path() -> Path:
    return resolve("gemma3-270m")


@pytest.fixture(scope="module")
def gemma_ids(gemma_path: Path) -> list[int]:
    from rewake.text.tokenizer import Tokenizer

    return [2, *Tokenizer(gemma_path).encode((Path(__file__).parents[2] / "docs" / "architecture.md").read_text())[:599]]


@pytest.fixture(scope="module")
def exact_gemma(gemma_path: Path, gemma_ids: list[int]) -> np.ndarray[Any, Any]:
    return exact_logits(gemma_path, gemma_ids, [c - 1 for c in GEMMA_CUTS])


@pytest.mark.parametrize("isa", native.isas())
def test_gemmas_logits_are_those_of_its_weights_as_shipped(
    monkeypatch: pytest.MonkeyPatch, gemma_path: Path, gemma_ids: list[int], exact_gemma: np.ndarray[Any, Any], isa: str
) -> None:
    """Q4_K, Q5_0, Q6_K and Q8_0, in one file; two windows, two rotations, norms on both sides. Mean KL, K and V in bf16."""
    monkeypatch.setenv("REWAKE_ISA", isa)
    loaded = load_model(gemma_path, threads=2)
    assert "native" in loaded.step_why and "shipped" in loaded.weights
    mine = steps(torch_backend(loaded, "bf16", 3), gemma_ids, GEMMA_CUTS)
    assert mean_kl(exact_gemma, mine) < 1e-3


def test_gemmas_row_has_the_same_bits_in_any_company(gemma_path: Path, gemma_ids: list[int], kv: str) -> None:
    """Alone, cut otherwise (but prompts stay prompts: tile registers take them), and beside five others."""
    loaded = load_model(gemma_path, threads=2)
    pages = Pages(torch_backend(loaded, kv, 14))
    for i in range(6):
        pages.run(pages.row(i, gemma_ids[i:], 0, 290 + i))
    together = pages.run(*(pages.row(i, gemma_ids[i:], 290 + i, 300) for i in range(6))).logits
    for i in (0, 5):
        for start, end in ((0, 100), (100, 290 + i), (290 + i, 300)):
            alone = pages.run(pages.row(6, gemma_ids[i:], start, end)).logits[0]
        assert np.array_equal(alone, together[i])


def test_plain_weights_are_as_near(model_path: Path, tmp_path: Path, ids: list[int]) -> None:
    """bfloat16 safetensors, against transformers in float32 with the same weights."""
    from transformers import AutoModelForCausalLM

    folder = plain_folder(model_path, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        want = model(torch.tensor([ids[:200]])).logits[0].numpy()
    loaded = load_model(folder, threads=2)
    assert loaded.plan is not None and loaded.weights == "bfloat16"
    cuts = [1, 9, 150, 160, 195, 200]
    assert mean_kl(want[[c - 1 for c in cuts]], steps(torch_backend(loaded, "bf16", 2), ids, cuts)) < 2e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_safetensors_of_any_float_are_bfloat16(tmp_path: Path, dtype: torch.dtype) -> None:
    """numpy reads some of them, torch the others; more rows than are rounded at a time."""
    from safetensors.torch import load_file, save_file

    folder = tiny("Llama", tmp_path, intermediate_size=640)
    weights = {name: x.to(dtype) if x.ndim == 2 else x.float() for name, x in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    plan = load_model(folder, threads=2).plan
    assert plan is not None
    want = weights["model.layers.0.mlp.up_proj.weight"].bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(plan.layers[0].up.matrix.data, plain(want).data)


@pytest.mark.parametrize(("weights", "loss"), [("q8", 0.002), ("q4", 0.3)])
def test_weights_are_coded_on_load_when_asked(model_path: Path, tmp_path: Path, ids: list[int], weights: str, loss: float) -> None:
    """As near to transformers with the very weights that the codes stand for; what coding them loses is bounded loosely."""
    from transformers import AutoModelForCausalLM

    folder = plain_folder(model_path, tmp_path)
    loaded = load_model(folder, threads=2, weights=weights)
    assert loaded.plan is not None and f"{weights}, coded on load" in loaded.weights
    assert loaded.facts["weights"] != load_model(folder, threads=2).facts["weights"], "a fact of the signature"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    cuts = [1, 9, 150, 160, 195, 200]
    rows = [c - 1 for c in cuts]
    with torch.inference_mode():
        uncoded = model(torch.tensor([ids[:200]])).logits[0, rows].numpy()
        for name, w in model.state_dict().items():
            if w.ndim == 2 and name != "lm_head.weight":  # which is the embedding
                found = quantise(w.numpy(), 8 if "embed" in name or weights == "q8" else 4)
                w.copy_(torch.from_numpy(found.codes * each(found.scales, 32)[..., 0] + each(found.minima, 32)[..., 0]))
        want = model(torch.tensor([ids[:200]])).logits[0, rows].numpy()
    got = steps(torch_backend(loaded, "bf16", 2), ids, cuts)
    assert mean_kl(want, got) < 2e-4
    assert mean_kl(uncoded, got) < loss


def test_weights_that_cannot_be_coded_are_refused(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="shipped in quantised blocks"):
        load_model(model_path, weights="q4")
    folder = tiny("Llama", tmp_path)
    with pytest.raises(ModelError, match="only the native step"):
        load_model(folder, weights="q8", prefer_native=False)
    with pytest.raises(ConfigError, match="weights is 'q5'"):
        Config(weights="q5")


def plain_folder(model_path: Path, tmp_path: Path) -> Path:
    """The default model as bfloat16 safetensors only."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(model_path / name)
    return folder


def tiny(kind: str, folder: Path, **changes: Any) -> Path:
    """A random model of two layers."""
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": 200,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    config = getattr(transformers, f"{kind}Config")(**{**shape, **changes})
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
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


GEMMA = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 40,
    "query_pre_attn_scalar": 48,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
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
        ("Gemma2", {"sliding_window": 40, "query_pre_attn_scalar": 48}),
        ("Gemma3Text", GEMMA),
        ("Gemma3Text", {**GEMMA, "attention_bias": True, "final_logit_softcapping": 20.0}),
    ],
)
def test_random_models_agree_with_transformers_in_float32(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny(kind, tmp_path, **changes)
    loaded = load_model(folder, threads=2)
    assert loaded.plan is not None, loaded.step_why
    tokens = np.random.default_rng(0).integers(0, 200, 300).tolist()
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        want = model(torch.tensor([tokens])).logits[0].numpy()
    cuts = [1, 2, 30, 257, 300]
    got = steps(torch_backend(loaded, "bf16", 2), tokens, cuts)
    error = np.abs(got - want[[c - 1 for c in cuts]]).max() / np.abs(want).max()
    assert error < 0.04  # K and V are bfloat16, and a prompt's products may be; a wrong plane, norm or bias gives 0.3 and more


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
    pages = Pages(torch_backend(replace(real_model, threads=threads), kv, 68))
    pages.run(*(pages.row(i, t, 0, 49 - i) for i, t in enumerate(texts)))
    together = pages.run(*(pages.row(i, t, 49 - i, 50 - i) for i, t in enumerate(texts))).logits
    for i in (0, 8, 31):
        pages.run(pages.row(32, texts[i], 0, 49 - i))
        alone = pages.run(pages.row(32, texts[i], 49 - i, 50 - i)).logits[0]
        assert np.array_equal(alone, together[i])
        planes = pages.backend.planes
        for a, b in zip(rows_of(pages.pages(32), planes, 50 - i), rows_of(pages.pages(i), planes, 50 - i), strict=True):
            assert np.array_equal(a, b)


def rows_of(pages: np.ndarray[Any, Any], planes: PagePlanes, rows: int) -> list[np.ndarray[Any, Any]]:
    """The stored rows [0, rows) of one page, array by array."""
    out = []
    for number, plane in enumerate(planes.planes):  # each in one slot
        for _, field, at in plane.slot.arrays():
            begin = number * planes.slot_bytes + at
            whole = pages[begin : begin + plane.slot.field_bytes(field)].reshape(plane.slot.kv_heads, PAGE_TOKENS, -1)
            out.append(whole[:, :rows])
    return out


ANY_CUTS = ([280], [1, 2, 30, 256, 279, 280], [*range(7, 280, 7), 280])
CUTS_OF_A_KIND = ([280], [33, 150, 200, 280], [120, 280])  # of more rows than are exact sums where there are tile registers


@pytest.mark.parametrize("isa", native.isas()[:2])
def test_how_a_prompt_is_cut_changes_no_bit(monkeypatch: pytest.MonkeyPatch, model_path: Path, ids: list[int], kv: str, isa: str) -> None:
    monkeypatch.setenv("REWAKE_ISA", isa)
    loaded, results = load_model(model_path, threads=2), []
    for cuts in CUTS_OF_A_KIND if isa == "amx" else ANY_CUTS:
        backend = torch_backend(loaded, kv, 2)
        logits = steps(backend, ids, cuts)[-1]
        results.append((logits, backend.arena.copy()))
    assert all(np.array_equal(results[0][0], r[0]) and np.array_equal(results[0][1], r[1]) for r in results)


def test_a_decode_row_has_the_same_bits_beside_a_prompt(real_model: Any, ids: list[int], kv: str) -> None:
    """A step with rows of both kinds: each is what it is alone, K and V and logits."""
    pages = Pages(torch_backend(real_model, kv, 14))
    for i in range(3):
        pages.run(pages.row(i, ids[i:], 0, 60))
    prompts = (pages.row(3, ids, 0, 50), pages.row(4, ids[5:], 0, 200))
    decodes = tuple(pages.row(i, ids[i:], 60, 60 + n) for i, n in enumerate((1, 32, 2)))
    mixed = (decodes[0], prompts[0], decodes[1], prompts[1], decodes[2])
    together, stored = pages.run(*mixed).logits, [pages.pages(i) for i in range(5)]
    for i, row in enumerate(mixed):
        assert np.array_equal(pages.run(row).logits[0], together[i])
    assert all(np.array_equal(pages.pages(i), before) for i, before in enumerate(stored))


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


def test_older_gemma_configs_mean_what_transformers_reads_in_them() -> None:
    from transformers import Gemma2Config, Gemma3TextConfig

    old = {"num_hidden_layers": 13, "sliding_window": 512, "rope_theta": 2e6, "rope_local_base_freq": 2e4, "sliding_window_pattern": 5}
    old["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    for made, config in ((Gemma2Config, {"num_hidden_layers": 5}), (Gemma3TextConfig, {"num_hidden_layers": 14}), (Gemma3TextConfig, old)):
        want, got = made(**config).to_dict(), completed({**config, "model_type": made.model_type})
        for key in ("layer_types", "head_dim", "query_pre_attn_scalar", "hidden_activation", "tie_word_embeddings", "sliding_window"):
            assert got[key] == want[key], key
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            assert got.get(key) == want[key], key
        if made is Gemma3TextConfig:
            for kind, rope in want["rope_parameters"].items():
                assert {"rope_type": "default", **got["rope_parameters"][kind]} == rope


def test_the_signature_names_the_way_that_was_taken(model_path: Path) -> None:
    ours, theirs = load_model(model_path, threads=1), load_model(model_path, threads=1, prefer_native=False)
    assert ours.facts["step"] == "native" and ours.facts["weights"] != theirs.facts["weights"]


def test_doctor_says_which_way_a_model_takes_and_why(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWAKE_DATA", str(tmp_path / "data"))
    assert main(["doctor", "--model", str(model_path), "--memory", "64MiB"]) == 0
    said = capsys.readouterr().out
    assert "step     native: it is of the Llama family" in said and "in the blocks they are shipped in: 5." in said
    folder = tiny("Llama", tmp_path, hidden_act="gelu")
    assert main(["doctor", "--model", str(folder), "--memory", "64MiB"]) == 0
    assert "step     transformers, not the native step: it has no 'gelu' activation" in capsys.readouterr().out


def test_both_ways_agree_on_what_is_likely(model_path: Path, ids: list[int], exact: np.ndarray[Any, Any]) -> None:
    """They differ by what bfloat16 costs transformers, and ours is the nearer one to the exact model.

    Where the processor has no bfloat16, only transformers' weights are rounded to it.
    """
    theirs = steps(torch_backend(load_model(model_path, threads=2, prefer_native=False), "bf16", 2), ids, CUTS)
    ours = steps(torch_backend(load_model(model_path, threads=2), "bf16", 2), ids, CUTS)
    want = exact[[c - 1 for c in CUTS]]
    assert mean_kl(want, ours) < mean_kl(want, theirs) / (5 if working_dtype()[0] == torch.bfloat16 else 1)
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


def test_matrices_lie_one_behind_the_other_each_from_the_start_of_a_cache_line() -> None:
    """Two threads place some at once, of sizes that are no multiple of a line, and one that has memory of its own."""
    rng = np.random.default_rng(0)
    sizes = [*rng.integers(1, 300_000, 300).tolist(), PIECE // 4 + 1]
    matrices = [Matrix(rng.integers(0, 256, size).astype(np.uint8), 16, 32, 0) for size in sizes]
    room = Room()
    with ThreadPoolExecutor(2) as threads:
        placed = list(threads.map(room.place, matrices))
    starts = [matrix.data.ctypes.data for matrix in placed]
    assert all(start % LINE == 0 for start in starts)
    ordered = sorted(zip(starts, sizes, strict=True))
    assert all(start + size <= behind for (start, size), (behind, _) in pairwise(ordered))
    for matrix, original in zip(placed, matrices, strict=True):
        assert np.array_equal(matrix.data, original.data) and (matrix.outputs, matrix.inputs, matrix.kind) == (16, 32, 0)


BLOCK_BYTES = {
    name: GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
}
HALVES = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}  # where blocks have float16 terms; others: two at their start


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Rows of random blocks of `kind`, their float16 terms such that a row of products stays near 1."""
    rng = np.random.default_rng(seed)
    weights, size = BLOCK_BYTES[kind]
    blocks = rng.integers(0, 256, (outputs, inputs // weights, size), np.uint8)
    largest = {"Q8_0": 128, "Q6_K": 32 * 128, "Q4_K": 16 * 63, "Q5_K": 32 * 63}.get(kind, 16)
    for at in HALVES.get(kind, (0, 2)):
        terms = rng.normal(1, 0.3, blocks.shape[:2]) * 4 / largest / inputs**0.5
        blocks[..., at : at + 2] = terms.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(outputs, -1)


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_blocks_are_read_as_gguf_reads_them(kind: str) -> None:
    blocks = random_blocks(kind, 6, 512)
    found = BLOCKS[kind](blocks)
    codes = found.codes.reshape(6, -1, 16).astype(np.float32)
    if isinstance(found, Codes):
        values = codes * each(found.scales, 2) + each(found.minima, 2)
    elif found.minima is None or found.minimum is None:
        values = (codes - 32) * each(found.scales, 1) * each(found.scale, 16)
    else:
        values = codes * each(found.scales, 2) * each(found.scale, 16) + each(found.minima, 2) * each(found.minimum, 16)
    np.testing.assert_allclose(values.reshape(6, 512), dequantize(blocks, GGMLQuantizationType[kind]), rtol=1e-5, atol=1e-7)


def each(terms: np.ndarray[Any, Any], times: int) -> np.ndarray[Any, Any]:
    """Float32 terms, one for each 16 columns."""
    return terms.astype(np.float32).repeat(times, 1)[..., None]


@pytest.mark.parametrize("kind", BLOCK_BYTES)
def test_products_with_weights_of_every_kind_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """On every instruction set: a random Llama whose matrices, embedding and head are blocks of `kind`; K and V in bf16."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    folder = tiny("Llama", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    weights = load_file(folder / "model.safetensors")
    blocks = {name: random_blocks(kind, *w.shape, seed=i) for i, (name, w) in enumerate(weights.items()) if w.ndim == 2}
    vectors = {name: w.float() for name, w in weights.items() if w.ndim == 1}
    (folder / CODED).parent.mkdir()
    metadata = {"blocks": json.dumps(dict.fromkeys(blocks, kind))}
    save_file({**vectors, **{name: torch.from_numpy(b) for name, b in blocks.items()}}, folder / CODED, metadata=metadata)

    tokens = np.random.default_rng(1).integers(0, 200, 40).tolist()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    for name, b in blocks.items():
        model.state_dict()[name].copy_(torch.from_numpy(dequantize(b, GGMLQuantizationType[kind])))
    with torch.inference_mode():
        want = model(torch.tensor([tokens])).logits[0].numpy()
    cuts = [1, 2, 18, 23, 40]  # rows alone, in whole blocks, and what is left of them
    found = {}
    for isa in native.isas():
        monkeypatch.setenv("REWAKE_ISA", isa)
        found[isa] = steps(torch_backend(load_model(folder, threads=2), "bf16", 2), tokens, cuts)
        error = np.abs(found[isa] - want[[c - 1 for c in cuts]]).max() / np.abs(want).max()
        assert error < 0.01, isa
    if "amx" in found:  # the same integers, so the same bits
        assert np.array_equal(found["amx"], found["avx512"])


def test_rotary_frequencies_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=64, rope_parameters=LLAMA3, max_position_embeddings=1024)
    want, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    np.testing.assert_allclose(frequencies(config.rope_parameters, 64), want.numpy(), rtol=1e-6)


def test_conversion_writes_the_same_bytes_each_time(model_path: Path) -> None:
    """Their digest is part of the signature. Entries of a file's metadata are written in no certain order: there is one."""
    with open(model_path / CODED, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert list(header["__metadata__"]) == ["blocks"]
    kinds = json.loads(header["__metadata__"]["blocks"])
    assert list(kinds) == sorted(kinds) and set(kinds.values()) == {"Q4_1", "Q8_0"}
