"""Whole days of a server at random: everything people and disks do, all at once, and what must hold all the same.

A day is one directory and one seed. Requests are begun, cancelled and given up; agents are forked, rewound, pinned, woken,
exported, imported, forgotten and left to expire; memory and disk are small; disks are slow or fail for a while; servers are
restarted, killed, and lose their directory. Then: every answer is the right one, every request ends, the books balance, what
was acknowledged is there, and disk, manifest and memory know of the same things.

TEST_DAYS=500 TEST_FIRST_DAY=1000 pytest tests/test_random_days.py     # more of them
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rewake.backends.base import Batch
from rewake.errors import Conflict, InternalError, InvalidRequest, NotFound, Overloaded, RequestError
from rewake.memory.portable import read_portable
from rewake.memory.tree import Branch, Page
from rewake.quant import PAGE_TOKENS
from rewake.request import Done, Failed
from rewake.store.crypto import Cipher
from rewake.store.directory import UNLIMITED
from rewake.store.files import Files
from tests.fakes import LAYOUT, EngineHarness, Pending, expected_answer

DAYS = int(os.environ.get("TEST_DAYS", "3"))
FIRST = int(os.environ.get("TEST_FIRST_DAY", "0"))
ACTS = int(os.environ.get("TEST_ACTS", "120"))
FILE = 4096 + LAYOUT.page_bytes + 4096  # a page with its header, and a block to spare
NAMESPACES = ("default", "other")
NAMES = ("ann", "bob", "cyd", "dee")
PATIENCE = 60.0


@dataclass(frozen=True)
class World:
    """What a day is like."""

    store: str
    num_pages: int
    disk: int
    always_load: bool
    troubles: bool  # steps of writes fail now and then
    slow: bool
    loses_directory: bool
    fails: bool  # steps of the model fail, and now and then the engine does
    chunk: int
    max_running: int
    window: int | None  # that two more layers see
    young: bool  # pages have residuals while they are young
    drifts: bool  # a row that is computed again is never quite the same

    @property
    def is_strict(self) -> bool:
        """Whether all that is acknowledged is kept until somebody forgets it."""
        return self.store != "none" and self.disk == UNLIMITED and not self.loses_directory


def world(rng: random.Random) -> World:
    store = rng.choice(("none", "clear", "clear", "clear", "encrypted"))
    return World(
        store=store,
        num_pages=rng.choice((5, 6, 8, 12, 24, 48)),
        disk=rng.choice((UNLIMITED, UNLIMITED, 10 * FILE, 20 * FILE)),
        always_load=rng.random() < 0.7,
        troubles=rng.random() < 0.4,
        slow=rng.random() < 0.4,
        loses_directory=store != "none" and rng.random() < 0.2,
        fails=rng.random() < 0.3,
        chunk=rng.choice((64, 256, 512)),
        max_running=rng.choice((1, 3, 8)),
        window=rng.choice((None, None, 1, 64, 257, 600)),
        young=rng.random() < 0.4,
        drifts=rng.random() < 0.6,
    )


class DayFiles(Files):
    """A file system that is slow, fails for a while, or whose process is killed at some step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = random.Random(rng.random())
        self.fail = 0.0
        self.seconds = 0.0
        self.read_seconds = 0.0
        self.kill: Callable[[], None] | None = None
        self.kill_in = 0

    def _step(self) -> None:
        if self.kill is not None:
            self.kill_in -= 1
            if self.kill_in <= 0:
                kill, self.kill = self.kill, None
                kill()
        if self.seconds:
            time.sleep(self.rng.random() * self.seconds)

    def _fails(self) -> bool:
        return self.rng.random() < self.fail

    def create(self, path: Path) -> int:
        self._step()
        if self._fails():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)

    def sync(self, fd: int) -> None:
        self._step()
        if self._fails():
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def sync_folder(self, folder: Path) -> None:
        if self._fails():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if not folder.is_dir():
            raise FileNotFoundError(folder)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def begin(self, cursor: sqlite3.Cursor) -> None:
        if self._fails():
            raise sqlite3.OperationalError("disk I/O error")
        super().begin(cursor)

    def commit(self, cursor: sqlite3.Cursor) -> None:
        self._step()
        if self._fails():
            raise sqlite3.OperationalError("database or disk is full")
        super().commit(cursor)
        self._step()

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        if self.read_seconds:
            time.sleep(self.rng.random() * self.read_seconds)
        return super().read(path, offset, into)


