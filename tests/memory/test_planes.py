"""Pages of several planes: layers that see a window leave memory behind it, and stay on disk.

The fake's two sliding layers are read back over their window at every step, and a plane that a query attends to and that is not
there fails the test (fakes.EchoBackend). So "the answer is right" says that each plane was where it was needed.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rewake.errors import CorruptFile
from rewake.memory.memory import pages_for
from rewake.memory.portable import read_portable
from rewake.memory.tree import Branch, Page
from rewake.quant import PAGE_TOKENS
from rewake.store.files import Files
from tests.fakes import EchoBackend, EngineHarness, expected_answer

WINDOW = 300
LENGTHS = (255, 256, 257, WINDOW - 1, WINDOW, WINDOW + 1, 511, 512, 513, 1300)


def text(seed: int, length: int) -> list[int]:
    return [2 + (seed * 131 + i * i * 7 + i) % 997 for i in range(length)]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[EngineHarness]:
    made = EngineHarness(tmp_path, window=WINDOW)
    yield made
    made.close()
    assert made.backend.num_wrong == 0


def path_of(harness: EngineHarness, agent: str) -> tuple[list[Page], Branch]:
    (branch, *_) = harness.engine.call(lambda: harness.memory.tree.branches_of("default", agent)).result()
    return branch.parent.path(), branch


def ask(harness: EngineHarness, prompt: list[int], agent: str, count: int = 3) -> Any:
    pending = harness.ask(prompt, agent, count)
    assert pending.tokens == expected_answer(prompt, count)
    return pending


def test_memory_holds_the_window_and_disk_holds_all(harness: EngineHarness) -> None:
    ask(harness, text(1, 2000), "a")
    pages, branch = path_of(harness, "a")
    assert branch.next_query == 2002 and set(branch.slots) == {0, 1}
    for page in pages:
        is_seen = page.end > branch.next_query - WINDOW + 1
        assert set(page.slots) == ({0, 1} if is_seen else {0}), page.number
        assert [f.plane for f in page.files] == [0, 1]
    assert [len(p.slots) for p in pages] == [1, 1, 1, 1, 1, 1, 2]
    shown = harness.engine.call(lambda: harness.memory.agents.show("default", "a")).result()
    slot = harness.memory.planes.slot_bytes
    assert shown.state == "hot" and shown.bytes_in_memory == (7 + 2 + 3) * slot


@pytest.mark.parametrize("window", [1, 2, 256, 257, WINDOW])
def test_every_length_goes_on_after_eviction_and_after_a_restart(tmp_path: Path, window: int) -> None:
    """W5: only what is new is computed, whatever lies at an edge."""
    harness = EngineHarness(tmp_path, window=window)
    for length in LENGTHS:
        told = text(length, length)
        told += ask(harness, told, str(length)).tokens
        harness.evict_all()
        pending = ask(harness, [*told, 5], str(length))
        told += [5, *pending.tokens]
        assert pending.match.computed_tokens == 2
        assert ask(harness, told[:-1], str(length), 1).match.computed_tokens == 1
    harness.restart()
    for length in LENGTHS:
        told = text(length, length)
        told += expected_answer(told, 3)
        told += [5, *expected_answer([*told, 5], 3)]
        pending = ask(harness, [*told, 7], str(length))
        assert (pending.match.kind, pending.match.computed_tokens) == ("extend", 2)
    harness.close()


def test_an_edit_anywhere_is_reused_up_to_there(harness: EngineHarness) -> None:
    """P7: what the edit needs of windows that have left memory is read."""
    told = text(1, 1700)
    ask(harness, told, "a")
    for at in (1, 255, 256, 257, 500, 768, 900, 1299, 1301, 1500):
        harness.evict_all() if at % 2 else None
        pending = ask(harness, [*told[:at], 1, 1, 1], f"edit{at}")
        assert (pending.match.kind, pending.match.reused_tokens) == ("diverge", at)


def test_an_agent_is_rewound_and_forked_to_any_length(harness: EngineHarness) -> None:
    told = text(1, 1200)
    told += ask(harness, told, "a").tokens
    for length in (1100, 1024, 700, 513, 300, 256, 20):
        harness.restart()
        for verb in ("fork", "rewind"):
            done: list[Any] = []
            ended = threading.Event()

            def note(error: Any, done: list[Any] = done, ended: threading.Event = ended) -> None:
                done.append(error)
                ended.set()

            agents = harness.memory.agents
            if verb == "fork":
                harness.engine.call(lambda note=note, n=length, a=agents: a.fork("default", "a", f"f{n}", note, tokens=n)).result()
            else:
                harness.engine.call(lambda note=note, n=length, a=agents: a.rewind("default", "a", note, tokens=n)).result()
            assert ended.wait(30) and done == [None]
            who = f"f{length}" if verb == "fork" else "a"
            assert ask(harness, [*told[:length], 9], who, 1).match.computed_tokens == 1


def test_without_a_disk_a_dropped_window_is_computed_again() -> None:
    """W9: the usable prefix is the least of all planes; an edit whose window is gone begins where one is left, or anew."""
    harness = EngineHarness(None, num_pages=6, window=WINDOW)
    told = text(1, 1200)
    told += ask(harness, told, "a").tokens
    ask(harness, text(50, 300), "b")  # in slots of windows that "a" has left behind
    assert ask(harness, [*told, 8], "a").match.computed_tokens == 2
    assert ask(harness, [*told[:800], 1, 1], "c").match.reused_tokens == 0
    assert harness.backend.num_wrong == 0
    harness.close()


def test_without_a_disk_a_window_stays_as_long_as_there_is_room() -> None:
    harness = EngineHarness(None, window=WINDOW)
    told = text(1, 1200)
    ask(harness, told, "a")
    assert ask(harness, [*told[:800], 1, 1], "a").match.reused_tokens == 800
    harness.close()


def test_a_damaged_window_is_computed_again_and_written_anew(harness: EngineHarness) -> None:
    """W2, for one plane: what later tokens do not attend to is not lost with it."""
    told = text(1, 1400)
    told += ask(harness, told, "a").tokens
    pages, _ = path_of(harness, "a")
    damaged = harness.data / pages[4].files[1].name  # type: ignore[operator]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    harness.restart()
    pending = ask(harness, [*told, 5], "a")
    assert 0 < pending.match.reused_tokens <= 4 * PAGE_TOKENS and not damaged.exists()
    pages, _ = path_of(harness, "a")
    assert [[f.plane for f in page.files] for page in pages] == [[0, 1]] * 5
    harness.restart()
    told += [5, *pending.tokens]
    assert ask(harness, [*told, 6], "a").match.computed_tokens == 2


def test_a_damaged_window_that_nobody_sees_hurts_nobody(harness: EngineHarness) -> None:
    told = text(1, 1400)
    told += ask(harness, told, "a").tokens
    pages, _ = path_of(harness, "a")
    (harness.data / pages[1].files[1].name).unlink()  # type: ignore[operator]
    harness.restart()
    assert ask(harness, [*told, 5], "a").match.computed_tokens == 2
    assert ask(harness, [*told[:600], 1], "b").match.reused_tokens == 1 * PAGE_TOKENS, "page 1 has no window any more"


def test_agents_share_a_page_of_which_each_needs_other_planes(harness: EngineHarness) -> None:
    """One has gone far ahead of a common beginning, others begin there: nobody's need is another's loss."""
    common = text(1, 600)
    ask(harness, [*common, *text(2, 1500)], "far")
    for i in range(4):
        ask(harness, [*common, 10 + i, 3], f"near{i}")
    harness.evict_all()
    running = [harness.submit([*common, *text(20 + i, 900 * (i % 2) + 5)], f"new{i}", 3) for i in range(6)]
    for i, pending in enumerate(running):
        pending.result()
        assert pending.tokens == expected_answer([*common, *text(20 + i, 900 * (i % 2) + 5)], 3)
    harness.check()


class SlowFiles(Files):
    """A disk that writes when it is told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def sync(self, fd: int) -> None:
        assert self.go_on.wait(60)
        super().sync(fd)


