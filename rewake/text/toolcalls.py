"""Tool calls in a history: one form for all ways to write the same JSON, and how a chat template takes them.

Clients send calls back with other spaces and another order of keys than the model wrote. Knows no protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

from jinja2 import TemplateError

__all__ = ["ArgumentStyle", "argument_style", "canonical_calls", "canonical_json", "parse_arguments", "with_text_arguments"]

ArgumentStyle = Literal["object", "text"]
CALL = re.compile(r"(?<=<tool_call>)(?:(?!<tool_call>).)*?(?=</tool_call>)", re.DOTALL)  # as Hermes and Qwen write them


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


def canonical_calls(text: str) -> str | None:
    """The text with the JSON of its tool calls in canonical form; None if there are none. What is no JSON stays as it is."""
    if "<tool_call>" not in text:
        return None

    def canonical(call: re.Match[str]) -> str:
        try:
            return canonical_json(parse_arguments(call[0]))
        except ValueError:
            return call[0]

    return CALL.sub(canonical, text)


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message for templates that want arguments as text."""
    calls = message.get("tool_calls", ())
    texts = [{**c, "function": {**c["function"], "arguments": canonical_json(c["function"]["arguments"])}} for c in calls]
    return {**message, "tool_calls": texts} if texts else message


def argument_style(render: Callable[[list[dict[str, Any]]], str]) -> ArgumentStyle | None:
    """How a template takes the arguments of calls, found by showing it one; None if it shows no calls or no results."""
    call = {"id": "callprobe", "type": "function", "function": {"name": "probe_name", "arguments": {"probe_key": "probe_value"}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}

    def shows(message: dict[str, Any], *wanted: str) -> bool:
        result = {"role": "tool", "content": "probe_result", "tool_call_id": "callprobe"}
        try:
            text = render([{"role": "user", "content": "Hi"}, message, result])
        except (TemplateError, TypeError, ValueError):
            return False
        return all(w in text for w in ("probe_name", "probe_value", "probe_result", *wanted)) and "'probe_key'" not in text

    if shows(asked, "probe_key"):
        return "object"
    return "text" if shows(with_text_arguments(asked), '"probe_key"') else None
