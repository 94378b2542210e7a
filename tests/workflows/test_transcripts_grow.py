"""Whatever the chat template: each prompt of an agent begins with all the tokens of the turn before, as they were sampled.

The claim is about tokens, and so is made without a model: answers are given as ids that a tokenizer would not choose.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewake.client import Client
from rewake.text.tokenizer import Tokenizer
from rewake.text.transcripts import Transcripts
from rewake.workflows import Agent, Answer, Play, Scenario, read_scenario, read_texts
from tests.templates import TEMPLATES, with_marks

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"
OWN = "the default model's"
ANSWERS = (
    " I saw nothing.\n\nDanny: Nor did I! ",
    "hello \N{PARTY POPPER} world",
    "\n\nIndented:\n    x = 1  \n",
    "",
    "Warden: It was   dark,\tand late.",
    "naïve café",
)


@pytest.fixture(scope="module", params=[OWN, *TEMPLATES])
def tokenizer(request: pytest.FixtureRequest, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, str]:
    """One of a template, and the token that ends its answers."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(model_path / name, folder)
    if request.param == OWN:
        return Tokenizer(folder), "<|im_end|>"
    template, end = TEMPLATES[request.param]
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer(with_marks(folder)), end


class Sampled:
    """Voices whose answers are cut as no tokenizer cuts them; keeps each agent's tokens as a server does."""

    def __init__(self, tokenizer: Tokenizer, end: str) -> None:
        self.tokenizer = tokenizer
        self.transcripts = Transcripts(tokenizer)
        self.end = tokenizer.encode(end)
        self.known: dict[str, list[int]] = {}
        self.broken: list[str] = []
        self.num_turns = 0

    async def __call__(self, agent: Agent, cue: str, on_piece: Callable[[str], object]) -> Answer:
        prompt = agent.prompt(cue)
        ids = self.transcripts.encode("ns", agent.name, self.tokenizer.render(prompt))
        before = self.known.get(agent.name, [])
        if ids[: len(before)] != before:
            same = next(i for i, (a, b) in enumerate(zip(before, [*ids, -1], strict=False)) if a != b)
            self.broken.append(
                f"{agent.name}: {self.tokenizer.decode(before[same:])!r} became {self.tokenizer.decode(ids[same : same + 9])!r}"
            )
        text = ANSWERS[self.num_turns % len(ANSWERS)]
        sampled = [i for at in range(0, len(text), 5) for i in self.tokenizer.encode(text[at : at + 5])]
        # every other answer is cut by its length: it has no end
        self.known[agent.name] = [*ids, *sampled, *(self.end if self.num_turns % 2 else [])]
        self.transcripts.learn("ns", agent.name, [self.known[agent.name]])
        self.num_turns += 1
        agent.said(prompt, text)
        return Answer(text, {})


async def turns_of(play: Play) -> int:
    return len([turn async for turn in play.run()])


@pytest.mark.parametrize("name", ["interrogation", "experts", "coding_team"])
def test_every_prompt_begins_with_all_of_the_turn_before(tokenizer: tuple[Tokenizer, str], name: str, tmp_path: Path) -> None:
    scenario = read_scenario(SCENARIOS / f"{name}.yaml")
    for file in scenario.files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(f"# {file}\n\nA text, with 12 words: it does not matter which they are.\n" * 3)
    sampled = Sampled(*tokenizer)
    with Client() as client:
        play = Play(scenario, client, voice=sampled, texts=read_texts(scenario, tmp_path))
        assert asyncio.run(turns_of(play)) == sampled.num_turns > 7
    assert not sampled.broken
    for agent in play.agents.values():
        roles = [message["role"] for message in agent.messages]
        assert roles == ["system"] + ["user", "assistant"] * agent.turns


def test_an_unfinished_character_at_the_end_of_an_answer_is_still_what_was_sampled(tokenizer: tuple[Tokenizer, str]) -> None:
    tokens, _ = tokenizer
    transcripts = Transcripts(tokens)
    asked: list[Any] = [{"role": "user", "content": "Hi"}]
    whole = tokens.encode("party \N{PARTY POPPER}")
    first = [*transcripts.encode("ns", "a", tokens.render(asked)), *whole[:-1]]
    assert tokens.decode(first).endswith("\N{REPLACEMENT CHARACTER}")
    transcripts.learn("ns", "a", [first])
    later = [*asked, {"role": "assistant", "content": "party "}, {"role": "user", "content": "More"}]
    assert transcripts.encode("ns", "a", tokens.render(later))[: len(first)] == first


def test_messages_are_read_back_from_tokens(tokenizer: tuple[Tokenizer, str]) -> None:
    """What is read back renders to the same text, with the end of an answer or without."""
    tokens, end = tokenizer
    talk: list[Any] = [
        {"role": "system", "content": "You are Ada."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello,\nyou."},
        {"role": "user", "content": "More"},
    ]
    for answer, ends in (("Good", ""), ("Good", end), (" Good ", end)):
        text = tokens.render(talk) + answer + ends
        read = tokens.messages(text)
        assert read is not None and read[-1]["content"].strip() == "Good" and read[-3]["content"] == "Hello,\nyou."
        assert "You are Ada." in read[0]["content"]
        assert tokens.render([*read[:-1]]) == tokens.render(talk)
    assert tokens.messages("no chat at all") is None


def test_a_system_message_is_at_the_head_of_the_first_question_where_the_template_has_no_place_for_it(
    tokenizer: tuple[Tokenizer, str],
) -> None:
    tokens, _ = tokenizer
    talk: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokens.render(talk)
    assert text.index("Be brief.") < text.index("Hi")
    longer = tokens.render([*talk, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "More"}])
    assert longer.startswith(text[: text.index("Hi") + 2]) and longer.count("Be brief.") == 1


def test_scenarios_are_what_they_say() -> None:
    scenario: Scenario = read_scenario(SCENARIOS / "interrogation.yaml")
    num_turns = sum(p.num_rounds * len(p.order if isinstance(p.order, list) else p.speakers) for p in scenario.phases)
    assert num_turns == 25 and len(scenario.phases) == 5
    assert len(read_scenario(SCENARIOS / "experts.yaml").files) == 9
