"""Encryption at rest: the keys, and what is sealed with them. Knows bytes and names; no tables, no files but the key's.

    master key, the user's ── page keys (HMAC), names of namespaces (AES-SIV), the proof that it is the right one
      └── a key for each namespace (HKDF) ── records (AES-256-GCM), agents' names (AES-SIV)
            └── wraps a random key for each file, which seals its data (AES-256-GCM), and nothing else

Names are sealed so that equal ones stay equal, for the manifest's queries; all else differs each time.
"""

from __future__ import annotations

import base64
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import ciphers, hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from filelock import FileLock

from rewake.errors import ConfigError, CorruptFile
from rewake.store.files import Files

__all__ = ["ALGORITHM", "KEY_BYTES", "Cipher", "fields", "find_key"]

ALGORITHM = "AES-256-GCM"
VARIABLE = "REWAKE_KEY"
KEY_BYTES, NONCE_BYTES, TAG_BYTES = 32, 12, 16
WRAPPED_BYTES = NONCE_BYTES + KEY_BYTES + TAG_BYTES
ONCE = bytes(NONCE_BYTES)  # a file's key seals one message, so that its nonce need not differ

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NamespaceKeys:
    """`sealed` is the namespace's name as the directory has it."""

    sealed: bytes
    records: AESGCM
    names: AESSIV


