"""A model's chat template, rendered as transformers renders it, without importing it: that takes a second of a start.

A template is somebody else's program: it runs in jinja's sandbox, and is given strings, numbers, lists and dictionaries only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["ChatTemplate"]

Message = Mapping[str, Any]
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of what a model thought; templates know one of them
HERE = "\N{OBJECT REPLACEMENT CHARACTER}go on\N{OBJECT REPLACEMENT CHARACTER}"  # where a message is to be continued


class ChatTemplate:
    """`source` is a template, or several by name: "default", and "tool_use" for chats with tools. `tokens` are special ones by name."""

    def __init__(self, source: str | Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self.source = source if isinstance(source, str) else json.dumps(source)
        named = {"default": source} if isinstance(source, str) else source
        if "default" not in named:
            raise TemplateError(f"there are several chat templates, and none is the default: {', '.join(named)}")
        environment = sandbox()
        self._default = environment.from_string(named["default"])
        self._with_tools = environment.from_string(named["tool_use"]) if "tool_use" in named else self._default
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Message], tools: Sequence[Message] | None, *, answer: bool, go_on: bool) -> str:
        """A chat's text. With `answer` the model's turn is opened behind it; with `go_on` it ends within the last message.

        Raises whatever the template does with messages it does not expect.
        """
        chat = [as_templates_read(message) for message in messages]
        if go_on:
            chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}{HERE} "}
        template = self._default if tools is None else self._with_tools
        text = template.render(messages=chat, tools=tools, documents=None, add_generation_prompt=answer, **self._tokens)
        return before_the_mark(text) if go_on else text


def as_templates_read(message: Message) -> dict[str, Any]:
    """Without what is None, and with thoughts under the names that templates look for."""
    said = {key: value for key, value in message.items() if value is not None}
    thought = next((said[name] for name in THOUGHTS if name in said), None)
    return said if thought is None else {"thinking": thought, **said, "reasoning_content": thought}


def before_the_mark(text: str) -> str:
    at = text.rfind(HERE)
    if at < 0:
        raise TemplateError("it does not show the last message as it is, which can therefore not be continued")
    trims = not text.startswith(" ", at + len(HERE))
    return text[:at].rstrip() if trims else text[:at]


def sandbox() -> ImmutableSandboxedEnvironment:
    """What templates on the Hub are written for."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
    environment.globals.update(dict=PlainDict(), namespace=PlainNamespace)
    return environment


class Generation(Extension):
    """`{% generation %}` marks, for training, what the model has written; here its text is text like any other."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class PlainDict:
    """`dict` in templates: makes them, and gives no way to the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class PlainNamespace(Namespace):
    """`namespace` in templates; none of its names begins with an underscore, behind which Python's own are."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: templates may use that name
        for name in dict(*args[1:], **kwargs):
            reject_private(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        reject_private(name)
        super().__setitem__(name, value)


def reject_private(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a template's namespace has no {name!r}")


def refuse(message: str) -> None:
    raise TemplateError(message)


def to_json(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Unlike jinja's own, which is made for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
