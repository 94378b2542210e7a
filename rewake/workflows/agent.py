"""One agent of a server, from asyncio: what it hears, and what it says. Its messages only ever grow, until it is rewound.

    ada = Agent(client, "ada", "You are Ada, a mathematician.")
    print(await ada.say("Who are you?"))

The server is sent the whole list each time, and no ids but the agent's name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from rewake.client import Client
from rewake.errors import Conflict, InvalidRequest, NotFound

__all__ = ["Agent", "Answer"]

Json = dict[str, Any]
WITH_USAGE = {"stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Answer:
    """What an agent said. `report` is the server's `rewake` object; times are seconds from asking to the first token, and to the last.

    `ttft` is None if nothing was said.
    """

    text: str
    report: Json = field(repr=False)
    ttft: float | None = field(default=None, compare=False)
    seconds: float = field(default=0.0, compare=False)
    completion_tokens: int = 0
    finish_reason: str = ""

    def __str__(self) -> str:
        return self.text


class Agent:
    """`messages` is the whole talk; `fields` go with each request (`temperature`, `max_tokens`, ...)."""

    def __init__(
        self, client: Client, name: str, instructions: str = "", *, messages: Sequence[Json] = (), model: str = "", **fields: Any
    ) -> None:
        """`messages` are those of an earlier talk to go on from; `instructions` only begin a new one. No `model` is the client's."""
        self.client = client
        self.name = name
        self.model = model
        self.fields = fields
        self.messages: list[Json] = list(messages)
        if instructions.strip() and not self.messages:
            self.messages.append({"role": "system", "content": instructions.strip()})
        self._heard: list[str] = []
        self._asked = 0  # how much of what it has heard is in the last prompt
        self._speaks = False

    @classmethod
    async def recall(cls, client: Client, name: str, **fields: Any) -> Agent:
        """One that the server remembers, whoever talked with it. Raises NotFound, and InvalidRequest if its words cannot be told."""
        return cls(client, name, messages=await asyncio.to_thread(client.messages, name, model=fields.get("model")), **fields)

    @property
    def turns(self) -> int:
        """How often it has answered."""
        return sum(m["role"] == "assistant" for m in self.messages)

    def hear(self, text: str) -> None:
        """What is said to it, or before it, until it is asked: all of that is one user turn, whoever spoke."""
        if text.strip():  # templates differ in what they do with white space at the ends, and so there is none
            self._heard.append(text.strip())

    def prompt(self, text: str = "") -> list[Json]:
        """The messages that `say(text)` sends. Raises InvalidRequest if nothing would be asked."""
        heard = [*self._heard, *([text.strip()] if text.strip() else [])]
        if not heard:
            raise InvalidRequest(f"nothing has been said to {self.name!r} since it spoke: give it a text", param="messages")
        self._asked = len(self._heard)
        return [*self.messages, {"role": "user", "content": "\n\n".join(heard)}]

    async def say(self, text: str = "", *, on_piece: Callable[[str], object] = lambda _: None, **fields: Any) -> Answer:
        """Its answer to all it has heard since it last spoke, and to `text`. Nothing is changed if it fails or is cancelled.

        Raises Conflict if it is being asked already.
        """
        if self._speaks:
            raise Conflict(f"{self.name!r} is being asked already", param="agent")
        prompt = self.prompt(text)
        self._speaks = True
        try:
            answer = await self._ask(prompt, on_piece, {**self.fields, **fields})
        finally:
            self._speaks = False
        self.said(prompt, answer.text)
        return answer

    def said(self, prompt: list[Json], text: str) -> None:
        """It has answered `text` to the last `prompt`; what it has heard since is for the next."""
        self.messages = [*prompt, {"role": "assistant", "content": text}]
        del self._heard[: self._asked]

    async def _ask(self, prompt: list[Json], on_piece: Callable[[str], object], fields: Json) -> Answer:
        if not self.model:
            self.model = await asyncio.to_thread(self.client.model)
        pieces: list[str] = []
        report: Json = {}
        usage: Json = {}
        finish, first = "", None
        started = time.perf_counter()
        stream = self.client.chat_async(prompt, agent=self.name, model=self.model, **{**WITH_USAGE, **fields})
        async with aclosing(stream) as events:
            async for event in events:
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        first = time.perf_counter() - started if first is None else first
                        pieces.append(piece)
                        on_piece(piece)
                    finish = choice["finish_reason"] or finish
                report, usage = event.get("rewake") or report, event.get("usage") or usage
        seconds = time.perf_counter() - started
        return Answer("".join(pieces), report, first, seconds, usage.get("completion_tokens", 0), finish)

    # ---- verbs

    async def fork(self, to: str, *, turn: int | None = None) -> Agent:
        """A second agent with the same talk, or its first `turn` answers; the server shares the pages. Raises as `Client.fork`."""
        messages = self.messages if turn is None else self._until(turn)
        await asyncio.to_thread(self.client.fork, self.name, to, turn=turn, model=self.model)
        made = Agent(self.client, to, messages=messages, model=self.model, **self.fields)
        made._heard = list(self._heard) if turn is None else []
        return made

    async def rewind(self, turn: int) -> None:
        """Back to the end of answer number `turn`; 0 is before the first. Raises InvalidRequest for more turns than there were."""
        messages = self._until(turn)
        with suppress(NotFound, InvalidRequest):  # of what the server has let go, the next turn reads what is left
            await asyncio.to_thread(self.client.rewind, self.name, turn=turn, model=self.model)
        self.messages = messages
        self._heard.clear()

    async def forget(self) -> None:
        """Gone from the server, and here all but the instructions."""
        with suppress(NotFound):
            await asyncio.to_thread(self.client.forget, self.name, model=self.model)
        self.messages = self._until(0)
        self._heard.clear()

    def _until(self, turn: int) -> list[Json]:
        ends = [i for i, m in enumerate(self.messages, 1) if m["role"] == "assistant"]
        if not 0 <= turn <= (num := len(ends)):
            raise InvalidRequest(f"agent {self.name!r} has had {num} turn{'s' * (num != 1)}, not {turn}", param="turn")
        return self.messages[: ends[turn - 1]] if turn else [m for m in self.messages[:1] if m["role"] == "system"]
