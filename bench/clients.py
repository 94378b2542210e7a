"""Which client can do what: a matrix of client x feature, each cell tried against live servers.

Clients are the official ones of OpenAI and Anthropic, as people use them (whole, streamed, async), and raw HTTP. Two servers run: the
default model, and the same weights behind a template that has tools. A cell passes if what came back is what was asked for;
nothing is measured. Features that a protocol does not have are empty.

    python -m bench.clients [--check] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from bench.common import Bar, finish, flags, table
from rewake.models import DEFAULT_MODEL, resolve
from tests.server import ServerProcess
from tests.templates import HERMES, with_template

TOOLED = "hermes"
HELLO = [{"role": "user", "content": "Tell me about the sea in two sentences."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOWN = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 16}},
    "required": ["town"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather of a town.", "parameters": TOWN}}
NAMED = {"type": "function", "function": {"name": "weather"}}
STRANGE = "👩‍👩‍👧‍👦 中文 עברית é"


@dataclass
class Told:
    """What came back, whatever the client and the protocol."""

    text: str = ""
    finish: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    calls: list[tuple[str, Any]] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # the texts of further choices
    report: dict[str, Any] = field(default_factory=dict)


Ask = Callable[..., Told]  # fields of a chat completion; `agent`


# ---- OpenAI's protocol


def defaults(fields: dict[str, Any]) -> dict[str, Any]:
    extra = {"agent_id": fields.pop("agent")} if "agent" in fields else {}
    model = TOOLED if "tools" in fields else DEFAULT_MODEL
    return {"model": model, "messages": HELLO, "max_tokens": 32, "temperature": 0, "extra_body": extra, **fields}


def of_completion(answer: Any) -> Told:
    first = answer.choices[0]
    told = Told(first.message.content or "", first.finish_reason, others=[c.message.content for c in answer.choices[1:]])
    for call in first.message.tool_calls or []:
        told.calls.append((call.function.name, json.loads(call.function.arguments)))
        told.call_ids.append(call.id)
    told.logprobs = first.logprobs.content if first.logprobs else []
    add_usage(told, answer)
    return told


def add_usage(told: Told, answer: Any) -> None:
    usage = answer.usage
    told.prompt_tokens, told.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    told.cached_tokens = usage.prompt_tokens_details.cached_tokens
    assert usage.total_tokens == told.prompt_tokens + told.completion_tokens
    told.report = answer.rewake


def add_chunk(told: Told, chunk: Any) -> None:
    if chunk.usage:
        add_usage(told, chunk)
    for choice in chunk.choices:
        if choice.index:
            told.others += [""] * (choice.index - len(told.others))
            told.others[choice.index - 1] += choice.delta.content or ""
            continue
        assert "\N{REPLACEMENT CHARACTER}" not in (choice.delta.content or "")
        told.text += choice.delta.content or ""
        told.finish = choice.finish_reason or told.finish
        told.logprobs += choice.logprobs.content if choice.logprobs else []
        for call in choice.delta.tool_calls or []:
            told.calls.append((call.function.name, json.loads(call.function.arguments)))
            told.call_ids.append(call.id)


def whole(clients: dict[str, openai.OpenAI]) -> Ask:
    def ask(**fields: Any) -> Told:
        filled = defaults(fields)
        return of_completion(clients[filled["model"]].chat.completions.create(**filled))

    return ask


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def streamed(clients: dict[str, openai.OpenAI]) -> Ask:
    def ask(**fields: Any) -> Told:
        filled, told = defaults(fields), Told()
        for chunk in clients[filled["model"]].chat.completions.create(**filled, **STREAMED):
            add_chunk(told, chunk)
        return told

    return ask


def asynchronous(ports: dict[str, int]) -> Ask:
    def ask(**fields: Any) -> Told:
        filled, told = defaults(fields), Told()

        async def run() -> None:
            url = f"http://127.0.0.1:{ports[filled['model']]}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                async for chunk in await client.chat.completions.create(**filled, **STREAMED):
                    add_chunk(told, chunk)

        asyncio.run(run())
        return told

    return ask


def raw(ports: dict[str, int]) -> Ask:
    """Plain HTTP, read byte by byte."""

    def ask(**fields: Any) -> Told:
        filled = defaults(fields)
        body = {**filled.pop("extra_body"), **filled, **STREAMED}
        told, received = Told(), b""
        with httpx.stream("POST", f"http://127.0.0.1:{ports[filled['model']]}/v1/chat/completions", json=body, timeout=120) as response:
            for chunk in response.iter_raw(1):
                received += chunk
        if response.is_error:
            raise RuntimeError(received.decode())
        lines = received.decode().split("\n")
        assert lines[-3:] == ["data: [DONE]", "", ""], "the stream ends as it should"
        for line in lines:
            if line.startswith("data: {"):
                add_chunk(told, openai.types.chat.ChatCompletionChunk.model_validate(json.loads(line[6:])))
        return told

    return ask


# ---- Anthropic's


def of_message(message: Any, report: dict[str, Any]) -> Told:
    told = Told("".join(b.text for b in message.content if b.type == "text"), message.stop_reason)
    told.calls = [(b.name, b.input) for b in message.content if b.type == "tool_use"]
    told.call_ids = [b.id for b in message.content if b.type == "tool_use"]
    told.cached_tokens = message.usage.cache_read_input_tokens or 0
    told.prompt_tokens = message.usage.input_tokens + told.cached_tokens
    told.completion_tokens, told.report = message.usage.output_tokens, report
    return told


def as_message(fields: dict[str, Any]) -> dict[str, Any]:
    header = {"extra_headers": {"X-Agent-ID": fields.pop("agent")}} if "agent" in fields else {}
    model = TOOLED if "tools" in fields else DEFAULT_MODEL
    # newer clients have no parameter for the temperature
    return {"model": model, "messages": HELLO, "max_tokens": 32, "extra_body": {"temperature": 0}, **header, **fields}


def message(clients: dict[str, anthropic.Anthropic]) -> Ask:
    def ask(**fields: Any) -> Told:
        filled = as_message(fields)
        answer: Any = clients[filled["model"]].messages.create(**filled)
        return of_message(answer, answer.rewake)

    return ask


def message_stream(clients: dict[str, anthropic.Anthropic]) -> Ask:
    def ask(**fields: Any) -> Told:
        filled, report = as_message(fields), {}
        with clients[filled["model"]].messages.stream(**filled) as stream:
            for event in stream:
                if event.type == "message_delta":
                    report = event.rewake  # type: ignore[union-attr]
            return of_message(stream.get_final_message(), report)

    return ask


# ---- features


def answers(ask: Ask) -> None:
    told = ask(agent="matrix")
    assert told.text and told.finish and told.prompt_tokens > 10 and told.completion_tokens > 1


def remembers(ask: Ask) -> None:
    agent = f"matrix {id(ask)}"
    first = ask(agent=agent)
    history = [*HELLO, {"role": "assistant", "content": first.text}, {"role": "user", "content": f"Go on, {agent}."}]
    told = ask(messages=history, agent=agent)
    assert told.report["match"] == "extend" and told.cached_tokens > first.prompt_tokens


def repeats(ask: Ask) -> None:
    assert ask().text == ask().text


def limits(ask: Ask, key: str = "max_tokens") -> None:
    told = ask(**({"max_tokens": 3} if key == "max_tokens" else {"max_tokens": openai.NOT_GIVEN, key: 3}))
    assert told.completion_tokens == 3 and told.finish in ("length", "max_tokens")


def stops(ask: Ask, key: str = "stop") -> None:
    text = ask().text
    stop = text[17:26]
    told = ask(**{key: [stop, "never said"]})
    assert told.text == text[: text.index(stop)] and told.finish in ("stop", "stop_sequence")


def chooses(ask: Ask) -> None:
    told = ask(n=3, temperature=1.2, seed=1)
    assert len({told.text, *told.others}) == 3


def seeds(ask: Ask) -> None:
    assert ask(temperature=1.2, seed=7).text == ask(temperature=1.2, seed=7).text != ask(temperature=1.2, seed=8).text


def reports_logprobs(ask: Ask) -> None:
    told = ask(logprobs=True, top_logprobs=2)
    assert b"".join(bytes(t.bytes) for t in told.logprobs).decode() == told.text
    assert all(len(t.top_logprobs) == 2 and t.logprob <= 0 for t in told.logprobs)


def biases(ask: Ask) -> None:
    text = ask(logit_bias={"1000": 100}, max_tokens=4).text
    assert text == text[: len(text) // 4] * 4


def penalises(ask: Ask) -> None:
    again = [{"role": "user", "content": "Repeat the word apple forever: apple apple apple"}]
    free, bound = (ask(messages=again, max_tokens=60, **f).text.split() for f in ({}, {"presence_penalty": 2, "frequency_penalty": 2}))
    assert len(bound) - len(set(bound)) < len(free) - len(set(free))


def forms(ask: Ask) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    told = ask(response_format=schema, max_tokens=200)
    assert set(json.loads(told.text)) == {"name", "age"} and told.finish == "stop"


def writes_json(ask: Ask) -> None:
    told = ask(response_format={"type": "json_object"}, max_tokens=200)
    assert told.finish == "length" or isinstance(json.loads(told.text), dict)


def writes_all_scripts(ask: Ask) -> None:
    schema = {"type": "object", "properties": {"t": {"const": STRANGE}}, "required": ["t"], "additionalProperties": False}
    told = ask(response_format={"type": "json_schema", "json_schema": {"name": "t", "schema": schema}}, max_tokens=100)
    assert told.text == json.dumps({"t": STRANGE}, ensure_ascii=False)


def calls(ask: Ask) -> None:
    told = ask(tools=[WEATHER], tool_choice=NAMED)
    ((name, arguments),) = told.calls
    assert name == "weather" and isinstance(arguments["town"], str) and told.finish == "tool_calls" and not told.text


def must_call(ask: Ask) -> None:
    told = ask(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=60)
    assert len(told.calls) == 1


def must_not_call(ask: Ask) -> None:
    assert not ask(tools=[WEATHER], tool_choice="none").calls


def takes_results(ask: Ask) -> None:
    told = ask(tools=[WEATHER], tool_choice=NAMED, agent=f"tool user {id(ask)}")
    function = {"name": "weather", "arguments": json.dumps(told.calls[0][1])}
    asked = {"role": "assistant", "content": None, "tool_calls": [{"id": told.call_ids[0], "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": told.call_ids[0], "content": f"Sunny. {id(ask)}"}
    assert ask(messages=[*HELLO, asked, result], tools=[WEATHER], agent=f"tool user {id(ask)}").report["match"] == "extend"


def takes_parts(ask: Ask) -> None:
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
    assert ask(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]).text


def forms_output(ask: Ask) -> None:
    told = ask(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, max_tokens=200)
    assert set(json.loads(told.text)) == {"name", "age"} and told.finish == "end_turn"


def takes_blocks(ask: Ask) -> None:
    text = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    assert ask(system=[text], messages=[{"role": "user", "content": [{"type": "text", "text": "Hello."}]}]).text


def uses(ask: Ask) -> None:
    tool = {"name": "weather", "description": "The weather of a town.", "input_schema": TOWN}
    told = ask(tools=[tool], tool_choice={"type": "tool", "name": "weather"}, agent=f"matrix tool {id(ask)}")
    assert told.finish == "tool_use" and isinstance(told.calls[0][1]["town"], str)
    used = {"type": "tool_use", "id": told.call_ids[0], "name": "weather", "input": told.calls[0][1]}
    result = {"type": "tool_result", "tool_use_id": told.call_ids[0], "content": f"Sunny. {id(ask)}"}
    history = [*HELLO, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    assert ask(messages=history, tools=[tool], agent=f"matrix tool {id(ask)}").report["match"] == "extend"


def refuses(ask: Ask) -> None:
    """What cannot be done, by name and before any work."""
    for fields, words in (({"tools": [WEATHER], "model": DEFAULT_MODEL}, "tools"), ({"max_tokens": 100_000}, "context")):
        try:
            ask(**fields)
        except (openai.BadRequestError, anthropic.BadRequestError, RuntimeError) as error:
            assert words in str(error)
        else:
            raise AssertionError(f"{fields} was not refused")


def refuses_length(ask: Ask) -> None:
    try:
        ask(messages=[{"role": "user", "content": "word " * 5000}])
    except anthropic.BadRequestError as error:
        assert "tokens" in str(error)
    else:
        raise AssertionError("it was not refused")


SHARED = {"answer, usage": answers, "next turn extends": remembers, "same again": repeats, "max_tokens": limits, "refusals": refuses}
OPENAI = {
    **SHARED,
    "max_completion_tokens": lambda ask: limits(ask, "max_completion_tokens"),
    "stop": stops,
    "n": chooses,
    "seed": seeds,
    "logprobs": reports_logprobs,
    "logit_bias": biases,
    "penalties": penalises,
    "json_schema": forms,
    "json_object": writes_json,
    "all scripts": writes_all_scripts,
    "tools: named": calls,
    "tools: required": must_call,
    "tools: none": must_not_call,
    "tools: results": takes_results,
    "parts, developer": takes_parts,
}
ANTHROPIC = {
    **SHARED,
    "refusals": refuses_length,
    "stop": lambda ask: stops(ask, "stop_sequences"),
    "json_schema": forms_output,
    "tools: results": uses,
    "system, blocks": takes_blocks,
}


@contextmanager
def servers() -> Iterator[dict[str, int]]:
    """Ports by model."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        model = with_template(resolve(DEFAULT_MODEL), HERMES, folder / TOOLED)
        common = ("--context", "2048", "--memory", "200MiB")
        plain = stack.enter_context(ServerProcess(folder / "plain", *common))
        tooled = stack.enter_context(ServerProcess(folder / "tooled", "--model", str(model), *common))
        yield {DEFAULT_MODEL: plain.port, TOOLED: tooled.port}


