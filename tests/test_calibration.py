"""Calibrations: kept with the model, never used for another, part of the signature; and how `--kv auto` chooses."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rewake.backends.torch.loader import load_model
from rewake.calibration import Calibration, Loss, choose, find, folder
from rewake.config import Config
from rewake.errors import ConfigError, ModelError
from rewake.request import Done, Event, Request, Sampling
from rewake.service import load_backend, open_service

MINE, OTHERS = "a" * 32, "b" * 32


def made(fingerprint: str = MINE, seed: int = 0, shape: tuple[int, ...] = (2, 1, 32), q4: float = 0.02) -> Calibration:
    mean = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return Calibration(fingerprint, mean, {"q4": Loss(q4, 0.001, 0.03, 0.9), "k8v4": Loss(0.004, 0.001, 0.01, 0.95)}, "a text")


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache."""
    monkeypatch.setenv("REWAKE_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def test_what_was_measured_is_found_again() -> None:
    calibration = made()
    file = calibration.save(folder())
    assert list(folder().iterdir()) == [file], "nothing temporary is left"
    found = find(MINE)
    assert found is not None and found.k_mean.tobytes() == calibration.k_mean.tobytes()
    assert (found.losses, found.text, found.fingerprint) == (calibration.losses, "a text", MINE)


def test_a_newer_one_replaces_it() -> None:
    made().save(folder())
    made(seed=1).save(folder())
    found = find(MINE)
    assert found is not None and (found.k_mean == made(seed=1).k_mean).all()


def test_another_models_is_not_found_and_never_taken() -> None:
    file = made(OTHERS).save(folder())
    assert find(MINE) is None
    file.rename(folder() / f"{MINE}.safetensors")
    with pytest.raises(ModelError, match="another model's"):
        find(MINE)


@pytest.mark.parametrize("damage", ["cut", "noise", "nan", "no metadata"])
def test_a_damaged_one_is_an_error_that_says_what_to_do(damage: str) -> None:
    """Going on without it would hide all memories that were made with it."""
    calibration = made()
    if damage == "nan":
        calibration.k_mean[0, 0, 0] = np.nan
    file = calibration.save(folder())
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-7])
    elif damage == "noise":
        file.write_bytes(b"\xff" * 100)
    elif damage == "no metadata":
        save_file({"k_mean": calibration.k_mean}, file)
    with pytest.raises(ModelError, match=r"remove it, then run `rewake calibrate`"):
        find(MINE)


def losses(**perplexities: float) -> Mapping[str, Loss]:
    return {codec: Loss(perplexity, 0.0, 0.0, 1.0) for codec, perplexity in perplexities.items()}


@pytest.mark.parametrize(
    ("measured", "most", "codec"),
    [
        (losses(**{"q4": 0.031, "q4+": 0.006, "k8v4": 0.004}), 0.01, "q4+"),
        (losses(q4=0.009, k8v4=0.004, q8=0.0), 0.01, "q4"),
        (losses(q4=-0.001, k8v4=0.004, q8=0.0), 0.0, "q4"),
        (losses(q4=0.031, k8v4=0.004, q8=0.0), 0.01, "k8v4"),
        (losses(q4=0.031, k8v4=0.004, q8=0.0), 0.05, "q4"),
        (losses(q4=0.031, k8v4=0.012, q8=0.002), 0.01, "q8"),
        (losses(q4=0.031, k8v4=0.012, q8=0.002), 0.001, "bf16"),
        (losses(k8v4=0.004), 0.01, "k8v4"),
        ({}, 0.01, "bf16"),
    ],
)
def test_the_smallest_codec_that_loses_little_enough_is_chosen(measured: Mapping[str, Loss], most: float, codec: str) -> None:
    assert choose(measured, most)[0] == codec


def test_the_choice_is_explained() -> None:
    _, why = choose(losses(q4=0.031, k8v4=0.004), 0.01)
    assert why == "loses 0.40% of perplexity, at most 1.00% were asked for; q4 loses 3.10%; q4+ was not measured"


def test_a_changed_model_has_another_fingerprint(tiny: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_tensors

    changed = tmp_path / "changed"
    changed.mkdir()
    for file in tiny.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    weights = load_file(tiny / "model.safetensors")
    save_tensors(
        {name: w + 1 if name == "model.norm.weight" else w for name, w in weights.items()}, changed / "model.safetensors", {"format": "pt"}
    )
    assert load_model(changed, 2).fingerprint != load_model(tiny, 2).fingerprint == load_model(tiny, 2).fingerprint


def test_memories_of_another_mean_are_never_used_and_never_lost(tiny: Path, tmp_path: Path) -> None:
    config = Config(model=str(tiny), data=tmp_path / "data", memory=2**24, disk=2**30, threads=2)
    fingerprint = load_model(tiny, 2).fingerprint

    def reused() -> int:
        service = open_service(config)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        service.engine.submit(Request("r", tuple(range(300, 600)), 1, events.put, Sampling(temperature=0), agent="ada"))
        while not isinstance(event := events.get(timeout=60), Done):
            pass
        service.close()
        return event.match.reused_tokens

    assert (reused(), reused()) == (0, 299)
    file = made(fingerprint).save(folder())
    assert (reused(), reused()) == (0, 299)
    made(fingerprint, seed=1).save(folder())
    assert reused() == 0
    file.unlink()
    assert reused() == 299


def test_the_backend_says_what_was_chosen_and_why(tiny: Path) -> None:
    config = Config(model=str(tiny), memory=2**24, threads=2, kv="auto")
    with pytest.raises(ConfigError, match=r"run `rewake calibrate --model"):
        load_backend(config, tiny)
    made(load_model(tiny, 2).fingerprint).save(folder())
    # heads of 32 values are padded to groups of 64
    assert load_backend(config, tiny).describe()["kv"].startswith("k8v4, 13 bits a value: loses 0.40%")
    assert load_backend(replace(config, kv_loss=0.03), tiny).describe()["kv"].startswith("q4, ")
    asked = load_backend(replace(config, kv="q4:32"), tiny)
    assert (asked.planes.codec.name, asked.planes.group_size) == ("q4", 32)
    assert asked.describe()["centring"] == "on a text"


def rewake(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rewake", *arguments], capture_output=True, text=True, check=False)


def test_a_model_is_measured_from_the_command_line(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    model = ("--model", str(tiny), "--threads", "2")
    text.write_text("Too short.")
    refused = rewake("calibrate", *model, "--text", str(text))
    assert refused.returncode == 1 and "at least 256 are needed" in refused.stderr
    text.write_text("The river carried the lamp past the stone garden. " * 40)
    measured = rewake("calibrate", *model, "--text", str(text))
    assert measured.returncode == 0, measured.stderr
    assert "are kept, but do not fit" in measured.stdout and "--kv auto takes" in measured.stdout
    (file,) = folder().iterdir()
    before = file.read_bytes()
    again = rewake("calibrate", *model)
    assert again.returncode == 0 and "--again does it anew" in again.stdout and file.read_bytes() == before
    shown = rewake("doctor", *model, "--kv", "auto")
    assert "tokens of text.txt" in shown.stdout and "at most 1.00% were asked for" in shown.stdout


def test_windows_of_a_given_text_begin_as_the_models_texts_do() -> None:
    from rewake.backends.torch.calibrate import cut

    text = list(range(1000, 2100))
    assert [len(w) for w in cut(text, 512, [])] == [513, 513], "the 76 tokens behind them say nothing"
    first, second = cut(text, 512, [2])
    assert first == [2, *text[:512]] and second == [2, *text[512:1024]]
