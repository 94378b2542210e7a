"""A scenario is played: phases, rounds and turns, and who hears what.

What others have said since an agent's last turn reaches it as one user turn, with names and cues. So its messages are a system message
and then users' and assistants' turns, one by one, as the strictest chat template wants them; they only grow, and each prompt begins
with the one before. Phases share agents: what was attended to in one is there in the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from rewake.client import Client
from rewake.errors import ConfigError
from rewake.workflows.agent import Agent, Answer
from rewake.workflows.orders import called_up, lines_of
from rewake.workflows.record import Record, Turn
from rewake.workflows.scenario import Phase, Scenario

__all__ = ["Play", "read_texts"]

Voice = Callable[[Agent, str, Callable[[str], object]], Awaitable[Answer]]
SILENCE = "(says nothing)"


def read_texts(scenario: Scenario, folder: Path) -> dict[str, str]:
    """The texts that agents of the scenario know, by file. Raises ConfigError."""
    texts = {}
    for name in scenario.files:
        try:
            texts[name] = (folder / name).read_text(encoding="utf-8").strip()
        except FileNotFoundError as error:
            more = f" and {len(scenario.files) - 1} more" if len(scenario.files) > 1 else ""
            raise ConfigError(
                f"this scenario needs the texts {name}{more}, and {folder} has none of that name: --texts names their directory"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{folder / name} cannot be read: {error}") from error
    return texts


async def say(agent: Agent, cue: str, on_piece: Callable[[str], object]) -> Answer:
    return await agent.say(cue, on_piece=on_piece)


class Play:
    """A scenario on a server, from where its record ends. Agents are called `prefix` + their name there."""

    def __init__(
        self,
        scenario: Scenario,
        client: Client,
        *,
        prefix: str = "",
        texts: Mapping[str, str] | None = None,
        record: Record | None = None,
        voice: Voice = say,
        on_phase: Callable[[int, Phase], object] = lambda *_: None,
        on_piece: Callable[[str, str], object] = lambda *_: None,
    ) -> None:
        """`voice` has an agent speak, `on_piece` is told who says what as it comes; broadcast answers come whole."""
        self.scenario = scenario
        self.record = record or Record(None, scenario)
        self.voice = voice
        self.on_phase = on_phase
        self.on_piece = on_piece
        self.agents = {name: self._agent(client, prefix, name, texts or {}) for name in scenario.agents}
        self.minutes: dict[str, list[str]] = {room: [] for room in scenario.rooms}
        self._known: dict[tuple[str, str], int] = {}  # (agent, room): how many of its minutes the agent has heard
        self._recorded = iter(list(self.record.turns))
        self._number = 0

    def _agent(self, client: Client, prefix: str, name: str, texts: Mapping[str, str]) -> Agent:
        person = self.scenario.agents[name]
        instructions = [person.instructions, self.scenario.opening, texts[person.file] if person.file else ""]
        return Agent(
            client,
            prefix + name,
            "\n\n".join(part.strip() for part in instructions if part.strip()),
            temperature=self.scenario.temperature,
            frequency_penalty=self.scenario.frequency_penalty,
            max_tokens=person.max_tokens or self.scenario.max_tokens,
        )

    async def run(self, until: int | None = None) -> AsyncIterator[Turn]:
        """Every turn as it ends, the recorded ones first; to the end of phase number `until` (from 1)."""
        for number, phase in enumerate(islice(self.scenario.phases, until)):
            self.on_phase(number, phase)
            self._enter(phase)
            for round in range(phase.num_rounds):
                async for turn in self._round(number, phase, round):
                    yield turn

    # ---- a round

    async def _round(self, number: int, phase: Phase, round: int) -> AsyncIterator[Turn]:
        at = (number, phase, round)
        question = phase.questions[round] if phase.questions else ""
        if question:
            alone = phase.apart and phase.moderator is not None  # speakers come when they are called up
            self._tell(phase, phase.asker, question, [name for name in phase.there if not alone or name not in phase.speakers])
        if phase.order == "broadcast":
            for turn in await self._together(*at):
                yield turn
            return
        speakers = phase.order if isinstance(phase.order, list) else phase.speakers
        if phase.moderator is not None:
            turn = await self._speak(*at, phase.moderator, self._call(phase))
            yield turn
            speakers = self._called_up(phase, turn.answer.text, question)
        for speaker in speakers:
            if phase.apart and question:
                self.agents[speaker].hear(f"{phase.asker}: {question}")
            yield await self._speak(*at, speaker, f"It is your turn, {self.scenario.called(speaker)}.")

    async def _speak(self, number: int, phase: Phase, round: int, speaker: str, cue: str) -> Turn:
        turn = await self._ask(number, phase, round, speaker, cue, lambda piece: self.on_piece(speaker, piece))
        self._has_spoken(phase, turn)
        return turn

    async def _together(self, number: int, phase: Phase, round: int) -> list[Turn]:
        """Everybody answers the same, at the same time, and hears the others afterwards."""
        cues = {speaker: f"Everybody answers now. You are {self.scenario.called(speaker)}." for speaker in phase.speakers}
        asked = [self._ask(number, phase, round, speaker, cue, lambda _: None) for speaker, cue in cues.items()]
        turns = await asyncio.gather(*asked)
        for turn in turns:
            self._has_spoken(phase, turn)
        return turns

    async def _ask(self, number: int, phase: Phase, round: int, speaker: str, cue: str, on_piece: Callable[[str], object]) -> Turn:
        """The recorded answer, if there is one; else the agent's."""
        agent, place = self.agents[speaker], (self._number, number, round, speaker, phase.room)
        self._number += 1
        if (known := next(self._recorded, None)) is not None:
            if (known.number, known.phase, known.round, known.speaker, known.room) != place:
                raise ConfigError(f"turn {known.number + 1} of the record is not one of this scenario: name another file")
            agent.said(agent.prompt(cue), known.answer.text)
            return known
        return Turn(*place, await self.voice(agent, cue, on_piece))

    def _has_spoken(self, phase: Phase, turn: Turn) -> None:
        if not turn.recorded:
            self.record.add(turn)
        name, hearers = self.scenario.called(turn.speaker), phase.with_whom(turn.speaker)
        if phase.apart:
            hearers = [other for other in hearers if other not in phase.speakers]
        others = [self.scenario.called(other) for other in phase.there if other != turn.speaker]
        self._tell(phase, name, lines_of(name, others, turn.answer.text) or SILENCE, hearers)

    # ---- who hears what

    def _enter(self, phase: Phase) -> None:
        """The phase begins: all who are there are told where they are, and of what was said before if minutes were kept."""
        for name in phase.there:
            for room in dict.fromkeys([*phase.reads.get(name, ()), phase.room]):
                self._catch_up(name, room)
            present = ", ".join(map(self.scenario.called, phase.with_whom(name))) or "nobody else"
            cue = f"\n{phase.cue.strip()}" if phase.cue.strip() else ""
            self.agents[name].hear(f"[{phase.name}. Here with you: {present}.]{cue}")

    def _catch_up(self, name: str, room: str) -> None:
        missed = self.minutes[room][self._known.get((name, room), 0) :]
        if missed:
            self.agents[name].hear("\n\n".join([f"[What was said in {room.replace('_', ' ')} before you came:]", *missed]))
        self._known[name, room] = len(self.minutes[room])

    def _tell(self, phase: Phase, speaker: str, text: str, hearers: Sequence[str]) -> None:
        line = f"{speaker}: {text}"
        if not self.scenario.rooms[phase.room].private:
            self.minutes[phase.room].append(line)
        for name in hearers:
            self.agents[name].hear(line)
        for name in phase.there:  # whoever was there reads no minutes of it
            self._known[name, phase.room] = len(self.minutes[phase.room])

    # ---- moderators

    def _call(self, phase: Phase) -> str:
        assert phase.moderator is not None
        names = ", ".join(self.scenario.called(name) for name in phase.speakers)
        return f"It is your turn, {self.scenario.called(phase.moderator)}. Call up {phase.asks} of these by name: {names}."

    def _called_up(self, phase: Phase, said: str, question: str) -> list[str]:
        names = {name: self.scenario.called(name) for name in phase.speakers}
        about = {name: self.scenario.agents[name].about for name in phase.speakers}
        return called_up(said, names, phase.asks, question, about)
