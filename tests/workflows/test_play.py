"""Scenarios on a real server with real weights: every turn but an agent's first extends what it remembers, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from rewake.cli import main
from rewake.client import Client
from rewake.errors import ConfigError, InvalidRequest
from rewake.workflows import Agent, Play, Record, Scenario, Turn, read_scenario, read_texts
from tests.server import ServerProcess

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"
SHORT = 8  # tokens of an answer


def shortened(name: str, folder: Path) -> Path:
    """The example scenario, with short answers."""
    text = yaml.safe_load((SCENARIOS / f"{name}.yaml").read_text())
    for person in text["agents"].values():
        person["max_tokens"] = SHORT
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(text, sort_keys=False))
    return path


def lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()[1:]]


def all_but_the_first_extend(turns: list[dict[str, Any]]) -> None:
    met: dict[str, int] = {}
    for turn in turns:
        report = turn["report"]
        if turn["speaker"] in met:
            assert report["match"] == "extend", turn
            assert report["reused_tokens"] >= met[turn["speaker"]] - 1, turn
        met[turn["speaker"]] = report["prompt_tokens"] + turn["completion_tokens"]


async def heard(play: Play, until: int | None = None) -> list[Turn]:
    return [turn async for turn in play.run(until)]


def test_five_phases_over_a_kill_and_three_processes(tmp_path: Path) -> None:
    file, talk = shortened("interrogation", tmp_path), tmp_path / "talk.jsonl"
    with ServerProcess(tmp_path / "data", "--memory", "200MiB") as server:

        def play(*flags: str) -> str:
            url = f"http://127.0.0.1:{server.port}"
            command = [sys.executable, "-m", "rewake", "play", str(file), "--url", url, "--talk", str(talk), *flags]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout

        first = play("--until", "3")
        assert "16 new turns" in first and "== 3. The yard (Marco, Danny, in private)" in first
        server.kill()
        server.start()
        then = play("--until", "4")
        assert "6 new turns (5 extend, 1 diverge)" in then and "said before" in then  # the analyst begins as others do: "You are"
        assert "from disk" in then
        torn = talk.read_bytes() + b'{"number": 99, "ph'  # a process was killed while it wrote
        talk.write_bytes(torn)
        last = play()
        assert "3 new turns (3 extend)" in last
        turns = lines(talk)
        assert len(turns) == 25
        all_but_the_first_extend(turns)
        with Client(f"http://127.0.0.1:{server.port}") as client:
            secret = " ".join(m["content"] for m in client.messages("interrogation/analyst"))
            assert "What was said in cell a before you came" in secret and "The yard" not in secret
            ours = " ".join(m["content"] for m in client.messages("interrogation/marco"))
            assert "The yard" in ours and "Interrogation of Danny" not in ours


def test_experts_and_a_coding_team_in_one_process(tmp_path: Path) -> None:
    """A server started for a play; a broadcast is one batch; the router's two experts are asked."""
    files = read_scenario(SCENARIOS / "experts.yaml").files
    for file in files:
        (tmp_path / file).write_text(f"An article about {file.removesuffix('.txt').replace('_', ' ')}. " * 20)
    for name, texts in (("experts", tmp_path), ("coding_team", SCENARIOS)):
        talk = tmp_path / f"{name}.jsonl"
        command = [sys.executable, "-m", "rewake", "play", str(shortened(name, tmp_path)), "--talk", str(talk), "--no-persist"]
        command += ["--texts", str(texts), "--memory", "500MiB"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        assert shown.stdout.startswith("Loading") and not shown.stderr, "a talk, and no log of requests"
        all_but_the_first_extend(lines(talk))
    asked = [turn["speaker"] for turn in lines(tmp_path / "experts.jsonl") if turn["phase"] == 1]
    assert len(asked) == 15 and asked[::3] == ["router"] * 5


def test_an_agent_talks_forks_rewinds_and_is_recalled(tmp_path: Path) -> None:
    async def talk(client: Client) -> None:
        ada = Agent(client, "ada", "You are Ada.", temperature=0, max_tokens=SHORT)
        pieces: list[str] = []
        first = await ada.say("Who are you?", on_piece=pieces.append)
        assert first.text == "".join(pieces) and first.report["match"] == "miss" and first.completion_tokens == SHORT
        assert first.ttft is not None and first.ttft <= first.seconds
        ada.hear("Bob: I was here first.")
        ada.hear("   ")
        second = await ada.say("It is your turn.")
        assert second.report["match"] == "extend" and ada.messages[-2]["content"] == "Bob: I was here first.\n\nIt is your turn."
        eve = await ada.fork("eve")
        assert (await eve.say("Go on.")).report["match"] == "extend"
        early = await ada.fork("eve 1", turn=1)
        assert early.turns == 1 and (await early.say("Go on.")).report["match"] == "extend"
        await ada.rewind(1)
        assert ada.turns == 1 and client.show("ada")["turns"] == client.show("eve 1")["turns"][:1]
        again = await ada.say("Bob: I was here first.\n\nIt is your turn.")
        assert again.text == second.text  # claim 1 or, with native steps, any schedule: greedy, on the same tokens
        recalled = await Agent.recall(client, "ada", max_tokens=SHORT)
        assert recalled.messages == ada.messages
        assert (await recalled.say("Once more.")).report["match"] == "extend"
        with pytest.raises(InvalidRequest, match="nothing has been said"):
            await ada.say()
        with pytest.raises(InvalidRequest, match="2 turns, not 3"):
            await ada.rewind(3)
        before = list(ada.messages)
        with pytest.raises(InvalidRequest):
            await ada.say("Hi", temperature=9)
        assert ada.messages == before
        await ada.forget()
        assert ada.turns == 0 and "ada" not in [a["agent"] for a in client.list()]

    with ServerProcess(tmp_path / "data", "--memory", "100MiB") as server, Client(f"http://127.0.0.1:{server.port}") as client:
        asyncio.run(talk(client))


def test_the_record_of_another_scenario_is_refused(tmp_path: Path) -> None:
    scenario = read_scenario(SCENARIOS / "interrogation.yaml")
    Record(tmp_path / "talk", scenario)
    with pytest.raises(ConfigError, match="another scenario"):
        Record(tmp_path / "talk", read_scenario(SCENARIOS / "experts.yaml"))
    (tmp_path / "other").write_text("hello\n")
    with pytest.raises(ConfigError, match="not the record"):
        Record(tmp_path / "other", scenario)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--url", "127.0.0.1:8000"), "must begin with http://"),
        (("--url", "http://127.0.0.1:1", "--memory", "1GiB"), "--memory is a setting of a server that is started here"),
        (("--url", "http://127.0.0.1:1/v1"), "no server at http://127.0.0.1:1: "),
        (("--until", "0"), "phases count from 1"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(flags: Sequence[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", str(SCENARIOS / "interrogation.yaml"), *flags]) == 1
    shown = capsys.readouterr()
    assert told in shown.err and "==" not in shown.out


GOOD: dict[str, Any] = {
    "title": "t",
    "agents": {"a": {"instructions": "x"}, "b": {"instructions": "y"}},
    "rooms": {"r": {}, "p": {"private": True}},
    "phases": [{"name": "one", "room": "r", "speakers": ["a", "b"]}],
}
PHASE = GOOD["phases"][0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"phases": [{**PHASE, "room": "q"}]}, "phases.0.room: there is no room 'q'"),
        ({"phases": [{**PHASE, "speakers": ["a", "c"]}]}, "no agent 'c'"),
        ({"phases": [{**PHASE, "order": "moderator"}]}, "phases.0: a moderator is named"),
        ({"phases": [{**PHASE, "order": "sometimes"}]}, "phases.0.order"),
        ({"phases": [{**PHASE, "order": ["c"]}]}, "order: c is not among the speakers"),
        ({"phases": [{**PHASE, "rounds": 0}]}, "phases.0.rounds"),
        ({"phases": [{**PHASE, "round": 2}]}, "phases.0.round: Extra inputs"),
        ({"phases": [{**PHASE, "reads": {"a": ["p"]}}]}, "'p' is private"),
        ({"agents": {"a": {"instructions": ""}}}, "agents.a.instructions"),
        ({"agents": {"a": {"instructions": "x", "called": "B"}, "b": {"instructions": "y"}}}, "two are called 'b'"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_what_is_wrong_in_a_scenario_is_named_by_its_place(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **change}, sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        read_scenario(path)
    assert str(caught.value).startswith(f"{path}:") and told in str(caught.value)


def test_the_scenario_in_the_documentation_is_one(tmp_path: Path) -> None:
    text = (SCENARIOS.parents[1] / "docs" / "workflows.md").read_text()
    (tmp_path / "boat.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    assert read_scenario(tmp_path / "boat.yaml").files == ["recipes.txt"]


def test_lines_are_named_in_a_file_that_is_no_yaml_or_no_scenario(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    for text, told in (
        ("title: t\nagents: [\n", ":3: "),
        ("title: t\ntitle: u\n", ":2: 'title' stands here twice"),
        ("title: t\nagents:\n  a: {instructions: 7}\nrooms: {r: {}}\nphases: []\n", ":3: agents.a.instructions"),
        ("", ":1: "),
        ("title: !!python/object:os.system x\n", ":1: "),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_scenario(path)
        assert str(caught.value).startswith(f"{path}{told}"), caught.value


def test_texts_that_are_not_there_are_named(tmp_path: Path) -> None:
    scenario = Scenario.model_validate({**GOOD, "agents": {**GOOD["agents"], "a": {"instructions": "x", "file": "no.txt"}}})
    with pytest.raises(ConfigError, match=r"no\.txt.*--texts"):
        read_texts(scenario, tmp_path)
    (tmp_path / "no.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"no\.txt cannot be read"):
        read_texts(scenario, tmp_path)
