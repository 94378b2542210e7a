"""Faults: steps of the file system that fail or are the last, and what must hold all the same.

A trial lets a few agents talk to an engine on the fake backend, breaks one step (or one file), and looks at every
answer and at all that was acknowledged: `saved: true` is a promise. `Toll` counts what was broken of it.

    kill        the process dies before, in or behind a step: the directory is copied just then, and a new engine
                opens the copy. What was acknowledged until then must be there.
    power cut   as kill, and nothing counts that was not synced: unsynced files are empty, short or full of zeros,
                entries of unsynced folders are gone or there, as the seed says
    torn        as kill, and of the file that was just renamed (or the manifest's log) the end is missing or zero
    EIO, ENOSPC the step fails, once or a few times, and the same process goes on
    short       a write takes fewer bytes than it was given, and goes on, fails, or was the last
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewake.quant import PAGE_TOKENS
from rewake.store.directory import BLOCK
from rewake.store.files import Files
from rewake.store.index import FILE, FILE_COLUMNS
from tests.fakes import SIGNATURE, EchoBackend, EngineHarness, Pending, expected_answer

STEPS = ("create", "append", "sync", "rename", "sync_folder", "begin", "commit", "remove")
READS = ("page read", "segment read")
FILES = ("page file", "segment file")
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}
SQLITE_ERRORS = {"EIO": "disk I/O error", "ENOSPC": "database or disk is full"}
DAMAGES = (
    "truncated",
    "emptied",
    "flipped in the data",
    "flipped in the header",
    "swapped, same agent",
    "swapped, another's",
    "another model's",
)
CELLS = (
    *((kind, step) for kind in ("kill", "power cut", *ERRORS) for step in STEPS),
    ("short", "append"),
    ("torn", "rename"),
    ("torn", "commit"),
    *((kind, step) for kind in ("EIO", "short", "gone") for step in READS),
    *((kind, step) for kind in (*DAMAGES, "older format") for step in FILES),
    ("older format", "manifest"),
)
NUM_PAGES = 10
MOST_TOKENS = 900  # of a talk, before it begins anew
SHAPES: tuple[dict[str, Any], ...] = (  # of the model: see EchoBackend
    {},
    {"young": True},
    {"window": 64, "drifts": True},
    {"window": 300, "young": True, "drifts": True},
)
MOST_ACTS = 60  # a fault that has not come until then will not


@dataclass
class Toll:
    """What went wrong, and how. All must be 0."""

    wrong: int = 0  # answers over bytes that were not what was appended
    lost: int = 0  # turns that had been acknowledged
    crashes: int = 0  # engines that died, requests without an answer, directories that could not be opened
    unsaved: int = 0  # turns that were not saved though the fault was over
    missed: int = 0  # trials whose fault did not happen
    stories: list[str] = field(default_factory=list)

    def add(self, what: str, story: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        self.stories.append(f"{what}: {story}")

    def include(self, other: Toll) -> None:
        for what in ("wrong", "lost", "crashes", "unsaved", "missed"):
            setattr(self, what, getattr(self, what) + getattr(other, what))
        self.stories += other.stories

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.lost or self.crashes or self.unsaved or self.missed)


class BrokenFiles(Files):
    """A file system whose `step` breaks the `nth` time, in the way of `kind`. `killed` is told when the process would be dead.

    Counts across restarts of the engine it is given to. Other threads than the writer's only read.
    """

    def __init__(self, kind: str, step: str, rng: random.Random, data: Path, killed: Callable[[Callable[[Path], None]], None]) -> None:
        self.kind, self.step, self.data, self.killed = kind, step, data, killed
        self.rng = random.Random(rng.random())  # used by other threads
        self.nth = self.rng.randrange(1, {"begin": 12, "commit": 12, "create": 12, "append": 24, "sync": 12}.get(step, 6))
        self.times = self.rng.choice((1, 1, 2, 5, 20)) if kind in ERRORS and step in STEPS else 1
        self.struck = 0
        self.victims: list[bytes] = []  # tokens of the rows that a read could not have
        self._count = 0
        self._reading = threading.Lock()
        self._fds: dict[int, Path] = {}
        self._unsynced: set[Path] = set()
        self._durable: set[Path] = set()  # entries of folders that were synced since

    @property
    def is_over(self) -> bool:
        return self.struck >= self.times

    def _is_due(self, step: str) -> bool:
        if step != self.step or self.is_over:
            return False
        self._count += 1
        if self._count < self.nth:
            return False
        self.struck += 1
        return True

    def _break(self, step: str, do: Callable[[], Any]) -> Any:
        if not self._is_due(step):
            return do()
        if self.kind in ERRORS:
            raise self._error(step)
        if self.kind == "torn":
            return self._tear(step, do)
        damage = self._cut_power if self.kind == "power cut" else (lambda copy: None)
        if self.rng.random() < 0.5:
            self.killed(damage)
            return do()
        result = do()
        self.killed(damage)
        return result

    def _error(self, step: str) -> Exception:
        if step in ("begin", "commit"):
            return sqlite3.OperationalError(SQLITE_ERRORS[self.kind])
        return OSError(ERRORS[self.kind], os.strerror(ERRORS[self.kind]))

    def _tear(self, step: str, do: Callable[[], Any]) -> Any:
        log = self.data / "manifest.sqlite-wal"
        victim, kept = (self._renamed, 0) if step == "rename" else (log, log.stat().st_size)
        result = do()
        self.killed(lambda copy: tear(self.rng, copy / victim.relative_to(self.data), kept))
        return result

    # ---- the steps

    def create(self, path: Path) -> int:
        def do() -> int:
            fd = super(BrokenFiles, self).create(path)
            self._fds[fd] = path
            self._unsynced.add(path)
            return fd

        return int(self._break("create", do))

    def append(self, fd: int, data: memoryview) -> int:
        if self.kind not in ("kill", "power cut", "short"):
            return int(self._break("append", lambda: super(BrokenFiles, self).append(fd, data)))
        if not self._is_due("append"):
            return super().append(fd, data)
        taken = super().append(fd, data[: self.rng.randrange(len(data))])
        if self.kind != "short":
            self.killed(self._cut_power if self.kind == "power cut" else (lambda copy: None))
        elif self.rng.random() < 0.5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken

    def sync(self, fd: int) -> None:
        def do() -> None:
            super(BrokenFiles, self).sync(fd)
            self._unsynced.discard(self._fds[fd])

        self._break("sync", do)

    def rename(self, source: Path, target: Path) -> None:
        def do() -> None:
            super(BrokenFiles, self).rename(source, target)
            self._durable -= {source, target}
            if source in self._unsynced:
                self._unsynced ^= {source, target}

        self._renamed = target
        self._break("rename", do)

    def sync_folder(self, folder: Path) -> None:
        def do() -> None:
            super(BrokenFiles, self).sync_folder(folder)
            self._durable |= {folder / name for name in os.listdir(folder)}

        self._break("sync_folder", do)

    def begin(self, cursor: sqlite3.Cursor) -> None:
        self._break("begin", lambda: super(BrokenFiles, self).begin(cursor))

    def commit(self, cursor: sqlite3.Cursor) -> None:
        self._break("commit", lambda: super(BrokenFiles, self).commit(cursor))

    def remove(self, path: Path) -> None:
        self._break("remove", lambda: super(BrokenFiles, self).remove(path))

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        step = "page read" if path.parts[-3] == "pages" else "segment read"
        with self._reading:
            due = self._is_due(step)
        if not due:
            return super().read(path, offset, into)
        self.victims.append(tokens_in(path))
        if self.kind == "EIO":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.kind == "short":
            return super().read(path, offset, into[: self.rng.randrange(len(into))])
        path.unlink()
        return super().read(path, offset, into)

    # ---- power

    def _cut_power(self, copy: Path) -> None:
        """Of what was not synced, leave as little as the seed says. SQLite syncs its own files, and their folder."""
        for path in sorted(self.data.rglob("*"), reverse=True):
            at = copy / path.relative_to(self.data)
            if path.name == "manifest.sqlite-shm":
                at.unlink(missing_ok=True)
            if path.name.startswith(("manifest", "lock")) or not at.exists():
                continue
            if path in self._unsynced:
                tear(self.rng, at, 0)
            if path not in self._durable and self.rng.random() < 0.7:
                shutil.rmtree(at) if at.is_dir() else at.unlink()
        if self.data not in self._durable and self.rng.random() < 0.7:
            shutil.rmtree(copy)


def tear(rng: random.Random, path: Path, kept: int) -> None:
    """The end of a file, behind `kept` bytes at least, is missing or zero."""
    content = path.read_bytes()
    at = rng.randrange(kept, len(content)) if len(content) > kept else len(content)
    path.write_bytes(content[:at] + bytes(len(content) - at) * (rng.random() < 0.5))


def tokens_in(path: Path) -> bytes:
    """The tokens a page or segment is about, from its header; none if it has no sound one."""
    with suppress(OSError, ValueError, KeyError), open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return bytes.fromhex(header["__metadata__"]["tokens"])
    return b""


# ---- talks


@dataclass(frozen=True)
class Turn:
    """A request, and what came of it."""

    agent: str
    prompt: tuple[int, ...]
    pending: Pending

    @property
    def is_saved(self) -> bool:
        return self.pending.is_saved

    @property
    def computed(self) -> tuple[int, ...]:
        """All tokens that have K/V: the last one was sampled, but never computed on."""
        return (*self.prompt, *self.pending.tokens[:-1])


class Talks:
    """A few agents that talk to an engine, as the seed says: in turns or at once, again, otherwise, in restarted servers."""

    def __init__(self, data: Path, files: Files | None, rng: random.Random, toll: Toll, story: str, model: bytes = b"") -> None:
        self.data, self.files, self.rng, self.toll, self.story, self.model = data, files, rng, toll, story, model
        self.shape = shape_of(story)
        self.harness = EngineHarness(data, self.backend(), num_pages=NUM_PAGES, signature=SIGNATURE + model, files=files)
        self.turns: list[Turn] = []
        self.system = self.text(rng.choice((20, PAGE_TOKENS, PAGE_TOKENS + 30)))
        self.talks: dict[str, list[int]] = {f"agent{i}": self.beginning() for i in range(rng.choice((2, 2, 3)))}

    def text(self, length: int) -> list[int]:
        return self.rng.choices(range(2, 1000), k=length)

    def beginning(self) -> list[int]:
        """Some share a page or more; lengths lie around a page's."""
        length = max(1, self.rng.choice((1, 40, 254, 255, 256, 257, 500, 512)) + self.rng.randrange(-2, 3))
        return (self.system if self.rng.random() < 0.5 else []) + self.text(length)

    def act(self) -> None:
        """One of the things that happen."""
        what = self.rng.random()
        names = sorted(self.talks)
        if what < 0.12:
            self.harness.evict_all()
        elif what < 0.17:
            self.restart()
        elif what < 0.27:
            self.ask(names)
        else:
            self.ask([self.rng.choice(names)])

    def ask(self, names: Sequence[str]) -> None:
        """A turn of each, at once; then what they will say next."""
        begun = [self.submit(name, self.talks[name], self.rng.randrange(1, 6)) for name in names]
        for turn in begun:
            self.check(turn)
            self.talks[turn.agent] = self.next_prompt(turn)

    def submit(self, name: str, prompt: Sequence[int], max_tokens: int) -> Turn:
        turn = Turn(name, tuple(prompt), self.harness.submit(prompt, name, max_tokens))
        self.turns.append(turn)
        return turn

    def check(self, turn: Turn) -> None:
        """The answer came, and is the right one."""
        turn.pending.result(20)
        if turn.pending.tokens != expected_answer(turn.prompt, len(turn.pending.tokens)):
            self.toll.add("wrong", f"{self.story}: {turn.agent}, {len(turn.prompt)} tokens: {turn.pending.match}")

    def next_prompt(self, turn: Turn) -> list[int]:
        what = self.rng.random()
        if len(turn.prompt) > MOST_TOKENS:
            return self.beginning()
        if what < 0.1:
            return list(turn.prompt)
        if what < 0.2:
            return [*turn.prompt[: self.rng.randrange(1, len(turn.prompt) + 1)], *self.text(10)]
        return [*turn.prompt, *turn.pending.tokens, *self.text(self.rng.choice((1, 7, 60, 150, 255, 256)))]

    def acknowledged(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.is_saved]

    def backend(self) -> EchoBackend:
        return EchoBackend(NUM_PAGES, self.model, **self.shape)

    def restart(self) -> None:
        self.harness.restart(self.backend())

    def wait_for_writer(self) -> None:
        """Until all that was said is written, and what it made obsolete is removed."""
        written = threading.Event()
        writer = self.harness.memory.ledger.writer
        assert writer is not None
        self.harness.engine.call(lambda: writer.barrier(written.set)).result(20)
        assert written.wait(20)

    def close(self) -> None:
        self.harness.close()


