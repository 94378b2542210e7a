"""Agents as objects: over HTTP, from Python and on the command line, against a real server on real weights."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

import rewake
from rewake.client import Client
from rewake.errors import ConfigError, Conflict, InvalidRequest, NotFound, RewakeError
from rewake.models import DEFAULT_MODEL
from tests.server import ServerProcess, free_port

SCENARIO = Path(__file__).parents[2] / "examples" / "scenarios" / "interrogation.yaml"
HELLO: list[Any] = [{"role": "user", "content": "Say hello to the " + "very " * 300 + "old house."}]
STRANGE = [
    "a/b",
    "../../etc/passwd",
    "CON",
    "a b",
    "\N{PARTY POPPER}",
    "." * 200,
    "x/fork",
    "import",
    "/x",
    "x/",
    "a?b#c%2F",
    "x'; DROP TABLE",
]
REFUSED = ["", ".", "..", "a\0b", "a\nb", "x" * 10_000, "half \ud83d"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("agents") / "data", "--context", "2048", "--memory", "100MiB", "--disk", "1GiB") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with rewake.Client(f"http://127.0.0.1:{server.port}") as made:
        yield made


def url(agent: str, verb: str = "") -> str:
    return "/v1/agents/" + quote(agent, safe="", errors="surrogatepass") + verb


def refused(response: httpx.Response, status: int, param: str | None = None) -> str:
    """The message of an error in the one form there is."""
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    return str(error["message"])


def talked(server: ServerProcess, agent: str, turns: int = 1) -> list[Any]:
    """The messages of a new agent's talk."""
    messages = list(HELLO)
    for turn in range(turns):
        text, report = server.chat(agent, messages, max_tokens=6)
        assert report["saved"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {turn}?"}]
    return messages[:-1]


def test_an_agent_is_created_shown_listed_and_changed(server: ServerProcess) -> None:
    made = server.http.post("/v1/agents", json={"agent": "new", "pinned": True, "ttl": 3600})
    assert made.status_code == 201
    summary = made.json()
    assert summary["state"] == "empty" and summary["tokens"] == 0 and summary["pinned"] is True and summary["ttl"] == 3600
    assert server.http.get(url("new")).json() == summary
    assert summary in server.http.get("/v1/agents").json()["data"]
    changed = server.http.patch(url("new"), json={"pinned": False}).json()
    assert changed["pinned"] is False and changed["ttl"] == 3600
    changed = server.http.patch(url("new"), json={"ttl": None}).json()
    assert changed["ttl"] is None
    assert "already" in refused(server.http.post("/v1/agents", json={"agent": "new"}), 409, "agent")
    assert server.http.delete(url("new")).json() == {"agent": "new", "forgotten": True}
    refused(server.http.get(url("new")), 404, "agent")


def test_a_fork_remembers_and_the_two_go_separate_ways(server: ServerProcess) -> None:
    talk = talked(server, "forked", turns=2)
    made = server.http.post(url("forked", "/fork"), json={"to": "fork"})
    assert made.status_code == 201 and made.json()["agent"] == "fork" and made.json()["pages_shared"] >= 1
    assert made.json()["tokens"] == server.http.get(url("forked")).json()["tokens"]
    for agent, words in (("fork", "Left."), ("forked", "Right.")):
        _, report = server.chat(agent, [*talk, {"role": "user", "content": words}], max_tokens=2)
        assert report["match"] == "extend" and report["computed_tokens"] < 20
    first = server.http.post(url("forked", "/fork"), json={"to": "fork at 1", "turn": 1}).json()
    assert first["turns"] == server.http.get(url("forked")).json()["turns"][:1] and first["tokens"] == first["turns"][0]
    assert server.http.post(url("forked", "/fork"), json={"to": "fork of 300", "tokens": 300}).json()["tokens"] == 300
    refused(server.http.post(url("forked", "/fork"), json={"to": "fork"}), 409, "agent")
    refused(server.http.post(url("forked", "/fork"), json={"to": "x", "turn": 9}), 400, "turn")
    refused(server.http.post(url("forked", "/fork"), json={"to": "x", "tokens": -1}), 400, "tokens")
    refused(server.http.post(url("forked", "/fork"), json={"to": "x", "turn": 1, "tokens": 1}), 400, "turn")
    refused(server.http.post(url("forked", "/fork"), json={"to": ".."}), 400, "to")
    refused(server.http.post(url("forked", "/fork"), json={}), 400, "to")


def test_a_rewound_agent_goes_on_from_there(server: ServerProcess) -> None:
    talk = talked(server, "rewound", turns=2)
    before = server.http.get(url("rewound")).json()
    after = server.http.post(url("rewound", "/rewind"), json={"turn": 1}).json()
    assert after["tokens"] == before["turns"][0] and after["turns"] == before["turns"][:1] and after["branches"] == before["branches"] + 1
    _, report = server.chat("rewound", [*talk[:2], {"role": "user", "content": "Something else."}], max_tokens=2)
    assert report["match"] == "extend" and report["computed_tokens"] < 20
    assert server.http.post(url("rewound", "/rewind"), json={"tokens": 10}).json()["tokens"] == 10
    refused(server.http.post(url("rewound", "/rewind"), json={}), 400, "turn")
    refused(server.http.post(url("rewound", "/rewind"), json={"turn": 5}), 400, "turn")
    refused(server.http.post(url("nobody", "/rewind"), json={"turn": 5}), 404, "agent")


def test_a_hot_agent_is_woken_at_no_cost_and_one_on_disk_is_read(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--memory", "100MiB") as server:
        talk = talked(server, "sleeper", turns=2)
        assert server.http.post(url("sleeper", "/wake")).json() == {"agent": "sleeper", "loaded_pages": 0, "state": "hot"}
        server.stop()
        server.start()
        assert server.http.get(url("sleeper")).json()["state"] == "warm"
        woken = server.http.post(url("sleeper", "/wake"), json={}).json()
        assert woken["state"] == "hot" and woken["loaded_pages"] >= 2
        _, report = server.chat("sleeper", talk[:-1], max_tokens=1)
        assert report["loaded_tokens"] == 0 and report["computed_tokens"] == 1


def test_an_exported_agent_comes_back_exactly(server: ServerProcess) -> None:
    talk = talked(server, "traveller", turns=2)
    answer = server.http.post(url("traveller", "/export"))
    assert answer.headers["content-type"] == "application/x-tar"
    assert answer.headers["content-disposition"] == 'attachment; filename="rewake-traveller.tar"'
    server.http.delete(url("traveller"))
    taken = server.http.post("/v1/agents/import", content=answer.content)
    assert taken.status_code == 201 and taken.json()["agent"] == "traveller" and len(taken.json()["turns"]) == 2
    _, report = server.chat("traveller", talk[:-1], max_tokens=1)
    assert report["match"] == "exact" and report["computed_tokens"] == 1
    refused(server.http.post("/v1/agents/import", content=answer.content), 409, "agent")
    named = server.http.post("/v1/agents/import", params={"agent": "a/b \N{PARTY POPPER}"}, content=answer.content)
    assert named.json()["agent"] == "a/b \N{PARTY POPPER}"
    _, report = server.chat("a/b \N{PARTY POPPER}", talk[:-1], max_tokens=1)
    assert report["match"] == "exact" and report["computed_tokens"] == 1


def renamed(content: bytes, **fields: Any) -> bytes:
    """An exported file with other facts in its `agent.json`."""
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(content)) as old, tarfile.open(fileobj=made, mode="w") as new:
        for member in old:
            data = old.extractfile(member).read()  # type: ignore[union-attr]
            if member.name == "agent.json":
                data = json.dumps({**json.loads(data), **fields}).encode()
            member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    return made.getvalue()


def test_a_file_that_is_not_what_was_exported_is_refused(server: ServerProcess) -> None:
    talked(server, "original")
    content = server.http.post(url("original", "/export")).content
    before = server.http.get("/v1/agents").json()
    damaged = bytearray(content)
    damaged[-20_000] ^= 1
    liar = renamed(content, tokens=[10**6] * server.http.get(url("original")).json()["tokens"])
    bad: list[tuple[bytes, str]] = [
        (b"", "not a file that"),
        (b"hello", "not a file that"),
        (content[:-30_000], "not a file that"),
        (bytes(damaged), "damaged"),
        (renamed(content, signature="00" * 32), "another model"),
        (renamed(content, format="rewake-agent-9"), "rewake-agent-9"),
        (renamed(content, num_computed=5), "do not agree"),
        (liar, "not those of this model"),
        (renamed(content, turns=[5, 5]), "do not agree"),
        (renamed(content, name="a\0b"), "printable"),
    ]
    for body, message in bad:
        params = {} if message == "printable" else {"agent": "bad"}
        assert message in refused(server.http.post("/v1/agents/import", params=params, content=body), 400)
    assert "surprise" in refused(server.http.post("/v1/agents/import", params={"surprise": "1"}, content=content), 400)
    assert server.http.get("/v1/agents").json() == before


def test_a_file_larger_than_the_budget_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", "--memory", "100MiB", "--disk", "1MB", "--no-persist") as server:
        assert "1000000 bytes" in refused(server.http.post("/v1/agents/import", content=bytes(1_000_001)), 413)
        assert "not a file that" in refused(server.http.post("/v1/agents/import", content=bytes(1_000_000)), 400)


@pytest.mark.parametrize("agent", STRANGE)
def test_every_verb_takes_every_id(server: ServerProcess, client: Client, tmp_path: Path, agent: str) -> None:
    """A10: an id is never a path, neither here nor there."""
    beside = sorted(server.data.parent.iterdir())
    assert client.create(agent)["agent"] == agent
    assert client.update(agent, pinned=True)["pinned"] is True
    refused(server.http.post(url(agent, "/export")), 400, "agent")
    server.chat(agent, HELLO, max_tokens=1)
    assert client.show(agent)["tokens"] > 300
    assert client.wake(agent)["agent"] == agent
    assert client.rewind(agent, tokens=290)["tokens"] == 290
    assert client.fork(agent, agent + "!")["agent"] == agent + "!"
    client.forget(agent + "!")
    client.export(agent, tmp_path / "it.tar")
    assert list(tmp_path.iterdir()) == [tmp_path / "it.tar"]
    disposition = server.http.post(url(agent, "/export")).headers["content-disposition"]
    assert disposition in ('attachment; filename="rewake-agent.tar"', f'attachment; filename="rewake-{agent}.tar"')
    client.forget(agent)
    with pytest.raises(NotFound):
        client.show(agent)
    assert client.import_(tmp_path / "it.tar")["agent"] == agent
    client.forget(agent)
    assert sorted(server.data.parent.iterdir()) == beside


@pytest.mark.parametrize("agent", REFUSED, ids=ascii)
def test_every_verb_refuses_what_is_no_id(server: ServerProcess, agent: str) -> None:
    body = json.dumps({"agent": agent})
    refused(server.http.post("/v1/agents", content=body, headers={"content-type": "application/json"}), 400, "agent")
    if agent in (".", "..") or "\ud83d" in agent:  # these cannot be sent in a path
        return
    requests = [("GET", "", None), ("PATCH", "", {"pinned": True}), ("DELETE", "", None), ("POST", "/fork", {"to": "x"})]
    requests += [("POST", "/rewind", {"turn": 0}), ("POST", "/wake", None), ("POST", "/export", None)]
    for method, verb, fields in requests:
        response = server.http.request(method, url(agent, verb), json=fields)
        assert refused(response, 404 if "\n" in agent else 400)


@pytest.mark.parametrize(
    ("method", "path", "body", "param"),
    [
        ("POST", "", {"agent": "x", "surprise": 1}, "surprise"),
        ("POST", "", {}, "agent"),
        ("POST", "", {"agent": 5}, "agent"),
        ("POST", "", {"agent": "x", "ttl": 0}, "ttl"),
        ("POST", "", {"agent": "x", "ttl": float("nan")}, "ttl"),
        ("POST", "", {"agent": "x", "pinned": "yes"}, "pinned"),
        ("PATCH", "/x", {}, "pinned"),
        ("PATCH", "/x", {"pinned": None}, "pinned"),
        ("PATCH", "/x", {"tokens": 1}, "tokens"),
        ("POST", "/x/fork", {"to": "y", "at": 1}, "at"),
        ("POST", "/x/rewind", {"turn": 1, "to": "y"}, "to"),
        ("POST", "/x/rewind", {"turn": "1"}, "turn"),
        ("POST", "/x/wake", {"now": True}, "now"),
        ("POST", "/x/export", {"to": "file"}, "to"),
    ],
)
def test_unknown_and_wrong_fields_are_refused_by_name(server: ServerProcess, method: str, path: str, body: Any, param: str) -> None:
    headers = {"content-type": "application/json"}
    refused(server.http.request(method, "/v1/agents" + path, content=json.dumps(body), headers=headers), 400, param)


@pytest.mark.parametrize(("method", "verb"), [("GET", ""), ("DELETE", ""), ("POST", "/wake"), ("POST", "/export")])
def test_nobody_is_not_found(server: ServerProcess, method: str, verb: str) -> None:
    assert "no agent 'nobody'" in refused(server.http.request(method, url("nobody", verb)), 404, "agent")


def test_an_agent_at_work_is_left_alone(server: ServerProcess, client: Client) -> None:
    events = client.chat(HELLO, agent="busy", max_tokens=400, temperature=0)
    while not next(events)["choices"][0]["delta"].get("content"):
        pass
    for verb, body in (("/fork", {"to": "x"}), ("/rewind", {"turn": 0}), ("/export", None)):
        assert "at work" in refused(server.http.post(url("busy", verb), json=body), 409, "agent")
    with pytest.raises(Conflict, match="at work"):
        client.forget("busy")
    events.close()


def test_an_agent_is_cancelled_by_somebody_else(server: ServerProcess, client: Client) -> None:
    """A5: it ends within a step, whoever listens is told, and what was computed is remembered."""
    with pytest.raises(Conflict, match="cancelled; what was computed is remembered") as error:
        for number, _ in enumerate(client.chat(HELLO, agent="stopped", max_tokens=1500, temperature=0)):
            if number == 3:
                assert client.cancel("stopped")["cancelled"] == 1
    assert error.value.code == "cancelled"
    assert client.show("stopped")["tokens"] > 3
    assert client.cancel("stopped")["cancelled"] == 0, "nothing is left to stop"


def test_metrics_add_up(server: ServerProcess) -> None:
    talked(server, "measured")
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values: dict[str, float] = {}
    described: set[str] = set()
    for line in response.text.splitlines():
        if line.startswith("# TYPE"):
            described.add(line.split()[2])
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
            family = name.split("{")[0]
            assert family in described or family.rpartition("_")[0] in described  # a histogram has three kinds of samples
    assert values["rewake_agents"] == len(server.http.get("/v1/agents").json()["data"])
    assert values["rewake_bytes_written_total"] >= values["rewake_disk_bytes"] > 1_000_000
    assert values["rewake_disk_budget_bytes"] == 2**30 and values["rewake_arena_bytes"] <= 100 * 2**20
    assert sum(values[f'rewake_pages{{state="{s}"}}'] for s in ("free", "held", "cached", "loading")) >= 40
    assert values["rewake_requests_running"] == values["rewake_requests_waiting"] == values["rewake_writer_waiting_bytes"] == 0
    assert 0 < values["rewake_load_gate_compute_seconds_per_token"] < 1


def test_the_client_says_what_the_server_says(client: Client, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no agent 'nobody'"):
        client.show("nobody")
    with pytest.raises(InvalidRequest):
        client.forget("..")
    with pytest.raises(NotFound, match="no agent 'nobody'"):
        client.export("nobody", tmp_path / "x.tar")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RewakeError, match="No such file"):
        client.import_(tmp_path / "missing.tar")
    list(client.chat(HELLO, agent="kept", max_tokens=1))
    with pytest.raises(RewakeError, match="not there"):
        client.export("kept", tmp_path / "not there" / "x.tar")
    with pytest.raises(InvalidRequest, match="temperature"):
        list(client.chat(HELLO, agent="c", temperature=9))
    with Client(f"http://127.0.0.1:{free_port()}") as lonely, pytest.raises(ConfigError, match="no server at"):
        lonely.list()


def test_the_client_chats_and_forgets(client: Client) -> None:
    *_, last = client.chat(HELLO, agent="c", max_tokens=2, temperature=0)
    assert last["rewake"]["agent"] == "c" and last["model"] == DEFAULT_MODEL
    assert "c" in [a["agent"] for a in client.list()]
    client.forget("c")


def run_cli(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rewake", *arguments], input=text, capture_output=True, text=True, check=False)


def test_the_command_line_has_every_verb(server: ServerProcess, tmp_path: Path) -> None:
    port, file = ("--port", str(server.port)), str(tmp_path / "cli.tar")

    def said(*arguments: str, text: str = "") -> str:
        done = run_cli(*arguments, *port, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "Nothing is remembered" in said("chat", "--agent", "cli", text="Say hello.\n\n")
    assert "of 1 turn are remembered (hot)" in said("chat", "--agent", "cli")
    assert "MB" in said("agents", "ls") and "last used" in said("agents", "ls")
    assert "never" in said("agents", "show", "cli")
    assert "2h" in said("agents", "create", "cli-new", "--ttl", "2h", "--pinned")
    assert "tokens of cli" in said("agents", "fork", "cli", "cli-2", "--turn", "1")
    assert "at 0 tokens, 0 turns" in said("agents", "rewind", "cli-2", "--turn", "0")
    assert "is pinned" in said("agents", "pin", "cli") and "no longer" in said("agents", "unpin", "cli")
    assert "forgotten 7d after" in said("agents", "ttl", "cli", "7d") and "never" in said("agents", "ttl", "cli", "never")
    assert "is hot; pages read: 0" in said("agents", "wake", "cli")
    assert "0 requests stopped" in said("agents", "cancel", "cli")
    assert "KB" in said("agents", "export", "cli", file)
    assert "cli-3 remembers" in said("agents", "import", file, "--as", "cli-3")
    again = said("chat", "--agent", "cli-3", text="And again.\n")
    assert "You go on from:\n> Say hello.\n" in again and "[extend: " in again
    assert "[extend: " not in said("chat", "--agent", "cli-3", "--new", text="And again.\n")
    said("agents", "create", "cli-4")
    assert "Nothing is remembered" in said("chat", "--agent", "cli-4")
    server.http.post("/v1/completions", json={"model": DEFAULT_MODEL, "prompt": "Once", "max_tokens": 2, "agent_id": "cli-4"})
    assert "not as a chat: this is a new one" in said("chat", "--agent", "cli-4")
    for agent in ("cli", "cli-2", "cli-3", "cli-4", "cli-new"):
        assert "is forgotten" in said("agents", "forget", agent)
    gone = run_cli("agents", "show", "cli", *port)
    assert gone.returncode == 1 and "no agent 'cli'" in gone.stderr


def test_the_command_line_explains_itself(server: ServerProcess, tmp_path: Path) -> None:
    """What is wrong is said before a model is loaded, and never as a traceback."""
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    (tmp_path / "json").write_text('{"row": []}\n')
    wrong = [
        (("serve", "--port", str(server.port)), "it is in use"),
        (("serve", "--port", str(free_port()), "--record", str(tmp_path / "no" / "where")), "No such file"),
        (("replay", str(tmp_path / "text")), "not a recording"),
        (("replay", str(tmp_path / "bytes")), "not a recording"),
        (("replay", str(tmp_path / "json")), "not a recording"),
        (("replay", str(tmp_path / "empty")), "records no step"),
        (("replay", str(tmp_path / "missing")), "No such file"),
        (("agents", "ls", "--port", str(free_port())), "no server at"),
        (("agents", "ttl", "x", "soon", "--port", str(server.port)), "not a span of time"),
        (("play", str(SCENARIO), "--data", str(server.data)), "play there: --url http://127.0.0.1:8000"),
        (("calibrate", "--text", str(tmp_path / "missing")), "not a text that can be read"),
    ]
    for arguments, message in wrong:
        told = run_cli(*arguments)
        assert told.returncode == 1 and message in told.stderr and "Traceback" not in told.stderr, told.stderr
        assert "Loading" not in told.stdout or "--record" in arguments or "play" in arguments