class Cipher:
    """Seals and opens under one master key. Whatever was not sealed so, under the same `about`, is a CorruptFile."""

    def __init__(self, master: bytes) -> None:
        assert len(master) == KEY_BYTES
        self._master = master
        self.proof = self._derive("proof", KEY_BYTES)  # tells a right key from a wrong one, and nothing of either
        self.page_secret = self._derive("page keys", KEY_BYTES)
        self._names = AESSIV(self._derive("namespaces", 2 * KEY_BYTES))
        self._keys: dict[str, NamespaceKeys] = {}
        self._namespaces: dict[bytes, str] = {}

    def _derive(self, purpose: str, length: int) -> bytes:
        return HKDF(hashes.SHA256(), length, salt=None, info=f"rewake {purpose}".encode()).derive(self._master)

    def _keys_of(self, namespace: str) -> NamespaceKeys:
        """Derived once: a start opens thousands of records."""
        if namespace not in self._keys:
            material = self._derive(f"namespace {namespace}", 3 * KEY_BYTES)
            sealed = self._names.encrypt(name_bytes(namespace), None)
            self._keys[namespace] = NamespaceKeys(sealed, AESGCM(material[:KEY_BYTES]), AESSIV(material[KEY_BYTES:]))
            self._namespaces[sealed] = namespace
        return self._keys[namespace]

    # ---- names

    def seal_namespace(self, namespace: str) -> str:
        return to_text(self._keys_of(namespace).sealed)

    def open_namespace(self, sealed: str) -> str:
        return self._namespace(authentic("a namespace", lambda: base64.b64decode(sealed, validate=True)))

    def _namespace(self, sealed: bytes) -> str:
        if sealed not in self._namespaces:
            return authentic("a namespace", lambda: name_of(self._names.decrypt(sealed, None)))
        return self._namespaces[sealed]

    def seal_name(self, namespace: str, name: str) -> str:
        return to_text(self._keys_of(namespace).names.encrypt(name_bytes(name), None))

    def open_name(self, namespace: str, sealed: str) -> str:
        names = self._keys_of(namespace).names
        return authentic("a name", lambda: name_of(names.decrypt(base64.b64decode(sealed, validate=True), None)))

    # ---- records

    def seal(self, namespace: str, data: bytes, about: bytes) -> bytes:
        """The nonce, the data sealed, the tag. `about` has to be given again to open it."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return nonce + self._keys_of(namespace).records.encrypt(nonce, data, about)

    def open(self, namespace: str, sealed: bytes, about: bytes) -> bytes:
        records = self._keys_of(namespace).records
        return authentic("a record", lambda: records.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about))

    # ---- the data of files

    def seal_file(self, namespace: str, data: Sequence[memoryview], about: bytes) -> tuple[list[bytes], bytes, bytes]:
        """The data sealed under a key of their own, the tag, and the secret: that key, wrapped, and whose it is."""
        key = secrets.token_bytes(KEY_BYTES)
        sealing = ciphers.Cipher(ciphers.algorithms.AES(key), ciphers.modes.GCM(ONCE)).encryptor()
        sealing.authenticate_additional_data(about)
        sealed = [*map(sealing.update, data), sealing.finalize()]
        return sealed, sealing.tag, self.seal(namespace, key, about) + self._keys_of(namespace).sealed

    def open_file(self, secret: bytes, tag: bytes, data: Sequence[memoryview], about: bytes) -> None:
        """Where they lie: no copy. If they turn out not to be authentic, what lies there then is worth nothing."""
        namespace = self._namespace(secret[WRAPPED_BYTES:])
        key = self.open(namespace, secret[:WRAPPED_BYTES], about)

        def decrypt() -> None:
            opening = ciphers.Cipher(ciphers.algorithms.AES(key), ciphers.modes.GCM(ONCE, tag)).decryptor()
            opening.authenticate_additional_data(about)
            for part in data:
                opening.update_into(part, part)
            opening.finalize()

        authentic("its data", decrypt)


def authentic(what: str, opened: Callable[[], T]) -> T:
    try:
        return opened()
    except (InvalidTag, ValueError) as error:  # ValueError: not even of the right form
        raise CorruptFile(f"{what} is not what was sealed under this key") from error


def fields(*values: bytes | str | int) -> bytes:
    """Values as bytes that no other values have."""
    parts: list[bytes] = []
    for value in values:
        part = value if isinstance(value, bytes) else str(value).encode()
        parts += (len(part).to_bytes(4, "little"), part)
    return b"".join(parts)


def name_bytes(name: str) -> bytes:
    return b"n" + name.encode()  # AES-SIV takes nothing that is empty


def name_of(content: bytes) -> str:
    return content[1:].decode()


def to_text(sealed: bytes) -> str:
    return base64.b64encode(sealed).decode()


# ---- the master key


def find_key(environment: Mapping[str, str], file: Path, *, create: bool) -> bytes:
    """The key in REWAKE_KEY, else in `file`; a new one in there if there is none and it may be made. Raises ConfigError."""
    if (text := environment.get(VARIABLE)) is not None:  # an empty one is a mistake, and no wish for a new key
        return parse_key(text, VARIABLE)
    if not file.exists():
        if not create:
            raise ConfigError(
                f"there is no key: set {VARIABLE}, or put {file} back; a new one is only made for a new directory of memories"
            )
        create_key(file)
    elif os.name != "nt" and file.stat().st_mode & 0o077:
        log.warning("%s can be read by others: `chmod 600` it", file)
    try:
        return parse_key(file.read_text(encoding="ascii", errors="replace"), str(file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error


def parse_key(text: str, where: str) -> bytes:
    """32 bytes, in hex or base64. The key itself is in no message."""
    text = text.strip()
    try:
        key = (
            bytes.fromhex(text) if len(text) == 2 * KEY_BYTES else base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
        )
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"{where} is not a key: it must be {KEY_BYTES} bytes in hex or base64, such as `openssl rand -hex {KEY_BYTES}` makes"
        )
    return key


def create_key(file: Path) -> None:
    """A random key that is on disk, all of it, before anything is sealed with it."""
    files = Files()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(file.with_name(f"{file.name}.lock"), mode=0o600):  # two servers may start for the first time at once
            if not file.exists():
                temporary = file.with_name(f"{file.name}.tmp")
                files.write(temporary, (secrets.token_bytes(KEY_BYTES).hex().encode() + b"\n",))
                files.rename(temporary, file)
                files.sync_folder(file.parent)
                log.warning("a new key is in %s: keep a copy elsewhere; without it, nobody can read these memories again", file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}): set {VARIABLE} instead") from error