def shape_of(story: str) -> dict[str, Any]:
    """What the model of a trial is like: before there were planes, all were alike."""
    return SHAPES[0] if story.startswith("older format / manifest") else random.Random(story).choice(SHAPES)


def verify(talks: Talks, turns: Sequence[Turn], exempt: Callable[[Turn], bool] = lambda turn: False) -> None:
    """Every one of `turns` is remembered to its last token, unless it is exempt, and answered rightly in any case."""
    for turn in turns:
        again = talks.submit(turn.agent, turn.computed, 1)
        talks.check(again)
        if again.pending.match.computed_tokens != 1 and not exempt(turn):
            talks.toll.add("lost", f"{talks.story}: {turn.agent}, {len(turn.computed)} tokens: {again.pending.match}")


# ---- trials


def trial(kind: str, step: str, seed: int, folder: Path | None = None) -> Toll:
    """One fault. `folder` is where its directories are made: in memory where that is possible, for speed."""
    toll = Toll()
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=folder or (shm if shm.is_dir() else None)) as made:
        run: Callable[[str, str, Path, random.Random, Toll, str], None]
        run = damage_trial if step.endswith("file") or step == "manifest" else read_trial if step in READS else step_trial
        story = f"{kind} / {step} / {seed}"
        for attempt in range(5):
            toll.missed = 0
            try:
                run(kind, step, Path(made) / str(attempt), random.Random(f"{story} / {attempt}"), toll, story)
            except Exception as error:  # noqa: BLE001 (whatever it is, it is a result)
                toll.add("crashes", f"{story}: {type(error).__name__}: {error}")
            if not toll.missed:
                break
    return toll


