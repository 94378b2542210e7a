"""The protocol, through the official client and raw HTTP, against a real server on real weights."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rewake.models import DEFAULT_MODEL
from tests.server import ServerProcess
from tests.templates import HERMES, with_template

HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]


def calling(arguments: str) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("api") / "data", "--context", "2048", "--memory", "200MiB") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, messages: list[Any] = HELLO, **fields: Any) -> Any:
    return client.chat.completions.create(model=DEFAULT_MODEL, messages=messages, **{"max_tokens": 8, "temperature": 0, **fields})


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [DEFAULT_MODEL]
    assert client.models.retrieve(DEFAULT_MODEL).id == DEFAULT_MODEL
    with pytest.raises(openai.NotFoundError, match="this server runs"):
        client.models.retrieve("gpt-4")


def test_an_answer_and_its_report(client: openai.OpenAI) -> None:
    answer = ask(client, extra_headers={"X-Agent-ID": "reporter"})
    report = answer.rewake
    assert answer.choices[0].message.content and answer.choices[0].finish_reason in ("stop", "length")
    assert report["agent"] == "reporter" and report["saved"] is True
    assert report["reused_tokens"] + report["computed_tokens"] == report["prompt_tokens"] == answer.usage.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = ask(client, extra_body={"agent_id": "reporter"})
    assert again.rewake["match"] == "exact"
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_streamed_and_whole_answers_are_the_same_and_remembered_alike(client: openai.OpenAI) -> None:
    """R3, A4."""
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}, extra_body={"agent_id": "streamer"}, max_tokens=20))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ask(client, extra_body={"agent_id": "whole"}, max_tokens=20).choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == [] and chunks[-1].usage.prompt_tokens > 0 and chunks[-1].rewake["saved"] is True
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    for agent in ("streamer", "whole"):
        history = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": f"Again, {agent}."}]
        next_turn = ask(client, history, extra_body={"agent_id": agent})
        assert next_turn.rewake["match"] == "extend"
        assert next_turn.rewake["computed_tokens"] < 20


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_usage_counts_everything_on_a_hit_and_on_a_miss(client: openai.OpenAI, stream: bool) -> None:
    """A4."""
    chat = [{"role": "user", "content": f"What is the name of the river behind {'a' if stream else 'the'} mill?"}]
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for hit in (False, True):
        answer = ask(client, chat, max_tokens=3, extra_body={"agent_id": f"usage {stream}"}, **fields)
        last = list(answer)[-1] if stream else answer
        usage, cached = last.usage, last.usage.prompt_tokens_details.cached_tokens
        assert 0 < usage.completion_tokens <= 3 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert cached == last.rewake["reused_tokens"] and (cached == usage.prompt_tokens - 1) == hit


def test_without_usage_the_report_is_in_the_last_chunk(client: openai.OpenAI) -> None:
    *_, last = ask(client, stream=True)
    assert last.choices[0].finish_reason and last.rewake["match"] in ("exact", "extend", "diverge", "miss")


def test_content_parts_developer_role_and_null_options(client: openai.OpenAI) -> None:
    """A9."""
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]},
    ]
    answer = ask(client, parts, n=1, user="u", seed=3, top_p=0.9, temperature=0.5, extra_body={"metadata": {"a": "b"}, "top_k": 5})
    assert answer.choices[0].message.content


def test_an_answer_can_be_sent_back_as_the_client_hands_it_out(client: openai.OpenAI) -> None:
    """A9: with its nulls."""
    first = ask(client, extra_body={"agent_id": "sender"}).choices[0].message
    history = [*HELLO, first, {"role": "user", "content": "Once more."}]
    assert ask(client, history, presence_penalty=0.0, extra_body={"agent_id": "sender"}).rewake["match"] == "extend"


def test_ids_in_headers_are_utf8_and_do_not_contradict_the_body(server: ServerProcess) -> None:
    body = {"model": DEFAULT_MODEL, "messages": HELLO, "max_tokens": 1}
    answer = server.http.post("/v1/chat/completions", json=body, headers={"X-Agent-ID": "zoë".encode()})
    assert answer.json()["rewake"]["agent"] == "zoë"
    both = server.http.post("/v1/chat/completions", json={**body, "agent_id": "a"}, headers={"X-Agent-ID": "b"})
    assert both.status_code == 400 and both.json()["error"]["param"] == "agent_id"


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    answers = {ask(client, temperature=1.5, seed=11, max_tokens=12).choices[0].message.content for _ in range(2)}
    others = {ask(client, temperature=1.5, seed=s, max_tokens=12).choices[0].message.content for s in range(3)}
    assert len(answers) == 1 and len(others) > 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"n": True}, "n"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "more": 1}}]}, "tools.0.function.more"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content.0.type"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x", "reasoning_content": "y"}]}, "messages.1.reasoning_content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c1"}]}, "messages.0.tool_call_id"),
        ({"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "c1"}]}, "messages.1.role"),
        ({"messages": [*HELLO, calling("{}")]}, "messages.1.tool_calls"),
        ({"messages": [*HELLO, calling("{oops")]}, "messages.1.tool_calls.0.function.arguments"),
        ({"messages": [*HELLO, calling('{"a": "\\ud83d"}')]}, "messages.1"),
        ({"messages": [{**calling("{}"), "role": "user"}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages.0.extra"),
        ({"surprise": 1}, "surprise"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"agent_id": ""}, "agent_id"),
        ({"agent_id": ".."}, "agent_id"),
        ({"max_tokens": True}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": [{"role": "user", "content": "half \ud83d"}]}, "messages.0"),
        ({"agent_id": "a\0b"}, "agent_id"),
        ({"agent_id": "x" * 10_000}, "agent_id"),
    ],
)
def test_what_is_not_obeyed_is_refused_by_name(server: ServerProcess, change: dict[str, Any], param: str) -> None:
    body = {"model": DEFAULT_MODEL, "messages": HELLO, **change}
    response = server.http.post("/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and error["message"]


def test_what_means_off_is_taken(client: openai.OpenAI) -> None:
    off = {"n": 1, "stop": [], "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0}
    answer = ask(client, **off, tools=[], tool_choice="none", response_format={"type": "text"})
    assert answer.choices[0].message.content


def test_a_system_prompt_with_the_time_is_reused_up_to_there(client: openai.OpenAI) -> None:
    """P5: and the answer says what the first difference was."""
    rules = "You are a careful assistant. " * 20

    def at(clock: str) -> dict[str, Any]:
        system = {"role": "system", "content": f"{rules}The time is {clock}. Be brief."}
        report: dict[str, Any] = ask(client, [system, *HELLO], extra_body={"agent_id": "clock"}).rewake
        return report

    at("09:41")
    report = at("09:52")
    difference = report["first_difference"]
    assert report["match"] == "diverge" and report["reused_tokens"] == difference["token"] > 100
    assert difference["stored"].startswith("41. Be brief") and difference["given"].startswith("52. Be brief")


def test_a_history_with_tool_calls_is_matched_whatever_their_json_looks_like(model_path: Path, tmp_path: Path) -> None:
    """P4: with a template that knows them."""
    model = with_template(model_path, HERMES, tmp_path / "hermes")
    with ServerProcess(tmp_path / "data", "--model", str(model), "--context", "1024", "--memory", "100MiB") as server:

        def match(arguments: str, *more: dict[str, Any]) -> str:
            history = [*HELLO, calling(arguments), {"role": "tool", "content": "sunny", "tool_call_id": "c1"}, *more]
            body = {"model": "hermes", "messages": history, "agent_id": "caller", "max_tokens": 2, "temperature": 0}
            return str(server.http.post("/v1/chat/completions", json=body).raise_for_status().json()["rewake"]["match"])

        assert match('{"town": "Rome", "days": 2}') == "miss"
        assert match('{"days":2,"town":"Rome"}') == "exact"
        assert match('{"days":3,"town":"Rome"}') == "diverge"


def test_errors_keep_the_protocol(server: ServerProcess) -> None:
    missing = server.http.post("/v1/chat/completions", json={"model": "gpt-4", "messages": HELLO})
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    garbled = server.http.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    assert garbled.status_code == 400
    assert "is not JSON: Expecting property name enclosed in double quotes, at character 1" in garbled.json()["error"]["message"]
    curled = server.http.post("/v1/chat/completions", content=b"{}", headers={"content-type": "application/x-www-form-urlencoded"})
    assert curled.status_code == 400 and "send the header content-type: application/json" in curled.json()["error"]["message"]
    assert server.http.get("/nowhere").json()["error"]["type"] == "not_found_error"
    assert server.http.get("/v1/chat/completions").status_code == 405
    assert server.http.get("/").headers["location"] == "/ui"


def test_too_long_is_said_before_any_work(client: openai.OpenAI) -> None:
    """A7."""
    for fields in ({"messages": [{"role": "user", "content": "word " * 3000}]}, {"max_tokens": 5000}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **fields)
        assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("agent", ["a/b", "../../etc/passwd", "CON", "a b", "\N{PARTY POPPER}", "." * 200, "x'; DROP TABLE pages;--"])
def test_strange_agent_ids_are_stored_safely(server: ServerProcess, agent: str) -> None:
    """A10: an id is never a path."""
    before = {p for p in server.data.parent.rglob("*") if p.parent == server.data.parent}
    _, report = server.chat(agent, HELLO, max_tokens=2)
    assert report["agent"] == agent
    assert server.http.get("/v1/agents/" + quoted(agent)).json()["agent"] == agent
    assert server.http.delete("/v1/agents/" + quoted(agent)).json()["forgotten"] is True
    assert server.http.get("/v1/agents/" + quoted(agent)).status_code == 404
    assert {p for p in server.data.parent.rglob("*") if p.parent == server.data.parent} == before


def quoted(agent: str) -> str:
    return "".join(f"%{byte:02X}" for byte in agent.encode())


def test_agents_are_listed_with_their_sizes(server: ServerProcess) -> None:
    _, report = server.chat("sized", [{"role": "user", "content": "word " * 600}], max_tokens=2)
    (row,) = [a for a in server.http.get("/v1/agents").json()["data"] if a["agent"] == "sized"]
    assert row["tokens"] >= report["prompt_tokens"] > 600
    assert row["pages_on_disk"] == -(-row["tokens"] // 256) and row["bytes_on_disk"] > 600 * 6480


def test_a_client_that_leaves_stops_the_work(server: ServerProcess) -> None:
    """A5: and what was computed is kept."""
    messages = [{"role": "user", "content": "Count to a thousand."}]
    body = {"model": DEFAULT_MODEL, "messages": messages, "stream": True, "agent_id": "leaver", "max_tokens": 1500, "temperature": 0}
    with httpx.stream("POST", f"http://127.0.0.1:{server.port}/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                break
    for _ in range(100):
        found = server.http.get("/v1/agents/leaver")
        if found.is_success:
            break
        time.sleep(0.1)
    assert found.json()["tokens"] < 200


def test_the_command_line_talks_to_it(server: ServerProcess) -> None:
    import subprocess
    import sys

    def rewake(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rewake", *arguments, "--port", str(server.port)]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    said = rewake("chat", "--agent", "cli", text="Say hello.\n\n")
    assert said.returncode == 0 and "tokens reused" in said.stdout, said.stderr
    assert "cli" in rewake("agents", "ls").stdout
    assert "tokens" in rewake("agents", "show", "cli").stdout
    assert rewake("agents", "forget", "cli").returncode == 0
    gone = rewake("agents", "show", "cli")
    assert gone.returncode == 1 and "no agent 'cli'" in gone.stderr


def test_the_readmes_example_runs(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0].replace(":8000", f":{server.port}")
    names: dict[str, Any] = {}
    exec(code, names)
    names["client"].close()
    assert "'agent': 'ada'" in capsys.readouterr().out


def test_files_have_no_paths_from_ids(server: ServerProcess) -> None:
    allowed = {"manifest.sqlite", "manifest.sqlite-wal", "manifest.sqlite-shm", "lock", "pages", "segments", "quarantine"}
    assert {p.name for p in Path(server.data).iterdir()} <= allowed