def test_a_long_prompt_passes_through_little_memory(tmp_path: Path) -> None:
    """Windows that are let go make room for the next, and a prompt whose windows wait for the disk waits, too."""
    files, pages = SlowFiles(), 20
    harness = EngineHarness(tmp_path, EchoBackend(11, window=1), num_pages=11, window=1, files=files, chunk=256)  # 33 slots; 60 for all
    told = text(1, pages * PAGE_TOKENS - 10)
    pending = harness.submit(told, "a", 3)
    assert not pending.first_token.wait(0.5)
    files.go_on.set()
    pending.result()
    assert pending.tokens == expected_answer(told, 3) and pages_for(len(told)) == pages
    assert ask(harness, [*told, *pending.tokens, 4], "a").match.computed_tokens == 2
    harness.close()


def test_an_export_has_what_is_left_of_each_page(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path / "data", window=WINDOW)
    told = text(1, 1400)
    told += ask(harness, told, "a").tokens
    ended = threading.Event()
    harness.engine.call(lambda: harness.memory.agents.export("default", "a", tmp_path / "a.tar", lambda _: ended.set())).result()
    assert ended.wait(30)
    harness.close()
    other = EngineHarness(tmp_path / "other", window=WINDOW)
    with open(tmp_path / "a.tar", "rb") as file:
        about, pages = read_portable(file, other.backend.planes)
        taken = threading.Event()
        other.engine.call(lambda: other.memory.agents.take_in("default", "b", about, pages, lambda _: taken.set())).result()
        assert taken.wait(30)
    assert ask(other, [*told, 5], "b").match.computed_tokens == 2
    assert ask(other, [*told[:500], 1], "c").match.reused_tokens == 500
    other.close()