def step_trial(kind: str, step: str, folder: Path, rng: random.Random, toll: Toll, story: str) -> None:
    """Break a step of a write. Either the process is dead then, or it goes on, and is restarted or killed later."""
    data, copy = folder / "data", folder / "killed"
    promised: list[Turn] = []

    def killed(damage: Callable[[Path], None]) -> None:
        """On the writer's thread: nothing else changes the directory."""
        shutil.copytree(data, copy)
        promised.extend(talks.acknowledged())
        damage(copy)
        died.set()

    died = threading.Event()
    files = BrokenFiles(kind, step, rng, data, killed)
    talks = Talks(data, files, rng, toll, story)
    for _ in range(MOST_ACTS):
        if files.is_over:
            break
        talks.act()
        if files.struck:  # what could not be saved may be lost with the arena; what was saved before may not
            talks.harness.evict_all()
    else:
        toll.missed += not files.struck
        files.times = files.struck
    if kind in ERRORS or kind == "short":
        go_on(talks, rng)
    talks.wait_for_writer()  # it may still be at the step, dying
    if kind in ERRORS or kind == "short":
        killed(lambda copy: None)
    if files.is_over:
        assert died.is_set(), "the directory could not be copied"
        woken = Talks(copy, None, rng, toll, story)
        check_turns(woken, promised, rng)
        woken.close()
    talks.close()


