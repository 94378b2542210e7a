"""What a chat template makes of a chat, found out by showing it one: where it leaves system messages, and how turns are marked.

Knows templates only as functions from messages to text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

__all__ = ["Marks", "folded", "keeps_system", "marks_of", "read_back", "trims_answers"]

Message = dict[str, Any]
Render = Callable[[list[Message]], str]  # without the opening of an answer
PROBES = ("probe_system", "probe_question", "probe_answer", "probe_more", "probe_last")


def chat(*contents: str, system: bool = True) -> list[Message]:
    roles = ("system", "user", "assistant", "user", "assistant")[not system :]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def shown(render: Render, messages: list[Message]) -> str | None:
    """The text, or None if the template refuses."""
    try:
        return render(messages)
    except (TemplateError, TypeError, ValueError):
        return None


def keeps_system(render: Render) -> bool:
    """Whether a system message is taken, and stays in its place when the talk goes on.

    Some templates refuse it, and some put it before the last question, so that no prompt begins as the one before it did.
    """
    once, later = shown(render, chat(*PROBES[:2])), shown(render, chat(*PROBES[:4]))
    if once is None or later is None or PROBES[0] not in once:
        return False
    return later.startswith(once[: once.index(PROBES[0]) + len(PROBES[0])])


def folded(messages: Sequence[Message]) -> list[Message]:
    """The chat with its first system messages at the head of the first question, as Gemma's own template has it."""
    first = next((i for i, m in enumerate(messages) if m["role"] != "system"), 0)
    if not first or messages[first]["role"] != "user":
        return list(messages)
    parts = [message["content"] for message in messages[: first + 1]]
    return [{**messages[first], "content": "\n\n".join(parts)}, *messages[first + 1 :]]


def trims_answers(render: Render) -> bool:
    """Whether white space around an answer is lost: what was sampled is then not to be known from the text."""
    text = shown(render, chat("Hi", " \nprobe_answer\n ", "More", system=False))
    return text is not None and "probe_answer\n " not in text


@dataclass(frozen=True)
class Marks:
    """What stands around the turns of a chat: before the first one, with and without a system message, and between any two.

    `lead` is put before each answer that is sent back; the model begins its own answers without.
    """

    before_system: str | None  # None: this template takes none
    behind_system: str
    before_question: str
    before_answer: str
    lead: str
    behind_answer: str


def marks_of(render: Render, ask: Render) -> Marks | None:
    """None if the template shows no chat, or each turn otherwise. `ask` renders with the opening of an answer."""
    text = shown(render, chat(*PROBES[1:], system=False))
    parts = None if text is None else split(text, PROBES[1:])
    asked = shown(ask, chat(PROBES[1], system=False))
    if parts is None or asked is None or parts[1] != parts[3]:
        return None
    opening = asked.partition(PROBES[1])[2]  # some templates put a space before answers, which is not in the prompt
    if not parts[1].startswith(opening):
        return None
    with_system = shown(render, chat(*PROBES))
    around = None if with_system is None else split(with_system, PROBES)
    if around is None or around[2:5] != parts[1:4]:
        return Marks(None, "", parts[0], opening, parts[1][len(opening) :], parts[2])
    return Marks(around[0], around[1], parts[0], opening, parts[1][len(opening) :], parts[2])


def split(text: str, contents: Sequence[str]) -> list[str] | None:
    """What stands before, between and behind the contents, if each is there once and in order."""
    parts = []
    for content in contents:
        before, found, text = text.partition(content)
        if not found:
            return None
        parts.append(before)
    return [*parts, text]


def read_back(text: str, marks: Marks, render: Render) -> list[Message] | None:
    """The messages of a transcript's text, which may end in an answer that is not complete; None if it cannot be told.

    They are believed only if they render to the text again, but for white space, which some templates trim.
    """
    messages: list[Message] = []
    rest = text
    if marks.before_system is not None and text.startswith(marks.before_system) and not text.startswith(marks.before_question):
        system, found, rest = text[len(marks.before_system) :].partition(marks.behind_system)
        messages.append({"role": "system", "content": system})
        rest = marks.before_question + rest if found else ""
    if not rest.startswith(marks.before_question):
        return None
    rest, role = rest[len(marks.before_question) :], "user"
    while True:
        mark = marks.before_answer if role == "user" else marks.behind_answer
        content, found, rest = rest.partition(mark)
        if not found:
            break
        messages.append({"role": role, "content": content.removeprefix(marks.lead) if role == "assistant" else content})
        role = "assistant" if role == "user" else "user"
    if role == "user":
        return None
    messages.append({"role": role, "content": without_end(content.removeprefix(marks.lead), marks.behind_answer)})
    again = shown(render, messages)
    return messages if again is not None and squeezed(again).startswith(squeezed(text)) else None


def squeezed(text: str) -> str:
    return "".join(text.split())


def without_end(text: str, mark: str) -> str:
    """Without as much of `mark` as has been written already."""
    return next((text[: len(text) - n] for n in range(len(mark), 0, -1) if text.endswith(mark[:n])), text)
