"""What can be asked of an answer: its form, its end, its choices and its probabilities; through the official client, on real weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest

from rewake.models import DEFAULT_MODEL
from rewake.text.tokenizer import Tokenizer
from tests.server import ServerProcess

HELLO: list[Any] = [{"role": "user", "content": "Tell me about the sea in three sentences."}]
STRANGE = "👩‍👩‍👧‍👦 中文, עברית, é, \U0001f1eb\U0001f1f7 <|im|> <|x|>   z"


def ask(client: openai.OpenAI, messages: list[Any] = HELLO, **fields: Any) -> Any:
    return client.chat.completions.create(model=DEFAULT_MODEL, messages=messages, **{"max_tokens": 40, "temperature": 0, **fields})


def streamed(client: openai.OpenAI, messages: list[Any] = HELLO, **fields: Any) -> tuple[str, list[Any]]:
    chunks = list(ask(client, messages, stream=True, **fields))
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks


@pytest.fixture(scope="module")
def story(chat_client: openai.OpenAI) -> str:
    """What the model says if nothing stops it."""
    text: str = ask(chat_client).choices[0].message.content
    assert len(text) > 65  # what is cut out of it lies before
    return text


@pytest.mark.parametrize(("start", "length"), [(0, 5), (10, 1), (11, 9), (37, 20), (60, 3)])
def test_a_stop_string_cuts_exactly(chat_client: openai.OpenAI, story: str, start: int, length: int) -> None:
    """A2: wherever tokens and chunks end, and streamed or not."""
    stop = story[start : start + length]
    cut = story[: story.index(stop)]
    answer = ask(chat_client, stop=stop)
    assert answer.choices[0].message.content == cut and answer.choices[0].finish_reason == "stop"
    text, chunks = streamed(chat_client, stop=[stop, "never said"])
    assert text == cut and chunks[-1].choices[0].finish_reason == "stop"


def test_of_several_stop_strings_the_first_that_is_complete_wins(chat_client: openai.OpenAI, story: str) -> None:
    """A2."""
    assert ask(chat_client, stop=[story[20:50], story[30:33]]).choices[0].message.content == story[: story.index(story[30:33])]
    assert ask(chat_client, stop=[story[20:26], story[20:30]]).choices[0].message.content == story[: story.index(story[20:26])]


def test_a_stop_string_in_the_prompt_does_not_count(chat_client: openai.OpenAI, story: str) -> None:
    """A2: neither does one that is begun and not finished."""
    messages = [{"role": "user", "content": "Say: three sentences"}]
    free = ask(chat_client, messages, max_tokens=10).choices[0].message.content
    assert ask(chat_client, messages, max_tokens=10, stop="Say: three sentences\n").choices[0].message.content == free
    assert ask(chat_client, stop=story[-8:] + "!").choices[0].message.content == story


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_stopped_is_remembered_up_to_there(chat_client: openai.OpenAI, story: str, stream: bool) -> None:
    """R3, A2: the tokens of the stop string are not part of the transcript, so the next turn extends it."""
    agent = {"agent_id": f"stopped {stream}"}
    cut = story[:45]
    stop = story[45:53]
    assert stop not in cut
    if stream:
        assert streamed(chat_client, stop=stop, extra_body=agent)[0] == cut
    else:
        assert ask(chat_client, stop=stop, extra_body=agent).choices[0].message.content == cut
    history = [*HELLO, {"role": "assistant", "content": cut}, {"role": "user", "content": f"Go on, {stream}."}]
    report = ask(chat_client, history, extra_body=agent, max_tokens=2).rewake
    assert report["match"] == "extend" and report["computed_tokens"] < 20
    assert report["prompt_tokens"] - report["computed_tokens"] > len(story) // 10


def test_of_several_answers_the_first_is_remembered(chat_client: openai.OpenAI) -> None:
    agent = {"agent_id": "several"}
    answer = ask(chat_client, n=3, temperature=1.3, seed=5, extra_body=agent)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert answer.usage.prompt_tokens == answer.rewake["prompt_tokens"] and answer.usage.completion_tokens > 40
    for number, text in enumerate(texts):
        alone = ask(chat_client, temperature=1.3, seed=5 + number).choices[0].message.content
        assert alone == text, "a seed gives the same answer in any company"
    history = [*HELLO, {"role": "assistant", "content": texts[0]}, {"role": "user", "content": "And?"}]
    assert ask(chat_client, history, max_tokens=1, extra_body=agent).rewake["match"] == "extend"


def test_several_answers_stream_side_by_side(chat_client: openai.OpenAI) -> None:
    texts, ended = ["", ""], []
    for chunk in ask(chat_client, n=2, temperature=1.3, seed=5, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ended += [choice.index] if choice.finish_reason else []
    assert texts == [c.message.content for c in ask(chat_client, n=2, temperature=1.3, seed=5).choices]
    assert sorted(ended) == [0, 1] and chunk.usage.completion_tokens > 20


def test_logprobs_are_the_models(chat_client: openai.OpenAI, story: str) -> None:
    """The greedy token is the likeliest, its bytes add up to the text, and a bias or a penalty changes none of it."""
    answer = ask(chat_client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(t.bytes) for t in content).decode() == story
    for token in content:
        assert token.logprob == token.top_logprobs[0].logprob <= 0 and len(token.top_logprobs) == 3
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1.001
    _, chunks = streamed(chat_client, logprobs=True, top_logprobs=3)
    pieces = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in pieces] == [t.token for t in content]
    stopped = ask(chat_client, logprobs=True, stop=story[45:53]).choices[0]
    assert story[:45].startswith(b"".join(bytes(t.bytes) for t in stopped.logprobs.content).decode())
    assert stopped.logprobs.content[0].top_logprobs == []


def test_a_bias_bans_and_prefers_tokens(chat_client: openai.OpenAI, model_path: Path) -> None:
    tokenizer = Tokenizer(model_path)
    first = ask(chat_client, max_tokens=1, logprobs=True, top_logprobs=2).choices[0].logprobs.content[0]
    best, second = (t.token for t in first.top_logprobs)
    (banned,) = tokenizer.encode(best)
    assert ask(chat_client, max_tokens=1, logit_bias={str(banned): -100}).choices[0].message.content == second
    assert ask(chat_client, max_tokens=3, logit_bias={"1000": 100}).choices[0].message.content == tokenizer.decode([1000] * 3)
    for wrong in ({"49152": 1}, {"-1": 1}, {"x": 1}, {"5": 101}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(chat_client, logit_bias=wrong)
        assert caught.value.param == "logit_bias"


def test_penalties_stop_repetition(chat_client: openai.OpenAI) -> None:
    def repeats(**fields: float) -> int:
        words = complete(chat_client, "apple " * 30, max_tokens=60, **fields).choices[0].text.split()
        return len(words) - len(set(words))

    assert repeats(presence_penalty=2.0, frequency_penalty=2.0) < repeats()


@pytest.mark.parametrize("stream", [False, True])
def test_text_of_all_scripts_arrives_whole(chat_client: openai.OpenAI, stream: bool) -> None:
    """A1, A3: the model is made to say it, token by token."""
    schema = {"type": "object", "properties": {"t": {"const": STRANGE}}, "required": ["t"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "strange", "schema": schema, "strict": True}}
    if stream:
        text, chunks = streamed(chat_client, response_format=form, max_tokens=200)
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert len(pieces) > 20 and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    else:
        text = ask(chat_client, response_format=form, max_tokens=200).choices[0].message.content
    assert json.loads(text) == {"t": STRANGE}
    assert STRANGE in text


def test_whitespace_is_exact(chat_client: openai.OpenAI) -> None:
    """A3: what is streamed adds up to what is whole, and extends when it is sent back."""
    messages = [{"role": "user", "content": "Write a Python class with two deeply indented methods."}]
    whole = ask(chat_client, messages, max_tokens=120, extra_body={"agent_id": "coder"})
    text, _ = streamed(chat_client, messages, max_tokens=120)
    assert text == whole.choices[0].message.content and "\n    " in text
    history = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Thanks."}]
    assert ask(chat_client, history, max_tokens=1, extra_body={"agent_id": "coder"}).rewake["match"] == "extend"


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_has_the_form_that_was_asked_for(chat_client: openai.OpenAI, temperature: float) -> None:
    """And ends by itself: then the next turn extends it."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    agent = {"agent_id": f"former {temperature}"}
    answer = ask(chat_client, response_format=form, max_tokens=300, temperature=temperature, seed=3, extra_body=agent)
    text = answer.choices[0].message.content
    person = json.loads(text)
    assert answer.choices[0].finish_reason == "stop" and isinstance(person["name"], str) and isinstance(person["age"], int)
    history = [*HELLO, {"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    assert ask(chat_client, history, max_tokens=1, extra_body=agent).rewake["match"] == "extend"


def test_any_json_object(chat_client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Give me a JSON object with a city and its country."}]
    answer = ask(chat_client, messages, response_format={"type": "json_object"}, max_tokens=300, temperature=0.3, seed=1).choices[0]
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)
    assert answer.message.content.startswith("{")


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_object", "json_schema": {"name": "x", "schema": {}}}, "response_format.json_schema"),
        ({"type": "xml"}, "response_format.type"),
    ],
)
def test_a_form_that_cannot_be_had_is_refused_by_name(chat_client: openai.OpenAI, form: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(chat_client, response_format=form)
    assert caught.value.param == param


def complete(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(model=DEFAULT_MODEL, prompt=prompt, **{"max_tokens": 12, "temperature": 0, **fields})


def test_a_text_is_gone_on_with(chat_client: openai.OpenAI) -> None:
    """Completions: whole and streamed, several prompts, token ids, with probabilities."""
    prompt = "The capital of France is"
    whole = complete(chat_client, prompt, logprobs=2)
    text = whole.choices[0].text
    assert text and whole.usage.completion_tokens == 12 and whole.object == "text_completion"
    logprobs = whole.choices[0].logprobs
    assert "".join(logprobs.tokens) == text and logprobs.text_offset[1] == len(logprobs.tokens[0])
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    assert "".join(chunk.choices[0].text for chunk in complete(chat_client, prompt, stream=True) if chunk.choices) == text
    both = complete(chat_client, [prompt, "One, two, three,"], n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == text != both.choices[2].text
    assert complete(chat_client, [1, 504, 3575]).choices[0].text
    assert complete(chat_client, prompt, stop=text[3:6]).choices[0].text == text[: text.index(text[3:6])]
    agent = {"agent_id": "completer"}
    complete(chat_client, prompt, extra_body=agent)
    assert complete(chat_client, prompt + text + " And so", extra_body=agent).rewake["match"] == "extend"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": ["a"] * 20}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "half \ud83d"}, "prompt"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"prompt": "word " * 3000}, "prompt"),
    ],
)
def test_completions_refuse_by_name(live: ServerProcess, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": DEFAULT_MODEL, "prompt": "x", **fields})
    response = live.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["param"].split(".")[0] == param, response.text
