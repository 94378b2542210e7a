"""What somebody waits for who comes back to an agent of 4,096 tokens, and gives it 16 new ones.

start   from the start of a process to the first token, with model and memory on disk (in page cache): Python and its imports, the
        weights' digest and their packing, the manifest, 27 MB of pages, one step
http    what HTTP adds: from sending a request to its first piece of text, less what the engine takes from having the same request
        to its first token. Templates, tokenising what is new, JSON, two threads, a socket
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.peers.ours import generate, open_ours

__all__ = ["over_http", "start"]

CONTEXT, NEW_TOKENS = 4096, 16
CLIENT = "--client"
WORDS = 3000  # of English, some 4,096 tokens


def start(kv: str, context: list[int], new: list[int], repetitions: int) -> float:
    """Median of seconds."""
    with tempfile.TemporaryDirectory() as data:
        service = open_ours(kv, Path(data))
        generate(service, [context], 1, agent="start")
        service.close()
        return statistics.median(start_once(kv, data, context + new[:i] + new[i + 1 :]) for i in range(repetitions))


def start_once(kv: str, data: str, prompt: list[int]) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "bench.peers.wake", kv, data]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(prompt) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        took = time.perf_counter() - began
    if not answer:
        raise RuntimeError(f"{' '.join(command)} has ended without an answer")
    return took


def over_http(kv: str, repetitions: int) -> float:
    """Median of milliseconds. The client is a process of its own, as clients are: in ours it would wait for the interpreter."""
    with tempfile.TemporaryDirectory() as data:
        service = open_ours(kv, Path(data))
        noted = note_engine(service.engine)
        with serving(service) as url:
            command = [sys.executable, "-m", "bench.peers.wake", CLIENT, url, str(repetitions)]
            took = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        service.close()
        return statistics.median(mine - engines for mine, engines in zip(took[1:], noted[1:], strict=True))  # the first computes the text


def ask_over_http(url: str, repetitions: int) -> list[float]:
    """The client: milliseconds to the first piece of each answer."""
    import httpx

    text = "Of the river and its stones there is little to be said that was not said before. " * (WORDS // 17)
    took = []
    with httpx.Client(base_url=url, timeout=600) as client:
        for i in range(repetitions + 1):
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "So it is."}]
            messages.append({"role": "user", "content": f"And what of number {i}, which came last of all?"})
            took.append(first_piece(client, messages))
    return took


def note_engine(engine: Any) -> list[float]:
    """Milliseconds that the engine takes to each request's first token, in a list that grows."""
    noted: list[float] = []
    submit = engine.submit

    def noting(request: Any) -> None:
        started, seen = time.perf_counter(), []

        def emit(event: Any) -> None:
            if not seen:
                seen.append(event)
                noted.append((time.perf_counter() - started) * 1000)
            request.emit(event)

        submit(replace(request, emit=emit))

    engine.submit = noting
    return noted


@contextmanager
def serving(service: Any) -> Iterator[str]:
    from rewake.api.server import in_background
    from rewake.services import Services

    with in_background(Services(service.config, lambda *_: service)) as url:
        yield url


def first_piece(client: Any, messages: list[dict[str, str]]) -> float:
    """Milliseconds from sending the request to the first text that comes back; the answer is read to its end."""
    from rewake.models import DEFAULT_MODEL

    body = {"model": DEFAULT_MODEL, "messages": messages, "stream": True, "temperature": 0, "max_tokens": 4, "agent_id": "http"}
    first = None
    started = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if first is None and line.startswith("data: {") and any(c["delta"].get("content") for c in json.loads(line[6:])["choices"]):
                first = (time.perf_counter() - started) * 1000
    assert first is not None, "no text came back"
    return first


def main() -> None:
    """In the new process: a client; or the first token of what comes in, whose time is now."""
    if sys.argv[1] == CLIENT:
        json.dump(ask_over_http(sys.argv[2], int(sys.argv[3])), sys.stdout)
        return
    kv, data = sys.argv[1:]
    service = open_ours(kv, Path(data))
    generate(service, [json.loads(sys.stdin.readline())], 1, agent="start")
    print("here", flush=True)
    service.close()


if __name__ == "__main__":
    main()
