"""Stop strings: found wherever tokens and chunks are cut, and never shown in part. Knows text and tokens; no protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["StopWatch", "Stops"]


class Spells(Protocol):
    """Turns tokens into text as they come; a token within a character adds nothing."""

    def push(self, token: int) -> str: ...


class Stops:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one.

    The first is the one that is complete first; of several that end together, the one that began first, so that none is shown in part.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """What can be shown of the text up to here, and was not yet."""
        if not self._stops or self.found is not None:
            return "" if self._stops else piece
        text = self._held + piece
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            self._held = ""
            return text[:at]
        safe = len(text) - self._num_begun(text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The text has ended: what was held back begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _num_begun(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class StopWatch:
    """An answer's text up to its first stop string, token by token; and how many of the tokens spell only what is shown.

    Called with a token, it is a `Request.watch`.
    """

    def __init__(self, spelling: Spells, stops: Sequence[str]) -> None:
        self._spelling = spelling
        self._stops = Stops(stops)
        self._num_tokens = self._num_shown = self._num_spelt = 0
        self._ends: list[tuple[int, int]] = [(0, 0)]  # characters, tokens: where both end; what is shown for sure is but the first

    @property
    def found(self) -> str | None:
        """The stop string."""
        return self._stops.found

    @property
    def num_whole(self) -> int:
        """How many tokens are shown, all of each of them."""
        return self._ends[0][1]

    def push(self, token: int) -> str:
        """What can be shown now."""
        self._num_tokens += 1
        piece = self._spelling.push(token)
        if not piece:
            return ""
        self._num_spelt += len(piece)
        self._ends.append((self._num_spelt, self._num_tokens))
        shown = self._stops.push(piece)
        self._note_shown(shown)
        return shown

    def finish(self) -> str:
        """The answer has ended: what was held back."""
        held = self._stops.finish()
        self._note_shown(held)
        return held

    def _note_shown(self, text: str) -> None:
        self._num_shown += len(text)
        while len(self._ends) > 1 and self._ends[1][0] <= self._num_shown:
            del self._ends[0]

    def __call__(self, token: int) -> int | None:
        self.push(token)
        return self.num_whole if self.found is not None else None
