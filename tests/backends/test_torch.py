"""The torch backend against transformers' own attention, and its coder against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rewake.backends.base import Batch, Row
from rewake.backends.torch.calibrate import fit_sink, k_mean, write_documents
from rewake.backends.torch.kernels.vectorised import decode, decode_refined, encode, encode_residual
from rewake.backends.torch.loader import load_model
from rewake.backends.torch.measure import compare, tables_of
from rewake.backends.torch.sampler import Sampler, candidates, logprobs_of, softmax
from rewake.calibration import SHIPPED, Calibration
from rewake.quant import bf16_to_f32, hadamard
from rewake.quant import decode as reference_decode
from rewake.quant import decode_refined as reference_decode_refined
from rewake.quant import encode as reference_encode
from rewake.quant import encode_residual as reference_encode_residual
from rewake.request import Sampling
from tests.shadow import torch_backend

GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize("dim", [64, 80, 192])
def test_the_torch_residuals_are_the_references_bit_for_bit(dim: int) -> None:
    x = np.random.default_rng(dim).normal(size=(40, 3, dim)).astype(np.float32)
    x[0] = 2.5  # a constant group
    ours, theirs = encode(torch.from_numpy(x), 4, 64), reference_encode(x, 4, 64)
    mine, reference = encode_residual(torch.from_numpy(x), *ours, 64), reference_encode_residual(x, *theirs, 64)
    assert mine.contiguous().numpy().tobytes() == reference.tobytes()
    decoded = decode_refined(ours[0], mine, *ours[1:], 64, dim).numpy()
    assert (decoded == reference_decode_refined(theirs[0], reference, *theirs[1:], 64, dim)).all()


@pytest.mark.parametrize("dim", [64, 80, 192])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_torch_coder_is_the_reference_bit_for_bit(dim: int, bits: int) -> None:
    x = np.random.default_rng(dim).normal(size=(40, 3, dim)).astype(np.float32)
    x[0] = 2.5  # a constant group
    codes, scales, biases = encode(torch.from_numpy(x), bits, 64)
    for mine, reference in zip((codes, scales, biases), reference_encode(x, bits, 64), strict=True):
        assert mine.contiguous().view(torch.uint8).numpy().tobytes() == reference.tobytes()
    decoded = decode(codes, scales, biases, bits, 64, dim)
    assert (decoded.numpy() == reference_decode(*reference_encode(x, bits, 64), bits, 64, dim)).all()
    assert bf16_to_f32(np.array([0x3F80], np.uint16)) == 1


def steps(backend: Any, tokens: list[int], cuts: list[int], first_slot: int = 0) -> np.ndarray[Any, Any]:
    """Logits behind each of `cuts`, computed in these pieces."""
    logits, start = [], 0
    for end in cuts:
        pages = range(first_slot, first_slot - (-end // 256))
        names = tuple(f"p{i}" for i in pages)
        row = Row(tuple(tokens[start:end]), start, start, tables_of(backend, pages), names, "s", GREEDY)
        logits.append(backend.forward(Batch((row,))).logits[0])
        start = end
    return np.stack(logits)


def mean_kl(p_logits: np.ndarray[Any, Any], q_logits: np.ndarray[Any, Any]) -> float:
    p, q = (torch.from_numpy(x).log_softmax(-1) for x in (p_logits, q_logits))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module")
def text_ids(model_path: Path) -> list[int]:
    from rewake.text.tokenizer import Tokenizer

    words = "The river carried the lamp past the stone garden while the violin kept playing for nobody in particular. " * 40
    return Tokenizer(model_path).encode(words)[:600]


@pytest.fixture(scope="module")
def transformers_logits(model_path: Path, text_ids: list[int]) -> np.ndarray[Any, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        return model(torch.tensor([text_ids])).logits[0].float().numpy()  # type: ignore[no-any-return]


CUTS = [255, 256, 257, 511, 512, 513, 600]


@pytest.mark.parametrize(("kv", "bound"), [("bf16", 0.002), ("q8", 0.005), ("k8v4", 0.05), ("q4", 0.2), ("q4+", 0.05)])
def test_logits_are_those_of_transformers(
    real_model: Any, text_ids: list[int], transformers_logits: np.ndarray[Any, Any], kv: str, bound: float
) -> None:
    """In pieces cut around page edges; what a codec loses is bounded on text the model finds easy."""
    mine = steps(torch_backend(real_model, kv, 4), text_ids, CUTS)
    assert mean_kl(transformers_logits[[c - 1 for c in CUTS]], mine) < bound


def test_centring_changes_the_error_of_coding_only(real_model: Any, text_ids: list[int]) -> None:
    """Softmax ignores the mean that is taken away: with 8 bits the logits stay, whatever it is."""
    mean = k_mean(real_model, [text_ids[:257]])
    made = {"bf16": torch_backend(real_model, "bf16", 2)}
    made |= {str(factor): torch_backend(real_model, "q8", 2, factor * mean) for factor in (0, 1, -1)}
    kl = {name: scores.kl.mean() for name, scores in compare(made, text_ids[:257]).items()}
    assert kl["bf16"] == 0 and max(kl.values()) < 0.01, kl


@pytest.mark.parametrize("dim", [16, 64, 96])
def test_the_fitted_mean_makes_the_sinks_code_exact(dim: int) -> None:
    rng = np.random.default_rng(dim)
    mean, first = rng.normal(size=(2, 5, 3, dim)).astype(np.float32) * 4
    fitted = fit_sink(mean, first)
    error, step = {}, 0.0
    for name, centre in (("mean", mean), ("fitted", fitted)):
        rotated = ((first - centre) @ hadamard(dim)).astype(np.float32)
        coded = reference_encode(rotated, 4, 64)
        step = max(step, float(bf16_to_f32(coded[1]).max()))
        error[name] = np.abs(reference_decode(*coded, 4, 64, dim) - rotated).mean()
    assert error["fitted"] < error["mean"] / 10
    assert np.abs((fitted - mean) @ hadamard(dim)).max() < step


def test_the_mean_is_that_of_transformers_keys(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    windows = [list(range(500, 1001))]  # its last token is never computed
    mean = k_mean(load_model(tiny, threads=2), windows)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        cache = model(torch.tensor(windows)[:, :-1], use_cache=True).past_key_values
    keys = np.stack([layer.keys[0].float().mean(1).numpy() for layer in cache.layers])
    assert mean.shape == keys.shape == (2, 1, 32)
    np.testing.assert_allclose(mean, keys, atol=2e-3)


def test_what_the_model_writes_is_the_same_each_time(tiny: Path) -> None:
    loaded = load_model(tiny, threads=2)
    text = write_documents(loaded, 3, 10)
    assert len(text) == 30 and len(set(text)) > 10 and text[::10] == [loaded.first_token] * 3
    assert write_documents(loaded, 3, 10) == text


def test_the_default_model_comes_calibrated(real_model: Any) -> None:
    """Should its weights be converted differently one day: `rewake calibrate`, and the file it writes to rewake/calibrations."""
    shipped = Calibration.load(SHIPPED / f"{real_model.fingerprint}.safetensors", real_model.fingerprint)
    assert shipped.k_mean.shape == (30, 3, 64) and set(shipped.losses) >= {"q4", "k8v4", "q8"}


def test_the_mean_is_a_fact_of_coded_pages_only(tiny: Path) -> None:
    loaded = load_model(tiny, threads=2)
    mean = np.zeros((2, 1, 32), np.float32)
    without, zero, other = (torch_backend(loaded, "q4", 1, m).facts() for m in (None, mean, mean + 1))
    assert "centring" not in without and zero["centring"] != other["centring"]
    assert {k: v for k, v in zero.items() if k != "centring"} == without
    assert torch_backend(loaded, "q4", 1, mean.copy()).facts() == zero
    assert torch_backend(loaded, "bf16", 1, mean).facts() == torch_backend(loaded, "bf16", 1).facts()


def test_a_batch_of_strangers_computes_what_each_alone_does(real_model: Any, text_ids: list[int]) -> None:
    """Rows of a batch attend to their own pages only; bf16 GEMMs differ in the last bits with the number of rows."""
    backend = torch_backend(real_model, "bf16", 9)
    parts = [text_ids[:300], text_ids[100:150], text_ids[200:201]]
    pages = [(0, 1), (2,), (3,)]
    where = enumerate(zip(parts, pages, strict=True))
    rows = tuple(Row(tuple(t), 0, 0, tables_of(backend, p), tuple(map(str, p)), str(i), GREEDY) for i, (t, p) in where)
    together = backend.forward(Batch(rows)).logits
    alone = np.stack([steps(backend, part, [len(part)], first_slot=4)[0] for part in parts])
    assert mean_kl(alone, together) < 0.002


def test_recomputing_the_last_token_uses_its_stored_row(real_model: Any, text_ids: list[int]) -> None:
    backend = torch_backend(real_model, "q4", 2)
    steps(backend, text_ids, [100])
    before = backend.arena.copy()
    row = Row((text_ids[99],), 99, 100, ((0,),), ("p0",), "s", GREEDY)
    backend.forward(Batch((row,)))
    assert (backend.arena == before).all()


def draw(sampler: Sampler, logits: np.ndarray[Any, Any], sampling: Sampling, stream: str) -> int:
    return sampler.sample(logits[None], [(sampling, stream)])[0]


def normal(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_sampling_obeys_its_bounds() -> None:
    sampler = Sampler()
    logits = np.array([0.0, 3.0, 2.0, 1.0], np.float32)
    assert draw(sampler, logits, Sampling(temperature=0), "a") == 1
    drawn = {draw(sampler, logits, Sampling(temperature=5.0, top_k=2), "a") for _ in range(200)}
    assert drawn == {1, 2}
    drawn = {draw(sampler, logits, Sampling(top_p=0.6), "a") for _ in range(200)}
    assert drawn == {1}
    drawn = {draw(sampler, logits, Sampling(temperature=2.0), "a") for _ in range(400)}
    assert drawn == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=5e-324), Sampling(top_p=1e-50), Sampling(temperature=1e-5, top_p=1e-46, top_k=3)]
)
def test_extreme_values_pick_the_best_token(sampling: Sampling) -> None:
    assert draw(Sampler(), np.array([0.0, 30.0, -30.0], np.float32), sampling, "a") == 1


def test_a_sequence_draws_from_its_own_stream() -> None:
    logits = np.zeros(1000, np.float32)
    sampling = Sampling(seed=5)
    alone = Sampler()
    expected = [draw(alone, logits, sampling, "a") for _ in range(5)]
    shared = Sampler()
    drawn = []
    for _ in range(5):
        drawn.append(draw(shared, logits, sampling, "a"))
        draw(shared, logits, Sampling(seed=6), "b")
    assert drawn == expected


def test_a_bias_and_penalties_shift_what_is_drawn() -> None:
    sampler, logits = Sampler(), np.array([0.0, 3.0, 2.5, 1.0], np.float32)
    assert draw(sampler, logits, Sampling(temperature=0, logit_bias=((1, -100.0),)), "a") == 2
    assert draw(sampler, logits, Sampling(temperature=0, logit_bias=((3, 5.0),)), "a") == 3
    penalised = Sampling(temperature=0, presence_penalty=0.75)
    assert [draw(sampler, logits, penalised, "b") for _ in range(4)] == [1, 2, 1, 1], "once, however often a token is there"
    penalised = Sampling(temperature=0, frequency_penalty=0.75)
    assert [draw(sampler, logits, penalised, "c") for _ in range(5)] == [1, 2, 1, 2, 1]
    assert (logits == np.array([0.0, 3.0, 2.5, 1.0], np.float32)).all(), "what is traced is what the model gave"


@pytest.mark.parametrize("top_p", [1e-50, 0.1, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("size", [5000, 262144])
def test_the_nucleus_is_that_of_the_whole_vocabulary(top_p: float, spread: float, size: int) -> None:
    """Beside a sort of everything; the sums' last bits may move its end by a token. In float32 they would be thousands off."""
    probabilities = softmax(spread * normal(size))
    weights, tokens = candidates(probabilities, Sampling(top_p=top_p))
    order = np.argsort(-probabilities, kind="stable")
    count = int((np.cumsum(probabilities[order], dtype=np.float64) - probabilities[order] < top_p).sum())
    assert abs(np.count_nonzero(weights) - count) <= 1 and tokens is not None
    assert np.array_equal(tokens[:count], order[:count]) and np.array_equal(weights[: count - 1], probabilities[order[: count - 1]])


