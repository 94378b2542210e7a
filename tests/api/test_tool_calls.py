"""Tools over OpenAI's protocol, on real weights behind a template that has tools: the model is small, so it is told when to call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import openai_client
from tests.server import ServerProcess
from tests.templates import THINKING, with_template

ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["town", "unit"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "The weather of a town.", "parameters": PARAMETERS}}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": EMPTY}}


def ask(client: openai.OpenAI, messages: list[Any] = ASKED, **fields: Any) -> Any:
    defaults = {"model": "hermes", "max_tokens": 80, "temperature": 0, "tools": [WEATHER, CLOCK]}
    return client.chat.completions.create(messages=messages, **{**defaults, **fields})


def check_weather(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    assert call.type == "function" and call.id and call.function.name == "weather"
    assert isinstance(arguments["town"], str) and arguments["unit"] in ("C", "F") and len(arguments) == 2


def test_a_call_is_made_answered_and_gone_on_from(tool_client: openai.OpenAI) -> None:
    """A9: null content and all; and the whole loop extends what is remembered."""
    agent = {"agent_id": "caller"}
    first = ask(tool_client, tool_choice="required", parallel_tool_calls=False, extra_body=agent)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.content is None
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}
    after = ask(tool_client, [*ASKED, message, result], extra_body=agent)
    assert after.rewake["match"] == "extend" and after.rewake["computed_tokens"] < 60


def test_a_named_tool_is_called(tool_client: openai.OpenAI) -> None:
    (call,) = ask(tool_client, tool_choice={"type": "function", "function": {"name": "weather"}}).choices[0].message.tool_calls
    check_weather(call)
    (call,) = ask(tool_client, tool_choice={"type": "function", "function": {"name": "clock"}}).choices[0].message.tool_calls
    assert call.function.name == "clock" and json.loads(call.function.arguments) == {}


def test_streamed_calls_are_the_same(tool_client: openai.OpenAI) -> None:
    named = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    whole = ask(tool_client, **named).choices[0].message.tool_calls[0]
    chunks = list(ask(tool_client, **named, stream=True))
    (call,) = [call for c in chunks for call in c.choices[0].delta.tool_calls or []]
    check_weather(call)
    assert call.index == 0 and call.function.arguments == whole.function.arguments
    assert not any(c.choices[0].delta.content for c in chunks) and chunks[-1].choices[0].finish_reason == "tool_calls"


def test_none_means_none(tool_client: openai.OpenAI) -> None:
    """And the tools stay in the prompt, so that what is remembered still matches."""
    agent = {"agent_id": "nobody's tool"}
    ask(tool_client, tool_choice="required", extra_body=agent)
    answer = ask(tool_client, tool_choice="none", extra_body=agent)
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].message.content
    assert answer.rewake["match"] == "exact"


def test_auto_may_answer_in_words(tool_client: openai.OpenAI) -> None:
    message = ask(tool_client, [{"role": "user", "content": "Say hello."}]).choices[0].message
    assert message.content or message.tool_calls


def test_strict_tools_are_kept_to(tool_client: openai.OpenAI) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    message = (
        ask(tool_client, tools=[strict], tool_choice="required", temperature=1.5, seed=2, parallel_tool_calls=False).choices[0].message
    )
    for call in message.tool_calls or []:
        check_weather(call)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "objekt"}}}]},
            "tools.0.function.parameters",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(tool_client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(tool_client, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize("depth", [100, 400, 900, 3000])
def test_what_is_nested_deeply_breaks_nothing(tooled: ServerProcess, depth: int) -> None:
    nested = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
    for field in ('"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}], "tool_choice": "required"',
                  '"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": %s}}'):  # fmt: skip
        body = '{"model": "hermes", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], ' + field % nested + "}"
        response = tooled.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), response.text
    assert tooled.http.get("/health").is_success


def test_a_model_without_tools_says_so(chat_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="has no tools") as caught:
        ask(chat_client, model="smollm2-135m")
    assert caught.value.param == "tools"


def test_thoughts_are_split_off(model_path: Path, tmp_path: Path) -> None:
    """The template opens them; a grammar makes the model close them, and say something else."""
    model = with_template(model_path, THINKING, tmp_path / "thinker")
    with (
        ServerProcess(tmp_path / "data", "--model", str(model), "--context", "1024", "--memory", "100MiB") as server,
        openai_client(server) as client,
    ):
        words = [{"role": "user", "content": "Think."}]
        thought = client.chat.completions.create(model="thinker", messages=words, max_tokens=20, temperature=0)  # type: ignore[arg-type]
        assert thought.choices[0].message.content == "" and thought.choices[0].message.reasoning_content  # type: ignore[attr-defined]
        body = {"messages": [*words, {"role": "assistant", "content": "A", "reasoning_content": "B"}, *words]}
        assert server.http.post("/v1/chat/completions", json={"model": "thinker", "max_tokens": 1, **body}).is_success
        form: Any = {"type": "json_object"}
        chunks = client.chat.completions.create(
            model="thinker",
            messages=words,
            max_tokens=20,
            stream=True,
            response_format=form,
            logit_bias={"0": -100},  # type: ignore[arg-type]
        )
        parts = [chunk.choices[0].delta for chunk in chunks]
        assert any(getattr(part, "reasoning_content", None) for part in parts)
