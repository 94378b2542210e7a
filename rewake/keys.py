"""API keys: who may ask, as whom, and how much. A file of records, of which each has the hash of one key.

A key is `rw-` and 256 random bits, so that one SHA-256 is enough: there is nothing to guess. It points to a namespace, which owns the
memories. Rotating a key, or revoking it and making another for the same namespace, keeps them.

The file is replaced as a whole, and read again by a running server when it has changed. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from rewake.errors import ConfigError

__all__ = ["Key", "KeyFile", "Limits"]

log = logging.getLogger(__name__)

FORMAT = "rewake-keys-1"
PREFIX = "rw-"
SECRET_BYTES = 32


@dataclass(frozen=True)
class Limits:
    """What one key may ask for; None is no limit but the server's."""

    requests: int | None = None  # a minute
    body: int | None = None  # bytes of a request
    context: int | None = None  # tokens of prompt and answer


@dataclass(frozen=True)
class Key:
    """A record. `operator`s may see what is everybody's: metrics, and whether the books add up."""

    id: str
    name: str
    namespace: str
    digest: str  # SHA-256 of the key, in hex
    created: float
    limits: Limits = field(default_factory=Limits)
    operator: bool = False


class KeyFile:
    """The records in one file. Raises ConfigError for a file that is not one of keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._keys: tuple[Key, ...] = ()
        self._seen: object = None

    def keys(self) -> tuple[Key, ...]:
        """As they are in the file now; none if there is no file."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            self._keys, self._seen = (), None
            return ()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from error
        version = (found.st_mtime_ns, found.st_size, found.st_ino)
        if version != self._seen:
            if os.name != "nt" and found.st_mode & 0o077:
                log.warning("%s can be read by others: `chmod 600` it", self.path)
            self._keys, self._seen = self._read(), version
        return self._keys

    def who(self, text: str) -> Key | None:
        """Whose key this is. All records are compared, each in constant time."""
        digest = digest_of(text)
        found = None
        for key in self.keys():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def create(self, name: str, namespace: str | None = None, limits: Limits = Limits(), operator: bool = False) -> tuple[Key, str]:
        """A new key, for a new namespace unless one is given; its record and its text, which is kept nowhere."""
        text = new_text()
        if not name or not name.isprintable():
            raise ConfigError(f"{name!r} is no name for a key: it must be printable text")
        if namespace is not None and (not namespace or not namespace.isprintable()):
            raise ConfigError(f"{namespace!r} is no namespace: it must be printable text")
        namespace = namespace or f"ns-{secrets.token_hex(8)}"
        key = Key(f"k-{secrets.token_hex(4)}", name, namespace, digest_of(text), time.time(), limits, operator)
        with self._changing() as keys:
            keys.append(key)
        return key, text

    def rotate(self, id: str) -> tuple[Key, str]:
        """Another text for a key, whose namespace and limits stay. The old one is no longer taken."""
        text = new_text()
        return self._changed(id, lambda key: replace(key, digest=digest_of(text))), text

    def limit(self, id: str, limits: Limits) -> Key:
        return self._changed(id, lambda key: replace(key, limits=limits))

    def revoke(self, id: str) -> Key:
        """The key is no longer taken; what its namespace remembers stays."""
        with self._changing() as keys:
            key = one_of(keys, id, self.path)
            keys.remove(key)
        return key

    def _changed(self, id: str, change: Callable[[Key], Key]) -> Key:
        with self._changing() as keys:
            old = one_of(keys, id, self.path)
            new = keys[keys.index(old)] = change(old)
        return new

    @contextmanager
    def _changing(self) -> Iterator[list[Key]]:
        """The records, to change; they are written behind that, so that at any time all of the old or all of the new are there."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(self.path.with_name(f"{self.path.name}.lock"), mode=0o600):
                keys = list(self.keys())
                yield keys
                write(self.path, json.dumps({"format": FORMAT, "keys": [asdict(key) for key in keys]}, indent=1))
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error

    def _read(self) -> tuple[Key, ...]:
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if stored["format"] != FORMAT:
                raise ValueError(stored["format"])
            return tuple(key_of(record) for record in stored["keys"])
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.path} is not a file of keys, as `rewake keys` writes it: {type(error).__name__} {error}") from error


def key_of(record: dict[str, Any]) -> Key:
    key = Key(**{**record, "limits": Limits(**record["limits"])})
    if len(bytes.fromhex(key.digest)) != hashlib.sha256().digest_size or not key.namespace:
        raise ValueError(f"the record of key {key.id}")
    return key


def one_of(keys: Sequence[Key], id: str, path: Path) -> Key:
    """The key with that id, or the only one with that name."""
    found = [key for key in keys if key.id == id] or [key for key in keys if key.name == id]
    if len(found) != 1:
        raise ConfigError(
            f"there are {len(found)} keys named {id!r} in {path}: say which by its id" if found else f"no key {id!r} in {path}"
        )
    return found[0]


def new_text() -> str:
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
