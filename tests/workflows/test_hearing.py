"""Who hears what: rooms, minutes, late comers and orders, with voices that say what a test wants. No server is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rewake.client import Client
from rewake.workflows import Agent, Answer, Play, Record, Scenario, Turn

PEOPLE = ("ann", "bob", "cem", "host")


def scenario(*phases: dict[str, Any]) -> Scenario:
    return Scenario.model_validate(
        {
            "title": "t",
            "agents": {name: {"instructions": f"You are {name}."} for name in PEOPLE},
            "rooms": {"hall": {}, "attic": {"private": True}, "yard": {}},
            "phases": [{"name": f"phase {i}", **phase} for i, phase in enumerate(phases)],
        }
    )


class Said:
    """Everybody says their name and how often they have spoken, or what `words` has for them; knows who asked at the same time."""

    def __init__(self, **words: str) -> None:
        self.words = words
        self.order: list[str] = []
        self.at_once = 0
        self.most_at_once = 0

    async def __call__(self, agent: Agent, cue: str, on_piece: Callable[[str], object]) -> Answer:
        prompt = agent.prompt(cue)
        self.order.append(agent.name)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        text = self.words.get(agent.name, f"{agent.name} {agent.turns}")
        agent.said(prompt, text)
        return Answer(text, {})


def play(made: Scenario, voice: Said, record: Record | None = None) -> tuple[Play, list[Turn]]:
    async def run() -> list[Turn]:
        return [turn async for turn in played.run()]

    with Client() as client:
        played = Play(made, client, voice=voice, record=record)
        return played, asyncio.run(run())


def heard(played: Play, name: str) -> str:
    return "\n".join(m["content"] for m in played.agents[name].messages if m["role"] == "user")


def test_a_private_room_keeps_no_minutes_and_a_public_one_is_read_by_who_comes_later() -> None:
    made = scenario(
        {"room": "attic", "speakers": ["ann", "bob"]},
        {"room": "hall", "speakers": ["ann", "bob"], "rounds": 2},
        {"room": "attic", "speakers": ["cem"]},
        {"room": "hall", "speakers": ["cem", "ann"]},
    )
    played, _ = play(made, Said())
    cem = heard(played, "cem")
    assert "before you came:]\n\nAnn: ann 1\n\nBob: bob 1\n\nAnn: ann 2\n\nBob: bob 2\n\n[phase 3" in cem
    assert "ann 0" not in cem and "bob 0" not in cem
    ann = heard(played, "ann")
    assert ann.count("Bob: bob 1") == 1 and "before you came" not in ann and "Ann:" not in ann


def test_who_was_there_for_a_part_reads_what_is_missing() -> None:
    made = scenario(
        {"room": "hall", "speakers": ["ann"], "present": ["cem"]},
        {"room": "hall", "speakers": ["ann", "bob"]},
        {"room": "yard", "speakers": ["cem"], "reads": {"cem": ["hall"]}},
    )
    cem = heard(play(made, Said())[0], "cem")
    assert cem.count("Ann: ann 0") == 1 and "came:]\n\nAnn: ann 1\n\nBob: bob 0\n\n[phase 2. Here with you: nobody else.]" in cem


def test_a_broadcast_is_asked_at_once_and_heard_afterwards() -> None:
    voice = Said()
    made = scenario({"room": "hall", "speakers": ["ann", "bob", "cem"], "order": "broadcast", "questions": ["Q1", "Q2"], "asker": "Kid"})
    played, turns = play(made, voice)
    assert voice.most_at_once == 3 and [turn.speaker for turn in turns] == ["ann", "bob", "cem"] * 2
    first, second = (m["content"] for m in played.agents["ann"].messages if m["role"] == "user")
    assert "Kid: Q1" in first and "Bob" not in first.replace("with you: Bob, Cem", "")
    assert second.startswith("Bob: bob 0\n\nCem: cem 0\n\nKid: Q2")


def test_a_moderator_calls_up_and_apart_means_apart() -> None:
    for apart in (False, True):
        voice = Said(host="Cem, then Ann, please.")
        phase = {
            "room": "hall",
            "speakers": ["ann", "bob", "cem"],
            "moderator": "host",
            "order": "moderator",
            "asks": 2,
            "questions": ["Why?"],
        }
        played, _ = play(scenario({**phase, "apart": apart}), voice)
        assert voice.order == ["host", "cem", "ann"]
        assert "Visitor: Why?" in heard(played, "ann") and "Visitor: Why?" in heard(played, "host")
        assert ("Cem: cem 0" in heard(played, "ann")) is not apart
        assert "Ann, Bob, Cem" in heard(played, "host")


def test_apart_from_each_other_all_hear_the_question() -> None:
    made = scenario({"room": "hall", "speakers": ["ann", "bob"], "order": "broadcast", "apart": True, "questions": ["A?", "B?"]})
    ann = heard(play(made, Said())[0], "ann")
    assert "A?" in ann and "B?" in ann and "Bob" not in ann


def test_a_play_goes_on_from_its_record_with_the_same_messages(tmp_path: Path) -> None:
    made = scenario(
        {"room": "hall", "speakers": ["ann", "bob"], "rounds": 2},
        {"room": "attic", "speakers": ["ann", "cem"], "order": "broadcast"},
        {"room": "hall", "speakers": ["bob", "cem"], "order": ["cem", "bob", "cem"]},
    )
    whole, turns = play(made, Said(), Record(tmp_path / "talk", made))
    lines = (tmp_path / "talk").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(turns) == 10
    for kept in range(1, 11):
        (tmp_path / "part").write_bytes(b"".join(lines[:kept]))
        voice = Said()
        again, repeated = play(made, voice, Record(tmp_path / "part", made))
        assert len(voice.order) == 10 - kept and sum(turn.recorded for turn in repeated) == kept - 1
        assert [agent.messages for agent in again.agents.values()] == [agent.messages for agent in whole.agents.values()]
        assert len((tmp_path / "part").read_bytes().splitlines()) == 10


def test_who_says_nothing_is_heard_to_say_nothing() -> None:
    played, _ = play(scenario({"room": "hall", "speakers": ["ann", "bob"]}), Said(ann="  \n"))
    assert "Ann: (says nothing)" in heard(played, "bob")


def test_what_is_heard_while_it_speaks_is_for_the_next_turn() -> None:
    with Client() as client:
        ann = Agent(client, "ann")
        ann.hear("One.")
        prompt = ann.prompt("Two.")
        ann.hear("Three.")
        ann.said(prompt, "Yes.")
        assert [m["content"] for m in ann.prompt()] == ["One.\n\nTwo.", "Yes.", "Three."]
