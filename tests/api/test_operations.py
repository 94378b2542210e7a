"""What the server tells those who run it, and what bad clients cost: a random model of two layers, the real tokenizer, real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import uvicorn

from rewake.api import streams
from rewake.api.app import create_app
from rewake.api.limits import read_body
from rewake.backends.base import Batch, Output
from rewake.client import Client
from rewake.config import Config
from rewake.counts import Histogram
from rewake.errors import BodyTooSlow, Overloaded
from rewake.logs import Json, Text, request_id
from rewake.service import Service, open_service
from tests.server import only

pytestmark = pytest.mark.usefixtures("short_collections")

CHUNK = 64
Body = dict[str, Any]


class Watched:
    """The service's backend, and what is done before each of its steps."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.before_step: Callable[[Batch], None] = lambda batch: None

    def forward(self, batch: Batch) -> Output:
        self.before_step(batch)
        output: Output = self.backend.forward(batch)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    data = tmp_path_factory.mktemp("operated") / "data"
    opened = open_service(Config(model=str(tiny), data=data, memory=2**24, threads=1, chunk=CHUNK))
    opened.engine.backend = Watched(opened.backend)  # type: ignore[assignment]
    yield opened
    opened.close()


@pytest.fixture
def steps(service: Service) -> Iterator[Watched]:
    """Ends with the books balanced."""
    watched: Any = service.engine.backend
    yield watched
    watched.before_step = lambda batch: None
    deadline = time.monotonic() + 30
    while not service.engine.call(lambda: service.engine.is_idle).result(30):
        assert time.monotonic() < deadline
    service.engine.call(lambda: service.engine.memory.check()).result(30)


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    """Over a real socket, so that a client can really leave."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(only(service)), log_config=None, log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=60) as made:
        yield made
    server.should_exit = True
    thread.join()
    listening.close()


def body_of(service: Service, agent: str, words: int, **fields: Any) -> Body:
    messages = [{"role": "user", "content": "lantern " * words}]
    return {"model": service.path.name, "messages": messages, "agent_id": agent, "temperature": 0, "max_tokens": 4, **fields}


def ask(client: httpx.Client, body: Body) -> Body:
    answer: Body = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    return answer


def metrics_of(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_metrics_count_what_requests_say(client: httpx.Client, service: Service, steps: Watched) -> None:
    before = metrics_of(client)
    answers = [ask(client, body_of(service, "counted", 300)) for _ in range(3)]
    after = metrics_of(client)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["rewake_ttft_seconds_count"] == 3 == grown['rewake_ttft_seconds_bucket{le="+Inf"}']
    assert grown['rewake_matches_total{kind="miss"}'] == 1 and grown['rewake_matches_total{kind="exact"}'] == 2
    for name in ("prompt", "reused", "loaded"):
        assert grown[f"rewake_{name}_tokens_total"] == sum(a["rewake"][f"{name}_tokens"] for a in answers)
    computed = sum(a["rewake"]["computed_tokens"] for a in answers)
    assert computed <= grown["rewake_step_tokens_total"] <= computed + grown["rewake_generated_tokens_total"]
    assert grown["rewake_generated_tokens_total"] >= sum(a["usage"]["completion_tokens"] for a in answers)
    assert grown["rewake_step_seconds_count"] >= computed / CHUNK
    assert grown['rewake_http_answers_total{status="200"}'] == 4, "with the metrics before"
    assert after["rewake_disk_pages"] >= 2 and after["rewake_arena_bytes"] <= service.config.memory


def test_metrics_are_in_prometheus_format(client: httpx.Client) -> None:
    """Every sample belongs to a family that was declared, once; buckets only grow."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    kinds: dict[str, str] = {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("#"):
            name = line.split("{")[0].split(" ")[0]
            family = name if name in kinds else name.rsplit("_", 1)[0]
            assert family in kinds and (kinds[family] == "counter") == family.endswith("_total"), line
            float(line.rsplit(" ", 1)[1])


def test_a_histogram_counts_what_is_at_most_its_bounds() -> None:
    seen = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        seen.observe(value)
    assert seen.cumulative() == [2, 4, 5] and seen.count == 5 and seen.sum == 14.0


def test_books_that_do_not_add_up_are_said(client: httpx.Client, service: Service, steps: Watched) -> None:
    assert client.get("/health/books").json() == {"status": "ok"}
    pool = service.engine.memory.residency.pool
    slot = service.engine.call(pool.take).result(10)
    try:
        wrong = client.get("/health/books")
        assert wrong.status_code == 500 and wrong.json()["status"] != "ok"
    finally:
        service.engine.call(lambda: pool.give(slot)).result(10)