def test_rows_that_turn_out_to_be_nowhere_are_not_remembered(harness: EngineHarness) -> None:
    """L5: the directory was deleted while they were read."""
    told = text(1, 600)
    ask(harness, told, "a")
    harness.evict_all()
    _, branch = path_of(harness, "a")

    def lose() -> None:
        branch.segments = []
        for plane in (0, 1):
            harness.memory.ledger.discard((branch, plane), CorruptFile("it was deleted"))
        harness.memory.check()

    harness.engine.call(lose).result()
    assert ask(harness, [*told, 5], "a").match.reused_tokens == 2 * PAGE_TOKENS


# ---- pages that settle


@pytest.fixture(params=[None, WINDOW], ids=["full", "sliding"])
def settling(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineHarness]:
    made = EngineHarness(tmp_path, window=request.param, young=True)
    yield made
    made.close()
    assert made.backend.num_wrong == 0


def test_a_settled_page_has_its_residuals_on_disk_only_and_page_0_in_memory_too(settling: EngineHarness) -> None:
    ask(settling, text(1, 256 * 5 + 70), "a")
    pages, branch = path_of(settling, "a")
    base = len(settling.backend.planes.base)
    over = [[plane for plane in page.slots if plane >= base] for page in pages]
    assert over[0] == [base] and not any(over[1:])  # a sliding page 0 is behind its window
    assert set(branch.slots) == set(settling.backend.planes.all)
    assert all(page.stored(plane) == PAGE_TOKENS for page in pages for plane in settling.backend.planes.all)
    ask(settling, text(2, 256 * 5 + 50), "young")
    pages, _ = path_of(settling, "young")
    assert base in pages[4].slots and base not in pages[3].slots


