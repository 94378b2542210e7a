"""An answer as it comes: tokens become text, stop strings end it, thoughts and tool calls are told from what is said. No protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewake.text.stops import Spells, StopWatch
from rewake.text.tools import Call, Reading
from rewake.text.tools.base import begun

__all__ = ["AnswerText", "Piece", "Said", "Thought"]

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Said:
    """A part of the answer's text."""

    text: str


@dataclass(frozen=True)
class Thought:
    """A part of what the model thought before it answered."""

    text: str


Piece = Said | Thought | Call


class Thinking:
    """Tells thoughts from what is said. Space around them, and around their tags, is theirs."""

    def __init__(self, begun: bool) -> None:
        """`begun`: the prompt has opened the thoughts already."""
        self._state = self._inside if begun else self._before
        self._held = ""
        self._has_thought = False

    def push(self, piece: str) -> list[Said | Thought]:
        self._held += piece
        found: list[Said | Thought] = []
        state = None
        while state != self._state:
            state = self._state
            found += state()
        return found

    def finish(self) -> list[Said | Thought]:
        held, self._held = self._held, ""
        if self._state == self._inside:
            held = held.strip("\n")
            return [Thought(held)] if held else []
        return [Said(held)] if held and self._state != self._behind else []

    def _before(self) -> list[Said | Thought]:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held, self._state = text[len(OPEN) :], self._inside
        elif not OPEN.startswith(text):
            self._state = self._saying
        return []

    def _inside(self) -> list[Said | Thought]:
        at = self._held.find(CLOSE)
        if at >= 0:
            thought, self._held, self._state = self._held[:at].rstrip("\n"), self._held[at + len(CLOSE) :], self._behind
        else:
            end = len(self._held[: len(self._held) - begun(self._held, CLOSE)].rstrip("\n"))
            thought, self._held = self._held[:end], self._held[end:]
        return self._thought(thought)

    def _thought(self, text: str) -> list[Said | Thought]:
        if not self._has_thought:
            text = text.lstrip("\n")
        self._has_thought = self._has_thought or bool(text)
        return [Thought(text)] if text else []

    def _behind(self) -> list[Said | Thought]:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = self._saying
        return []

    def _saying(self) -> list[Said | Thought]:
        text, self._held = self._held, ""
        return [Said(text)] if text else []


class AnswerText:
    """One answer. `push` its tokens, then `finish`; `stop` is the stop string that has ended it."""

    def __init__(self, spelling: Spells, stops: Sequence[str] = (), thinking: bool | None = None, calls: Reading | None = None) -> None:
        """`thinking`: whether the prompt has opened the thoughts already; None for a model that does not think."""
        self._watch = StopWatch(spelling, stops)
        self._thinking = Thinking(thinking) if thinking is not None else None
        self._calls = calls

    @property
    def stop(self) -> str | None:
        return self._watch.found

    @property
    def num_whole(self) -> int:
        """How many tokens have been told, all of each of them."""
        return self._watch.num_whole

    def push(self, token: int) -> list[Piece]:
        return self._split(self._watch.push(token))

    def finish(self) -> list[Piece]:
        pieces = self._split(self._watch.finish())
        if self._thinking is not None:
            pieces += self._read(self._thinking.finish())
        if self._calls is not None:
            pieces += told(self._calls.finish())
        return pieces

    def _split(self, text: str) -> list[Piece]:
        if not text:
            return []
        return self._read(self._thinking.push(text) if self._thinking is not None else [Said(text)])

    def _read(self, pieces: Sequence[Said | Thought]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if self._calls is None or isinstance(piece, Thought):
                found.append(piece)
            else:
                found += told(self._calls.push(piece.text))
        return found


def told(parts: list[str | Call]) -> list[Piece]:
    return [Said(part) if isinstance(part, str) else part for part in parts]
