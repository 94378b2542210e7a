"""The file of keys: hashes at rest, and a running server that notices."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import pytest

from rewake.errors import ConfigError
from rewake.keys import KeyFile, Limits


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "deep" / "keys.json")


def test_a_key_is_known_and_kept_nowhere(file: KeyFile) -> None:
    key, text = file.create("ada", limits=Limits(requests=5))
    assert file.who(text) == key and file.keys() == (key,) and key.limits.requests == 5
    assert text not in file.path.read_text() and text[3:] not in file.path.read_text()
    assert KeyFile(file.path).who(text) == key
    for wrong in ("", text[:-1], text + "x", text.upper(), key.digest, key.id, "\ud83d", "ключ"):
        assert file.who(wrong) is None


def test_namespaces_are_new_unless_given(file: KeyFile) -> None:
    spaces = {file.create("ada")[0].namespace for _ in range(3)} | {file.create("bob", "default")[0].namespace}
    assert len(spaces) == 4 and "default" in spaces


def test_rotating_keeps_all_but_the_text(file: KeyFile) -> None:
    key, old = file.create("ada", limits=Limits(body=9), operator=True)
    rotated, new = file.rotate("ada")
    assert file.who(old) is None and file.who(new) == rotated
    assert (rotated.id, rotated.namespace, rotated.limits, rotated.operator) == (key.id, key.namespace, key.limits, key.operator)


def test_changes_are_noticed_by_who_reads_already(file: KeyFile) -> None:
    reader = KeyFile(file.path)
    assert reader.keys() == ()
    key, text = file.create("ada")
    assert reader.who(text) == key
    limited = file.limit(key.id, Limits(context=100))
    assert reader.who(text) == limited
    assert file.revoke("ada") == limited
    assert reader.who(text) is None and reader.keys() == ()
    _, text = file.create("bob")
    file.path.unlink()
    assert reader.who(text) is None


def test_a_key_is_named_by_its_id_where_its_name_does_not_do(file: KeyFile) -> None:
    first, _ = file.create("ada")
    file.create("ada")
    with pytest.raises(ConfigError, match="there are 2 keys named 'ada'"):
        file.revoke("ada")
    file.revoke(first.id)
    with pytest.raises(ConfigError, match="no key 'bob'"):
        file.rotate("bob")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": "other", "keys": []}',
        '{"format": "rewake-keys-1", "keys": [{}]}',
        '{"format": "rewake-keys-1"}',
        "\ufffd",
    ],
)
def test_what_is_not_a_file_of_keys_is_refused_and_left_alone(file: KeyFile, content: str) -> None:
    file.path.parent.mkdir()
    file.path.write_text(content, encoding="utf-8")
    for act in (file.keys, lambda: file.who("x"), lambda: file.create("ada")):
        with pytest.raises(ConfigError, match="is not a file of keys"):
            act()
    assert file.path.read_text(encoding="utf-8") == content


def test_keys_made_at_once_are_all_there(file: KeyFile) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: KeyFile(file.path).create(f"k{n}"), range(24)))
    assert {key.id for key, _ in made} == set(map(attrgetter("id"), file.keys()))
    assert all(file.who(text) == key for key, text in made)


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
def test_others_cannot_read_it(file: KeyFile) -> None:
    file.create("ada")
    assert file.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("name", "namespace"), [("", None), ("a\nb", None), ("ada", ""), ("ada", "a\0")])
def test_names_are_printable(file: KeyFile, name: str, namespace: str | None) -> None:
    with pytest.raises(ConfigError, match="printable"):
        file.create(name, namespace)
    assert not file.path.exists()


def test_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def rewake(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rewake", "keys", *arguments, "--keys", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "no keys" in rewake("ls").stdout
    text = rewake("create", "ada", "--requests", "60", "--body", "1MiB", "--context", "2048", "--operator").stdout.splitlines()[0]
    key = KeyFile(path).who(text)
    assert key is not None and key.operator and key.limits == Limits(60, 2**20, 2048)
    rotated = rewake("rotate", "ada").stdout.splitlines()[0]
    assert KeyFile(path).who(text) is None and KeyFile(path).who(rotated) is not None
    assert rewake("limit", "ada", "--context", "1024").returncode == 0
    shown = rewake("ls").stdout
    assert key.id in shown and "1024" in shown and rotated not in shown and key.digest not in shown
    assert rewake("create", "bob", "--requests", "0").returncode == 1
    assert rewake("revoke", "ada").returncode == 0 and KeyFile(path).keys() == ()
    assert "no key 'ada'" in rewake("revoke", "ada").stderr