def test_residuals_are_written_once(settling: EngineHarness) -> None:
    """What a turn leaves of them in segments stays there when the page is full; what the codes leave is written anew."""
    told = text(1, 200)
    told += ask(settling, told, "a").tokens
    told += [7] * 40
    told += ask(settling, told, "a").tokens
    before = settling.engine._store.bytes_written  # type: ignore[union-attr]
    told += [8] * 30
    ask(settling, told, "a")
    (page,), branch = path_of(settling, "a")
    planes = settling.backend.planes
    for number, plane in enumerate(planes.planes):
        files = [f for f in page.files if f.plane == number]
        assert sum(f.rows for f in files) == PAGE_TOKENS and len(files) == (3 if plane.slot.residuals else 1)
    there = {str(p.relative_to(settling.data)) for f in ("pages", "segments") for p in settling.data.glob(f"{f}/*/*")}  # type: ignore
    assert there == {f.name for f in (*page.files, *branch.segments)}
    row = planes.planes[0].slot.token_bytes * sum(p.num_slots for p in planes.base)
    headers = 4096 * 2 * len(planes.all) * 2
    assert settling.engine._store.bytes_written - before <= 256 * row + 2 * 33 * row + headers  # type: ignore[union-attr]


def test_every_verb_holds_across_settling_and_restart(settling: EngineHarness) -> None:
    """Claims 1 and 2 rest on it: whatever a query attends to by its position is there, exactly as it was written."""
    told: list[int] = []
    for turn in range(14):
        told += text(turn, (5, 60, 64, 100, 256, 190, 1)[turn % 7])
        told += ask(settling, told, "a").tokens
        if turn % 3 == 2:
            settling.restart()
        elif turn % 3 == 1:
            settling.evict_all()
    for at in (1, 256, 300, 319, 320, 321, 511, 512, 575, 576, 700, 1024):
        pending = ask(settling, [*told[:at], 1, 1], f"edit{at}")
        assert (pending.match.kind, pending.match.reused_tokens) == ("diverge", at)
        settling.evict_all()
    settling.restart()
    assert ask(settling, [*told, 6], "a").match.computed_tokens == 2


def test_without_a_disk_what_needs_lost_residuals_is_computed_again() -> None:
    """W9: the usable prefix is the least of all planes; an edit that sees lost residuals goes back to page 0, which keeps its own."""
    harness = EngineHarness(None, num_pages=8, young=True)
    told = text(1, 1200)
    told += ask(harness, told, "a").tokens
    ask(harness, text(50, 1030), "b")
    assert ask(harness, [*told, 8], "a").match.computed_tokens == 2
    assert ask(harness, [*told[:800], 1, 1], "c").match.reused_tokens == PAGE_TOKENS
    assert harness.backend.num_wrong == 0
    harness.close()


class PagesFail(Files):
    """A disk on which pages find no room, while `armed`."""

    armed = False

    def create(self, path: Path) -> int:
        if self.armed and path.parts[-3] == "pages":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


def test_a_saved_turn_stays_saved_when_the_page_it_grows_into_cannot_be_written(tmp_path: Path) -> None:
    """The page's residuals are in the turn's segments: they were taken for the page, and the turn's codes removed."""
    files = PagesFail()
    harness = EngineHarness(tmp_path / "data", young=True, files=files)
    told = text(1, 200)
    first = ask(harness, told, "a")
    assert first.result().saved
    told += first.tokens
    files.armed = True
    longer = [*told, *text(2, 100)]
    second = ask(harness, longer, "a")
    assert not second.result().saved
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    killed = EngineHarness(tmp_path / "killed", young=True)
    assert ask(killed, told[:-1], "a", 1).match.computed_tokens == 1
    killed.close()
    files.armed = False
    third = ask(harness, [*longer, *second.tokens, 7], "a")
    assert third.match.computed_tokens == 2 and third.result().saved
    pages, branch = path_of(harness, "a")
    there = {str(p.relative_to(tmp_path / "data")) for f in ("pages", "segments") for p in (tmp_path / "data").glob(f"{f}/*/*")}
    assert there == {f.name for r in (*pages, branch) for f in r.files}
    harness.close()


def vacate(harness: EngineHarness, plane: int) -> None:
    """A plane of all pages leaves memory before the others, as that of which it is longest ago that it was used."""

    def drop() -> None:
        for piece in [piece for piece in harness.memory.residency.cached if piece[1] == plane]:
            harness.memory.residency.drop(piece)

    harness.engine.call(drop).result()


