"""The model's tokenizer and chat template, and what the rest of the server asks of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream

from rewake.errors import InvalidRequest, ModelError
from rewake.text.chats import Marks, folded, keeps_system, marks_of, read_back, trims_answers
from rewake.text.template import ChatTemplate
from rewake.text.toolcalls import HI, REFUSALS, Shown, shown_calls, shows_several, shows_tools, with_text_arguments
from rewake.text.tools import Dialect, dialect_of
from rewake.text.vocabulary import open_vocabulary

__all__ = ["Detokenizer", "Tokenizer"]

# Models are fine-tuned from others, and now and then end as those did, whatever their configuration says.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>")


class Tokenizer:
    """Text to ids and back; special tokens in text are recognised as such."""

    def __init__(self, path: Path) -> None:
        self._backend, self._vocabulary = open_vocabulary(path)
        template = self._vocabulary.template
        try:
            self._chat_template = ChatTemplate(template, self._vocabulary.named) if template else None
        except TemplateError as error:
            raise ModelError(f"the model's chat template cannot be used: {error}") from error
        special = {str(t.content): i for i, t in self._backend.get_added_tokens_decoder().items() if t.special}
        self._special = special
        self._split = re.compile("(" + "|".join(re.escape(t) for t in sorted(special, key=len, reverse=True)) + ")")
        self.cut_ids = frozenset(special.values()) if self._splitting_changes_nothing() else frozenset()

    def encode(self, text: str) -> list[int]:
        """Token ids of text that already has all special tokens it is to have."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The exact text, special tokens and spaces included."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def split(self, text: str) -> list[str]:
        """Cut at the tokens of `cut_ids`, which become pieces of their own; tokens never cross these cuts."""
        if not self.cut_ids:
            return [text]
        return [piece for piece in self._split.split(text) if piece]

    def special_id(self, piece: str) -> int | None:
        return self._special.get(piece)

    def begins_answer(self, text: str, at: int) -> bool:
        """Whether the piece of `text` at `at` is the model's turn, as the chat template opens one."""
        *before, first = self.split(self._answer_start) or [""]
        if first in self._special:
            before, first = [*before, first], ""
        opening = "".join(before)
        return bool(opening) and text.startswith(opening + first, max(at - len(opening), 0))

    def begins_calls(self, text: str, at: int) -> bool:
        """Whether the piece of `text` at `at` stands behind a special token that opens tool calls."""
        openers = self.dialect.openers if self.dialect is not None else ()
        return any(opener in self._special and text.endswith(opener, 0, at) for opener in openers)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._backend)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @cached_property
    def thinks(self) -> bool:
        """Whether the model thinks before it answers, between <think> and </think>."""
        return "</think>" in self._template

    @property
    def _template(self) -> str:
        return self._chat_template.source if self._chat_template else ""

    @cached_property
    def dialect(self) -> Dialect | None:
        """How the model writes tool calls, as its template shows; None if it has none, or one we do not know."""
        return dialect_of(self._shown.text) if self._shown is not None else None

    @cached_property
    def parallel_calls(self) -> bool:
        """Whether the template takes more than one call in a message."""
        return self._shown is not None and shows_several(self._apply_template, self._shown.arguments)

    @cached_property
    def offers_tools(self) -> bool:
        """Whether the template tells the model of tools, and the calls it then writes are understood."""
        return self.dialect is not None and shows_tools(self._apply_template)

    def literally(self, text: str) -> str:
        """A text as it stands in a grammar: a special token is one, and no text spells it."""
        special = self.special_id(text)
        return json.dumps(text) if special is None else f"<[{special}]>"

    def raw(self, text: str) -> str:
        """A text that is no chat, begun as the model was trained to have texts begin."""
        begins = self._vocabulary.begins
        return text if text.startswith(begins) else begins + text

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, go_on: bool = False) -> str:
        """The prompt's text for a chat. `tools` are what may be called; with `go_on`, the last message is the answer's beginning.

        Raises InvalidRequest for what the model's template refuses.
        """
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template: it cannot be used for chat completions", param="messages")
        for number, message in enumerate(messages):
            field = "tool_calls" if "tool_calls" in message else "role" if message["role"] == "tool" else None
            if field and self._shown is None:
                raise InvalidRequest("this model's chat template knows no tool calls", param=f"messages.{number}.{field}")
            if "reasoning_content" in message and not self.thinks:
                raise InvalidRequest("this model's chat template knows no reasoning", param=f"messages.{number}.reasoning_content")
        if self.thinks and "reasoning_content" not in self._template:
            messages = [with_thoughts(message) for message in messages]
        if tools and not self.offers_tools:
            is_strange = self._shown is not None and self.dialect is None
            reason = "writes tool calls in a way that is not known here" if is_strange else "has no tools"
            raise InvalidRequest(f"this model's chat template {reason}: docs/protocols.md names models that have", param="tools")
        if self._shown is not None and self._shown.arguments == "text":
            messages = [with_text_arguments(message) for message in messages]
        if messages[0]["role"] == "system" and not self._keeps_system:
            messages = folded(messages)
        try:
            return self._apply_template(messages, tools, go_on=go_on)
        except REFUSALS as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error

    def _apply_template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, answer: bool = True, go_on: bool = False
    ) -> str:
        return self._render(messages, tools or self._no_tools, answer and not go_on, go_on)

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, answer: bool, go_on: bool) -> str:
        assert self._chat_template is not None
        return self._chat_template.render(messages, tools, answer=answer, go_on=go_on)

    @cached_property
    def _no_tools(self) -> list[dict[str, Any]] | None:
        """What a template takes for no tools: those that are made for tools only want a list."""
        try:
            self._render([HI], None, True, False)
        except REFUSALS:
            return []
        return None

    def _show(self, messages: list[dict[str, Any]]) -> str:
        return self._apply_template(messages, answer=False)

    def messages(self, text: str) -> list[dict[str, Any]] | None:
        """The messages of a transcript's text; None if that cannot be told."""
        return read_back(text, self._marks, self._show) if self._marks is not None else None

    def is_answer(self, text: str, ids: Sequence[int]) -> bool:
        """Whether a piece that begins an answer says what was sampled, but for what is lost or added on the way.

        That is an unfinished character at the end, what the template puts before each answer, and white space if it trims that.
        """
        start = self.split(self._answer_start)[-1:] or [""]
        own = "" if start[0] in self._special else start[0]
        given, whole = text.removeprefix(own), self.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")
        said = whole.removeprefix(own)
        return given in (said, whole) or (self._trims_answers and given.strip() == said.strip())

    @cached_property
    def _answer_start(self) -> str:
        """What the template puts in front of an answer; where it adds nothing, the end of the question."""
        if not self.has_chat_template:
            return ""
        chat = [{"role": "user", "content": "Hi"}]
        if start := self.render(chat).removeprefix(self._apply_template(chat, answer=False)):
            return start
        between = self._marks.before_answer + self._marks.lead if self._marks else ""
        first = next((piece for piece in self.split(between) if piece in self._special), "")
        return between[between.index(first) :]

    @cached_property
    def _keeps_system(self) -> bool:
        return keeps_system(self._show)

    @cached_property
    def _trims_answers(self) -> bool:
        return trims_answers(self._show)

    @cached_property
    def _marks(self) -> Marks | None:
        return marks_of(self._show, self._apply_template) if self.has_chat_template else None

    @cached_property
    def _shown(self) -> Shown | None:
        return shown_calls(self._apply_template) if self.has_chat_template else None

    def stop_ids(self, path: Path) -> frozenset[int]:
        """Tokens that end an answer: the tokenizer's end, those of the model's generation config, and the usual ones by their text."""
        ids = {self._vocabulary.end_id, *(self._special[t] for t in END_TOKENS if t in self._special)}
        config = path / "generation_config.json"
        if config.is_file():
            eos = json.loads(config.read_text()).get("eos_token_id")
            ids |= set(eos if isinstance(eos, list) else [eos])
        return frozenset(i for i in ids if i is not None)

    def description(self) -> str:
        """The tokenizer as JSON, as the tokenizers library writes it."""
        return self._backend.to_str()

    def digest(self) -> str:
        return hashlib.sha256(self.description().encode()).hexdigest()

    def _splitting_changes_nothing(self) -> bool:
        """Whether text behind a special token is tokenised as it is alone; false for some sentencepiece vocabularies."""
        if not self._special:
            return False
        probe = "user\nHello, wörld! 12 \n\n  x"
        return all(self.encode(t + probe + t) == [i, *self.encode(probe), i] for t, i in self._special.items())


def with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """The message for templates that look for thoughts in the text."""
    if "reasoning_content" not in message:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**rest, "content": f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"}


class Detokenizer:
    """Turns one answer's tokens into text as they come; a character split over tokens waits for its last byte.

    Special tokens are text, too: what was sampled is what is sent, so that it is recognised when it comes back.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=False)

    def push(self, token: int) -> str:
        return self._stream.step(self._backend, token) or ""
