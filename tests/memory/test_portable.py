"""Files that say they are exported agents, and what happens to the memory while agents come and go."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from rewake.errors import CorruptFile, InvalidRequest, Overloaded
from rewake.memory.portable import Portable, read_portable
from rewake.quant import PAGE_TOKENS
from tests.fakes import PLANES, VOCAB, EchoBackend, EngineHarness, expected_answer

PROMPT = [2 + i % 900 for i in range(3 * PAGE_TOKENS + 40)]
SPEC = EchoBackend(1).spec


def told(harness: EngineHarness, verb: Callable[..., None]) -> Exception | None:
    """What a verb reports in the end."""
    report: Future[Exception | None] = Future()
    harness.engine.call(lambda: verb(report.set_result)).result(30)
    return report.result(30)


def exported(harness: EngineHarness, path: Path, agent: str = "a") -> Path:
    harness.ask(PROMPT, agent)
    assert told(harness, lambda done: harness.memory.agents.export("default", agent, path, done)) is None
    return path


def take_in(harness: EngineHarness, path: Path, name: str) -> Exception | None:
    with open(path, "rb") as file:
        about, pages = read_portable(file, PLANES, SPEC)
    return told(harness, lambda done: harness.memory.agents.take_in("default", name, about, pages, done))


def test_what_was_exported_is_taken_in_and_goes_on(harness: EngineHarness, tmp_path: Path) -> None:
    path = exported(harness, tmp_path / "a.tar")
    other = EngineHarness(tmp_path / "other")
    assert take_in(other, path, "b") is None
    answered = other.ask(PROMPT, "b")
    assert answered.tokens == expected_answer(PROMPT, 4)
    assert answered.match.kind == "exact" and answered.match.computed_tokens == 1
    other.close()


Members = dict[str, bytes]


def remade(path: Path, change: Callable[[Members], object]) -> io.BytesIO:
    """The file with some of its members changed."""
    with tarfile.open(path) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    change(members)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    made.seek(0)
    return made


def said(**fields: Any) -> Callable[[Members], None]:
    """Other facts in `agent.json`."""

    def change(members: Members) -> None:
        members["agent.json"] = json.dumps({**json.loads(members["agent.json"]), **fields}).encode()

    return change


def flipped(members: Members) -> None:
    page = bytearray(members["0001.safetensors"])
    page[-5] ^= 1
    members["0001.safetensors"] = bytes(page)


def swapped(members: Members) -> None:
    members["0000.safetensors"], members["0001.safetensors"] = members["0001.safetensors"], members["0000.safetensors"]


@pytest.mark.parametrize(
    "change",
    [
        flipped,
        swapped,
        lambda members: members.pop("0002.safetensors"),
        lambda members: members.pop("agent.json"),
        lambda members: members.update({"0000.safetensors": b""}),
        lambda members: members.update({"agent.json": b"[" * 100_000}),
        lambda members: members.update({"agent.json": b"[]"}),
        said(format="rewake-agent-2"),
        said(tokens=[5] * 100),
        said(tokens=[-1, *PROMPT]),
        said(tokens=[VOCAB] * len(PROMPT)),
        said(tokens=[2**40]),
        said(tokens="abc"),
        said(num_computed=-1),
        said(num_computed=0),
        said(num_computed=10**30),
        said(num_computed=PAGE_TOKENS),
        said(turns=[300, 200]),
        said(turns=[10_000]),
        said(turns=[0]),
        said(xxh3_128=[]),
        said(signature="zz"),
    ],
)
def test_a_file_that_is_damaged_or_lies_is_refused(harness: EngineHarness, tmp_path: Path, change: Callable[[Members], object]) -> None:
    path = exported(harness, tmp_path / "a.tar")
    with pytest.raises(InvalidRequest):
        read_portable(remade(path, change), PLANES, SPEC)


def test_a_transcript_longer_than_any_is_refused(harness: EngineHarness, tmp_path: Path) -> None:
    path = exported(harness, tmp_path / "a.tar")
    tokens = [5] * (SPEC.max_positions + 1)
    with pytest.raises(InvalidRequest, match="longest context"):
        read_portable(remade(path, said(tokens=tokens, num_computed=len(tokens))), PLANES, SPEC)


@pytest.mark.parametrize("kind", ["link to itself", "holes", "cut", "empty", "text"])
def test_a_file_that_is_no_plain_tar_is_refused(harness: EngineHarness, tmp_path: Path, kind: str) -> None:
    path = exported(harness, tmp_path / "a.tar")
    made = io.BytesIO({"cut": path.read_bytes()[:20_000], "text": b"hello " * 1000}.get(kind, b""))
    if kind in ("link to itself", "holes"):
        info = tarfile.TarInfo("agent.json")
        info.type = tarfile.SYMTYPE
        info.linkname = "agent.json"
        if kind == "holes":
            info.type = tarfile.REGTYPE
            info.pax_headers = {"GNU.sparse.size": str(2**50), "GNU.sparse.map": "0,0", "GNU.sparse.name": "agent.json"}
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(info)
        made.seek(0)
    with pytest.raises(InvalidRequest):
        read_portable(made, PLANES, SPEC)


def test_another_models_agent_is_refused_and_nothing_is_left_of_it(harness: EngineHarness, tmp_path: Path) -> None:
    path = exported(harness, tmp_path / "a.tar")
    about, pages = read_portable(remade(path, said(signature=b"other".hex())), PLANES, SPEC)
    with pytest.raises(InvalidRequest, match="another model"):
        harness.engine.call(lambda: harness.memory.agents.take_in("default", "b", about, pages, lambda _: None)).result(30)
    assert [a.agent for a in harness.memory.agents.list("default")] == ["a"]
    assert isinstance(about, Portable)


def test_an_import_that_cannot_be_saved_never_hangs_a_page_from_another_prefix(
    harness: EngineHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first page leaves memory before the last is there: what is left must not stand for another text."""
    path = exported(harness, tmp_path / "a.tar")
    other = EngineHarness(tmp_path / "other", num_pages=2)

    def full(*_: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(other.memory.ledger.store, "write", full)
    assert isinstance(take_in(other, path, "b"), Overloaded)
    assert other.memory.agents.list("default") == []
    tail = PROMPT[2 * PAGE_TOKENS :][:300]
    assert other.ask(tail, "c", max_tokens=1).tokens == expected_answer(tail, 1)
    other.close()


def test_a_page_found_damaged_while_another_is_exported_keeps_the_books(
    harness: EngineHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export waits for an I/O thread; meanwhile somebody who shares its first page finds that it is damaged."""
    harness.ask(PROMPT, "a")
    harness.ask([*PROMPT[: PAGE_TOKENS + 10], 7], "b")
    harness.evict_all()
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(harness.memory.residency, "run", waiting.append)
    report: Future[Exception | None] = Future()
    harness.engine.call(lambda: harness.memory.agents.export("default", "a", tmp_path / "a.tar", report.set_result)).result(30)
    first = harness.memory.tree.branches_of("default", "a")[0].parent.path()[0]
    assert first.files
    file = harness.data / first.files[0].name  # type: ignore[operator]
    file.write_bytes(file.read_bytes()[:-1])
    assert harness.ask([*PROMPT[: PAGE_TOKENS + 10], 8], "b").match.computed_tokens > PAGE_TOKENS
    waiting[0]()
    assert isinstance(report.result(30), CorruptFile)
    harness.check()
    assert harness.ask(PROMPT, "a").tokens == expected_answer(PROMPT, 4)


def test_a_page_lost_while_its_rows_are_copied_leaves_a_fork_without_them(harness: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows to copy are being read when a page before them turns out to be damaged."""
    harness.ask(PROMPT, "a")
    harness.evict_all()
    head = harness.memory.tree.branches_of("default", "a")[0]
    first = head.parent.path()[0]
    assert first.files
    finish, waiting, is_read = harness.memory.residency._finish_load, [], Event()

    def finish_later(*what: Any) -> None:
        if what[0][0] is not head:
            finish(*what)
            return
        waiting.append(lambda: finish(*what))
        is_read.set()

    monkeypatch.setattr(harness.memory.residency, "_finish_load", finish_later)
    report: Future[Exception | None] = Future()
    harness.engine.call(lambda: harness.memory.agents.fork("default", "a", "f", report.set_result)).result(30)
    assert is_read.wait(30)
    file = harness.data / first.files[0].name  # type: ignore[operator]
    file.write_bytes(file.read_bytes()[:-1])
    harness.ask([*PROMPT[:PAGE_TOKENS], 8], "b")
    harness.engine.call(waiting[0]).result(30)
    assert report.result(30) is None
    harness.check()
    assert harness.memory.agents.show("default", "f").tokens == 0
    assert harness.ask(PROMPT, "f").tokens == expected_answer(PROMPT, 4)
