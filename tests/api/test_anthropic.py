"""Anthropic's protocol, through its official client and raw HTTP, on real weights."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from rewake.models import DEFAULT_MODEL
from tests.server import ServerProcess

HELLO: list[Any] = [{"role": "user", "content": "Say hello."}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a town.",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 20}},
        "required": ["town"],
        "additionalProperties": False,
    },
}


def ask(client: anthropic.Anthropic, messages: list[Any] = HELLO, **fields: Any) -> Any:
    sampling = {"temperature": 0, **fields.pop("extra_body", {})}  # newer clients have no parameter for it
    return client.messages.create(messages=messages, extra_body=sampling, **{"model": DEFAULT_MODEL, "max_tokens": 12, **fields})


def test_a_message_and_its_usage(claude: anthropic.Anthropic) -> None:
    header = {"X-Agent-ID": "claude"}
    answer = ask(claude, extra_headers=header)
    (block,) = answer.content
    assert answer.type == "message" and answer.role == "assistant" and block.type == "text" and block.text
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.rewake["agent"] == "claude"
    again = ask(claude, extra_headers=header)
    assert again.content == answer.content and again.usage.input_tokens == 1
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == again.rewake["prompt_tokens"]


def test_a_stream_has_the_events_in_order(claude: anthropic.Anthropic, live: ServerProcess) -> None:
    body = {"model": DEFAULT_MODEL, "max_tokens": 12, "temperature": 0, "messages": HELLO, "stream": True}
    lines = live.http.post("/v1/messages", json=body).text.splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in data]
    told = [name for name in names if name != "ping"]
    assert told[:2] == ["message_start", "content_block_start"] and set(told[2:-3]) == {"content_block_delta"}
    assert told[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with claude.messages.stream(model=DEFAULT_MODEL, max_tokens=12, messages=HELLO, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = ask(claude)
    assert text == final.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == whole.rewake["prompt_tokens"]


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic) -> None:
    text = ask(claude, max_tokens=30).content[0].text
    answer = ask(claude, max_tokens=30, stop_sequences=["never", text[4:8]])
    assert answer.content[0].text == text[: text.index(text[4:8])]
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == text[4:8]


def test_system_blocks_cache_control_and_content_blocks(claude: anthropic.Anthropic) -> None:
    cached = {"type": "ephemeral"}
    system = [{"type": "text", "text": "Be brief.", "cache_control": cached}, {"type": "text", "text": "Be kind."}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hello.", "cache_control": cached}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi."}]},
        *HELLO,
    ]
    assert ask(
        claude, messages, system=system, metadata={"user_id": "u"}, extra_body={"top_k": 3, "top_p": 0.9, "temperature": 0.5}
    ).content
    plain = ask(
        claude, [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}, *HELLO], system="Be brief.\nBe kind."
    )
    counted = claude.messages.count_tokens(model=DEFAULT_MODEL, messages=messages, system=system)  # type: ignore[arg-type]
    assert counted.input_tokens == plain.rewake["prompt_tokens"]


def test_the_beginning_of_an_answer_can_be_given(claude: anthropic.Anthropic) -> None:
    begun = ask(claude, [*HELLO, {"role": "assistant", "content": "The word is: "}])
    assert begun.content[0].text
    assert begun.rewake["prompt_tokens"] > ask(claude).rewake["prompt_tokens"]


def test_an_answer_has_the_form_that_was_asked_for(claude: anthropic.Anthropic) -> None:
    schema = WEATHER["input_schema"]
    answer = ask(claude, max_tokens=60, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert set(json.loads(answer.content[0].text)) == {"town"} and answer.stop_reason == "end_turn"


def test_tools_are_used_and_their_results_taken(tool_claude: anthropic.Anthropic) -> None:
    """And the loop extends what is remembered."""
    fields: dict[str, Any] = {"model": "hermes", "tools": [WEATHER], "max_tokens": 60, "extra_headers": {"X-Agent-ID": "user"}}
    asked = [{"role": "user", "content": "Weather in Rome?"}]
    answer = ask(tool_claude, asked, tool_choice={"type": "tool", "name": "weather"}, **fields)
    (block,) = answer.content
    assert answer.stop_reason == "tool_use" and block.type == "tool_use" and isinstance(block.input["town"], str)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "Sunny."}]}
    history = [*asked, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    after = ask(tool_claude, history, **fields)
    assert after.rewake["match"] == "extend"
    assert ask(tool_claude, [*history[:2], {"role": "user", "content": [{**result, "is_error": True}]}], **fields).content
    with tool_claude.messages.stream(
        model="hermes",
        max_tokens=60,
        messages=asked,
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body={"temperature": 0},  # type: ignore[arg-type]
    ) as stream:
        final = stream.get_final_message()
    used = [b for b in final.content if b.type == "tool_use"]
    assert final.stop_reason == "tool_use" and used and isinstance(used[0].input["town"], str)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"surprise": 1}, "surprise"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "id": "y"}]}]}, "messages.0.content.0.id"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": "half \ud83d"}]}, "messages.0"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [WEATHER]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}}, "output_config.format.schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"stop_sequences": [""]}, "stop_sequences.0"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"agent_id": ".."}, "agent_id"),
    ],
)
def test_errors_have_their_own_form_and_name_the_field(live: ServerProcess, change: dict[str, Any], param: str) -> None:
    body = {"model": DEFAULT_MODEL, "max_tokens": 4, "messages": HELLO, **change}
    response = live.http.post("/v1/messages", content=json.dumps(body), headers={"content-type": "application/json"})
    told = response.json()
    assert response.status_code == 400 and set(told) == {"type", "error"} and told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error" and told["error"]["message"].startswith(param)


def test_other_errors_are_the_clients_own(claude: anthropic.Anthropic, live: ServerProcess) -> None:
    with pytest.raises(anthropic.NotFoundError, match="this server runs"):
        ask(claude, model="claude-x")
    assert live.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    garbled = live.http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert garbled.status_code == 400 and garbled.json()["type"] == "error"
