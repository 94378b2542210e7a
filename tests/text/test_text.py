"""Text to ids and back, on the real tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewake.text.tokenizer import Tokenizer
from rewake.text.transcripts import Transcripts

SAMPLES = [
    "plain text, with 1234 digits and CamelCase",
    "def f(x):\n        return {\n\n\n            'deep': x,   \n        }\n",
    "emoji 👩‍👩‍👧‍👦 and 中文, עברית, é, \U0001f1eb\U0001f1f7",
    "text like <|x|> and <|im| and trailing spaces   ",
]


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer(model_path)


@pytest.mark.parametrize("text", SAMPLES)
def test_streamed_pieces_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    """A1, A3: and no piece holds half a character."""
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text == tokenizer.decode(tokenizer.encode(text))
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    """As SmolLM was trained; transformers' reading of GGUF forgets it."""
    assert len(tokenizer.encode("1234")) == 4


def test_the_chat_template_is_the_models(tokenizer: Tokenizer) -> None:
    text = tokenizer.render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_splitting_at_special_tokens_changes_no_ids(tokenizer: Tokenizer) -> None:
    text = tokenizer.render([{"role": "user", "content": SAMPLES[0]}, {"role": "assistant", "content": SAMPLES[1]}])
    pieces = tokenizer.split(text)
    assert "".join(pieces) == text and len(pieces) > 6
    assert [i for piece in pieces for i in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_a_models_own_text_keeps_its_ids_when_it_is_sent_back(tokenizer: Tokenizer) -> None:
    """P1: a sampled pair of tokens whose text tokenises as one."""
    transcripts = Transcripts(tokenizer)
    prompt = tokenizer.render([{"role": "user", "content": "Hi"}])
    before = transcripts.encode("ns", "a", prompt)
    generated = [*tokenizer.encode("hel"), *tokenizer.encode("lo")]
    assert generated != tokenizer.encode("hello")
    transcripts.learn("ns", "a", [[*before, *generated]])
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "More"}]
    text = tokenizer.render(history)
    ids = transcripts.encode("ns", "a", text)
    assert ids[: len(before) + len(generated)] == [*before, *generated]
    assert tokenizer.decode(ids) == text
    assert transcripts.encode("ns", "b", text) == tokenizer.encode(text), "what another agent said is nobody else's"


def test_an_edit_is_tokenised_afresh_from_its_segment_on(tokenizer: Tokenizer) -> None:
    transcripts = Transcripts(tokenizer)
    transcripts.learn("ns", "a", [tokenizer.encode("<|im_start|>user\none<|im_end|>\n<|im_start|>user\ntwo<|im_end|>")])
    edited = "<|im_start|>user\none!<|im_end|>\n<|im_start|>user\ntwo<|im_end|>"
    assert transcripts.encode("ns", "a", edited) == tokenizer.encode(edited)


def test_agents_are_forgotten_here_when_there_are_many(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewake.text.transcripts.MOST_AGENTS", 2)
    transcripts = Transcripts(tokenizer)
    for agent in "abc":
        transcripts.learn("ns", agent, [])
    assert [transcripts.knows("ns", agent) for agent in "abc"] == [False, True, True]
