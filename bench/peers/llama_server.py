"""llama.cpp's own server, compiled here from the sources that llama-cpp-python carries; slots are saved and restored by the client.

It keeps what its slots hold, and nothing else, unless a client says `/slots/N?action=save` with a file name, and `restore` later:
which agent is in which slot, who has to go, and what to do after a restart is for the client to know. `Slots` is such a client.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.peers.base import THREADS, Absent, cache, last_words
from bench.peers.llama_cpp import VERSION, compilers, gguf

__all__ = ["LlamaServer", "Slots", "server_binary"]

OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
    " -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF"
)
START_SECONDS, ANSWER_SECONDS = 120, 300


def server_binary() -> Path:
    """The compiled server, made once. Raises Absent."""
    folder = cache() / f"llama-server-{VERSION}"
    binary = folder / "build" / "bin" / "llama-server"
    if (folder / "made").exists():
        return binary
    if shutil.which("cmake") is None:
        raise Absent("there is no cmake")
    print(f"Building {folder} (once; a quarter of an hour) ...", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with open(folder / "build.log", "w") as log:
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", str(folder)]
        run([*download, f"llama-cpp-python=={VERSION}"], log, folder)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (source,) = folder.glob("*/vendor/llama.cpp")
        run(["cmake", "-S", str(source), "-B", str(folder / "build"), *OPTIONS.split()], log, folder)
        run(["cmake", "--build", str(folder / "build"), "-j", str(THREADS), "--target", "llama-server"], log, folder)
    (folder / "made").touch()
    return binary


def run(command: Sequence[str], log: Any, folder: Path) -> None:
    if subprocess.run(["nice", "-n", "10", *command], env={**os.environ, **compilers()}, stdout=log, stderr=log, check=False).returncode:
        raise Absent(f"{command[0]} failed, see {folder / 'build.log'}: {last_words(folder / 'build.log')}")


class LlamaServer:
    """The process, with `slots` of `context` tokens. Stopped (SIGSTOP) whenever it is not asked, as the workers of other peers are."""

    def __init__(self, slots: int, context: int, saved: Path) -> None:
        """Raises Absent. `saved` is where slots are saved."""
        binary = server_binary()
        self.log = cache() / "llama-server.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [str(binary), "-m", str(gguf()), "--host", "127.0.0.1", "--port", str(self.port)]
        command += [
            "--parallel",
            str(slots),
            "--ctx-size",
            str(slots * context),
            "--threads",
            str(THREADS),
            "--threads-batch",
            str(THREADS),
        ]
        # 0: no store of evicted prompts in memory beside the slots, which would be more memory than was agreed
        command += ["--slot-save-path", str(saved), "--cache-ram", "0", "--no-webui"]
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
        self._wait_until_healthy()
        self._signal(signal.SIGSTOP)

    def _wait_until_healthy(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(OSError, http.client.HTTPException):
                if self._post("GET", "/health").status == 200:
                    return
            time.sleep(0.1)
        self.close()
        raise Absent(f"it does not start, see {self.log}: {last_words(self.log)}")

    def _post(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        return connection.getresponse()

    def complete(self, slot: int, prompt: list[int], new: int) -> float:
        """Seconds to the first token; returns behind the last."""
        body = {
            "prompt": prompt,
            "n_predict": new,
            "id_slot": slot,
            "cache_prompt": True,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        started = time.perf_counter()
        answer = self._post("POST", "/completion", body)
        if answer.status != 200:
            raise Absent(f"/completion: {answer.status} {answer.read()[:200]!r}")
        first = None
        for line in answer:
            if first is None and line.startswith(b"data:"):
                first = time.perf_counter() - started
        assert first is not None
        return first

    def slot(self, slot: int, action: str, file: str) -> None:
        answer = self._post("POST", f"/slots/{slot}?action={action}", {"filename": file})
        content = answer.read()
        if answer.status != 200:
            raise Absent(f"/slots action {action}: {answer.status} {content[:200]!r}")

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def sleep(self) -> None:
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()


class Slots:
    """A client that has more agents than the server has slots: the least recently used slot is taken, and the agent's file restored.

    A slot is saved after every turn, so that an agent that leaves, or a server that dies, has its last turn.
    """

    def __init__(self, slots: int, context: int, saved: Path) -> None:
        self.saved = saved
        self.server = LlamaServer(slots, context, saved)
        self._agents: dict[int, str] = {}  # by slot, the least recently used first
        self._free = list(range(slots))

    def ask(self, agent: str, prompt: list[int], new: int) -> tuple[float, float]:
        """Milliseconds to the first token, a restore included, and until all is saved."""
        self.server.wake()
        started = time.perf_counter()
        slot = self._slot_of(agent)
        before = time.perf_counter() - started
        first = before + self.server.complete(slot, prompt, new)
        self.server.slot(slot, "save", agent)
        whole = time.perf_counter() - started
        self.server.sleep()
        return first * 1000, whole * 1000

    def _slot_of(self, agent: str) -> int:
        slot = next((s for s, a in self._agents.items() if a == agent), None)
        if slot is None:
            slot = self._free.pop() if self._free else next(iter(self._agents))
            if (self.saved / agent).exists():
                self.server.slot(slot, "restore", agent)
        self._agents.pop(slot, None)
        self._agents[slot] = agent
        return slot

    def close(self) -> None:
        self.server.close()
