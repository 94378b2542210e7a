"""Stop strings, thoughts and their tokens, however an answer is cut; on the real tokenizer where tokens matter."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewake.text.answer import AnswerText, Said, Thought
from rewake.text.grammar import Grammars
from rewake.text.stops import Stops, StopWatch
from rewake.text.tokenizer import Tokenizer
from rewake.text.tools import Call
from rewake.text.tools.hermes import Hermes


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer(model_path)


def cut(text: str, stops: list[str]) -> str:
    """By definition: at the first character with which a stop string is complete, before the longest of those that are."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


letters = st.text("abc", max_size=12)


@given(st.lists(letters, max_size=8), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_cut_exactly_and_are_never_partly_shown(pieces: list[str], given_stops: list[str]) -> None:
    """A2: for every text, cut in every way."""
    stops, shown = Stops(given_stops), ""
    for piece in pieces:
        shown += stops.push(piece)
        assert cut("".join(pieces), given_stops).startswith(shown)
    assert shown + stops.finish() == cut("".join(pieces), given_stops)
    assert (stops.found is not None) == any(stop in "".join(pieces) for stop in given_stops)


@pytest.mark.parametrize("stop", ["jumps over", "ps ov", "\n\n", "é", "👩‍👩", "."])
def test_the_tokens_that_are_kept_spell_only_what_is_shown(tokenizer: Tokenizer, stop: str) -> None:
    text = "The quick fox jumps over é 👩‍👩‍👧‍👦 and\n\n\nends."
    watch, kept = StopWatch(tokenizer.detokenizer(), [stop]), None
    tokens = tokenizer.encode(text)
    for token in tokens:
        kept = watch(token)
        if kept is not None:
            break
    assert kept is not None and kept == watch.num_whole
    shown = text[: text.index(stop)]
    spelt = tokenizer.decode(tokens[:kept])
    assert shown.startswith(spelt) and tokenizer.decode(tokens[: kept + 1]) not in shown
    assert "\N{REPLACEMENT CHARACTER}" not in spelt


def read(tokenizer: Tokenizer, text: str, **fields: object) -> tuple[str, str, list[Call]]:
    answer = AnswerText(tokenizer.detokenizer(), **fields)  # type: ignore[arg-type]
    pieces = [p for token in tokenizer.encode(text) for p in answer.push(token)] + answer.finish()
    said = "".join(p.text for p in pieces if isinstance(p, Said))
    thought = "".join(p.text for p in pieces if isinstance(p, Thought))
    return said, thought, [p for p in pieces if isinstance(p, Call)]


@pytest.mark.parametrize(
    ("text", "opened", "said", "thought"),
    [
        ("<think>\nHm.\n\nWell.\n</think>\n\nHello.\n", False, "Hello.\n", "Hm.\n\nWell."),
        ("Hm.\n</think>\n\nHello.", True, "Hello.", "Hm."),
        ("Hm. And on", True, "", "Hm. And on"),
        ("<think>\n\n</think>\n\nHello.", False, "Hello.", ""),
        ("Hello, <think> is a tag.", False, "Hello, <think> is a tag.", ""),
        ("  Hello.", False, "  Hello.", ""),
        ("<thi", False, "<thi", ""),
        ("<think>a</think>b", None, "<think>a</think>b", ""),
    ],
)
def test_thoughts_are_told_from_what_is_said(tokenizer: Tokenizer, text: str, opened: bool | None, said: str, thought: str) -> None:
    assert read(tokenizer, text, thinking=opened) == (said, thought, [])


def test_calls_stand_behind_thoughts(tokenizer: Tokenizer) -> None:
    text = '<think>\nI call <tool_call>.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    said, thought, calls = read(tokenizer, text, thinking=False, calls=Hermes().reading(None))
    assert (said, thought, calls) == ("", "I call <tool_call>.", [Call("f", "{}")])


def test_tokens_have_bytes_and_names(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer, 49152, [2])
    text = "A 👩‍👩‍👧‍👦 é"
    assert b"".join(map(grammars.token_bytes, tokenizer.encode(text))).decode() == text
    names = [grammars.token_name(token) for token in tokenizer.encode(text)]
    assert names[0] == "A" and any(name.startswith("bytes:\\x") for name in names)