def test_who_is_turned_away_is_told_when_to_come_back(
    client: httpx.Client, service: Service, steps: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both protocols; and those that wait are answered."""
    engine, go = service.engine, threading.Event()
    for agent in ("runs", "waits", "refused"):
        ask(client, body_of(service, agent, 5))  # what is known of one that is new, the engine says between two steps
    monkeypatch.setattr(engine, "max_running", 1)
    monkeypatch.setattr(engine, "max_waiting", 1)

    def hold(_: Batch) -> None:
        go.wait(30)

    steps.before_step = hold
    with ThreadPoolExecutor(2) as others:
        taken = [others.submit(ask, client, body_of(service, "runs", 5))]
        wait_until(lambda: len(engine.running) == 1)
        taken.append(others.submit(ask, client, body_of(service, "waits", 5)))
        wait_until(lambda: len(engine.waiting) + len(engine._coming) == 1)
        body = body_of(service, "refused", 5)
        for path in ("chat/completions", "messages"):
            refused = client.post(f"/v1/{path}", json=body)
            assert refused.status_code == 429 and "waiting already" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 600
        with Client(str(client.base_url)) as ours, pytest.raises(Overloaded) as caught:
            list(ours.chat([{"role": "user", "content": "Hello."}], agent="refused", model=service.path.name))
        assert caught.value.retry_after == int(refused.headers["retry-after"])
        go.set()
        assert all(future.result(30)["usage"]["completion_tokens"] for future in taken)


def test_a_client_that_leaves_in_a_long_prompt_finds_what_was_done(client: httpx.Client, service: Service, steps: Watched) -> None:
    """A5: it stops within a step, and the prompt is known as far as it was computed."""
    go, num_steps = threading.Event(), 0

    def hold(_: Batch) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            go.wait(30)

    steps.before_step = hold
    body = body_of(service, "leaver", 700)
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        wait_until(lambda: num_steps == 5)
        assert response.status_code == 200
    wait_until(lambda: service.engine._inbox.qsize() > 0)
    go.set()
    wait_until(lambda: service.engine.call(lambda: service.engine.is_idle).result(10))
    assert num_steps == 5
    report = ask(client, body)["rewake"]
    assert report["reused_tokens"] >= 4 * CHUNK and report["computed_tokens"] == report["prompt_tokens"] - report["reused_tokens"]


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_client_that_leaves_in_an_answer_stops_it(client: httpx.Client, service: Service, steps: Watched, path: str) -> None:
    """A5: within a step, and what was said so far is remembered."""
    go, num_steps, held_at = threading.Event(), 0, 8
    body = body_of(service, f"leaves an answer of {path}", 20, max_tokens=500)
    ask(client, {**body, "max_tokens": 1})  # so that all steps from here on are the answer's

    def hold(_: Batch) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == held_at:
            go.wait(30)

    steps.before_step = hold
    with client.stream("POST", f"/v1/{path}", json={**body, "stream": True}) as response:
        pieces = response.iter_bytes()
        while num_steps < held_at:
            assert next(pieces)
    wait_until(lambda: service.engine._inbox.qsize() > 0)
    go.set()
    wait_until(lambda: service.engine.call(lambda: service.engine.is_idle).result(10))
    assert num_steps == held_at
    agent = client.get(f"/v1/agents/{quote(body['agent_id'], safe='')}").json()
    prompt_tokens = ask(client, {**body, "max_tokens": 1})["rewake"]["prompt_tokens"]
    assert agent["tokens"] >= prompt_tokens + held_at - 1


def test_a_silent_stream_shows_signs_of_life(
    client: httpx.Client, service: Service, steps: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A6: while a step is as long as it likes, comments come, or Anthropic's pings; then the answer."""
    monkeypatch.setattr(streams, "KEEP_ALIVE", 0.01)
    for path, sign in (("chat/completions", b": keep-alive\n\n"), ("messages", b"event: ping\n")):
        go = threading.Event()

        def hold(_: Batch, go: threading.Event = go) -> None:
            go.wait(30)

        ask(client, body_of(service, path, 5))  # of one that is not known the engine is asked first, between two steps
        steps.before_step = hold
        with client.stream("POST", f"/v1/{path}", json=body_of(service, path, 100, stream=True)) as response:
            pieces, seen = response.iter_bytes(), b""
            while seen.count(sign) < 5:
                seen += next(pieces)
            go.set()
            seen += b"".join(pieces)
        assert b"[DONE]" in seen or b"message_stop" in seen
        steps.before_step = lambda batch: None


def test_a_stream_that_fails_after_it_began_ends_with_an_error(client: httpx.Client, service: Service, steps: Watched) -> None:
    """A8: no empty success, and no end that looks like one; others go on."""
    num_steps = 0

    def fail(batch: Batch) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 3:
            raise RuntimeError("the model is broken")

    steps.before_step = fail
    with client.stream("POST", "/v1/chat/completions", json=body_of(service, "broken", 5, stream=True, max_tokens=50)) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert response.status_code == 200 and "[DONE]" not in events
    assert json.loads(events[-1])["error"]["type"] == "internal_error"
    assert not any("finish_reason" in c and c["finish_reason"] for e in events[:-1] for c in json.loads(e)["choices"])
    steps.before_step = lambda batch: None
    assert ask(client, body_of(service, "broken", 5))["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("kind", ["whole", "streamed", "whole, left", "streamed, left", "two answers", "events", "refused"])
def test_nothing_of_a_request_waits_for_a_full_collection(client: httpx.Client, service: Service, steps: Watched, kind: str) -> None:
    """Cycles would: a server would keep prompts, tokens and texts of what is over, until there are a hundred thousand such objects."""

    def request(number: int) -> None:
        more: Body = {"n": 2} if kind == "two answers" else {"surprise": 1} if kind == "refused" else {}
        body = body_of(service, f"gone {number}", 300, stream="streamed" in kind, **more)
        if kind == "events":
            with client.stream("GET", "/v1/rewake/events") as response:
                assert response.is_success and next(response.iter_bytes())
        elif kind == "streamed, left":
            with client.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 50}) as response:
                assert response.is_success and next(response.iter_bytes())
        elif kind == "whole, left":
            with pytest.raises(httpx.TimeoutException):
                client.post("/v1/chat/completions", json={**body, "max_tokens": 400}, timeout=0.02)
        else:
            assert client.post("/v1/chat/completions", json=body).is_success == (kind != "refused")

    def is_over() -> bool:
        return service.engine.call(lambda: service.engine.is_idle).result(30)

    request(0)  # the first has things looked up that stay
    wait_until(is_over)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for number in range(1, 4):
            request(number)
        wait_until(is_over)
        client.get("/health")  # who has answered the last one is through with it
        gc.collect()
        ours = Counter(type(o).__qualname__ for o in gc.garbage if type(o).__module__.startswith("rewake."))
        whose = {f"{o.__module__}.{o.__qualname__}" for o in gc.garbage if isinstance(o, FunctionType)}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not ours and not {name for name in whose if name.startswith("rewake.")}


