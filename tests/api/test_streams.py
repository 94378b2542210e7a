"""What is on the wire while an answer is in the making: keep-alives, failures, clients that leave. Raw HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rewake.api import streams
from rewake.api.app import create_app
from rewake.config import Config
from rewake.errors import RESTART
from rewake.models import DEFAULT_MODEL
from rewake.service import Service, open_service
from tests.server import ServerProcess, only

LONG = [{"role": "user", "content": "word " * 700}]


@pytest.fixture
def service(tiny: Path, tmp_path: Path) -> Iterator[Service]:
    opened = open_service(Config(model=str(tiny), data=tmp_path / "data", memory=16 * 2**20, threads=2, chunk=32))
    yield opened
    opened.close()


def posted(service: Service, path: str, **fields: Any) -> str:
    """The whole stream that is the answer."""

    async def post() -> str:
        transport = httpx.ASGITransport(create_app(only(service)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"model": service.path.name, "messages": LONG, "max_tokens": 8, "stream": True, **fields}
            return (await client.post(path, json=body)).raise_for_status().text

    return asyncio.run(post())


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ") and line != "data: [DONE]"]


def test_a_long_prefill_shows_signs_of_life(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A6: comments in OpenAI's streams, pings in Anthropic's; readers of events do not see the former."""
    monkeypatch.setattr(streams, "KEEP_ALIVE", 0.001)
    text = posted(service, "/v1/chat/completions")
    assert ": keep-alive\n\n" in text.split('"content":"')[1], "before the first token"
    assert text.endswith("data: [DONE]\n\n") and events(text)[-1]["choices"][0]["finish_reason"]
    text = posted(service, "/v1/messages", messages=[{"role": "user", "content": "sea " * 700}])
    assert text.count("event: ping\n") > 1 and events(text)[-1]["type"] == "message_stop"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_that_fails_ends_with_an_error(service: Service, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A8: not with an empty success."""
    forward, steps = service.backend.forward, 0

    def fail(batch: Any) -> Any:
        nonlocal steps
        steps += batch.rows[0].sampling is not None
        if steps > 4:
            raise RuntimeError("a step is made to fail")
        return forward(batch)

    monkeypatch.setattr(service.backend, "forward", fail)
    text = posted(service, path)
    assert "has failed" in events(text)[-1]["error"]["message"] and "[DONE]" not in text and "message_stop" not in text
    monkeypatch.undo()
    assert "error" not in events(posted(service, path))[-1]


def test_what_cannot_begin_is_no_stream(service: Service) -> None:
    """A7: an error with its status, not an empty success."""
    with pytest.raises(httpx.HTTPStatusError) as caught:
        posted(service, "/v1/chat/completions", max_tokens=5000)
    assert caught.value.response.status_code == 400 and "context_length_exceeded" in caught.value.response.text


def test_a_server_that_goes_says_when_another_may_be_there(service: Service) -> None:
    """Behind the time that answers have to end; who looks after it is told the same."""

    async def answers() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(services)), base_url="http://127.0.0.1") as client:
            body = {"model": service.path.name, "messages": LONG}
            return [await client.post("/v1/chat/completions", json=body), await client.get("/health"), await client.get("/v1/agents")]

    services = only(service)
    services.begin_stop(20)
    for answer in asyncio.run(answers()):
        assert answer.status_code == 503 and RESTART < int(answer.headers["retry-after"]) <= 20 + RESTART


def test_no_event_has_a_line_end_within(service: Service) -> None:
    """Some readers end lines at U+2028, U+0085 and others, which are text in JSON."""
    assert streams.sse({"x": "a\u2028b\u0085c\u000bd"}).isascii() and len(streams.sse({"x": "a\u2028\r\n"}).splitlines()) == 2


def send_raw(port: int, agent: str, messages: list[Any], stream: bool) -> socket.socket:
    body = json.dumps({"model": DEFAULT_MODEL, "messages": messages, "agent_id": agent, "stream": stream, "max_tokens": 4}).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def is_idle(server: ServerProcess) -> bool:
    lines = server.http.get("/metrics").text.splitlines()
    return all(f"rewake_requests_{state} 0" in lines for state in ("running", "waiting"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_gives_up_in_a_long_prefill_finds_what_was_done(tmp_path: Path, stream: bool) -> None:
    """A5: when it tries again."""
    with ServerProcess(tmp_path / "data", "--context", "2048", "--memory", "200MiB", "--chunk", "32") as server:
        reports = []
        for attempt in range(1, 30):
            messages = [{"role": "user", "content": f"{attempt} says: " + "word " * 700}]
            connection = send_raw(server.port, "impatient", messages, stream)
            time.sleep(0.05 * attempt)  # however fast this machine is, some attempt leaves in the middle
            connection.close()
            while not is_idle(server):
                time.sleep(0.01)
            reports.append(server.chat("impatient", messages, max_tokens=1)[1])
            if 64 <= reports[-1]["reused_tokens"] < reports[-1]["prompt_tokens"] - 1:
                return
        pytest.fail(f"nothing was kept: {reports}")


def test_a_slow_reader_gets_everything(live: ServerProcess) -> None:
    """Split where the network likes: the pieces of an answer add up to the whole."""
    body = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 30, "temperature": 0}
    whole = live.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    content = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    received = b""
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        for at in range(0, len(request), 7):
            connection.sendall(request[at : at + 7])
        while chunk := connection.recv(11):
            received += chunk
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in events(received.decode()) if c["choices"])
    assert text == whole
