"""`rewake play`: a scenario on a running server, or on one that is started for it; the talk as it comes, and what each turn cost."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rewake.agents_cli import address
from rewake.client import Client
from rewake.config import Config
from rewake.errors import ConfigError, DirectoryLocked
from rewake.logs import begin_logging
from rewake.terminal import count, say

if TYPE_CHECKING:
    from rewake.workflows import Phase, Play, Scenario, Turn

__all__ = ["PLAY_FLAGS", "add_play", "play"]

# settings of the server that is started if there is no --url
PLAY_FLAGS = ("model", "data", "memory", "disk", "kv", "context", "threads", "persist")


def add_play(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, metavar="FILE", help="a scenario in YAML; see examples/scenarios")
    parser.add_argument(
        "--url", help="a running server, whose settings count (--model says which of its models); without it, one is started here"
    )
    parser.add_argument("--texts", type=Path, metavar="DIR", help="directory of the texts that agents of the scenario know (FILE's)")
    parser.add_argument("--talk", type=Path, metavar="FILE", help="keep what is said here, and go on from there the next time")
    parser.add_argument("--until", type=int, metavar="N", help="stop behind phase N")
    parser.add_argument("--as", dest="prefix", metavar="NAME", help="agents are called NAME/..., on the server (the file's name)")


def play(config: Config, flags: dict[str, Any]) -> int:
    from rewake.workflows import Play, Record, read_scenario, read_texts  # pydantic among it, which other commands need not wait for

    check(flags)
    scenario = read_scenario(flags["scenario"])
    texts = read_texts(scenario, flags["texts"] or flags["scenario"].parent)
    record = Record(flags["talk"], scenario)
    prefix = (flags["prefix"] or flags["scenario"].stem) + "/"
    with server(config, flags["url"]) as url, Client(url, flags["model"] if flags["url"] else None) as client:
        name = client.model()  # whether there is a server is said before anything else
        screen = Screen(scenario)
        made = Play(scenario, client, prefix=prefix, texts=texts, record=record, on_phase=screen.phase, on_piece=screen.piece)
        for agent in made.agents.values():
            agent.model = name
        asyncio.run(screen.show(made, flags["until"]))
    return 0


def check(flags: dict[str, Any]) -> None:
    """Whether what was given goes together. Raises ConfigError."""
    if (url := flags["url"]) is not None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url is {url!r}: it must begin with http:// or https://")
        for name in PLAY_FLAGS:
            if name != "model" and flags[name] is not None:
                raise ConfigError(f"--{name} is a setting of a server that is started here; the one at --url has its own")
    if flags["until"] is not None and flags["until"] < 1:
        raise ConfigError(f"--until is {flags['until']}: phases count from 1")


@contextmanager
def server(config: Config, url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    from rewake.api.server import in_background
    from rewake.services import Services

    begin_logging("warning", config.log_format)  # the talk is shown here, not who asked for what
    say(f"Loading {config.model} ...")
    try:
        services = Services(replace(config, log_level="warning"))
    except DirectoryLocked as error:
        raise DirectoryLocked(f"{error}. If it is a server, play there: --url {address(config)}") from None
    try:
        with in_background(services) as at:
            yield at
    finally:
        services.close()


class Screen:
    """The talk, as people read it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.speaker = ""  # whose pieces are being shown

    def phase(self, number: int, phase: Phase) -> None:
        about = ", ".join(self.scenario.called(name) for name in phase.there)
        private = ", in private" if self.scenario.rooms[phase.room].private else ""
        say(f"\n== {number + 1}. {phase.name} ({about}{private})")
        if phase.order == "broadcast":
            say("All answer at once; it is shown when the last one has ended.")

    def piece(self, speaker: str, piece: str) -> None:
        if self.speaker != speaker:
            self.speaker = speaker
            say(f"\n{self.scenario.called(speaker)}: ", end="")
        say(piece, end="")

    async def show(self, made: Play, until: int | None) -> None:
        turns = []
        async for turn in made.run(until):
            turns.append(turn)
            if self.speaker != turn.speaker:
                say(f"\n{self.scenario.called(turn.speaker)}: {turn.answer.text}", end="")
            self.speaker = ""
            say(f"\n  [{cost(turn)}]")
        say(f"\n{total(turns)}")


def cost(turn: Turn) -> str:
    report = turn.answer.report
    how = f"{report['match']}: {report['reused_tokens']} tokens reused, {report['computed_tokens']} computed"
    if turn.recorded:
        return f"said before; {how}"
    loaded = f", {report['loaded_tokens']} of them from disk" if report["loaded_tokens"] else ""
    waited = "no token" if turn.answer.ttft is None else f"{turn.answer.ttft * 1000:.0f} ms to the first token"
    return how.replace(" reused", f" reused{loaded}") + f", {waited}"


def total(turns: list[Turn]) -> str:
    new = [turn for turn in turns if not turn.recorded]
    kinds = [turn.answer.report["match"] for turn in new]
    told = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    reused, computed = (sum(turn.answer.report[f"{what}_tokens"] for turn in new) for what in ("reused", "computed"))
    return f"{count(len(new), 'new turn')}{f' ({told})' if told else ''}: {reused} tokens reused, {computed} computed."
