"""Tool calls in a history: one form for all ways to write the same JSON, and how a chat template takes them.

Clients send calls back with other spaces and another order of keys than the model wrote. Knows no protocol and no model's way of
writing calls: see `tools`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError

__all__ = [
    "HI",
    "REFUSALS",
    "ArgumentStyle",
    "Shown",
    "canonical_json",
    "parse_arguments",
    "shown_calls",
    "shows_several",
    "shows_tools",
    "with_text_arguments",
]

ArgumentStyle = Literal["object", "text"]
Render = Callable[..., str]  # messages and tools: the template's text
HI = {"role": "user", "content": "Hi"}
RESULT = {"role": "tool", "content": "probe_result", "tool_call_id": "callprobe"}
PARAMETERS = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "A key."}}, "required": ["probe_key"]}
TOOL = {"type": "function", "function": {"name": "probe_name", "description": "A probe.", "parameters": PARAMETERS}}
REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    RecursionError,
)  # what templates do with what they do not expect


@dataclass(frozen=True)
class Shown:
    """How a template takes arguments, and the text it makes of a call of `probe_name` with {"probe_key": "probe_value"}."""

    arguments: ArgumentStyle
    text: str


def canonical_json(value: Any) -> str:
    """One text for equal values, spaced as models write JSON. Raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def parse_arguments(text: str) -> dict[str, Any]:
    """A call's arguments, keys in canonical order. Raises ValueError for what is no JSON object."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
        ordered: dict[str, Any] = json.loads(canonical_json(value))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return ordered


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message for templates that want arguments as text."""
    calls = message.get("tool_calls", ())
    texts = [{**c, "function": {**c["function"], "arguments": canonical_json(c["function"]["arguments"])}} for c in calls]
    return {**message, "tool_calls": texts} if texts else message


def probe(*names: str) -> dict[str, Any]:
    """A message that calls these."""
    calls = [
        {"id": "callprobe", "type": "function", "function": {"name": name, "arguments": {"probe_key": "probe_value"}}} for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def shown_calls(render: Render) -> Shown | None:
    """How a template shows calls, found by showing it one; None if it shows no calls or no results."""

    def shows(message: dict[str, Any], *wanted: str) -> str | None:
        try:
            text = render([HI, message, RESULT])
        except REFUSALS:
            return None
        is_whole = all(w in text for w in ("probe_name", "probe_value", "probe_result", *wanted)) and "'probe_key'" not in text
        return text if is_whole else None

    asked = probe("probe_name")
    if text := shows(asked, "probe_key"):
        return Shown("object", text)
    text = shows(with_text_arguments(asked), '"probe_key"')
    return Shown("text", text) if text else None


def shows_several(render: Render, style: ArgumentStyle) -> bool:
    """Whether a template takes more than one call in a message."""
    message = probe("probe_name", "probe_other")
    try:
        text = render([HI, message if style == "object" else with_text_arguments(message), RESULT])
    except REFUSALS:
        return False
    return "probe_name" in text and "probe_other" in text


def shows_tools(render: Render) -> bool:
    """Whether a template tells the model which tools there are."""
    try:
        return "probe_name" in render([HI], [TOOL])
    except REFUSALS:
        return False
