"""A real server process for tests, and what to ask it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from rewake.models import DEFAULT_MODEL
from rewake.service import Service
from rewake.services import Services


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def only(service: Service) -> Services:
    """One that a test has opened, as a server has it; the test closes it."""
    return Services(service.config, lambda *_: service)


class ServerProcess:
    """`rewake serve` in a process of its own; `kill` is SIGKILL."""

    def __init__(self, data: Path, *flags: str) -> None:
        self.data = data
        self.flags = flags
        self.http = httpx.Client()
        self.start()

    def start(self) -> None:
        self.port = free_port()
        where = ["--port", str(self.port), "--data", str(self.data), "--threads", "2"]
        command = [sys.executable, "-m", "rewake", "serve", *where, *self.flags]
        self.log = self.data.with_suffix(".log")
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.http.close()  # of the process before
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        for _ in range(600):
            if self.process.poll() is not None:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()}")
            try:
                if self.http.get("/health").is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        raise RuntimeError("the server does not answer")

    def stop(self, how: int = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait(30)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()
        self.http.close()

    def chat(self, agent: str, messages: list[dict[str, str]], **fields: Any) -> tuple[str, dict[str, Any]]:
        """The whole answer and its `rewake` object (with `completion_tokens`), over a stream that is left behind its last chunk."""
        text, report = "", {}
        for event in self.stream(agent, messages, stream_options={"include_usage": True}, **fields):
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
            if "rewake" in event:
                report = {**event["rewake"], "completion_tokens": event["usage"]["completion_tokens"]}
        return text, report

    def stream(self, agent: str, messages: list[dict[str, str]], **fields: Any) -> Iterator[dict[str, Any]]:
        body = {"model": DEFAULT_MODEL, "messages": messages, "stream": True, "temperature": 0, "agent_id": agent, **fields}
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    yield json.loads(line[6:])