def compute(harness: EngineHarness) -> None:
    """From here on the disk is slower than the model."""
    gate = harness.memory.residency.gate
    gate.always, gate.read_cost, gate.compute_cost = False, 1.0, 1e-9


def test_residuals_refine_the_codes_they_were_computed_with(tmp_path: Path) -> None:
    """A page whose codes had left memory was computed again, by other steps, and kept the residuals that were still there."""
    harness = EngineHarness(tmp_path, young=True, drifts=True)
    told = text(1, 600)
    ask(harness, told, "a")
    vacate(harness, plane=0)
    compute(harness)
    assert ask(harness, [*told[:300], 1], "b").match.computed_tokens == 301
    for _ in range(2):
        assert ask(harness, [*told[:300], 2], "c").tokens == expected_answer([*told[:300], 2], 3)
        harness.restart()
    harness.close()
    assert harness.backend.num_wrong == 0


def test_what_could_not_be_written_anew_is_not_mixed_with_what_is_on_disk(tmp_path: Path) -> None:
    """A page in memory that differs from its files, as the disk is full: residuals that have left are not read from these."""
    files = PagesFail()
    harness = EngineHarness(tmp_path / "data", young=True, drifts=True, files=files)
    told = text(1, 600)
    ask(harness, told, "a")
    harness.evict_all()
    compute(harness)
    files.armed = True
    assert ask(harness, [*told[:-9], 1], "b").match.computed_tokens == 592
    vacate(harness, plane=1)
    harness.memory.residency.gate.always = True
    assert ask(harness, [*told[:300], 1], "c").tokens == expected_answer([*told[:300], 1], 3)
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    killed = EngineHarness(tmp_path / "killed", young=True, drifts=True)
    assert ask(killed, told, "a", 1).match.computed_tokens == 1
    assert ask(killed, [*told[:550], 1], "b", 1).match.computed_tokens == 1
    killed.close()
    files.armed = False
    harness.evict_all()
    assert ask(harness, [*told[:550], 2], "d").tokens == expected_answer([*told[:550], 2], 3)
    harness.restart()
    assert ask(harness, [*told[:550], 3], "e").match.computed_tokens == 1
    harness.close()
    assert harness.backend.num_wrong + killed.backend.num_wrong == 0


def test_of_two_that_share_a_prompt_the_one_that_is_whole_is_gone_on_with(tmp_path: Path) -> None:
    """A full page whose residuals are nowhere was preferred to a branch that has all of the same rows."""
    harness = EngineHarness(tmp_path, young=True)
    told = text(1, 900)
    ask(harness, told, "a")
    (page,) = [page for page in path_of(harness, "a")[0] if page.number == 2]
    harness.evict_all()
    for file in page.files:
        if file.plane == 1:
            (tmp_path / file.name).unlink()
    ask(harness, [*told[:540], 1], "b")  # which finds out
    ask(harness, [*told[:540], 1], "b")
    assert ask(harness, told[:540], "c").match.computed_tokens == 1
    harness.close()


@pytest.mark.parametrize("window", [None, 300, 600])
def test_what_fits_when_it_is_computed_is_answered_when_it_is_remembered(tmp_path: Path, window: int | None) -> None:
    """What it holds of windows and residuals, and those it may grow by, were more than there are slots: it waited for ever."""
    least = EngineHarness(None, window=window, young=True, chunk=64)
    num_slots = least.memory._most_slots(6)
    least.close()
    for more in range(6):
        backend = EchoBackend(8, window=window, young=True)
        backend.arena = backend.arena[: (num_slots + more) * backend.planes.slot_bytes]
        harness = EngineHarness(tmp_path / str(more), backend, chunk=64)
        told = text(1, 1500)
        for length in (256, 300, 512, 700, 1000, 1100, 1300, 1500):
            for name in ("a", f"b{length}"):
                prompt = [*told[:length], *text(length, 1500 - length)]
                pending = harness.submit(prompt, name, 5)
                pending.result(30)
                assert pending.tokens == expected_answer(prompt, 5)
        assert harness.backend.num_wrong == 0
        harness.close()