def go_on(talks: Talks, rng: random.Random) -> None:
    """The fault is over: what is said now is saved again."""
    for name in sorted(talks.talks):
        talks.ask([name])
        if not talks.turns[-1].is_saved:
            talks.toll.add("unsaved", f"{talks.story}: {name}")
    if rng.random() < 0.3:
        talks.restart()
    if rng.random() < 0.5:
        talks.harness.evict_all()
        verify(talks, talks.acknowledged())


def check_turns(woken: Talks, turns: Sequence[Turn], rng: random.Random, exempt: Callable[[Turn], bool] = lambda turn: False) -> None:
    """In a process that has just opened the directory, in any order; and now and then in one that opens it again."""
    order = list(turns)
    rng.shuffle(order)
    verify(woken, order, exempt)
    if rng.random() < 0.2:
        woken.restart()
        verify(woken, order)


def read_trial(kind: str, step: str, folder: Path, rng: random.Random, toll: Toll, story: str) -> None:
    """Break a read. What the file held may be computed again, once; nothing else."""
    data = folder / "data"
    files = BrokenFiles(kind, step, rng, data, lambda damage: None)
    talks = Talks(data, files, rng, toll, story)
    for _ in range(MOST_ACTS):
        if files.is_over:
            break
        talks.act()
        if rng.random() < 0.5:
            talks.harness.evict_all()
    else:
        toll.missed += 1
    turns = talks.acknowledged()
    verify(talks, turns, lambda turn: any(depends(turn.computed, victim) for victim in files.victims))
    check_turns(talks, turns, rng)
    talks.close()


