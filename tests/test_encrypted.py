"""Encrypted memories under the engine: nobody without the key learns what was said, and agents notice nothing."""

from __future__ import annotations

import random
import shutil
import struct
from array import array
from concurrent.futures import Future
from pathlib import Path

import pytest

from rewake.memory.tree import page_key, to_tokens
from rewake.quant import PAGE_TOKENS
from rewake.store.crypto import Cipher
from tests.fakes import SIGNATURE, EngineHarness, expected_answer

CIPHER = Cipher(bytes(range(32)))
AGENT, NAMESPACE = "agent-marie-curie", "tenant-sklodowska"


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(2, 1000), k=length)


def rows_in_memory(harness: EngineHarness) -> set[bytes]:
    """A few rows of K, as the backend made them."""
    arena = harness.memory.residency.arena
    slots = [r.slots[0][0] for r in harness.engine.call(lambda: list(harness.memory.tree.residents())).result() if r.slots]
    return {arena[at : at + 16].tobytes() for slot in slots for at in range(slot + 16, slot + 16 * 100, 160)}


def told(path: Path, tokens: list[int], rows: set[bytes]) -> set[str]:
    """What the files of a directory tell somebody who can guess what to look for."""
    pieces = {i: tokens[i : i + 4] for i in range(0, len(tokens) - 4, 50)}
    ids = {array("i", piece).tobytes() for piece in pieces.values()}
    first_key = page_key(NAMESPACE, SIGNATURE, b"", to_tokens(tokens[:PAGE_TOKENS]))
    secrets = {
        "token ids": ids | {i.hex().encode() for i in ids} | {str(piece)[1:-1].encode() for piece in pieces.values()},
        "rows": rows,
        "turns": {struct.pack("<i", len(tokens) + 4)},
        "agent": {AGENT.encode()},
        "namespace": {NAMESPACE.encode()},
        "page key": {first_key, first_key.hex().encode()},
    }
    content = b"".join(p.as_posix().encode() + p.read_bytes() for p in path.rglob("*") if p.is_file())
    return {what for what, forms in secrets.items() if any(form in content for form in forms)}


@pytest.mark.parametrize("cipher", [None, CIPHER], ids=["clear", "encrypted"])
def test_nothing_that_was_said_stands_in_any_file(tmp_path: Path, cipher: Cipher | None) -> None:
    harness = EngineHarness(tmp_path, cipher=cipher)
    text = prompt(700)
    harness.ask(text, AGENT, namespace=NAMESPACE)
    rows = rows_in_memory(harness)
    running = told(tmp_path, text, rows)
    assert (tmp_path / "manifest.sqlite-wal").stat().st_size > 0
    harness.close()
    everything = {"token ids", "rows", "turns", "agent", "namespace", "page key"}
    for found in (running, told(tmp_path, text, rows)):
        assert found == (set() if cipher else everything)


def test_an_encrypted_agent_goes_on_after_eviction_restart_and_a_kill(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path / "data", cipher=CIPHER)
    text = prompt(700)
    for turn in range(3):
        answer = harness.ask(text, AGENT, namespace=NAMESPACE)
        assert answer.tokens == expected_answer(text, 4) and answer.result().saved
        assert not turn or answer.match.computed_tokens == 1 + 7
        text = [*text, *answer.tokens, *prompt(7, seed=turn)]
        harness.evict_all()
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    harness.restart()
    killed = EngineHarness(tmp_path / "killed", cipher=Cipher(bytes(range(32))))
    for woken in (harness, killed):
        answer = woken.ask(text, AGENT, namespace=NAMESPACE)
        assert answer.tokens == expected_answer(text, 4)
        assert (answer.match.kind, answer.match.computed_tokens) == ("extend", 8)
        woken.close()


def test_an_agent_has_nothing_under_another_name_or_namespace(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path, cipher=CIPHER)
    text = prompt(700)
    harness.ask(text, AGENT, namespace=NAMESPACE)
    harness.restart()
    assert harness.ask(text, AGENT).match.kind == "miss"
    assert harness.engine.call(lambda: [a.agent for a in harness.memory.agents.list(NAMESPACE)]).result() == [AGENT]
    harness.close()


def test_files_of_two_agents_that_change_places_are_not_believed(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path, cipher=CIPHER)
    texts = {name: prompt(300, seed) for seed, name in enumerate(("a", "b"))}
    for name, text in texts.items():
        harness.ask(text, name)
    harness.close()
    pages = {p.name for p in tmp_path.glob("pages/*/*")}
    for folder in ("pages", "segments"):
        one, other = sorted(tmp_path.glob(f"{folder}/*/*"))
        one.rename(tmp_path / "x")
        other.rename(one)
        (tmp_path / "x").rename(other)
    harness.start(type(harness.backend)(64))
    for name, text in texts.items():
        again = harness.ask(text, name)
        assert again.tokens == expected_answer(text, 4)
        assert again.match.computed_tokens == 300
    assert {p.name for p in tmp_path.glob("quarantine/*")} >= pages  # what stood behind them is removed, if it was not read first
    harness.close()


def test_a_page_computed_again_is_written_anew(tmp_path: Path) -> None:
    """Its tag never equals the checksum of what is in memory."""
    harness = EngineHarness(tmp_path, cipher=CIPHER)
    text = prompt(600)
    harness.ask(text, "a")
    before = {p.name for p in tmp_path.glob("pages/*/*")}
    harness.evict_all()
    harness.memory.residency.gate.pays = lambda *_: False  # type: ignore[method-assign]
    again = harness.ask(text, "a")
    assert again.tokens == expected_answer(text, 4) and again.match.computed_tokens == 600
    after = {p.name for p in tmp_path.glob("pages/*/*")}
    assert len(after) == len(before) == 2 and not after & before
    harness.restart()
    assert harness.ask(text, "a").match.computed_tokens == 1
    harness.close()


def test_a_page_two_agents_compute_at_once_is_written_once(tmp_path: Path) -> None:
    """Under another key, it could not take its own place: for a moment, the manifest would have the old one."""
    harness = EngineHarness(tmp_path, cipher=CIPHER)
    text = prompt(PAGE_TOKENS)
    pendings = [harness.submit([*text, 5 + i], f"a{i}") for i in range(4)]
    assert all(p.result().saved for p in pendings)
    store = harness.memory.ledger.store
    assert store is not None and store.bytes_written == store.used
    harness.close()


def test_a_deleted_manifest_is_begun_anew_with_the_same_key(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path, cipher=CIPHER)
    text = prompt(600)
    harness.ask(text, "a")
    (tmp_path / "manifest.sqlite").unlink()
    harness.ask([*text, 5], "a")
    assert harness.ask([*text, 5, 6], "a").result().saved
    harness.restart()
    assert harness.ask([*text, 5, 6], "a").match.computed_tokens == 1
    harness.close()


def test_forgetting_an_agent_leaves_no_key_of_it(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path, cipher=CIPHER)
    for seed, name in enumerate(("a", "b")):
        harness.ask(prompt(600, seed), name)
    branches = harness.engine.call(lambda: harness.memory.tree.branches_of("default", "a")).result()
    files = [f for b in branches for r in (b, *b.parent.path()) for f in r.files]
    keys = [f.secret[at : at + 12] for f in files for at in (0, 24, 48)]
    assert len(files) == 3
    gone: Future[Exception | None] = Future()
    harness.engine.call(lambda: harness.memory.agents.forget("default", "a", gone.set_result)).result(10)
    assert gone.result(10) is None
    content = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert not any(key in content for key in keys)
    assert harness.ask(prompt(600, 1), "b").match.computed_tokens == 1
    harness.close()