def test_what_cannot_fit_is_refused_before_any_step(client: httpx.Client, service: Service, steps: Watched) -> None:
    """A7."""

    def never(batch: Batch) -> None:
        raise AssertionError("a step was computed")

    steps.before_step = never
    for body in (body_of(service, "long", 2000), body_of(service, "long", 5, max_tokens=5000), body_of(service, "long", 2000, stream=True)):
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert client.get("/v1/agents/long").status_code == 404


@pytest.mark.parametrize("prompt", [[1821496, 49504743581345], [-1], [2**31], [49152]])
def test_tokens_that_the_model_does_not_have_are_refused(client: httpx.Client, service: Service, steps: Watched, prompt: list[int]) -> None:
    """They would end the engine, or be read from behind the embeddings."""
    refused = client.post("/v1/completions", json={"model": service.path.name, "prompt": prompt})
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("prompt")


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def never() -> Any:
        await asyncio.sleep(60)

    with pytest.raises(BodyTooSlow):
        asyncio.run(read_body(never, None, 100, patience=0.01))


@pytest.mark.parametrize("form", [Json(), Text()])
def test_a_record_is_one_line_that_names_its_request(form: logging.Formatter) -> None:
    record = logging.LogRecord("rewake.x", logging.INFO, __file__, 1, "said %r", ("a\nb",), None)
    record.about = {"status": 200}
    token = request_id.set("req-1")
    line = form.format(record)
    request_id.reset(token)
    assert "\n" not in line and "req-1" in line
    if isinstance(form, Json):
        fields = json.loads(line)
        assert fields["message"] == "said 'a\\nb'" and fields["request"] == "req-1" and fields["status"] == 200
        assert fields["level"] == "info" and fields["logger"] == "rewake.x"
