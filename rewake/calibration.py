"""What is known of a model from measuring it: the mean of K, and what each codec loses. One file for each model.

    FINGERPRINT.safetensors   "k_mean" F32 [layers, kv_heads, k_dim]; metadata: format, fingerprint, text, losses (JSON)

The fingerprint is a hash of the weights and of the cache's shape, so a changed model never finds another's file. The
mean is part of the signature of pages; the losses are not. Knows files and numbers; measures nothing itself.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rewake.cache import models_path
from rewake.errors import ModelError
from rewake.quant import AUTO_ORDER

__all__ = ["SHIPPED", "Calibration", "Loss", "choose", "find", "folder"]

FORMAT = "rewake-calibration-1"
SHIPPED = Path(__file__).parent / "calibrations"  # of the default model: equal everywhere, so that its agents can move


@dataclass(frozen=True)
class Loss:
    """What a codec does to the model's answers on the calibration text, beside plain bfloat16."""

    perplexity: float  # relative: 0.01 is 1 % worse
    error: float  # half of the 95 % interval of it
    kl: float
    agreement: float  # of the best token


@dataclass(frozen=True, eq=False)
class Calibration:
    """One model's. `text` says in words what it was measured on."""

    fingerprint: str
    k_mean: npt.NDArray[np.float32]
    losses: Mapping[str, Loss]
    text: str

    def save(self, to: Path) -> Path:
        """Write it as one file into the folder `to`: whole, or not at all."""
        losses = {codec: asdict(loss) for codec, loss in self.losses.items()}
        metadata = {"format": FORMAT, "fingerprint": self.fingerprint, "text": self.text, "losses": json.dumps(losses)}
        to.mkdir(parents=True, exist_ok=True)
        target = to / f"{self.fingerprint}.safetensors"
        with tempfile.NamedTemporaryFile(dir=to, prefix=".calibration-", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(save({"k_mean": self.k_mean}, metadata))
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
        return target

    @classmethod
    def load(cls, file: Path, fingerprint: str) -> Calibration:
        """Raises ModelError for a file that is damaged or another model's: without it memories would silently not be found."""
        try:
            with safe_open(file, "numpy") as opened:
                metadata, k_mean = opened.metadata() or {}, opened.get_tensor("k_mean")
            if metadata.get("format") != FORMAT or metadata.get("fingerprint") != fingerprint:
                raise ModelError(f"{file} is another model's calibration, or of another format: remove it, then run `rewake calibrate`")
            losses = {codec: Loss(**loss) for codec, loss in json.loads(metadata["losses"]).items()}
            text = metadata["text"]
        except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{file} is damaged ({error}): remove it, then run `rewake calibrate`") from error
        if k_mean.dtype != np.float32 or k_mean.ndim != 3 or not np.isfinite(k_mean).all():
            raise ModelError(f"{file} is damaged (its mean is no finite vector): remove it, then run `rewake calibrate`")
        return cls(fingerprint, np.ascontiguousarray(k_mean), losses, text)


def folder() -> Path:
    """Where calibrations made on this machine are kept: beside the models."""
    return models_path() / "calibrations"


def find(fingerprint: str) -> Calibration | None:
    """The user's own calibration of a model, else the one that comes with us, else None. Raises ModelError if it is damaged."""
    for place in (folder(), SHIPPED):
        file = place / f"{fingerprint}.safetensors"
        if file.exists():
            return Calibration.load(file, fingerprint)
    return None


def choose(losses: Mapping[str, Loss], most: float) -> tuple[str, str]:
    """The smallest codec that loses at most `most` of perplexity, and why. Plain bfloat16 loses nothing, and always will do."""
    too_much = []
    for codec in AUTO_ORDER:
        lost = 0.0 if codec == "bf16" else losses[codec].perplexity if codec in losses else None
        if lost is not None and lost <= most:
            break
        too_much.append(f"{codec} {'was not measured' if lost is None else f'loses {lost:.2%}'}")
    reason = f"loses {lost:.2%} of perplexity, at most {most:.2%} were asked for"
    return codec, "; ".join([reason, *too_much])
