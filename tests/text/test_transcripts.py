"""What is sent back in a history keeps the ids it had, on the real tokenizer."""

from __future__ import annotations

import json
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import pytest

from rewake.text.tokenizer import Tokenizer
from rewake.text.transcripts import Transcripts

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
PROSE = "The quick brown fox, it is said, jumps over 12 lazy dogs; nobody has seen it. "


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer(model_path)


@pytest.fixture
def transcripts(tokenizer: Tokenizer) -> Transcripts:
    return Transcripts(tokenizer)


def oddly(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids as a model might sample them: the same text, but cut where the tokenizer would not cut it."""
    ids = [i for at in range(0, len(text), 7) for i in tokenizer.encode(text[at : at + 7])]
    assert tokenizer.decode(ids) == text and ids != tokenizer.encode(text)
    return ids


def answered(transcripts: Transcripts, answer: list[int], messages: list[dict[str, Any]] = HI) -> list[int]:
    """An agent was asked, and answered in these tokens: all that is stored of it."""
    stored = [*transcripts.encode("ns", "a", transcripts.tokenizer.render(messages)), *answer]
    transcripts.learn("ns", "a", [stored])
    return stored


def sent_back(transcripts: Transcripts, answer: str, messages: list[dict[str, Any]] = HI) -> list[int]:
    """The ids of the next turn, whose text must be what was sent."""
    history = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "More"}]
    text = transcripts.tokenizer.render(history)
    ids = transcripts.encode("ns", "a", text)
    assert transcripts.tokenizer.decode(ids) == text
    return ids


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_models_own_text_keeps_its_ids_when_it_is_sent_back(transcripts: Transcripts) -> None:
    """P1: a sampled pair of tokens whose text tokenises as one."""
    tokenizer = transcripts.tokenizer
    generated = [*tokenizer.encode("hel"), *tokenizer.encode("lo")]
    assert generated != tokenizer.encode("hello")
    stored = answered(transcripts, generated)
    ids = sent_back(transcripts, "hello")
    assert ids[: len(stored)] == stored
    text = tokenizer.decode(ids)
    assert transcripts.encode("ns", "b", text) == tokenizer.encode(text), "what another agent said is nobody else's"


def test_no_text_has_no_ids(transcripts: Transcripts) -> None:
    assert transcripts.encode("ns", "a", "") == []


def test_turn_after_turn_keeps_every_answers_ids(transcripts: Transcripts) -> None:
    """P1: also when it was learned turn by turn, and again from what is stored."""
    messages, again = list(HI), Transcripts(transcripts.tokenizer)
    for turn in range(6):
        answer = PROSE * (turn + 1)
        stored = answered(transcripts, oddly(transcripts.tokenizer, answer), messages)
        ids = sent_back(transcripts, answer, messages)
        assert ids[: len(stored)] == stored
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "More"}]
    again.learn("ns", "a", [stored])
    assert sent_back(again, answer, messages[:-2]) == ids


@pytest.mark.parametrize("lost", ["\n", " ", "\n\n", "  \n"])
def test_whitespace_lost_at_the_end_costs_nothing_before_it(transcripts: Transcripts, lost: str) -> None:
    """P2: of an answer of thousands of tokens, none of which need be what the tokenizer would choose."""
    answer = PROSE * 150
    answer = answer.rstrip()
    ids = oddly(transcripts.tokenizer, answer)
    assert len(ids) > 3000
    stored = answered(transcripts, [*ids, *transcripts.tokenizer.encode(lost)])
    kept = shared(sent_back(transcripts, answer), stored)
    assert kept >= len(stored) - len(transcripts.tokenizer.encode(lost))


def test_whitespace_lost_inside_a_token_is_cut_before_it(transcripts: Transcripts) -> None:
    """P2: the stored token that holds the lost character goes, and no more."""
    tokenizer = transcripts.tokenizer
    (blank_lines,) = tokenizer.encode("\n\n")
    stored = answered(transcripts, [*oddly(tokenizer, PROSE * 20), *tokenizer.encode("end"), blank_lines])
    assert shared(sent_back(transcripts, PROSE * 20 + "end\n"), stored) == len(stored) - 1


def test_a_difference_within_an_answer_keeps_the_words_before_it(transcripts: Transcripts) -> None:
    """P2: and no word begins as stored and ends as sent."""
    stored = answered(transcripts, oddly(transcripts.tokenizer, PROSE * 40))
    ids = sent_back(transcripts, PROSE * 20 + "The quickest" + PROSE * 19)
    kept = transcripts.tokenizer.decode(stored[: shared(ids, stored)])
    assert kept.endswith(("nobody has seen it. The", "nobody has seen it."))


def test_half_a_character_is_never_kept(transcripts: Transcripts) -> None:
    """P2: an answer whose last token is the first half of an emoji, which no client ever saw."""
    tokenizer = transcripts.tokenizer
    emoji = tokenizer.encode(" \N{DNA DOUBLE HELIX}")
    assert len(emoji) > 1 and "\N{REPLACEMENT CHARACTER}" in tokenizer.decode(emoji[:-1])
    answer = oddly(tokenizer, PROSE * 3)
    stored = answered(transcripts, [*answer, *emoji[:-1]])
    assert shared(sent_back(transcripts, PROSE * 3 + "\N{BOOKS}"), stored) <= len(stored) - len(emoji) + 1


def test_thinking_that_is_stripped_costs_only_what_is_behind_it(transcripts: Transcripts) -> None:
    """P3: of two answers with thoughts, the first comes back without, the second with them."""
    tokenizer = transcripts.tokenizer
    said = PROSE * 2 + "\n<think>\nWhat would a fox do?\n</think>\n\nIt jumps."
    stored = answered(transcripts, oddly(tokenizer, said))
    assert sent_back(transcripts, said)[: len(stored)] == stored
    ids = sent_back(transcripts, PROSE * 2 + "\nIt jumps.")
    kept = tokenizer.decode(stored[: shared(ids, stored)])
    assert kept.rstrip().endswith(PROSE.strip()) and "<think>" not in kept


def test_a_system_message_in_mid_conversation_stays_where_it_is(transcripts: Transcripts) -> None:
    """P6."""
    messages = [*HI, {"role": "assistant", "content": "Hello."}, {"role": "system", "content": "Be brief."}, *HI]
    text = transcripts.tokenizer.render(messages)
    assert text.index("Hello.") < text.index("Be brief.") < text.rindex("Hi")
    stored = answered(transcripts, oddly(transcripts.tokenizer, PROSE), messages)
    assert sent_back(transcripts, PROSE, messages)[: len(stored)] == stored


def test_an_edit_is_tokenised_afresh_from_its_word_on(transcripts: Transcripts) -> None:
    tokenizer = transcripts.tokenizer
    transcripts.learn("ns", "a", [tokenizer.encode("<|im_start|>user\none<|im_end|>\n<|im_start|>user\ntwo<|im_end|>")])
    edited = "<|im_start|>user\none!<|im_end|>\n<|im_start|>user\ntwo<|im_end|>"
    assert transcripts.encode("ns", "a", edited) == tokenizer.encode(edited)


def test_all_branches_of_a_history_are_known(transcripts: Transcripts) -> None:
    """Runs are split where a history parts, and stay what they were."""
    tokenizer = transcripts.tokenizer

    def said(*words: str) -> list[int]:
        opening, closing = tokenizer.encode("<|im_start|>assistant\n"), tokenizer.encode("<|im_end|>\n")
        return [i for word in words for i in (*opening, *oddly(tokenizer, PROSE + word), *closing)]

    branches = [
        said(*words.split()) for words in ("one two three four", "one two six", "one seven", "eight two three", "one two three nine")
    ]
    transcripts.learn("ns", "a", branches)
    for ids in branches:
        assert transcripts.encode("ns", "a", tokenizer.decode(ids)) == ids


def test_text_that_the_tokenizer_normalises_is_known_all_the_same(model_path: Path, tmp_path: Path) -> None:
    """Its stored ids say it in composed characters; what was said behind it keeps its ids, too."""
    for file in model_path.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**description, "normalizer": {"type": "NFC"}}))
    tokenizer = Tokenizer(tmp_path)
    transcripts = Transcripts(tokenizer)
    decomposed = "<|im_start|>user\nCafe\N{COMBINING ACUTE ACCENT}?<|im_end|>\n<|im_start|>assistant\n"
    stored = [*tokenizer.encode(decomposed), *oddly(tokenizer, PROSE)]
    transcripts.learn("ns", "a", [stored])
    assert transcripts.encode("ns", "a", decomposed + PROSE) == stored


def test_of_too_much_the_oldest_is_let_go(transcripts: Transcripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was just learned is known."""
    monkeypatch.setattr("rewake.text.transcripts.MOST_TOKENS", 2000)
    tokenizer = transcripts.tokenizer
    start = tokenizer.encode("<|im_start|>assistant\n")
    answers = [[*start, *oddly(tokenizer, f"{number} {PROSE * 5}")] for number in range(40)]
    for ids in answers:
        transcripts.learn("ns", None, [ids])
        assert transcripts.encode("ns", None, tokenizer.decode(ids)) == ids
    known = [transcripts.encode("ns", None, tokenizer.decode(ids)) == ids for ids in answers]
    assert known == sorted(known) and 5 < sum(known) < 40, "the latest ones"
    transcripts.learn("ns", "long", [oddly(tokenizer, PROSE * 100)])
    assert transcripts.encode("ns", "long", PROSE * 100) == oddly(tokenizer, PROSE * 100), "one history may be longer than the bound"


def test_agents_are_forgotten_here_when_there_are_many(transcripts: Transcripts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewake.text.transcripts.MOST_AGENTS", 2)
    for agent in "abc":
        transcripts.learn("ns", agent, [])
    assert [transcripts.knows("ns", agent) for agent in "abc"] == [False, True, True]


def test_all_agents_together_are_bounded(transcripts: Transcripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long each of them is; the latest one is known whatever its length."""
    monkeypatch.setattr("rewake.text.transcripts.MOST_IN_ALL", 1000)
    ids = oddly(transcripts.tokenizer, PROSE * 3)
    for agent in range(1 + 1000 // len(ids)):
        transcripts.learn("ns", str(agent), [ids])
        assert transcripts.num_tokens <= 1000
    assert not transcripts.knows("ns", "0") and transcripts.knows("ns", "1")
    transcripts.learn("ns", "long", [oddly(transcripts.tokenizer, PROSE * 100)])
    assert transcripts.knows("ns", "long") and not transcripts.knows("ns", "1")


def chat_of(tokenizer: Tokenizer, tokens: int, turns: int) -> str:
    sentence = len(tokenizer.encode(PROSE))
    answer = PROSE * (tokens // turns // sentence)
    return tokenizer.render([{"role": "assistant" if i % 2 else "user", "content": f"{i} {answer}"} for i in range(turns)])


def test_an_idle_agent_costs_little_more_than_its_ids(transcripts: Transcripts) -> None:
    """Of 4,096 tokens: 16 KB of ids, and under 30 KB in all."""
    ids = array("i", transcripts.tokenizer.encode(chat_of(transcripts.tokenizer, 4096, 20)))
    assert 3500 < len(ids) < 4500
    tracemalloc.start()
    transcripts.learn("ns", "a", [ids])
    cost, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cost < 30_000


def test_a_long_known_history_is_not_tokenised_again(transcripts: Transcripts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32k tokens in 150 turns, learned from what is stored; bench.memory says how long it takes."""
    text = chat_of(transcripts.tokenizer, 32_768, 150)
    ids = transcripts.tokenizer.encode(text)
    transcripts.learn("ns", "a", [ids])
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: pytest.fail("it was tokenised"))
    assert transcripts.encode("ns", "a", text) == ids
