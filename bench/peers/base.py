"""What a peer is: an engine in an environment of its own, asked through a pipe for one thing only.

    parent   {"prompts": [[ids], ...], "new": n}   ->   worker
    parent   <-   {"ms": [[t1 ... tn], ...]}            worker

Every prompt starts at once, and greedy decoding goes on for `n` tokens whatever they are; `t` are milliseconds from when
the worker has the ids until each token is sampled. So t1 is the time to the first token, and what lies between the others
is decoding; the pipe and JSON are in neither. What a worker has seen before it may reuse, as its engine does by default.

OpenMP programs that compete for a few cores slow each other down tenfold and more, and some spin while idle: a worker is
stopped (SIGSTOP) whenever it is not asked, together with all processes it started. Knows no engine and no measurement.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import venv
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["THREADS", "Absent", "Peer", "Times", "Worker", "cache", "cores", "environment", "serve"]

THREADS = 2
Times = list[list[float]]
Generate = Callable[[list[list[int]], int], Times]

ROOT = Path(__file__).parents[2]


class Absent(Exception):
    """A peer cannot be built, started or asked; says why."""


class Peer(ABC):
    """One engine in one configuration. `python` builds what it needs, once; `arguments` go to its module in the worker."""

    name: ClassVar[str]
    kv: str  # its cache's codec
    weights = "bf16"
    repetitions = 3  # at most; for engines of which one takes minutes, 1
    start_seconds = 180.0
    reuses = True  # whether it finds the prefix of an earlier prompt in its cache
    batches = True  # whether it decodes several sequences together

    @abstractmethod
    def python(self) -> Path:
        """The interpreter of its environment, made if need be. Raises Absent."""

    @property
    @abstractmethod
    def arguments(self) -> list[str]: ...

    @property
    def variables(self) -> dict[str, str]:
        """Set in the worker's environment."""
        return {}


def cache() -> Path:
    from platformdirs import user_cache_path

    path = user_cache_path("rewake") / "peers"
    path.mkdir(parents=True, exist_ok=True)
    return path


def cores() -> list[int]:
    """The cores a peer may be bound to: as many as threads."""
    found = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return found[:THREADS]


def environment(name: str, pips: Sequence[Sequence[str]], variables: Mapping[str, str] | None = None) -> Path:
    """A virtual environment made once by running pip with each of `pips`; its interpreter. Raises Absent."""
    folder = cache() / name
    python, made = folder / "bin" / "python", folder / "made"
    if made.exists():
        return python
    print(f"Building {folder} (once; some minutes) ...", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    log_path = folder / "build.log"
    with open(log_path, "w") as log:
        for arguments in pips:
            command = ["nice", "-n", "10", str(python), "-m", "pip", *arguments]
            if subprocess.run(command, env={**os.environ, **(variables or {})}, stdout=log, stderr=log, check=False).returncode:
                raise Absent(f"pip {' '.join(arguments)} failed, see {log_path}: {last_words(log_path)}")
    made.touch()
    return python


def last_words(log: Path) -> str:
    """The line of a log that most likely says what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:300]


class Worker:
    """A peer's process. Stopped at all times except while it starts and while it is asked."""

    def __init__(self, peer: Peer) -> None:
        """Start it and wait until it is ready. Raises Absent."""
        python = peer.python()
        self.peer = peer
        self.log = cache() / f"{peer.name}.log"
        module = type(peer).__module__
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                [python, "-m", module, *peer.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": str(THREADS), **peer.variables},
                process_group=0,  # not a new session: when the parent dies, a stopped group of its session is hung up
            )
        try:
            self.about = str(self._answer(peer.start_seconds)["ready"])
        except Absent:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(self, prompts: list[list[int]], new: int, seconds: float = 600) -> Times:
        """Milliseconds from the start to each new token of each prompt. Raises Absent if the worker dies or takes too long."""
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
            self._process.stdin.flush()
            times: Times = self._answer(seconds)["ms"]
        except BrokenPipeError:
            raise Absent(f"it has ended, see {self.log}: {last_words(self.log)}") from None
        finally:
            self._signal(signal.SIGSTOP)
        assert [len(t) for t in times] == [new] * len(prompts)
        return times

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = threading.Timer(seconds, self._signal, [signal.SIGKILL])
        late.start()
        line = self._process.stdout.readline()
        in_time = late.is_alive()
        late.cancel()
        if not line:
            raise Absent(f"it has ended, see {self.log}: {last_words(self.log)}" if in_time else f"no answer in {seconds:.0f} s")
        return dict(json.loads(line))

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Closing its input ends it; if not, force does."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()


def serve(start: Callable[[], tuple[str, Generate]]) -> None:
    """The worker's side: answer until the input ends. What libraries print goes to the log, not into the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    about, generate = start()
    print(json.dumps({"ready": about}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"ms": generate(asked["prompts"], asked["new"])}), file=answers, flush=True)