class Turn:
    def __init__(self, who: tuple[str, str | None], prompt: tuple[int, ...], pending: Pending, most: int) -> None:
        self.who, self.prompt, self.pending, self.most = who, prompt, pending, most
        self.promised = True  # until somebody forgets it
        self.checked = False

    @property
    def end(self) -> Done | Failed | None:
        return self.pending._end

    @property
    def computed(self) -> tuple[int, ...]:
        return (*self.prompt, *self.pending.tokens[:-1])

    @property
    def is_saved(self) -> bool:
        end = self.end
        return self.promised and isinstance(end, Done) and end.saved and end.reason != "cancelled"


class Day:
    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(f"day {seed}")
        self.seed = seed
        self.folder = folder
        self.world = world(rng)
        self.files = DayFiles(rng)
        self.cipher = Cipher(bytes(range(32))) if self.world.store == "encrypted" else None
        self.data = folder / "data" if self.world.store != "none" else None
        self.num_failures = 0
        self.fail_engine = False
        self.lock = threading.Lock()
        self.turns: list[Turn] = []
        self.killed: list[tuple[Path, list[Turn]]] = []
        self.exports: list[Path] = []
        self.mortal: set[tuple[str, str | None]] = set()
        self.harness = self.open(self.data, self.world.num_pages, self.world.disk, self.files)
        self.harness.backend.before_step = self.before_step
        self.texts: list[list[int]] = [self.text(n) for n in (20, PAGE_TOKENS, PAGE_TOKENS + 30, 2 * PAGE_TOKENS)]
        self.log: list[str] = []

    def open(self, data: Path | None, num_pages: int, disk: int, files: Files | None) -> EngineHarness:
        made = EngineHarness(
            data,
            num_pages=num_pages,
            window=self.world.window,
            young=self.world.young,
            drifts=self.world.drifts,
            disk=disk,
            files=files,
            cipher=self.cipher,
            always_load=self.world.always_load,
            chunk=self.world.chunk,
            max_running=self.world.max_running,
        )
        return made

    def text(self, length: int) -> list[int]:
        return self.rng.choices(range(2, 1000), k=length)

    def before_step(self, batch: Batch) -> None:
        """On the engine's thread."""
        if self.world.slow:
            time.sleep(0.001)
        if self.world.fails and self.files.rng.random() < 0.02:
            raise RuntimeError("the model has failed")

    # ---- acts

    def act(self) -> None:
        acts: list[tuple[float, Callable[[], None]]] = [
            (10, self.submit),
            (3, self.wait),
            (1, self.cancel),
            (1.5, self.fork),
            (1.5, self.rewind),
            (1, self.update),
            (0.7, self.create),
            (1, self.wake),
            (1, self.export),
            (1, self.take_in),
            (0.7, self.forget),
            (1, self.look),
            (0.5, self.evict),
            (0.4, self.restart),
            (0.6, self.kill),
            (0.7, self.trouble),
            (0.15, self.lose_directory),
            (0.3, self.break_engine),
            (2, self.check),
        ]
        act = self.rng.choices([a for _, a in acts], [w for w, _ in acts])[0]
        self.log.append(act.__name__)
        act()

    def who(self) -> tuple[str, str]:
        return self.rng.choices(NAMESPACES, (4, 1))[0], self.rng.choice(NAMES)

    def prompt(self, who: tuple[str, str | None]) -> list[int]:
        rng = self.rng
        done = [t for t in self.turns if t.pending.tokens and len(t.prompt) < 900]
        own = [t for t in done if t.who == who]
        what = rng.random()
        if what < 0.5 and own:
            turn = rng.choice(own[-3:])
            return [*turn.prompt, *turn.pending.tokens, *self.text(rng.choice((0, 1, 7, 60, 255, 256)))]
        if what < 0.7 and done:
            turn = rng.choice(done)
            cut = rng.randrange(1, len(turn.prompt) + 1)
            return [*turn.prompt[:cut], *self.text(rng.choice((0, 1, 30, 200)))]
        if what < 0.8 and done:
            return list(rng.choice(done).prompt)
        length = max(1, rng.choice((1, 40, 255, 256, 257, 512, 600)) + rng.randrange(-2, 3))
        return [*rng.choice(self.texts), *self.text(length)] if rng.random() < 0.5 else self.text(length)

    def submit(self) -> None:
        rng = self.rng
        who: tuple[str, str | None] = self.who()
        if rng.random() < 0.15:
            who = (who[0], None)
        prompt = self.prompt(who)
        most = rng.choice((1, 2, 5, 20))
        prompt = prompt[: (self.world.num_pages * PAGE_TOKENS) - most]
        deadline = time.monotonic() + rng.random() * 0.2 if rng.random() < 0.07 else None
        try:
            pending = self.harness.submit(prompt, who[1], most, namespace=who[0], deadline=deadline)
        except RequestError:
            return
        turn = Turn(who, tuple(prompt), pending, most)
        with self.lock:
            turn.promised = who not in self.mortal
            self.turns.append(turn)
        if rng.random() < 0.5:
            self.finish(turn)

    def finish(self, turn: Turn) -> None:
        if turn.checked:
            return
        assert turn.pending._ended.wait(PATIENCE), self.story(f"no answer for {turn.who}")
        turn.checked = True
        tokens = turn.pending.tokens
        assert tokens == expected_answer(turn.prompt, len(tokens)), self.story(f"WRONG {turn.who} {turn.end}")
        end = turn.end
        if isinstance(end, Done):
            assert end.num_generated == len(tokens) and (end.reason == "cancelled" or len(tokens) == turn.most)
        if not (self.world.fails or self.num_failures) and isinstance(end, Failed):
            assert not isinstance(end.error, InternalError), self.story(f"failed: {end.error}")

    def story(self, what: str) -> str:
        return f"day {self.seed}: {what}; {self.world}; {self.log[-12:]}"

    def wait(self) -> None:
        for turn in list(self.turns):
            self.finish(turn)

    def cancel(self) -> None:
        if self.turns:
            self.harness.engine.cancel(self.rng.choice(self.turns[-4:]).pending.id)  # type: ignore[attr-defined]

    # ---- verbs

    def verb(self, name: str, *arguments: Any, namespace: str, **keywords: Any) -> Any:
        told: Future[Any] = Future()
        engine, memory = self.harness.engine, self.harness.memory
        try:
            engine.call(lambda: getattr(engine.memory.agents, name)(namespace, *arguments, done=told.set_result, **keywords)).result(
                PATIENCE
            )
        except (NotFound, Conflict, InvalidRequest, Overloaded):
            return None
        until = time.monotonic() + PATIENCE
        while True:
            with suppress(TimeoutError):
                return told.result(0.2)
            if engine.memory is not memory or time.monotonic() > until:
                assert self.num_failures, self.story(f"{name} was never done")
                return InternalError("the engine has failed")

    def drop(self, who: tuple[str, str | None]) -> None:
        with self.lock:
            for turn in self.turns:
                if turn.who == who:
                    turn.promised = False

    def fork(self) -> None:
        namespace, name = self.who()
        self.measured("fork", namespace, name, self.rng.choice(NAMES))

    def rewind(self) -> None:
        namespace, name = self.who()
        self.measured("rewind", namespace, name)

    def measured(self, verb: str, namespace: str, *names: str) -> None:
        what = self.rng.random()
        if what < 0.3:
            self.verb(verb, *names, namespace=namespace, turn=self.rng.randrange(4))
        elif what < 0.7:
            self.verb(verb, *names, namespace=namespace, tokens=self.rng.choice((0, 1, 100, 255, 256, 257, 300, 512)))
        elif verb == "fork":
            self.verb(verb, *names, namespace=namespace)

    def update(self) -> None:
        namespace, name = self.who()
        if self.rng.random() < 0.3:
            self.mortal.add((namespace, name))
            self.drop((namespace, name))
            self.verb("update", name, namespace=namespace, ttl=self.rng.random() * 2)
        else:
            self.verb("update", name, namespace=namespace, pinned=self.rng.random() < 0.5)

    def create(self) -> None:
        namespace, name = self.who()
        self.verb("create", name, namespace=namespace, pinned=self.rng.random() < 0.3, ttl=None)

    def wake(self) -> None:
        namespace, name = self.who()
        self.verb("wake", name, namespace=namespace)

    def export(self) -> None:
        namespace, name = self.who()
        path = self.folder / f"{len(self.exports)}.tar"
        error = self.verb("export", name, path, namespace=namespace)
        if error is None and path.exists():
            self.exports.append(path)

    def take_in(self) -> None:
        if not self.exports:
            return
        with open(self.rng.choice(self.exports), "rb") as file:
            exported, pages = read_portable(file, self.harness.backend.planes, self.harness.backend.spec)
        namespace, name = self.who()
        self.verb("take_in", name, exported, pages, namespace=namespace)

    def forget(self) -> None:
        who = self.who()
        self.drop(who)
        self.verb("forget", who[1], namespace=who[0])

    def look(self) -> None:
        namespace, _ = self.who()
        self.call(lambda: self.harness.engine.memory.agents.list(namespace))

    def call(self, function: Callable[[], Any]) -> Any:
        return self.harness.engine.call(function).result(PATIENCE)

    # ---- what happens

    def evict(self) -> None:
        self.harness.memory = self.harness.engine.memory
        self.harness.evict_all()

    def settle(self) -> None:
        """Everything has ended, and all is written."""
        self.wait()
        memory = self.harness.memory = self.harness.engine.memory
        for _ in range(3):
            reached = threading.Event()
            if memory.ledger.writer is not None:
                self.call(lambda reached=reached: memory.ledger.writer.barrier(reached.set))
                assert reached.wait(PATIENCE)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if self.call(lambda: self.harness.engine.is_idle and not memory.residency.loading):
                return
            time.sleep(0.01)
        raise AssertionError(self.story("never idle"))

    def restart(self) -> None:
        calm = self.files.fail
        self.files.fail = 0.0
        self.settle()
        self.balance()
        self.harness.restart()
        self.harness.backend.before_step = self.before_step
        self.after_restart()
        self.files.fail = calm

    def kill(self) -> None:
        """At some step of a write from now: a copy of the directory, and what had been promised just before."""
        if self.data is None or len(self.killed) >= 2 or self.files.kill is not None:
            return
        copy = self.folder / f"killed{len(self.killed)}{self.rng.random()}"

        def kill() -> None:
            with self.lock:
                promised = [t for t in self.turns if t.is_saved]
            with suppress(FileNotFoundError, shutil.Error):
                shutil.copytree(self.data or Path(), copy)
                self.killed.append((copy, promised))

        self.files.kill_in = self.rng.randrange(1, 12)
        self.files.kill = kill

    def trouble(self) -> None:
        if self.world.troubles:
            self.files.fail = self.rng.choice((0.0, 0.0, 0.1, 0.5, 1.0))
        if self.world.slow:
            self.files.seconds = self.rng.choice((0.0, 0.0, 0.002, 0.01))
            self.files.read_seconds = self.rng.choice((0.0, 0.005, 0.02))

    def lose_directory(self) -> None:
        if self.world.loses_directory and self.data is not None:
            shutil.rmtree(self.data, ignore_errors=True)

    def break_engine(self) -> None:
        if self.world.fails and self.num_failures < 2:
            self.num_failures += 1
            engine = self.harness.engine
            engine.post(self.explode)
            until = time.monotonic() + PATIENCE
            while len(engine._beginnings) == sum(1 for _ in engine._beginnings[: self.num_failures - 1]) and time.monotonic() < until:
                time.sleep(0.005)

            self.call(lambda: setattr(engine.memory.residency.gate, "always", self.world.always_load))
            self.harness.memory = engine.memory

    def explode(self) -> None:
        raise RuntimeError("the engine is made to fail")

    # ---- what must hold

    def check(self) -> None:
        self.harness.memory = self.harness.engine.memory
        self.harness.check()
        if self.data is not None and self.data.is_dir() and not self.world.loses_directory:
            taken = on_disk(self.data)
            assert taken <= self.world.disk, self.story(f"{taken} bytes on disk")

    def balance(self) -> None:
        """Nothing is at work: what is in memory, in the manifest and on disk is the same."""
        engine = self.harness.engine
        memory = engine.memory
        self.harness.memory = memory
        self.harness.check()
        self.call(self.nothing_is_left)
        store: Any = engine._store
        if store is None or self.data is None or not self.data.is_dir():
            return
        self.call(lambda: self.same_everywhere(store))

    def nothing_is_left(self) -> None:
        engine, memory = self.harness.engine, self.harness.engine.memory
        left = (engine.waiting, engine.opening, engine.running, engine.closing, engine._overtaken, engine._cancelled)
        assert not any(left), self.story(f"{left}")
        assert not memory.open_sequences and not memory.residency.loading
        for resident in memory.tree.residents():
            assert resident.refs == 0, self.story(f"held for ever: {resident!r:.200}")
            assert not resident.forgotten
            if isinstance(resident, Page):
                assert resident.slots or resident.files or memory.planes.fleeting == memory.planes.all, self.story("a page that is nowhere")
                assert resident.children or resident.branches, self.story("a page nobody needs")
                assert not resident.saving
            else:
                assert not resident.running, self.story("a branch runs for ever")
                assert all(t <= resident.num_tokens for t in resident.turns), self.story(f"{resident.turns} {resident.num_tokens}")
                assert list(resident.turns) == sorted(set(resident.turns))
                assert len(resident.tokens) <= PAGE_TOKENS
        ledger = memory.ledger
        if ledger.writer is not None:
            assert ledger.writer.waiting_bytes == 0 and ledger._to_remove == 0, self.story("bytes wait for ever")

    def same_everywhere(self, store: Any) -> None:
        if self.files.fail or not store._index.is_in_place():
            return
        memory = self.harness.engine.memory
        names = store._index.file_names()
        there = {
            str(p.relative_to(self.data)) for f in ("pages", "segments") for p in (self.data or Path()).glob(f"{f}/*/*") if p.is_file()
        }
        assert names <= there, self.story(f"named and missing: {names - there}")
        if not self.world.troubles and not self.world.loses_directory:
            assert there == names, self.story(f"there and not named: {there - names}")
            assert store.used == on_disk(self.data or Path()), self.story(f"used {store.used}, on disk {on_disk(self.data or Path())}")
            residents = list(memory.tree.residents())
            assert {f.name for r in residents for f in r.files} == names
            snapshot = store._index.load()
            branches = {r.id: r for r in residents if isinstance(r, Branch)}
            recorded = {b.id for b in snapshot.branches}
            unsaved = branches.keys() - recorded
            assert recorded <= branches.keys() and (not unsaved or self.world.disk < UNLIMITED), self.story("branches")
            for record in snapshot.branches:
                branch = branches[record.id]
                if branch.saved is not None and branch.saved.tokens is branch.tokens:  # else its last turn found no room
                    assert record.parent == branch.parent.key and record.tokens == branch.tokens.tobytes(), self.story("another branch")
                    assert record.turns == branch.turns.tobytes() and record.agent == branch.agent
                else:
                    assert self.world.disk < UNLIMITED, self.story("an unsaved turn")
            known = {who: a for who, a in memory.tree.agents.items() if who[1] is not None}
            agents = {(a.namespace, a.name): a for a in snapshot.agents}
            assert agents.keys() <= known.keys() and len(agents) == len(snapshot.agents), self.story("agents")
            for who, agent in known.items():
                if who in agents:
                    assert (agents[who].pinned, agents[who].ttl, agents[who].id) == (agent.pinned, agent.ttl, agent.id)
                else:
                    assert self.world.disk < UNLIMITED, self.story(f"an unsaved agent {who}")

    def after_restart(self) -> None:
        if self.data is None:
            return
        store: Any = self.harness.engine._store
        self.settle()

        def look() -> None:
            names = store._index.file_names()
            there = {str(p.relative_to(self.data)) for f in ("pages", "segments") for p in (self.data or Path()).glob(f"{f}/*/*")}
            assert there <= names, self.story(f"unreferenced behind a restart: {there - names}")
            assert names <= there, self.story(f"missing behind a restart: {names - there}")
            if not self.world.loses_directory:
                assert store.used == on_disk(self.data or Path()) <= self.world.disk, self.story("the budget behind a restart")

        self.call(look)

    def verify(self, harness: EngineHarness, turns: list[Turn], strict: bool) -> None:
        harness.memory.residency.gate.always = True
        self.rng.shuffle(turns)
        for turn in turns[:25]:
            again = harness.ask(turn.computed, turn.who[1], 1, namespace=turn.who[0])
            assert again.tokens == expected_answer(turn.computed, 1), self.story("WRONG behind a kill")
            if strict:
                assert again.match.computed_tokens == 1, self.story(f"LOST {turn.who} {len(turn.computed)}: {again.match}")
        harness.close()

    def run(self) -> None:
        try:
            for _ in range(ACTS):
                self.act()
            self.files.fail = self.files.seconds = self.files.read_seconds = 0.0
            self.settle()
            self.balance()
        finally:
            self.files.fail = self.files.seconds = self.files.read_seconds = 0.0
            with suppress(BaseException):
                self.harness.engine.stop()
        assert self.harness.backend.num_wrong == 0
        if self.data is not None:
            with self.lock:
                promised = [t for t in self.turns if t.is_saved]
            self.verify(self.open(self.data, 64, UNLIMITED, None), promised, self.world.is_strict)
            for copy, turns in self.killed:
                # what was forgotten behind the kill was promised then
                self.verify(self.open(copy, 64, UNLIMITED, None), turns, self.world.is_strict)


def on_disk(data: Path) -> int:
    total = 0
    for folder in ("pages", "segments", "quarantine"):
        for path in data.glob(f"{folder}/**/*"):
            with suppress(FileNotFoundError):
                total += path.stat().st_size if path.is_file() else 0
    return total


@pytest.fixture
def folder() -> Iterator[Path]:
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as made:
        yield Path(made)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + DAYS))
def test_a_day(seed: int, folder: Path) -> None:
    Day(seed, folder).run()
