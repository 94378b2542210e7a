"""What was said so far, in a file of lines of JSON: with it a play goes on in another process, or after a crash.

A turn is written when its answer has come, and synced before the next one is asked. A torn last line was never acknowledged.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rewake.errors import ConfigError
from rewake.workflows.agent import Answer
from rewake.workflows.scenario import Scenario

__all__ = ["Record", "Turn"]


@dataclass(frozen=True)
class Turn:
    """One answer, and where it was given. Phases, rounds and turns count from 0."""

    number: int
    phase: int
    round: int
    speaker: str
    room: str
    answer: Answer = field(repr=False)
    recorded: bool = False  # it was said by an earlier process

    def line(self) -> dict[str, Any]:
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("answer", "recorded")}
        return {**about, **asdict(self.answer)}


class Record:
    """The turns of a file; none, and nothing is written, without one."""

    def __init__(self, path: Path | None, scenario: Scenario) -> None:
        """Raises ConfigError for a file that is no record, or is one of another scenario."""
        self.path = path
        self.turns: list[Turn] = []
        digest = hashlib.sha256(scenario.model_dump_json().encode()).hexdigest()
        self._head = {"scenario": scenario.title, "digest": digest}
        if path is not None and path.exists() and path.stat().st_size:
            self._read(path)
        elif path is not None:
            self._write(self._head)

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self._write(turn.line())

    def _write(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        with open(self.path, "ab") as file:
            file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        whole, newline, torn = path.read_bytes().rpartition(b"\n")
        try:
            head, *turns = [json.loads(line) for line in (whole if newline else torn).splitlines()]
            known = head.keys() == self._head.keys()
            self.turns = [turn_of(line) for line in turns]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not the record of a play: {error}") from error
        if not known or head != self._head:
            raise ConfigError(f"{path} is the record of another scenario, or of another version of this one: name another file")
        if torn:
            os.truncate(path, len(whole) + 1)


def turn_of(line: dict[str, Any]) -> Turn:
    answer = Answer(**{f.name: line[f.name] for f in fields(Answer)})
    return Turn(line["number"], line["phase"], line["round"], line["speaker"], line["room"], answer, recorded=True)
