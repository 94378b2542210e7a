"""The user's model cache: where models are kept, made whole or not at all, and what their files are known to hold.

A file's SHA-256 is computed once and kept beside what its `stat` said then. It is believed as long as that says the same;
a file so young that it could still change unseen is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

__all__ = ["file_digest", "made_once", "models_path", "write_whole"]

YOUNG = 2 * 10**9  # nanoseconds in which some file systems give two writes the same time


def models_path() -> Path:
    return Path(os.environ.get("REWAKE_MODELS") or user_cache_path("rewake") / "models")


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` in the model cache; made beside it and renamed, so that it is whole or not there."""
    target = models_path() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        make(temporary)
        os.replace(temporary, target)
    except OSError:
        if not target.is_dir():  # else: another process was faster
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def write_whole(path: Path, content: Any) -> None:
    """Write JSON to a file: all of it, or the file stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content, in hex. Raises OSError if it cannot be read."""
    path = path.resolve()
    note = models_path() / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    stamp, now = stamp_of(path), time.time_ns()
    with suppress(OSError, ValueError, LookupError, TypeError):
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return str(known["sha256"])
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stamp == stamp_of(path) and max(stamp[1:3]) < now - YOUNG:
        with suppress(OSError):  # a cache that cannot be written is none
            write_whole(note, {"path": str(path), "stamp": stamp, "sha256": digest})
    return digest


def stamp_of(path: Path) -> list[int]:
    """What changes with a file's content: size, times, and the file itself if another one was put in its place."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
