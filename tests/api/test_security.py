"""Who may ask for what: keys, namespaces, limits, pages, and what the log says. A random model of two layers, the real tokenizer."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.testclient import TestClient

from rewake.api.app import create_app
from rewake.api.auth import Access
from rewake.api.limits import Rates
from rewake.api.server import in_background
from rewake.backends.base import Batch, Output
from rewake.cli import main
from rewake.config import Config
from rewake.errors import ConfigError, RateLimited
from rewake.keys import Key, KeyFile, Limits
from rewake.service import Service, open_service
from tests.server import only

LONG = [{"role": "user", "content": "The password of the harbour is " + "copper lantern " * 200}]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    opened = open_service(Config(model=str(tiny), data=tmp_path_factory.mktemp("secure") / "data", memory=2**24, threads=1))
    yield opened
    opened.engine.call(opened.engine.memory.check).result(30)
    opened.close()


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    made = KeyFile(tmp_path / "keys.json")
    made.create("first")
    return made


Open = Callable[..., TestClient]


@pytest.fixture
def connect(service: Service, file: KeyFile) -> Iterator[Open]:
    """Clients of one app with keys (or, with `keys=""`, without); `key` goes into the header."""
    with ExitStack() as stack:

        def open(key: str | None = None, header: str = "authorization", host: str = "127.0.0.1:8000", **config: Any) -> TestClient:
            used = replace(service, config=replace(service.config, **{"keys": str(file.path), **config}))
            headers = {} if key is None else {header: f"Bearer {key}" if header == "authorization" else key}
            return stack.enter_context(TestClient(create_app(only(used)), f"http://{host}", headers=headers, raise_server_exceptions=False))

        yield open


def chat(client: TestClient, agent: str | None = None, messages: list[Json] = LONG, **fields: Any) -> httpx.Response:
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": messages, "max_tokens": 2, "temperature": 0, "agent_id": agent, **fields}
    return client.post("/v1/chat/completions", json=body)


def url(agent: str, verb: str = "") -> str:
    return f"/v1/agents/{quote(agent, safe='')}{verb}"


def test_both_headers_work_and_anything_else_is_refused(connect: Open, file: KeyFile) -> None:
    """A11."""
    _, key = file.create("ada")
    for header in ("authorization", "x-api-key"):
        assert connect(key, header).get("/v1/models").status_code == 200
    assert connect(header="x").get("/v1/models", headers={"Authorization": f"bearer {key}"}).status_code == 200
    for headers in (
        {},
        {"Authorization": "Bearer "},
        {"Authorization": key},
        {"Authorization": f"Basic {key}"},
        {"x-api-key": key[:-1]},
        {"x-api-key": f"{key}x"},
        {"x-api-key": key, "Authorization": "Bearer other"},
    ):
        for path in ("/v1/models", "/v1/agents", "/metrics", "/health/books", "/nowhere", "/v1/agents/import"):
            refused = connect().get(path, headers=headers)
            assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["type"] == "authentication_error" and key not in refused.text


def test_health_needs_no_key(connect: Open) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/openapi.json"):
        assert connect().get(path).status_code == 200


def test_two_keys_never_see_each_others_agents(connect: Open, file: KeyFile) -> None:
    """A11: not by id, not by listing, not by any verb."""
    ada, bob = (connect(file.create(name)[1]) for name in ("ada", "bob"))
    assert chat(ada, "shared name").is_success and chat(ada, "hers").is_success
    assert [a["agent"] for a in bob.get("/v1/agents").json()["data"]] == []
    verbs: list[tuple[str, str, Json | None]] = [
        ("GET", "", None),
        ("DELETE", "", None),
        ("PATCH", "", {"pinned": True}),
        ("POST", "/fork", {"to": "x"}),
        ("POST", "/rewind", {"turn": 0}),
        ("POST", "/wake", None),
        ("POST", "/export", None),
    ]
    for method, verb, body in verbs:
        of_hers, of_nobody = (bob.request(method, url(agent, verb), json=body) for agent in ("hers", "nobody"))
        assert of_hers.status_code == of_nobody.status_code == 404
        assert of_hers.text.replace("hers", "nobody") == of_nobody.text
    assert bob.post("/v1/agents", json={"agent": "hers"}).status_code == 201, "a name that somebody else has is free"
    mine = chat(bob, "shared name", [{"role": "user", "content": "Short."}]).json()["rewake"]
    assert mine["match"] == "miss" and mine["reused_tokens"] == 0
    assert ada.get(url("shared name")).json()["tokens"] > 400 > bob.get(url("shared name")).json()["tokens"]
    assert bob.delete(url("shared name")).is_success
    assert ada.get(url("shared name")).is_success


@pytest.mark.parametrize("agent", ["asks", None])
@pytest.mark.parametrize("stored_by", ["asks", None])
def test_what_another_has_stored_is_computed_as_if_nobody_had(
    connect: Open, file: KeyFile, service: Service, monkeypatch: pytest.MonkeyPatch, agent: str | None, stored_by: str | None
) -> None:
    """A11, not by timing: the work is that of a cold prompt, step for step. Claim 2 of "the same" is not touched: nothing is shared."""
    forward, steps = service.backend.forward, list[tuple[int, int]]()

    def watched(batch: Batch) -> Output:
        steps.extend((row.start, row.end) for row in batch.rows)
        return forward(batch)

    monkeypatch.setattr(service.backend, "forward", watched)
    ada, bob, cold = (connect(file.create(name)[1]) for name in ("ada", "bob", "cold"))
    for _ in range(2):
        assert chat(ada, stored_by).is_success
    assert chat(ada, stored_by).json()["rewake"]["match"] == "exact"
    steps.clear()
    of_bob = chat(bob, agent).json()
    steps_of_bob = steps[:]
    steps.clear()
    of_cold = chat(cold, agent).json()
    assert steps_of_bob == steps and steps[0][0] == 0, "not one row less is computed"
    assert of_bob["rewake"] == of_cold["rewake"] and of_bob["usage"] == of_cold["usage"]
    report = of_bob["rewake"]
    assert report["match"] == "miss" and report["reused_tokens"] == 0 and report["computed_tokens"] == report["prompt_tokens"] > 256
    assert report["first_difference"] is None
    assert chat(ada, stored_by).json()["rewake"]["match"] == "exact"


def test_rotating_a_key_keeps_the_memory_and_revoking_it_ends_at_once(connect: Open, file: KeyFile) -> None:
    key, text = file.create("ada")
    chat(connect(text), "kept")
    _, rotated = file.rotate(key.id)
    assert connect(text).get("/v1/agents").status_code == 401
    assert chat(connect(rotated), "kept").json()["rewake"]["match"] == "exact"
    client = connect(rotated)
    file.revoke(key.id)
    assert client.get("/v1/agents").status_code == 401
    _, again = file.create("ada again", key.namespace)
    assert chat(connect(again), "kept").json()["rewake"]["match"] == "exact"


def test_when_the_keys_cannot_be_read_nobody_is_let_in(connect: Open, file: KeyFile) -> None:
    _, text = file.create("ada")
    client = connect(text)
    good = file.path.read_text()
    file.path.write_text("{")
    assert client.get("/v1/agents").status_code == 500
    file.path.write_text(good)
    assert client.get("/v1/agents").is_success


def test_only_operators_see_what_is_everybodys(connect: Open, file: KeyFile) -> None:
    plain, operator = connect(file.create("ada")[1]), connect(file.create("ops", operator=True)[1])
    for path in ("/metrics", "/health/books"):
        assert plain.get(path).status_code == 403
        assert operator.get(path).is_success


def test_limits_are_each_keys_own(connect: Open, file: KeyFile) -> None:
    slow, free = connect(file.create("slow", limits=Limits(requests=2))[1]), connect(file.create("free")[1])
    answers = [slow.get("/v1/agents") for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30 and answers[2].json()["error"]["type"] == "rate_limit_error"
    assert free.get("/v1/agents").is_success
    small = connect(file.create("small", limits=Limits(body=1000))[1])
    assert chat(small).status_code == 413 and chat(small, messages=[{"role": "user", "content": "Hi."}]).is_success

    def parts() -> Iterator[bytes]:  # without a length
        yield from (b"x" * 600, b"x" * 600)

    for path in ("/v1/chat/completions", "/v1/agents/import"):
        refused = small.post(path, content=parts(), headers={"content-type": "application/json"})
        assert refused.status_code == 413 and refused.json()["error"]["code"] == "request_too_large"
    short = connect(file.create("short", limits=Limits(context=100))[1])
    assert chat(short).json()["error"]["code"] == "context_length_exceeded"
    fits = chat(short, messages=[{"role": "user", "content": "Hi."}], max_tokens=None).json()
    assert fits["usage"]["total_tokens"] <= 100
    refused = chat(short, messages=[{"role": "user", "content": "Hi."}], max_tokens=100)
    assert refused.status_code == 400 and "this key" in refused.json()["error"]["message"]


def test_a_bucket_fills_evenly() -> None:
    now = 0.0
    rates, key = Rates(lambda: now), Key("k", "ada", "ns", "", 0.0, Limits(requests=60))
    for _ in range(60):
        rates.take(key)
    with pytest.raises(RateLimited) as caught:
        rates.take(key)
    assert caught.value.retry_after == 1
    now = 2.0
    rates.take(key)
    rates.take(key)
    with pytest.raises(RateLimited):
        rates.take(key)
    rates.take(replace(key, id="other"))
    rates.take(replace(key, limits=Limits()))


def test_a_body_is_bounded_without_keys_too(connect: Open) -> None:
    refused = connect(keys="").post("/v1/chat/completions", headers={"content-length": str(2**40)}, content=b"x")
    assert refused.status_code == 413


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "192.168.0.7:8000", "[::2]", "[::1", "user@127.0.0.1.example"],
)
def test_without_keys_a_name_that_points_here_is_not_enough(connect: Open, host: str) -> None:
    """DNS rebinding: the page's own name leads here, and the browser takes us for its server."""
    client = connect(keys="")
    assert client.get("/v1/agents", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:8000", "[::1]:8000"])
def test_this_machines_names_are_served(connect: Open, host: str) -> None:
    assert connect(keys="").get("/v1/agents", headers={"Host": host}).is_success


def test_pages_of_other_origins_may_not_ask_unless_allowed(connect: Open, file: KeyFile) -> None:
    page = "http://localhost:3000"
    for client in (connect(keys=""), connect(file.create("ada")[1])):
        assert client.post("/v1/agents", json={"agent": "x"}, headers={"Origin": page}).status_code == 403
        for origin in ("null", "", "[::", "http://", "127.0.0.1:8000.evil.example"):
            assert client.get("/v1/agents", headers={"Origin": origin}).status_code == 403
        assert client.get("/v1/agents", headers={"Origin": "http://127.0.0.1:8000"}).is_success, "its own pages"
        asked = {"Origin": page, "Access-Control-Request-Method": "POST"}
        assert "access-control-allow-origin" not in client.options("/v1/agents", headers=asked).headers
    allowed = connect(file.create("ada")[1], cors=f"{page}, https://other.example")
    asked = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = httpx.Headers(connect(cors=page).options("/v1/agents", headers=asked).headers)
    assert preflight["access-control-allow-origin"] == page and "authorization" in preflight["access-control-allow-headers"]
    answer = allowed.get("/v1/agents", headers={"Origin": page})
    assert answer.is_success and answer.headers["access-control-allow-origin"] == page
    assert allowed.get("/v1/agents", headers={"Origin": "http://localhost:3001"}).status_code == 403


def test_every_answer_has_a_number_that_is_in_the_log(connect: Open, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(keys="")
    with caplog.at_level(logging.INFO, "rewake.access"):
        given = client.get("/v1/agents", headers={"X-Request-ID": "mine-1"})
        made = {client.get(path).headers["x-request-id"] for path in ("/v1/agents", "/nowhere", "/v1/agents/nobody")}
        for strange in ("x" * 200, "a b", 'a"b', ""):
            made.add(client.get("/v1/agents", headers={"X-Request-ID": strange}).headers["x-request-id"])
    assert given.headers["x-request-id"] == given.headers["request-id"] == "mine-1"
    assert len(made) == 7 and all(number.startswith("req-") for number in made)
    assert [r.about["status"] for r in caplog.records[:4]] == [200, 200, 404, 404]  # type: ignore[attr-defined]


def test_the_log_has_no_words_unless_asked(connect: Open, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        client = connect(keys="")
        assert chat(client, "logged").is_success and chat(client, max_tokens=0).status_code == 400
        assert chat(client, LONG[0]["content"]).status_code == 400 and chat(client, surprise=LONG).status_code == 400
        assert "copper" not in caplog.text and "copper" not in json.dumps([r.__dict__ for r in caplog.records], default=str)
        assert chat(connect(keys="", log_prompts=True), "logged").is_success
        assert "copper" in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.com"])
def test_other_addresses_are_refused_without_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without --keys, only loopback"):
        Access(Config(host=host))
    with pytest.raises(ConfigError, match=r"there are no keys in .*rewake keys create"):
        Access(Config(host=host, keys=str(tmp_path / "none.json")))
    KeyFile(tmp_path / "keys.json").create("ada")
    Access(Config(host=host, keys=str(tmp_path / "keys.json")))


def test_ids_never_become_paths(connect: Open, file: KeyFile, service: Service) -> None:
    """A10: names of agents and of namespaces."""
    client = connect(file.create("ada", "../../ns")[1])
    outside = {p for p in service.config.data.parent.rglob("*") if service.config.data not in (p, *p.parents)}
    for agent in ("../../etc/passwd", "CON", "a/b", "..\\x", "\N{PARTY POPPER}"):
        assert chat(client, agent).json()["rewake"]["saved"] is True
        assert client.get(url(agent)).json()["agent"] == agent
    assert {p for p in service.config.data.parent.rglob("*") if service.config.data not in (p, *p.parents)} == outside


def test_the_command_line_says_where_it_takes_a_key_from(service: Service, file: KeyFile, capsys: pytest.CaptureFixture[str]) -> None:
    with in_background(only(replace(service, config=replace(service.config, keys=str(file.path))))) as url:
        assert main(["agents", "ls", "--port", url.rpartition(":")[2]]) == 1
    assert capsys.readouterr().err.endswith("the command line takes it from REWAKE_API_KEY\n")
