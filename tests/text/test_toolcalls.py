"""P4: tool calls come back with other spaces and another order of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rewake.errors import InvalidRequest
from rewake.text.tokenizer import Tokenizer
from rewake.text.toolcalls import parse_arguments
from rewake.text.transcripts import Transcripts
from tests.templates import HERMES, with_template

HI: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "c1"}


@pytest.fixture(scope="module")
def hermes(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(with_template(model_path, HERMES, tmp_path_factory.mktemp("hermes") / "model"))


def calling(arguments: str, content: str = "") -> dict[str, Any]:
    function = {"name": "weather", "arguments": parse_arguments(arguments)}
    return {"role": "assistant", "content": content, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{"name": "weather", "arguments": {"town": "Rome", "days": 2}}', '{"days":2,"town":"Rome"}'),
        ('{"arguments": {"town": "Rome", "days": 2}, "name": "weather"}', '{"town": "Rome",\n"days": 2}'),
        ('{"name":"weather","arguments":{"where":{"z":1,"a":[1, 2]}}}', '{"where": {"a": [1,2], "z": 1}}'),
        ('{"name": "weather", "arguments": {"town": "K\\u00f6ln"}}', '{"town": "Köln"}'),
    ],
)
@pytest.mark.parametrize("said", ["", "I shall look it up."])
def test_a_call_the_model_wrote_keeps_its_ids_whatever_the_order_of_its_keys(hermes: Tokenizer, written: str, sent: str, said: str) -> None:
    transcripts = Transcripts(hermes)
    generated = hermes.encode((f"{said}\n" if said else "") + f"<tool_call>\n{written}\n</tool_call>")
    stored = [*transcripts.encode("ns", "a", hermes.render(HI)), *generated]
    transcripts.learn("ns", "a", [stored])
    text = hermes.render([*HI, calling(sent, said), RESULT])
    assert hermes.decode(stored) not in text, "it is written another way"
    assert transcripts.encode("ns", "a", text)[: len(stored)] == stored


@pytest.mark.parametrize("sent", ['{"town": "Rom"}', '{"town": "Rome", "days": 2}', '{"days": 1}'])
def test_a_call_that_says_something_else_is_something_else(hermes: Tokenizer, sent: str) -> None:
    transcripts = Transcripts(hermes)
    stored = [
        *hermes.encode(hermes.render(HI)),
        *hermes.encode('<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'),
    ]
    transcripts.learn("ns", "a", [stored])
    text = hermes.render([*HI, calling(sent), RESULT])
    ids = transcripts.encode("ns", "a", text)
    assert ids[: len(stored)] != stored and hermes.decode(ids) == text


def test_what_a_user_writes_is_taken_as_it_is(hermes: Tokenizer) -> None:
    """Order and spacing may be what a user asks about."""
    transcripts = Transcripts(hermes)
    one, other = (
        hermes.render([{"role": "user", "content": f"<tool_call>{j}</tool_call>"}]) for j in ('{"a": 1, "b": 2}', '{"b":2,"a":1}')
    )
    transcripts.learn("ns", "a", [hermes.encode(one)])
    assert transcripts.encode("ns", "a", other) == hermes.encode(other)


def test_calls_in_a_history_are_rendered_in_one_way(hermes: Tokenizer) -> None:
    texts = {hermes.render([*HI, calling(a), RESULT]) for a in ('{"b": 1, "a": {"d": 2, "c": 3}}', '{"a":{"c":3,"d":2},"b":1}')}
    (text,) = texts
    assert '{"name": "weather", "arguments": {"a": {"c": 3, "d": 2}, "b": 1}}' in text and "sunny" in text


def test_templates_that_want_arguments_as_text_get_text(model_path: Path, tmp_path: Path) -> None:
    template = HERMES.replace("(call.function.arguments | tojson)", "call.function.arguments")
    tokenizer = Tokenizer(with_template(model_path, template, tmp_path / "model"))
    assert '"arguments": {"a": 1, "b": 2}}' in tokenizer.render([*HI, calling('{"b":2,"a":1}'), RESULT])


@pytest.mark.parametrize("message", [calling("{}"), RESULT])
def test_a_template_without_tool_calls_refuses_them_by_name(model_path: Path, message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="knows no tool calls") as caught:
        Tokenizer(model_path).render([*HI, message])
    assert caught.value.param in ("messages.1.tool_calls", "messages.1.role")


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"a": NaN}', '{"a": 1e999}', '{"a":' * 100_000, "{'a': 1}", "9" * 5000])
def test_arguments_are_a_json_object(text: str) -> None:
    with pytest.raises(ValueError):
        parse_arguments(text)