class Only:
    """A constraint: tokens with numbers in `allowed`; it has seen `taken`."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed
        self.taken: list[int] = []

    def allow(self, mask: Any) -> None:
        if not self.allowed:
            raise ArithmeticError("a dead end")
        for token in self.allowed:
            mask[token // 32] |= np.int32(np.uint32(1 << token % 32).view(np.int32))

    def take(self, token: int) -> None:
        self.taken.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_only_what_a_constraint_allows_is_drawn(temperature: float) -> None:
    sampler, logits, only = Sampler(), normal(1000), Only(31, 32, 999)
    sampling = Sampling(temperature=temperature, constraint=only)
    drawn = [draw(sampler, logits, sampling, "a") for _ in range(100)]
    assert set(drawn) <= {31, 32, 999} and only.taken == drawn
    assert temperature < 50 or len(set(drawn)) == 3


def test_company_changes_nothing() -> None:
    """One call for all rows; each row's token is what it would be alone."""
    logits = normal(6, 1000)

    def kinds() -> list[Sampling]:
        return [
            Sampling(seed=1),
            Sampling(temperature=0),
            Sampling(seed=2, top_p=0.5, presence_penalty=1.0),
            Sampling(seed=3, constraint=Only(5, 6, 700)),
            Sampling(seed=4, top_k=7, logit_bias=((3, 9.0),)),
            Sampling(seed=5, temperature=0.3, frequency_penalty=-1.0, constraint=Only(*range(100))),
        ]

    together, alone = Sampler(), Sampler()
    one, other = list(enumerate(kinds())), list(enumerate(kinds()))
    for _ in range(20):
        drawn = together.sample(logits, [(sampling, str(i)) for i, sampling in one])
        assert drawn == [draw(alone, logits[i], sampling, str(i)) for i, sampling in other]


def test_a_dead_end_moves_no_stream() -> None:
    """The step is tried again in halves, and only the request that is stuck fails."""
    sampler, logits = Sampler(), normal(1000)
    fine = Sampling(seed=1, presence_penalty=1.0, constraint=Only(*range(0, 1000, 3)))
    expected = [draw(Sampler(), logits, Sampling(seed=1, constraint=Only(*range(0, 1000, 3))), "a")]
    with pytest.raises(ArithmeticError, match="dead end"):
        sampler.sample(np.stack([logits, logits]), [(fine, "a"), (Sampling(constraint=Only()), "b")])
    assert draw(sampler, logits, fine, "a") == expected[0]


def test_logprobs_are_those_of_the_rows_that_ask() -> None:
    logits = np.array([[0.0, 1.0, 2.0], [3.0, 3.0, 0.0]], np.float32)
    found = logprobs_of(logits, [1, 0], [None, 2])
    assert list(found) == [1] and found[1].chosen == pytest.approx(-np.log(2 + np.exp(-3)))
    assert [token for token, _ in found[1].top] == [0, 1]
    assert logprobs_of(logits, [2, 0], [0, None])[0].top == ()
