"""Models from the Hugging Face Hub: asked for by name, fetched file by file, and checked before they are used.

    hub/REPO-COMMIT/          config, tokenizer and weights as the repository has them
    hub/REPO.json             which commit `pull` has found last, so that a start needs no network
    hub/parts/SHA-NAME        what has come of a file so far: the next attempt goes on behind it

Requests are made by huggingface_hub, with its settings (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE). What comes of them is kept here,
because a download that was killed is to go on, and because a file is used only if it has the checksum that the Hub says.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from filelock import FileLock

from rewake.cache import made_once, models_path, write_whole
from rewake.errors import ModelError

__all__ = ["Remote", "fetch", "fetch_repository", "find_file", "flat", "known_repository"]

WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*")
UNWANTED = ("*.bin.index.json", "consolidated*", "*.onnx*")  # of the same names, and of no use here


@dataclass(frozen=True)
class Remote:
    """A file of a repository: `check` is what its content hashes to, by SHA-256 or, for small ones, as git names it."""

    repository: str
    commit: str
    name: str
    size: int
    check: str

    @property
    def part(self) -> Path:
        """Where it is fetched to. It keeps its ending, which converters look at."""
        return models_path() / "hub" / "parts" / f"{self.check[:16]}-{flat(self.name)}"


def look_up(repository: str) -> list[Remote]:
    """All files of a repository, as it is now. Raises ModelError with what to do."""
    from huggingface_hub import HfApi

    logging.getLogger("huggingface_hub").handlers.clear()  # ours shows its warnings, too
    print(f"Looking for {repository} on the Hub ...", file=sys.stderr)  # noqa: T201
    with hub_errors(repository):
        info = HfApi().model_info(repository, files_metadata=True)
        commit = str(info.sha)
        return [
            Remote(repository, commit, s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else str(s.blob_id)) for s in info.siblings or ()
        ]


def fetch_repository(repository: str) -> Path:
    """The folder with a repository's configuration, tokenizer and safetensors as they are now. Raises ModelError."""
    there = look_up(repository)
    wanted = [r for r in there if is_wanted(r.name)]
    if not any(r.name.endswith(".safetensors") for r in wanted):
        ggufs = [f"{repository}:{r.name}" for r in there if r.name.endswith(".gguf")]
        raise ModelError(f"{repository!r} has no safetensors files" + (f": name one of {', '.join(ggufs)}" if ggufs else ""))
    before = known_repository(repository)

    def make(folder: Path) -> None:
        for remote in wanted:
            had = before / remote.name if before is not None else None
            if had is not None and is_as_named(had, remote):
                shutil.copyfile(had, folder / remote.name)
            else:
                os.replace(fetch(remote), folder / remote.name)

    folder = made_once(f"hub/{flat(repository)}-{wanted[0].commit[:12]}", make)
    write_whole(note_of(repository), {"repository": repository, "commit": wanted[0].commit, "folder": folder.name})
    return folder


def known_repository(repository: str) -> Path | None:
    """The folder that was fetched last; else what other programs have put into the Hub's own cache, if that is whole."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        folder = note_of(repository).parent / Path(json.loads(note_of(repository).read_text(encoding="utf-8"))["folder"]).name
        if (folder / "config.json").is_file():
            return folder
    from huggingface_hub import snapshot_download

    with suppress(OSError, ValueError, LookupError):  # nothing is there, or something strange: the Hub is asked
        folder = Path(snapshot_download(repository, allow_patterns=list(WANTED), local_files_only=True))
        if is_whole(folder):
            return folder
    return None


def find_file(repository: str, name: str) -> Remote:
    """One file of a repository, as it is now. Raises ModelError."""
    there = look_up(repository)
    remote = next((r for r in there if r.name == name), None)
    if remote is None:
        ggufs = ", ".join(r.name for r in there if r.name.endswith(".gguf")) or "none"
        raise ModelError(f"{repository!r} has no file {name!r}; its GGUF files: {ggufs}")
    return remote


def fetch(remote: Remote) -> Path:
    """Bring the whole file into its part, and check it. Raises ModelError."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    part = remote.part
    part.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{part}.lock"), hub_errors(remote.repository):
        with open(part, "ab") as file:
            if file.tell() > remote.size:
                file.truncate(0)
            url = hf_hub_url(remote.repository, remote.name, revision=remote.commit)
            if file.tell() < remote.size:
                http_get(
                    url,
                    file,
                    resume_size=file.tell(),
                    headers=build_hf_headers(),
                    expected_size=remote.size,
                    displayed_filename=remote.name,
                )
        if not is_as_named(part, remote):
            part.unlink()
            raise ModelError(
                f"{remote.name} of {remote.repository!r} is not what the Hub says it is (checksum {remote.check}): fetch it again"
            )
    return part


def is_as_named(path: Path, remote: Remote) -> bool:
    """Whether a file holds what the Hub says: large files are named by SHA-256, small ones as git does."""
    if not path.is_file() or path.stat().st_size != remote.size:
        return False
    is_git = len(remote.check) == 40
    digest = hashlib.sha1(b"blob %d\0" % remote.size, usedforsecurity=False) if is_git else hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest() == remote.check


def is_wanted(name: str) -> bool:
    """A file of the top folder that a model in safetensors needs."""
    ours = any(fnmatch(name, p) for p in WANTED) and not any(fnmatch(name, p) for p in UNWANTED)
    return ours and re.fullmatch(r"[^/\\:]+", name) is not None and not name.startswith(".")


def is_whole(folder: Path) -> bool:
    """Whether a folder has a model's configuration and all weights that it names."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return all((folder / name).is_file() for name in set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return any(folder.glob("*.safetensors"))


def flat(repository: str) -> str:
    """A repository's name, and that of a file in it, as a name of one file or folder."""
    return re.sub(r"[^A-Za-z0-9._-]+", "--", repository)


def note_of(repository: str) -> Path:
    return models_path() / "hub" / f"{flat(repository)}.json"


@contextmanager
def hub_errors(repository: str) -> Iterator[None]:
    """What can go wrong on the way, as what a user can do about it."""
    from huggingface_hub import errors

    any_http: Any = errors.HfHubHTTPError.__bases__[0]  # of httpx, or of what has taken its place
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{repository!r} is gated: accept its terms on its page on the Hub, then log in with `hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{repository!r} could not be fetched: the Hub has no such repository; if it is private, `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{repository!r} is not the name of a repository, such as org/name") from error
    except errors.OfflineModeIsEnabled as error:
        raise ModelError(f"{repository!r} was not fetched before, and HF_HUB_OFFLINE is set") from error
    except (any_http, OSError) as error:
        raise ModelError(
            f"{repository!r} could not be fetched from the Hub: {error}; what has come is kept, the next attempt goes on"
        ) from error