def depends(tokens: Sequence[int], victim: bytes) -> bool:
    """Whether rows of a page or segment that begins with `victim`'s first token may be among those of `tokens`."""
    first = int.from_bytes(victim[:4], "little")
    return not victim or first in tokens[::PAGE_TOKENS]


def damage_trial(kind: str, step: str, folder: Path, rng: random.Random, toll: Toll, story: str) -> None:
    """Damage a file of a server that runs (what is in memory goes) or that does not."""
    data = folder / "data"
    talks = Talks(data, None, rng, toll, story)
    for _ in range(rng.randrange(6, 14)):
        talks.act()
    turns = talks.acknowledged()
    runs = rng.random() < 0.5 and step != "manifest"
    if runs:
        talks.wait_for_writer()
        talks.harness.evict_all()
    else:
        talks.close()
    victims = [b""]
    if step == "manifest":
        make_version_1(data)
    else:
        victims = damage(kind, step, data, rng, talks)
        if not victims:
            toll.missed += 1
    if not runs:
        talks = Talks(data, None, rng, toll, story)
    verify(talks, turns, lambda turn: step != "manifest" and any(depends(turn.computed, victim) for victim in victims))
    check_turns(talks, turns, rng)
    talks.close()


def damage(kind: str, step: str, data: Path, rng: random.Random, talks: Talks) -> list[bytes]:
    """Damage one file, or swap two; the tokens they are about."""
    paths = sorted(data.glob("pages/*/*.safetensors" if step == "page file" else "segments/*/*.safetensors"))
    if kind == "another model's":
        return replace_by_foreign(data, paths, rng, talks)
    if kind.startswith("swapped"):
        return swap(paths, rng, data, same=kind == "swapped, same agent")
    if not paths:
        return []
    path = rng.choice(paths)
    victim = tokens_in(path)
    content = bytearray(path.read_bytes())
    data_at = 8 + int.from_bytes(content[:8], "little")
    if kind == "truncated":
        del content[rng.randrange(1, len(content)) :]
    elif kind == "emptied":
        content.clear()
    elif kind == "flipped in the data":
        content[rng.randrange(data_at, len(content))] ^= 1 << rng.randrange(8)
    elif kind == "flipped in the header":
        content[rng.randrange(data_at)] ^= 1 << rng.randrange(8)
    else:
        content = content[:BLOCK].replace(b"rewake-page-1", b"rewake-page-0") + content[:data_at][BLOCK:] + content[data_at:][::-1]
    path.write_bytes(content)
    return [victim]


