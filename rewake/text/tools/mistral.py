"""Calls as Mistral's models write them: `[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]`.

Newer ones write `[TOOL_CALLS]f[ARGS]{...}`, and some of these name their calls: `[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{...}`.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rewake.text.tools.base import Call, Literally, Rules, Schema, Tool, begun, call_of

__all__ = ["Mistral"]

MARK, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAMED = re.compile(r"\s*([\w.-]+?)\s*(?:\[CALL_ID\](\w*))?(?:\[ARGS\])?\s*(?=\{)")
ID_LENGTH = 9  # what the templates insist on
DECODER = json.JSONDecoder(strict=False)


class MistralReading:
    """Calls are the end of an answer: behind the mark all is held back."""

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names
        self._held = ""
        self._marked = False

    def push(self, piece: str) -> list[str | Call]:
        self._held += piece
        if self._marked:
            return []
        at = self._held.find(MARK)
        self._marked = at >= 0
        end = at if self._marked else len(self._held) - begun(self._held, MARK)
        end = len(self._held[:end].rstrip())
        text, self._held = self._held[:end], self._held[end:]
        return [text] if text else []

    def finish(self) -> list[str | Call]:
        held, self._held = self._held, ""
        calls: list[str | Call] = list(self._calls(held)) if self._marked else []
        return calls or ([held] if held else [])

    def _calls(self, text: str) -> list[Call]:
        """The calls behind the marks; none if there is anything else."""
        calls: list[Call | None] = []
        for part in text.split(MARK)[1:]:
            try:
                calls += self._list(part) if part.lstrip().startswith("[") else self._named(part)
            except (ValueError, RecursionError):
                return []
        return [] if None in calls else [call for call in calls if call is not None]

    def _list(self, text: str) -> list[Call | None]:
        values = json.loads(text, strict=False)
        return [call_of(value, self._names) for value in values]

    def _named(self, text: str) -> list[Call | None]:
        named = NAMED.match(text)
        if named is None:
            return [None]
        value, end = DECODER.raw_decode(text, named.end())
        if text[end:].strip():
            return [None]
        call = call_of({"name": named[1], "arguments": value}, self._names)
        return [replace(call, id=named[2] or "") if call is not None else None]


@dataclass(frozen=True)
class Mistral:
    """`named`: as the newer ones do; `identified`: with names for calls."""

    named: bool = False
    identified: bool = False

    name = "mistral"
    openers = (MARK, ARGS)

    def writes(self, shown: str) -> bool:
        follows = rf"probe_name{'' if self.identified else '(?!'}\[CALL_ID\]{'' if self.identified else ')'}"
        sign = rf"\[TOOL_CALLS\]\s*{follows}.*probe_value" if self.named else r'\[TOOL_CALLS\]\s*\[.*"probe_name".*probe_value'
        return re.search(sign, shown, re.DOTALL) is not None

    def reading(self, names: frozenset[str] | None) -> MistralReading:
        return MistralReading(names)

    def rules(self, tools: Sequence[Tool], parallel: bool, literally: Literally, schema: Schema) -> Rules:
        mark = literally(MARK)
        if self.named:
            between = f"{literally(ID)} ID {literally(ARGS)}" if self.identified else literally(ARGS)
            one = " | ".join(f"{json.dumps(tool.name)} {between} {schema(tool)}" for tool in tools)
            more, ends = f" ({mark} one)*", ("", "")
        else:
            names = [json.dumps('{"name": ' + json.dumps(tool.name) + ', "arguments": ') for tool in tools]
            one = " | ".join(f'{name} {schema(tool)} "}}"' for name, tool in zip(names, tools, strict=True))
            more, ends = ' (", " one)*', ('"["', '"]"')
        listed = f"{ends[0]} one{more if parallel else ''} {ends[1]}"
        if mark.startswith('"'):
            free = f"calls: before {listed}\nbefore[suffix={mark}]: /(?s:.*)/\nTEXT: /(?s:.*)/ & ~/(?s:.*)\\[TOOL_CALLS\\](?s:.*)/"
        else:
            free = f"calls: TEXT {mark} {listed}\nTEXT: /(?s:.*)/"
        return Rules(f"{free}\nonly: {mark} {listed}\none: {one}\nID: /[a-zA-Z0-9]{{{ID_LENGTH}}}/")

    def call_id(self) -> str:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))
