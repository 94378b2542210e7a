"""Real chat templates and vocabularies, from the source of llama-cpp-python on PyPI; fetched once, into the model cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from rewake.cache import models_path

__all__ = ["real_template", "real_vocabulary"]

REQUIREMENT = "llama-cpp-python==0.3.36"
WANTED = ("/vendor/llama.cpp/models/templates/", "/vendor/llama.cpp/models/ggml-vocab-")


def sources() -> Path:
    """The folder they are in. Skips the test where they cannot be had."""
    folder = models_path() / ".llama-cpp-sources"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            fetch(Path(temporary))
            made = Path(temporary) / "made"
            if not folder.is_dir():
                shutil.move(made, folder)
    return folder


def fetch(temporary: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(temporary), REQUIREMENT]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{REQUIREMENT} cannot be fetched: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    (archive,) = temporary.glob("*.tar.gz")
    (temporary / "made").mkdir()
    with tarfile.open(archive) as opened:
        for member in opened:
            if member.isfile() and any(part in member.name for part in WANTED):
                content = opened.extractfile(member)
                assert content is not None
                with open(temporary / "made" / Path(member.name).name, "wb") as file:
                    shutil.copyfileobj(content, file)


def real_template(name: str) -> str:
    return (sources() / f"{name}.jinja").read_text(encoding="utf-8")


def real_vocabulary(name: str) -> Path:
    return sources() / f"ggml-vocab-{name}.gguf"