def clients(ports: dict[str, int]) -> dict[str, tuple[Ask, dict[str, Callable[[Ask], None]]]]:
    fields: dict[str, Any] = {"api_key": "none", "max_retries": 0}
    chat = {model: openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", **fields) for model, port in ports.items()}
    claude = {model: anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", **fields) for model, port in ports.items()}
    return {
        "openai": (whole(chat), OPENAI),
        "openai stream": (streamed(chat), OPENAI),
        "openai async": (asynchronous(ports), OPENAI),
        "raw http": (raw(ports), {name: f for name, f in OPENAI.items() if name != "max_completion_tokens"}),
        "anthropic": (message(claude), ANTHROPIC),
        "anthropic stream": (message_stream(claude), ANTHROPIC),
    }


def tried(feature: Callable[[Ask], None], ask: Ask) -> bool:
    try:
        feature(ask)
    except Exception:  # noqa: BLE001 (whatever a client raises, the cell has failed)
        traceback.print_exc(file=sys.stderr)
        return False
    return True


def main() -> int:
    args = flags(__doc__).parse_args()
    with servers() as ports:
        found = {client: {name: tried(f, ask) for name, f in features.items()} for client, (ask, features) in clients(ports).items()}
    names = list(dict.fromkeys(name for cells in found.values() for name in cells))
    shown = {True: "pass", False: "FAIL", None: ""}
    rows = [{"feature": name, **{client: shown[cells.get(name)] for client, cells in found.items()}} for name in names]
    table(rows)
    bars = [Bar(client, name, float(ok), 1) for client, cells in found.items() for name, ok in cells.items()]
    return finish("clients", rows, bars, args)


if __name__ == "__main__":
    sys.exit(main())