def swap(paths: Sequence[Path], rng: random.Random, data: Path, *, same: bool) -> list[bytes]:
    """Two files of one agent, or of two: of equal size if there are such."""
    owners = owners_of(data)
    pairs = [(a, b) for i, a in enumerate(paths) for b in paths[i + 1 :] if bool(owners[a.name] & owners[b.name]) == same]
    alike = [(a, b) for a, b in pairs if a.stat().st_size == b.stat().st_size and a.read_bytes()[-64:] != b.read_bytes()[-64:]]
    if not pairs:
        return []
    a, b = rng.choice(alike or pairs)
    victims = [tokens_in(a), tokens_in(b)]
    aside = a.with_suffix(".aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)
    return victims


def owners_of(data: Path) -> dict[str, set[str]]:
    """File names, and the agents whose transcripts they are part of."""
    owners: dict[str, set[str]] = {}
    with closing(sqlite3.connect(data / "manifest.sqlite")) as db:
        pages = {key: (parent, {name}) for key, parent, name in db.execute("SELECT key, parent, name FROM pages")}
        for key, name in db.execute("SELECT key, name FROM planes"):
            pages[key][1].add(name)
        for id, agent, parent in db.execute("SELECT id, agent, parent FROM branches").fetchall():
            for (name,) in db.execute("SELECT name FROM segments WHERE branch = ?", (id,)):
                owners.setdefault(Path(name).name, set()).add(agent)
            while parent in pages:
                parent, names = pages[parent]
                for name in names:
                    owners.setdefault(Path(name).name, set()).add(agent)
    return owners


def replace_by_foreign(data: Path, paths: Sequence[Path], rng: random.Random, talks: Talks) -> list[bytes]:
    """The same talks with a finetune of equal shape, in a directory of its own: one of its files takes the place of ours."""
    other = Talks(data.with_name("other"), None, random.Random(0), talks.toll, talks.story, model=b"finetune")
    for turn in talks.turns:
        other.check(other.submit(turn.agent, turn.prompt, len(turn.pending.tokens)))
    other.close()
    theirs = {tokens_in(p) + bytes([p.stat().st_size % 251]): p for p in other.data.glob("*/*/*.safetensors")}
    pairs = [(p, theirs[alike]) for p in paths if (alike := tokens_in(p) + bytes([p.stat().st_size % 251])) in theirs]
    if not pairs:
        return []
    ours, foreign = rng.choice(pairs)
    assert ours.read_bytes() != foreign.read_bytes()
    shutil.copyfile(foreign, ours)
    return [tokens_in(ours)]


def make_version_2(data: Path) -> None:
    """The manifest as it was before pages had planes."""
    with closing(sqlite3.connect(data / "manifest.sqlite", isolation_level=None)) as db:
        db.executescript(
            f"DROP TABLE planes; ALTER TABLE segments RENAME TO newer; CREATE TABLE segments (branch TEXT NOT NULL, {FILE_COLUMNS},"
            f" PRIMARY KEY (branch, first)) WITHOUT ROWID; INSERT INTO segments SELECT branch, {FILE} FROM newer; DROP TABLE newer;"
            " PRAGMA user_version = 2;"
        )


def make_version_1(data: Path) -> None:
    """The manifest as the first version of the format had it: neither agents nor turns, and no secrets."""
    make_version_2(data)
    with closing(sqlite3.connect(data / "manifest.sqlite", isolation_level=None)) as db:
        for table, column in (("pages", "secret"), ("segments", "secret"), ("branches", "turns")):
            db.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
        db.execute("DROP TABLE agents")
        db.execute("DROP TABLE encryption")
        db.execute("PRAGMA user_version = 1")


def seeded(count: int, seed: int) -> Iterator[tuple[str, str, int]]:
    """So many faults, every cell in turn."""
    for i in range(count):
        yield (*CELLS[i % len(CELLS)], seed + i)
