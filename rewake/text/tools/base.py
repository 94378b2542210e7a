"""What a model's way to write tool calls consists of: read them from an answer as it comes, and hold an answer to them.

Names, arguments and text; knows no protocol and no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rewake.text.toolcalls import canonical_json, parse_arguments

__all__ = ["Call", "Choice", "Dialect", "Literally", "Reading", "Rules", "Tool", "begun", "call_of", "calls_in", "read"]


@dataclass(frozen=True)
class Tool:
    """A function that may be called. `parameters` is the JSON schema of its arguments, which came in the request's `field`.

    `strict`: the arguments must obey it, and a schema that cannot be obeyed is refused.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    field: str = "tools"


@dataclass(frozen=True)
class Call:
    """A call as the model wrote it: `arguments` are the text of a JSON object. Some models name their calls: `id`, else empty."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True)
class Choice:
    """Whether an answer calls: not at all, if it wants to, or for sure; `parallel`: more than once, if it wants to."""

    mode: Literal["none", "auto", "required"] = "auto"
    parallel: bool = True


@dataclass(frozen=True)
class Rules:
    """Rules of a grammar in which `text` is an answer without calls, and `calls` are calls with what may stand before them."""

    rules: str
    text: str = "TEXT"
    calls: str = "calls"

    def answer(self, choice: Choice) -> str:
        wanted = {"none": self.text, "auto": f"{self.text} | {self.calls}", "required": "only"}[choice.mode]
        return f"answer: {wanted}\n{self.rules}"


Literally = Callable[[str], str]  # how a text stands in a grammar: some are tokens that no text spells
Schema = Callable[[Tool], str]  # how a tool's arguments do


class Reading(Protocol):
    """One answer, as it comes: pieces of text that are no calls, and calls once they are complete."""

    def push(self, piece: str) -> list[str | Call]: ...

    def finish(self) -> list[str | Call]:
        """The answer has ended: what was held back, as text if it is no call."""
        ...


class Dialect(Protocol):
    """How a family of models writes calls. `openers` are marks behind which calls, or their arguments, stand."""

    @property
    def name(self) -> str: ...

    @property
    def openers(self) -> tuple[str, ...]: ...

    def writes(self, shown: str) -> bool:
        """Whether a template that shows the probe's call as in `shown` (see `toolcalls.probe`) writes in this dialect."""
        ...

    def reading(self, names: frozenset[str] | None) -> Reading:
        """For calls of tools with these names (None: any); others are text."""
        ...

    def rules(self, tools: Sequence[Tool], parallel: bool, literally: Literally, schema: Schema) -> Rules: ...

    def call_id(self) -> str:
        """A new call's id, such as the model's template takes."""
        ...


def begun(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)


def call_of(value: Any, names: frozenset[str] | None, keys: Sequence[str] = ("arguments", "parameters")) -> Call | None:
    """The call that a JSON value describes; None if it does not, or calls what nobody has offered."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):  # some models quote them
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if not isinstance(arguments, dict) or (names is not None and value["name"] not in names):
        return None
    try:
        return Call(value["name"], json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return None


def read(dialect: Dialect, text: str, names: frozenset[str] | None = None) -> tuple[str, list[Call]]:
    """A whole answer's text and calls."""
    reading = dialect.reading(names)
    parts = [*reading.push(text), *reading.finish()]
    return "".join(p for p in parts if isinstance(p, str)), [p for p in parts if isinstance(p, Call)]


def calls_in(dialect: Dialect, text: str, behind: bool) -> Any:
    """What an answer calls and says, equal for all ways to write the same JSON; None if it calls nothing.

    `behind`: the text is not a whole answer, but what stands between one of the dialect's `openers` and the next special token.
    """
    if behind:
        with suppress(ValueError):
            return canonical_json(parse_arguments(text))
        text = f"{dialect.openers[0]}{text}"
    content, calls = read(dialect, text)
    try:
        return (content.strip(), [(c.name, canonical_json(parse_arguments(c.arguments))) for c in calls]) if calls else None
    except ValueError:
        return None
