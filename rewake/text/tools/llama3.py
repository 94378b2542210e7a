"""Calls as Llama 3 writes them: the whole answer is `{"name": "f", "parameters": {...}}`, or several with `;` between."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence

from rewake.text.tools.base import Call, Literally, Rules, Schema, Tool, call_of

__all__ = ["Llama3"]

TAG = "<|python_tag|>"
KEYS = ("name", "type", "function", "parameters")  # what a call may begin with
BEGINS = re.compile(rf'\s*(?:{re.escape(TAG)}\s*)?\{{\s*"')
BETWEEN = re.compile(r"[\s;,]*")
DECODER = json.JSONDecoder(strict=False)


def may_call(text: str) -> bool:
    """Whether an answer that begins so may be a call."""
    begins = BEGINS.match(text)
    if begins is not None:
        rest = text[begins.end() :]
        return any(key.startswith(rest) or rest.startswith(key + '"') for key in KEYS)
    body = text.lstrip()
    if body.startswith(TAG):
        body = body[len(TAG) :].lstrip()
    return TAG.startswith(body) or re.fullmatch(r"\{\s*", body) is not None


class Llama3Reading:
    """A call has no mark of its own: what may be one is held back to the end."""

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names
        self._held = ""
        self._is_text = False

    def push(self, piece: str) -> list[str | Call]:
        if self._is_text:
            return [piece] if piece else []
        self._held += piece
        if may_call(self._held):
            return []
        self._is_text = True
        return self._text()

    def finish(self) -> list[str | Call]:
        return self._calls() or self._text()

    def _text(self) -> list[str | Call]:
        held, self._held = self._held, ""
        return [held] if held else []

    def _calls(self) -> list[str | Call]:
        """The calls that are all there is; none if there is anything else."""
        text = self._held.strip().removeprefix(TAG)
        at, calls = BETWEEN.match(text).end(), []  # type: ignore[union-attr]
        while at < len(text):
            try:
                value, at = DECODER.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            call = call_of(value, self._names, ("parameters", "arguments"))
            if call is None:
                return []
            calls.append(call)
            at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        return list(calls)


class Llama3:
    name = "llama3"
    openers = (TAG,)

    def writes(self, shown: str) -> bool:
        return re.search(r'\{"name": "probe_name", "parameters": \{"probe_key": "probe_value"\}\}', shown) is not None

    def reading(self, names: frozenset[str] | None) -> Llama3Reading:
        return Llama3Reading(names)

    def rules(self, tools: Sequence[Tool], parallel: bool, literally: Literally, schema: Schema) -> Rules:
        names = [json.dumps('{"name": ' + json.dumps(tool.name) + ', "parameters": ') for tool in tools]
        bodies = " | ".join(f'{name} {schema(tool)} "}}"' for name, tool in zip(names, tools, strict=True))
        more = ' ("; " one)*' if parallel else ""
        free = r'TEXT: /(?s:.*)/ & ~/\s*\{\s*"(name|type|function|parameters)"(?s:.*)/'
        return Rules(f"calls: one{more}\nonly: one{more}\n{free}\none: {bodies}")

    def call_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"
