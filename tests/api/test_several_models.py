"""A server of two models, in a process of its own: each answers for itself, and remembers for itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rewake.client import Client
from rewake.errors import NotFound
from rewake.models import DEFAULT_MODEL
from rewake.workflows import Agent
from tests.server import ServerProcess

CHAT = [{"role": "user", "content": "Tell me of a river, a stone and a lamp, and of who lives beside them."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_eager: Path) -> Iterator[ServerProcess]:
    flags = ("--model", DEFAULT_MODEL, "--model", str(tiny_eager), "--memory", "400MiB", "--max-loaded", "1")
    with ServerProcess(tmp_path_factory.mktemp("several") / "data", *flags) as running:
        yield running


def test_all_are_listed_and_others_are_refused(server: ServerProcess, tiny_eager: Path) -> None:
    assert [m["id"] for m in server.http.get("/v1/models").json()["data"]] == [DEFAULT_MODEL, tiny_eager.name]
    assert server.http.get(f"/v1/models/{tiny_eager.name}").json()["id"] == tiny_eager.name
    refused = server.http.post("/v1/chat/completions", json={"model": "gpt-4", "messages": CHAT})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    assert DEFAULT_MODEL in refused.json()["error"]["message"] and tiny_eager.name in refused.json()["error"]["message"]


def test_each_remembers_for_itself_through_swaps_and_kill_9(server: ServerProcess, tiny_eager: Path) -> None:
    names = (DEFAULT_MODEL, tiny_eager.name)
    texts: dict[str, str] = {}
    for name in names:
        texts[name], report = server.chat("ada", CHAT, model=name, max_tokens=12)
        assert report["match"] == "miss" and report["saved"]
    for name in names:
        assert server.chat("ada", CHAT, model=name, max_tokens=12)[1]["match"] == "exact"
    server.kill()  # right behind the last chunk
    server.start()
    assert server.http.get("/health/ready").is_success
    for name in reversed(names):
        history: list[Any] = [*CHAT, {"role": "assistant", "content": texts[name]}, {"role": "user", "content": "Go on."}]
        _, report = server.chat("ada", history, model=name, max_tokens=4)
        assert report["match"] in ("extend", "diverge") and report["loaded_tokens"] > 20


def test_agents_are_of_the_model_that_is_named(server: ServerProcess, tiny_eager: Path) -> None:
    url = f"http://127.0.0.1:{server.port}"
    with Client(url) as first, Client(f"{url}/v1", tiny_eager.name) as second:
        assert (first.model(), second.model()) == (DEFAULT_MODEL, tiny_eager.name)
        first.create("only here")
        assert "only here" in [a["agent"] for a in first.list()]
        assert "only here" not in [a["agent"] for a in second.list()]
        with pytest.raises(NotFound):
            second.show("only here")
    with Client(url, "gpt-4") as wrong, pytest.raises(NotFound, match="this server runs"):
        wrong.list()


def test_an_agent_is_exported_and_imported_for_its_model(server: ServerProcess, tiny_eager: Path, tmp_path: Path) -> None:
    with Client(f"http://127.0.0.1:{server.port}", tiny_eager.name) as client:
        list(client.chat(CHAT, agent="eve", max_tokens=4))
        client.export("eve", tmp_path / "eve.tar")
        assert client.import_(tmp_path / "eve.tar", "eve2")["tokens"] == client.show("eve")["tokens"]


def test_metrics_say_of_which_model_they_are(server: ServerProcess, tiny_eager: Path) -> None:
    server.chat("ada", CHAT, model=tiny_eager.name, max_tokens=1)
    text = server.http.get("/metrics").text
    assert f'rewake_pages{{model="{tiny_eager.name}",state="free"}}' in text
    assert text.count("# TYPE rewake_pages gauge") == 1


def test_every_protocol_names_its_model(server: ServerProcess, tiny_eager: Path) -> None:
    """Completions, two answers of each; Anthropic's messages, and the counting of their tokens."""
    for name in (tiny_eager.name, DEFAULT_MODEL):
        completed = server.http.post("/v1/completions", json={"model": name, "prompt": "Once", "n": 2, "max_tokens": 3}).json()
        assert completed["model"] == name and len(completed["choices"]) == 2
        messages = {"model": name, "messages": CHAT}
        assert server.http.post("/v1/messages", json={**messages, "max_tokens": 3}).json()["model"] == name
        assert server.http.post("/v1/messages/count_tokens", json=messages).json()["input_tokens"] > 10
    refused = server.http.post("/v1/messages", json={"model": "gpt-4", "messages": CHAT, "max_tokens": 3})
    assert refused.status_code == 404 and refused.json()["error"]["type"] == "not_found_error"


def test_answers_at_work_end_before_their_model_leaves(server: ServerProcess, tiny_eager: Path) -> None:
    def ask(name: str, n: int, max_tokens: int) -> list[Any]:
        body = {"model": name, "messages": CHAT, "n": n, "max_tokens": max_tokens, "temperature": 0}
        found: list[Any] = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
        return found

    alone = ask(tiny_eager.name, 2, 200)
    with ThreadPoolExecutor() as pool:
        asked = [(name, pool.submit(ask, name, 2, 200)) for name in (tiny_eager.name, DEFAULT_MODEL, tiny_eager.name)]
        answers = [(name, future.result(120)) for name, future in asked]
    assert all(len(choices) == 2 for _, choices in answers)
    assert [choices for name, choices in answers if name == tiny_eager.name] == [alone, alone]


def test_an_agent_of_a_model_is_forked_and_forgotten_there(server: ServerProcess, tiny_eager: Path) -> None:
    async def live(client: Client) -> None:
        ada = Agent(client, "lovelace", "You are Ada.", model=tiny_eager.name, max_tokens=4)
        answer = await ada.say("Who are you?")
        fork = await ada.fork("byron")
        assert (await fork.say("And now?")).report["reused_tokens"] > answer.report["prompt_tokens"] - 2
        assert client.messages("lovelace", model=tiny_eager.name)[0]["role"] == "system"
        with pytest.raises(NotFound):
            client.messages("lovelace")
        await ada.forget()

    with Client(f"http://127.0.0.1:{server.port}") as client, Client(client.url, tiny_eager.name) as there:
        asyncio.run(live(client))
        assert "lovelace" not in {a["agent"] for a in there.list()} and "byron" in {a["agent"] for a in there.list()}
        assert there.cancel("byron") == {"agent": "byron", "cancelled": 0}


def test_the_window_shows_the_first_or_the_one_that_is_named(server: ServerProcess, tiny_eager: Path) -> None:
    def first_event(**params: str) -> str:
        with server.http.stream("GET", "/v1/rewake/events", params=params) as response:
            return next(response.raise_for_status().iter_lines())

    server.chat("ada", CHAT, model=tiny_eager.name, max_tokens=1)
    assert first_event(model=tiny_eager.name) == "event: snapshot"
    assert first_event() == "event: unloaded", "to look at it does not load it"
    assert server.http.get("/v1/rewake/events", params={"model": "gpt-4"}).status_code == 404
    assert server.http.get("/health/books").json() == {"status": "ok"}
