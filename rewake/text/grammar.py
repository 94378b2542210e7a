"""Answers that must have a form: token masks by llguidance, from a JSON schema or a grammar of ours. Knows no protocol.

Texts of grammars are in llguidance's Lark dialect. A mask allows a token that ends an answer only where the form is complete, and
nothing else once it can only end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from rewake.errors import InvalidRequest
from rewake.text.answer import CLOSE, OPEN
from rewake.text.tokenizer import Tokenizer
from rewake.text.tools import Choice, Tool

__all__ = ["Form", "Grammars"]

# as models write JSON, and as `canonical_json` does; free spaces would let a model write nothing but them until its bound
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: Mapping[str, Any]) -> str:
    """A schema as it stands in a grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": SPACING}, ensure_ascii=False)


class Form:
    """The state of one answer in its grammar. See `rewake.request.Constraint`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allow(self, mask: npt.NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error() or not mask.any():
            raise ArithmeticError(f"the grammar of an answer allows no token: {self._matcher.get_error()}")

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)  # what goes wrong shows in the next mask


class Grammars:
    """Grammars over the tokens of one model. May be used by any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_tokens: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size  # of the logits: some models have more than tokens
        self._stop_tokens = sorted(stop_tokens)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        return LLTokenizer(self._tokenizer.description(), n_vocab=self._vocab_size, eos_token=self._stop_tokens)

    def form(self, grammar: str, param: str) -> Form:
        """A new answer's. Raises InvalidRequest, which names the field it came in, for what is no grammar or no schema we can obey."""
        matcher = LLMatcher(self._tokens, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            why = matcher.get_error().split("\n")[0]
            raise InvalidRequest(f"this cannot be obeyed: {why}", param=param)
        return Form(matcher)

    def of_schema(self, schema: Mapping[str, Any], thinking: bool | None, param: str) -> str:
        """The grammar of an answer that is JSON by `schema`. Raises InvalidRequest for one that cannot be obeyed."""
        self._check(schema, param)
        return self._behind_thoughts(f"answer: {json_rule(schema)}", thinking)

    def of_tools(self, tools: Sequence[Tool], choice: Choice, thinking: bool | None) -> str | None:
        """The grammar of an answer that may, must or must not call; None if it is free.

        `thinking` is as for `AnswerText`. Raises InvalidRequest for schemas of strict tools that cannot be obeyed.
        """
        dialect = self._tokenizer.dialect
        assert dialect is not None, "tools are refused without"
        parallel = choice.parallel and self._tokenizer.parallel_calls
        if choice.mode == "auto" and parallel and not any(tool.strict for tool in tools):
            return None
        rules = dialect.rules(tools, parallel, self._tokenizer.literally, self._arguments)
        return self._behind_thoughts(rules.answer(choice), thinking)

    def _arguments(self, tool: Tool) -> str:
        """The rule for a call's arguments. A schema that cannot be obeyed need not be, unless its tool is strict."""
        try:
            self._check(tool.parameters, tool.field)
        except InvalidRequest:
            if tool.strict:
                raise
            return json_rule({"type": "object"})
        return json_rule(tool.parameters)

    def _behind_thoughts(self, answer: str, thinking: bool | None) -> str:
        if thinking is None:
            return f"start: answer\n{answer}"
        opening, closing = self._tokenizer.literally(OPEN), self._tokenizer.literally(CLOSE)
        thoughts = (
            f"thoughts[suffix={closing}]: /(?s:.*)/" if closing.startswith('"') else f"thoughts: THOUGHT {closing}\nTHOUGHT: /(?s:.*)/"
        )
        start = "thoughts GAP? answer" if thinking else f"({opening} thoughts GAP?)? answer"
        return f"start: {start}\n{thoughts}\nGAP: /\\n+/\n{answer}"

    def _check(self, schema: Mapping[str, Any], param: str) -> None:
        try:
            self.form(f"start: {json_rule(schema)}", param)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"this is no JSON schema: {error}", param=param) from error

    def warm_up(self) -> None:
        """Build what is needed for all answers; a third of a second for 49,000 tokens."""
        assert self._tokens

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to a text; part of a character, maybe."""
        return self._tokens.decode_bytes([token])

    def token_name(self, token: int) -> str:
        """The same as text; bytes that are none are written out."""
        content = self.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
