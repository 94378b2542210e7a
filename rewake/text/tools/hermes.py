"""Calls as Hermes and Qwen write them: `<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>`, one behind another."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence

from rewake.text.tools.base import Call, Literally, Rules, Schema, Tool, begun, call_of

__all__ = ["Hermes"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesReading:
    """Space around calls separates them, and is not part of the answer's text."""

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names
        self._held = ""
        self._calls = False

    def push(self, piece: str) -> list[str | Call]:
        self._held += piece
        parts: list[str | Call] = []
        while (at := self._held.find(OPEN)) >= 0:
            found = self._complete(at + len(OPEN))
            if found is None:
                self._show(at, parts)
                return parts
            call, end = found
            before, self._held = self._held[: at if call else end], self._held[end:]
            if call is None:
                parts.append(before)
                continue
            if before.strip():
                parts.append(before.rstrip())
            parts.append(call)
            self._calls = True
        self._show(len(self._held) - begun(self._held, OPEN), parts)
        return parts

    def _complete(self, start: int) -> tuple[Call | None, int] | None:
        """The call that begins at `start`, and where it ends; None if it has not come to its end."""
        end = self._held.find(CLOSE, start)
        while end >= 0:
            try:
                return call_of(json.loads(self._held[start:end], strict=False), self._names), end + len(CLOSE)
            except RecursionError:
                return None, end + len(CLOSE)
            except ValueError:  # the mark may be part of an argument
                end = self._held.find(CLOSE, end + 1)
        return None

    def _show(self, end: int, parts: list[str | Call]) -> None:
        """Let text go up to `end`, but for space before it, which may separate it from a call."""
        text = self._held[:end].rstrip()
        if text:
            parts.append(text)
            self._held = self._held[len(text) :]

    def finish(self) -> list[str | Call]:
        held, self._held = self._held, ""
        return [] if not held or (self._calls and held.isspace()) else [held]


class Hermes:
    name = "hermes"
    openers = (OPEN,)

    def writes(self, shown: str) -> bool:
        return re.search(OPEN + r'\s*\{"name": "probe_name", "arguments": \{"probe_key": "probe_value"\}\}\s*' + CLOSE, shown) is not None

    def reading(self, names: frozenset[str] | None) -> HermesReading:
        return HermesReading(names)

    def rules(self, tools: Sequence[Tool], parallel: bool, literally: Literally, schema: Schema) -> Rules:
        opening, closing = literally(OPEN), literally(CLOSE)
        names = [json.dumps('\n{"name": ' + json.dumps(tool.name) + ', "arguments": ') for tool in tools]
        bodies = " | ".join(f'{name} {schema(tool)} "}}\\n" {closing}' for name, tool in zip(names, tools, strict=True))
        more = f' ("\\n"? {opening} one)*' if parallel else ""
        if opening.startswith('"'):
            free = f"calls: before one{more}\nbefore[suffix={opening}]: /(?s:.*)/\nTEXT: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/"
        else:
            free = f"calls: TEXT {opening} one{more}\nTEXT: /(?s:.*)/"
        return Rules(f"{free}\nonly: {opening} one{more}\none: {bodies}")

    def call_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"
