"""The model's tokenizer and chat template, as transformers knows them, and what the rest of the server asks of them."""

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
from transformers import AutoTokenizer

from rewake.errors import InvalidRequest, ModelError
from rewake.text.chats import Marks, folded, keeps_system, marks_of, read_back, trims_answers
from rewake.text.toolcalls import ArgumentStyle, argument_style, with_text_arguments

__all__ = ["Detokenizer", "Tokenizer"]

# Models are fine-tuned from others, and now and then end as those did, whatever their configuration says.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>")


class Tokenizer:
    """Text to ids and back; special tokens in text are recognised as such."""

    def __init__(self, path: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        if not self._tokenizer.is_fast:
            raise ModelError("the model's tokenizer has no fast version: its text cannot be streamed exactly")
        special = {str(t): int(i) for i, t in self._tokenizer.added_tokens_decoder.items() if t.special}
        self._special = special
        self._split = re.compile("(" + "|".join(re.escape(t) for t in sorted(special, key=len, reverse=True)) + ")")
        self.cut_ids = frozenset(special.values()) if self._splitting_changes_nothing() else frozenset()

    def encode(self, text: str) -> list[int]:
        """Token ids of text that already has all special tokens it is to have."""
        return self._tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    def decode(self, ids: Sequence[int]) -> str:
        """The exact text, special tokens and spaces included."""
        return self._tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)  # type: ignore[no-any-return]

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

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer.backend_tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt's text for a chat. Raises InvalidRequest for what the model's template refuses."""
        if not self.has_chat_template:
            raise InvalidRequest("this model has no chat template: it cannot be used for chat completions", param="messages")
        for number, message in enumerate(messages):
            field = "tool_calls" if "tool_calls" in message else "role" if message["role"] == "tool" else None
            if field and self._argument_style is None:
                raise InvalidRequest("this model's chat template knows no tool calls", param=f"messages.{number}.{field}")
        if self._argument_style == "text":
            messages = [with_text_arguments(message) for message in messages]
        if messages[0]["role"] == "system" and not self._keeps_system:
            messages = folded(messages)
        try:
            return self._apply_template(messages)
        except (TemplateError, TypeError) as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", param="messages") from error

    def _apply_template(self, messages: list[dict[str, Any]], answer: bool = True) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)  # type: ignore[no-any-return]

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
    def _argument_style(self) -> ArgumentStyle | None:
        return argument_style(self._apply_template)

    def stop_ids(self, path: Path) -> frozenset[int]:
        """Tokens that end an answer: the tokenizer's end, those of the model's generation config, and the usual ones by their text."""
        ids = {self._tokenizer.eos_token_id, *(self._special[t] for t in END_TOKENS if t in self._special)}
        config = path / "generation_config.json"
        if config.is_file():
            eos = json.loads(config.read_text()).get("eos_token_id")
            ids |= set(eos if isinstance(eos, list) else [eos])
        return frozenset(i for i in ids if i is not None)

    def digest(self) -> str:
        return hashlib.sha256(self._tokenizer.backend_tokenizer.to_str().encode()).hexdigest()

    def _splitting_changes_nothing(self) -> bool:
        """Whether text behind a special token is tokenised as it is alone; false for some sentencepiece vocabularies."""
        if not self._special:
            return False
        probe = "user\nHello, wörld! 12 \n\n  x"
        return all(self.encode(t + probe + t) == [i, *self.encode(probe), i] for t, i in self._special.items())


class Detokenizer:
    """Turns one answer's tokens into text as they come; a character split over tokens waits for its last byte.

    Special tokens are text, too: what was sampled is what is sent, so that it is recognised when it comes back.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=False)

    def push(self, token: int) -> str:
        return self._stream.step(self._backend, token) or ""
