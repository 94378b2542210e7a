"""The bridge between one HTTP request and the engine's thread: text in, pieces of text and an ending out."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from rewake.api.auth import caller, namespace
from rewake.errors import ContextLengthExceeded, InvalidRequest
from rewake.quant import PAGE_TOKENS
from rewake.request import Done, Event, Failed, Generated, Request, Sampling
from rewake.service import Service

__all__ = ["MOST_AGENT_ID", "Ask", "Generation", "Generator", "check_agent_id"]

log = logging.getLogger(__name__)

T = TypeVar("T")
MOST_AGENT_ID = 256  # characters


@dataclass(frozen=True)
class Ask:
    """What a client wants, protocol aside."""

    messages: list[dict[str, Any]]
    agent: str | None
    sampling: Sampling
    max_tokens: int | None
    timeout: float | None = None  # seconds


def check_agent_id(agent: str | None, param: str = "agent_id") -> str | None:
    """An id is any short printable text; it never becomes a path. Raises InvalidRequest, which names the field it came in."""
    if agent is None:
        return None
    if not agent or len(agent) > MOST_AGENT_ID or not agent.isprintable() or agent in (".", ".."):
        raise InvalidRequest(f"an agent id is 1 to {MOST_AGENT_ID} printable characters, and not . or ..", param=param)
    return agent


class Generator:
    """Starts generations. Tokenisation runs on a thread of its own, which also owns the transcripts."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._text = ThreadPoolExecutor(1, thread_name_prefix="rewake-text")

    async def start(self, ask: Ask) -> Generation:
        """Tokenise, and hand over to the engine. Raises RequestError for what cannot be answered."""
        engine, transcripts = self.service.engine, self.service.transcripts
        deadline = time.monotonic() + ask.timeout if ask.timeout is not None else None
        space, agent = namespace(), ask.agent
        self._note("asked", ask.messages)
        if not transcripts.knows(space, agent):
            stored = await asyncio.wrap_future(engine.call(lambda: engine.memory.agents.transcripts(space, agent)))
            await self._on_text_thread(lambda: transcripts.learn(space, agent, stored))

        def tokenise() -> tuple[int, ...]:
            return tuple(transcripts.encode(space, agent, self.service.tokenizer.render(ask.messages)))

        prompt = await self._on_text_thread(tokenise)
        generation = Generation(self.service, asyncio.get_running_loop())
        request = Request(
            id=generation.id,
            prompt=prompt,
            max_tokens=self._room(len(prompt), ask.max_tokens),
            emit=generation.emit,
            sampling=ask.sampling,
            stop_tokens=self.service.stop_tokens,
            namespace=space,
            agent=agent,
            deadline=deadline,
            arrived=caller.get().arrived,
        )

        def learn() -> None:
            self._note("answered", self.service.tokenizer.decode(generation.tokens))
            self._text.submit(transcripts.learn, space, agent, [[*prompt, *generation.tokens]])

        generation.on_done = learn
        engine.submit(request)
        return generation

    def _room(self, num_prompt: int, asked: int | None) -> int:
        """How long the answer may get: as asked, else as long as there is room for."""
        engine = self.service.engine
        most = min(engine.context, engine.memory.residency.pool.num_slots * PAGE_TOKENS)
        limit = caller.get().limits.context
        if limit is not None and limit < most and num_prompt + (asked or 1) > limit:
            raise ContextLengthExceeded(
                f"{num_prompt} prompt tokens and up to {asked or 1} new ones are more than the {limit} this key may have", param="messages"
            )
        if asked is not None:
            return asked
        most = min(most, limit or most)
        if num_prompt >= most:
            raise ContextLengthExceeded(f"the prompt has {num_prompt} tokens; prompt and answer together may have {most}", param="messages")
        return most - num_prompt

    def _note(self, what: str, words: Any) -> None:
        """In the log, with --log-prompts only."""
        if self.service.config.log_prompts:
            log.info("%s: %s", what, json.dumps(words))

    async def forget(self, agent: str) -> None:
        """Forget an agent's texts, too."""
        space = namespace()
        await self._on_text_thread(lambda: self.service.transcripts.forget(space, agent))

    async def _on_text_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._text, copy_context().run, function)  # which knows who asks


class Generation:
    """One answer in the making. Iterate `pieces`, then look at `done`."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self.id = secrets.token_hex(12)
        self.tokens: list[int] = []
        self.done: Done | None = None
        self.on_done: Callable[[], object] = lambda: None
        self._service = service
        self._loop = loop
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False
        self._detokenizer = service.tokenizer.detokenizer()

    def emit(self, event: Event) -> None:
        """Called on the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: the server is going, and nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def pieces(self, keep_alive: float | None = None) -> AsyncIterator[str | None]:
        """Pieces of the answer as they come; None whenever `keep_alive` seconds pass without any. Raises RequestError.

        Leaving early, however, cancels the request.
        """
        try:
            while True:
                try:
                    event = await asyncio.wait_for(self._events.get(), keep_alive)
                except TimeoutError:
                    yield None
                    continue
                if isinstance(event, Generated):
                    self.tokens.append(event.token)
                    if piece := self._detokenizer.push(event.token):
                        yield piece
                    continue
                self._ended = True
                if isinstance(event, Failed):
                    raise event.error
                self.done = event
                self.on_done()
                return
        finally:
            self.cancel()

    def cancel(self) -> None:
        if not self._ended:
            self._service.engine.cancel(self.id)

    def report(self, agent: str | None) -> dict[str, Any]:
        """The `rewake` object of the answer."""
        assert self.done is not None
        match = self.done.match
        difference = None
        if match.first_difference is not None:
            token, stored, given = match.first_difference
            decode = self._service.tokenizer.decode
            difference = {"token": token, "stored": decode(stored), "given": decode(given)}
        return {
            "agent": agent,
            "match": match.kind,
            "prompt_tokens": match.prompt_tokens,
            "reused_tokens": match.reused_tokens,
            "loaded_tokens": match.loaded_tokens,
            "computed_tokens": match.computed_tokens,
            "first_difference": difference,
            "saved": self.done.saved,
        }
