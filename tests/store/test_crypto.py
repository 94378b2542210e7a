"""Encrypted directories: what cannot be read, what is not believed, and what is gone when it is forgotten."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import shutil
import sqlite3
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from rewake.config import Config
from rewake.errors import ConfigError, CorruptFile, StoreError
from rewake.memory.tree import page_key, to_tokens
from rewake.quant import PAGE_TOKENS
from rewake.service import open_store
from rewake.store.base import AgentRecord, BranchRecord, Commit, PageRecord, StoredFile
from rewake.store.crypto import Cipher, fields, find_key
from rewake.store.directory import FORMAT, Directory
from rewake.store.files import Files
from tests.faults import make_version_1, make_version_2
from tests.store.test_directory import CIPHER, LAYOUT, PLANES, directory, random_page

OTHER = Cipher(bytes(32))
WRAPPED = slice(0, 60)  # of a secret: nonce, key, tag


def encrypted(path: Path, signature: bytes = b"sig") -> Directory:
    return directory(path, signature, CIPHER)


def put(store: Directory, name: str, seed: int, rows: int = PAGE_TOKENS, first: int = 0, namespace: str = "ns") -> StoredFile:
    return store.write(f"{name}.safetensors", [random_page(seed, rows).data], first, rows, {"namespace": namespace})


def get(store: Directory, file: StoredFile) -> bytes:
    into = np.zeros(file.size, np.uint8)
    store.read(file, into.data)
    return into.tobytes()


def page(store: Directory, key: bytes, seed: int, parent: bytes = b"", depth: int = 1) -> PageRecord:
    return PageRecord(key, parent, depth, "ns", bytes([seed] * 1024), (put(store, f"pages/ab/{key.hex()}", seed),))


def branch(store: Directory, id: str, agent: str | None, parent: bytes, seed: int) -> BranchRecord:
    segments = tuple(put(store, f"segments/ab/{id}-{first}", seed + first, 5, first) for first in (0, 5))
    return BranchRecord(id, "ns", agent, parent, bytes([seed] * 44), segments, 1.0, 2.0, bytes([seed] * 8))


def agent(id: str, name: str) -> AgentRecord:
    return AgentRecord(id, "ns", name, 1.0, 2.0, True, 3.0)


def filled(path: Path) -> Directory:
    """Two agents of two pages and one branch each."""
    store = encrypted(path)
    for i, name in enumerate(("ada", "bob")):
        first = page(store, bytes([i]) * 32, 10 * i)
        second = page(store, bytes([i + 2]) * 32, 10 * i + 1, first.key, 2)
        end = branch(store, f"b{i}", name, second.key, 10 * i + 2)
        store.commit(Commit((first, second), (end,), (agent(f"a{i}", name),)))
    return store


def content(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# ---- sealing


def test_the_same_is_never_sealed_the_same_way_twice_except_for_names() -> None:
    assert CIPHER.seal("ns", b"text", b"") != CIPHER.seal("ns", b"text", b"")
    sealed = [CIPHER.seal_file("ns", [memoryview(b"text" * 100)], b"") for _ in range(2)]
    assert not {b"".join(sealed[0][0]), *sealed[0][1:]} & {b"".join(sealed[1][0]), *sealed[1][1:]}
    assert CIPHER.seal_name("ns", "ada") == CIPHER.seal_name("ns", "ada") != CIPHER.seal_name("ns2", "ada")
    for name in ("", "ada", "ÄÖ\n" * 100):
        assert CIPHER.open_name("ns", CIPHER.seal_name("ns", name)) == name
        assert Cipher(bytes(range(32))).open_namespace(CIPHER.seal_namespace(name)) == name


@pytest.mark.parametrize("text", ["", "n", "AAAA", "not base64", CIPHER.seal_name("ns2", "ada"), OTHER.seal_name("ns", "ada")])
def test_a_name_that_was_not_sealed_is_none(text: str) -> None:
    with pytest.raises(CorruptFile):
        CIPHER.open_name("ns", text)


def test_one_namespace_does_not_open_anothers_records() -> None:
    sealed = CIPHER.seal("ns", b"text", b"about")
    assert CIPHER.open("ns", sealed, b"about") == b"text"
    for namespace, changed, about in (
        ("ns2", sealed, b"about"),
        ("ns", sealed, b"else"),
        ("ns", b"", b"about"),
        ("ns", sealed[:20], b"about"),
    ):
        with pytest.raises(CorruptFile):
            CIPHER.open(namespace, changed, about)


def test_fields_of_different_values_differ() -> None:
    assert len({fields("a", "bc"), fields("ab", "c"), fields("abc"), fields("abc", ""), fields(1, 23), fields(12, 3)}) == 6


def test_page_keys_are_plain_hashes_without_a_secret_and_hmacs_with_one() -> None:
    def field(tag: bytes, value: bytes) -> bytes:
        return tag + len(value).to_bytes(8, "little") + value

    tokens = to_tokens([1, 2, 3])
    values = {b"ns": b"space", b"sig": b"signature", b"grp": bytes(4), b"par": b"parent", b"tok": tokens.tobytes()}
    content = b"".join(field(tag, value) for tag, value in values.items())
    assert page_key("space", b"signature", b"parent", tokens) == hashlib.sha256(content).digest()
    assert page_key("space", b"signature", b"parent", tokens, secret=b"s") == hmac.digest(b"s", content, "sha256")


# ---- files


@pytest.mark.parametrize("where", ["data", "tag", "wrapped key", "namespace", "no secret", "first", "rows", "name", "signature"])
def test_nothing_but_what_was_written_there_is_believed(tmp_path: Path, where: str) -> None:
    store = encrypted(tmp_path)
    file = put(store, "segments/ab/x", 1, rows=16)
    if where == "data":
        path = tmp_path / file.name
        damaged = bytearray(path.read_bytes())
        damaged[file.offset + file.size // 2] ^= 4
        path.write_bytes(damaged)
    elif where == "name":  # the file of another, with all that belongs to it
        other = put(store, "segments/ab/y", 2, rows=16)
        os.replace(tmp_path / file.name, tmp_path / other.name)
        file = replace(file, name=other.name)
    elif where == "signature":
        store.signature = b"another"
    else:
        file = {
            "tag": replace(file, checksum=flipped(file.checksum, 0)),
            "wrapped key": replace(file, secret=flipped(file.secret, 30)),
            "namespace": replace(file, secret=flipped(file.secret, -1)),
            "no secret": replace(file, secret=b""),
            "first": replace(file, first=1),
            "rows": replace(file, rows=15),
        }[where]
    with pytest.raises(CorruptFile, match=file.name):
        get(store, file)
    store.close()


def flipped(data: bytes, at: int) -> bytes:
    damaged = bytearray(data)
    damaged[at] ^= 1
    return bytes(damaged)


def test_the_official_reader_opens_an_encrypted_page_and_learns_nothing(tmp_path: Path) -> None:
    store = encrypted(tmp_path)
    file = store.write("pages/ab/x.safetensors", [random_page().data], 0, PAGE_TOKENS, {"namespace": "ns", "tokens": "ff", "key": "k"})
    with safe_open(tmp_path / file.name, framework="numpy") as opened:  # type: ignore[no-untyped-call]
        assert opened.metadata() == {"format": FORMAT, "encryption": "AES-256-GCM"}
        assert opened.get_tensor("0.k.codes").shape == (3, PAGE_TOKENS, 8)
    stored = (tmp_path / file.name).read_bytes()[file.offset :]
    same = np.frombuffer(stored, np.uint8) == random_page()
    assert len(stored) == LAYOUT.page_bytes and same.mean() < 0.01
    store.close()


# ---- the manifest


def test_what_was_committed_is_remembered(tmp_path: Path) -> None:
    store = filled(tmp_path)
    before = store.load()
    assert [p.tokens[0] for p in before.pages] == [0, 10, 1, 11]
    assert [(b.agent, b.tokens, b.turns) for b in before.branches] == [
        ("ada", bytes([2] * 44), bytes([2] * 8)),
        ("bob", bytes([12] * 44), bytes([12] * 8)),
    ]
    assert before.agents == (agent("a0", "ada"), agent("a1", "bob"))
    store.close()
    store = encrypted(tmp_path)
    assert store.load() == before
    for file in [f for p in before.pages for f in p.files] + [s for b in before.branches for s in b.segments]:
        get(store, file)
    store.close()


TAMPERED = {
    "tokens of another page": "UPDATE pages SET tokens = (SELECT tokens FROM pages WHERE depth = 1 AND key != x'{0}') WHERE key = x'{0}'",
    "a page elsewhere": "UPDATE pages SET parent = x'{1}' WHERE key = x'{0}'",
    "the file of another page": "UPDATE pages SET (name, at, size, checksum, secret) = (SELECT name, at, size, checksum, secret FROM pages"
    " WHERE key = x'{1}') WHERE key = x'{0}'",
    "in clear": "UPDATE pages SET namespace = 'ns', tokens = x'0000' WHERE key = x'{0}'",
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_page_whose_row_was_changed_is_forgotten(tmp_path: Path, how: str) -> None:
    store = filled(tmp_path)
    before = store.load()
    store.close()
    with closing(sqlite3.connect(tmp_path / "manifest.sqlite", isolation_level=None)) as db:
        db.execute(TAMPERED[how].format("00" * 32, "01" * 32))
    store = encrypted(tmp_path)
    after = store.load()
    assert after.pages == before.pages[1:] and after.branches == before.branches
    assert not (tmp_path / before.pages[0].files[0].name).exists()
    kept = [f for p in after.pages for f in p.files] + [s for b in after.branches for s in b.segments]
    assert store.used == sum(f.file_bytes for f in kept)
    assert store.load() == after
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE branches SET agent = (SELECT agent FROM branches WHERE id = 'b1') WHERE id = 'b0'",
        "UPDATE branches SET agent = NULL WHERE id = 'b0'",
        "UPDATE branches SET turns = tokens WHERE id = 'b0'",
        "UPDATE branches SET parent = x'00' WHERE id = 'b0'",
        "DELETE FROM segments WHERE branch = 'b0' AND first = 0",
        "UPDATE segments SET branch = 'b0', first = 10 WHERE branch = 'b1' AND first = 5",
    ],
)
def test_a_transcript_whose_row_was_changed_is_forgotten(tmp_path: Path, change: str) -> None:
    store = filled(tmp_path)
    before = store.load()
    store.close()
    with closing(sqlite3.connect(tmp_path / "manifest.sqlite", isolation_level=None)) as db:
        db.execute(change)
    store = encrypted(tmp_path)
    assert "b0" not in {b.id for b in store.load().branches}
    assert store.load().pages == before.pages
    store.close()


@pytest.mark.parametrize(
    ("first", "then", "advice"),
    [
        (CIPHER, OTHER, "encrypted with another key: give that one"),
        (CIPHER, None, "start with --encrypt"),
        (None, CIPHER, "start without --encrypt"),
    ],
    ids=["wrong key", "no key", "key on a clear directory"],
)
def test_clear_and_encrypted_are_never_mixed(tmp_path: Path, first: Cipher | None, then: Cipher | None, advice: str) -> None:
    store = directory(tmp_path, cipher=first)
    record = page(store, b"k" * 32, 1)
    store.commit(Commit(pages=(record,)))
    store.close()
    put_aside = content(tmp_path)
    with pytest.raises(StoreError, match=advice):
        directory(tmp_path, cipher=then)
    assert content(tmp_path) == put_aside
    store = directory(tmp_path, cipher=first)
    assert store.load().pages == (record,)
    store.close()


@pytest.mark.parametrize("cipher", [None, CIPHER], ids=["clear", "encrypted"])
def test_a_manifest_that_does_not_say_which_is_refused(tmp_path: Path, cipher: Cipher | None) -> None:
    directory(tmp_path, cipher=cipher).close()
    with closing(sqlite3.connect(tmp_path / "manifest.sqlite", isolation_level=None)) as db:
        db.execute("DELETE FROM encryption")
    for then in (None, CIPHER):
        with pytest.raises(StoreError, match="move it away"):
            directory(tmp_path, cipher=then)


def test_a_manifest_of_the_first_format_is_a_clear_one(tmp_path: Path) -> None:
    store = directory(tmp_path)
    record = page(store, b"k" * 32, 1)
    store.commit(Commit(pages=(record,)))
    store.close()
    make_version_1(tmp_path)
    with pytest.raises(StoreError, match="not encrypted"):
        encrypted(tmp_path)
    store = directory(tmp_path)
    assert store.load().pages == (record,)
    store.close()


@pytest.mark.parametrize("cipher", [None, CIPHER], ids=["clear", "encrypted"])
def test_a_manifest_from_before_there_were_planes_is_taken_over(tmp_path: Path, cipher: Cipher | None) -> None:
    store = directory(tmp_path, cipher=cipher)
    record = page(store, b"k" * 32, 1)
    end = branch(store, "b1", "ada", record.key, 3)
    store.commit(Commit(pages=(record,), branches=(end,)))
    store.close()
    make_version_2(tmp_path)
    store = directory(tmp_path, cipher=cipher)
    known = store.load()
    assert known.pages == (record,) and known.branches == (end,)
    assert get(store, known.branches[0].segments[1]) == random_page(8, 5).tobytes()
    store.close()


# ---- forgetting


def forgotten_ada(store: Directory) -> list[StoredFile]:
    """Her files; those of pages are left where they are."""
    before = store.load()
    pages, end = [p for p in before.pages if p.tokens[0] < 10], before.branches[0]
    store.commit(Commit(gone_pages=tuple(p.key for p in pages), gone_branches=(end.id,), gone_agents=("a0",)))
    return [*(f for p in pages for f in p.files), *end.segments]


def found(path: Path, files: list[StoredFile]) -> set[str]:
    """Where a piece of a wrapped key is."""
    pieces = [f.secret[WRAPPED][at : at + 12] for f in files for at in (0, 24, 48)]
    return {name for name, data in content(path).items() if any(piece in data for piece in pieces)}


def test_what_is_forgotten_cannot_be_read_again_even_from_a_copy(tmp_path: Path) -> None:
    store = filled(tmp_path)
    everything = [f for p in store.load().pages for f in p.files]
    assert found(tmp_path, everything) >= {"manifest.sqlite-wal"}
    hers = forgotten_ada(store)
    assert not found(tmp_path, hers) and found(tmp_path, everything) == {"manifest.sqlite"}
    for file in hers:  # the data are there, and so are the key of the directory and all that is public
        assert (tmp_path / file.name).exists()
        with pytest.raises(CorruptFile):
            get(store, replace(file, secret=secrets.token_bytes(60) + file.secret[60:]))
    assert [b.agent for b in store.load().branches] == ["bob"]
    store.close()
    assert not found(tmp_path, hers)


class KilledAtCommit(Files):
    """Keeps the directory as a kill right behind a commit would leave it."""

    def __init__(self, path: Path, copy: Path) -> None:
        self.path, self.copy = path, copy

    def commit(self, cursor: sqlite3.Cursor) -> None:
        super().commit(cursor)
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.path, self.copy)


def test_a_kill_between_commit_and_clean_up_forgets_at_the_next_start(tmp_path: Path) -> None:
    filled(tmp_path / "data").close()
    store = Directory(tmp_path / "data", b"sig", PLANES, cipher=CIPHER, files=KilledAtCommit(tmp_path / "data", tmp_path / "killed"))
    hers = forgotten_ada(store)
    store.close()
    assert found(tmp_path / "killed", hers)
    store = encrypted(tmp_path / "killed")
    assert not found(tmp_path / "killed", hers)
    assert [b.agent for b in store.load().branches] == ["bob"]
    store.close()


def test_other_models_memories_are_forgotten_as_thoroughly(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.commit(Commit(agents=(replace(agent("a0", "ada"), pinned=False),)))
    before = store.load()
    store.close()
    store = encrypted(tmp_path, b"another")
    store.reclaim(10**9)
    store.close()
    left = encrypted(tmp_path)
    assert [b.agent for b in left.load().branches] == ["bob"], "the pinned one's stay"
    assert not found(tmp_path, list(before.branches[0].segments))
    left.close()


def test_forgetting_fails_aloud_while_another_program_reads_the_manifest(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store._index._db.execute("PRAGMA busy_timeout = 10")  # instead of the seconds it waits for others
    with closing(sqlite3.connect(tmp_path / "manifest.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN")
        db.execute("SELECT * FROM pages").fetchone()
        with pytest.raises(StoreError, match="close the other program"):
            forgotten_ada(store)
    store.close()


# ---- the key


@pytest.mark.parametrize("text", ["{hex}", " {hex}\n", "{base64}", "{urlsafe}"])
def test_a_key_is_hex_or_base64(tmp_path: Path, text: str) -> None:
    key = bytes([255, 254, 253, 252] * 8)
    forms = {"hex": key.hex(), "base64": base64.b64encode(key).decode(), "urlsafe": base64.urlsafe_b64encode(key).decode()}
    assert find_key({"REWAKE_KEY": text.format(**forms)}, tmp_path / "key", create=False) == key
    (tmp_path / "key").write_text(text.format(**forms))
    assert find_key({}, tmp_path / "key", create=False) == key


@pytest.mark.parametrize("text", ["", "hunter2", "00" * 31, "zz" * 32, "00" * 33, "é" * 64])
def test_what_is_no_key_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="REWAKE_KEY is not a key: it must be 32 bytes") as caught:
        find_key({"REWAKE_KEY": text}, tmp_path / "key", create=True)
    assert not text or text not in str(caught.value)
    (tmp_path / "key").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a key"):
        find_key({}, tmp_path / "key", create=True)


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config" / "key"
    with pytest.raises(ConfigError, match="there is no key: set REWAKE_KEY"):
        find_key({}, file, create=False)
    assert not file.exists()
    key = find_key({}, file, create=True)
    assert "keep a copy" in caplog.text and key.hex() not in caplog.text
    assert find_key({}, file, create=True) == find_key({}, file, create=False) == key
    if os.name != "nt":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        file.chmod(0o644)
        find_key({}, file, create=False)
        assert "chmod 600" in caplog.text


def test_a_lost_key_is_not_replaced_by_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REWAKE_KEY", raising=False)
    monkeypatch.setattr("rewake.service.KEY_FILE", tmp_path / "key")
    config = Config(data=tmp_path / "data", encrypt=True)

    def open_and_close() -> None:
        store = open_store(config, b"sig", PLANES)
        assert store is not None
        store.close()

    open_and_close()
    open_and_close()
    (tmp_path / "key").unlink()
    with pytest.raises(ConfigError, match=r"put .*key back"):
        open_and_close()
    assert not (tmp_path / "key").exists()
