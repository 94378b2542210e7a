"""The bridge between one HTTP request and the engine's thread: text in, pieces of text and an ending out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rewake.engine import Engine
from rewake.errors import ContextLengthExceeded, InvalidRequest
from rewake.quant import PAGE_TOKENS
from rewake.request import Done, Event, Failed, Generated, Request, Sampling
from rewake.service import Service
from rewake.services import Services

__all__ = ["NAMESPACE", "Ask", "Generation", "Generator", "check_agent_id"]

T = TypeVar("T")
NAMESPACE = "default"
MOST_AGENT_ID = 256  # characters


@dataclass(frozen=True)
class Ask:
    """What a client wants, protocol aside."""

    messages: list[dict[str, Any]]
    agent: str | None
    sampling: Sampling
    max_tokens: int | None
    timeout: float | None = None  # seconds
    model: str | None = None  # None: the server's first


def check_agent_id(agent: str | None, param: str = "agent_id") -> str | None:
    """An id is any short printable text; it never becomes a path. Raises InvalidRequest, which names the field it came in."""
    if agent is None:
        return None
    if not agent or len(agent) > MOST_AGENT_ID or not agent.isprintable() or agent in (".", ".."):
        raise InvalidRequest(f"an agent id is 1 to {MOST_AGENT_ID} printable characters, and not . or ..", param=param)
    return agent


class Generator:
    """Starts generations, on the model that is asked for. Tokenisation runs on a thread of its own, which also owns the transcripts."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._text = ThreadPoolExecutor(1, thread_name_prefix="rewake-text")

    async def start(self, ask: Ask) -> Generation:
        """Tokenise, and hand over to the engine of the model, which stays loaded until the answer has ended.

        Raises RequestError for what cannot be answered.
        """
        name = self.services.find(ask.model)
        service = await self.use(name)
        try:
            return await self._start(service, ask, lambda: self.services.release(name))
        except BaseException:
            self.services.release(name)
            raise

    async def use(self, name: str) -> Service:
        """The service of a model, loaded if need be; to be released once. Raises RequestError."""
        future = self.services.use(name)
        if future.done():
            return future.result()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # who asked has gone; what it was given all the same goes back
            future.add_done_callback(lambda f: None if f.cancelled() or f.exception() else self.services.release(name))
            raise

    async def _start(self, service: Service, ask: Ask, ended: Callable[[], None]) -> Generation:
        engine, transcripts = service.engine, service.transcripts
        deadline = time.monotonic() + ask.timeout if ask.timeout is not None else None
        agent = ask.agent
        if not transcripts.knows(NAMESPACE, agent):
            stored = await asyncio.wrap_future(engine.call(lambda: engine.memory.agents.transcripts(NAMESPACE, agent)))
            await self._on_text_thread(lambda: transcripts.learn(NAMESPACE, agent, stored))

        def tokenise() -> tuple[int, ...]:
            return tuple(transcripts.encode(NAMESPACE, agent, service.tokenizer.render(ask.messages)))

        prompt = await self._on_text_thread(tokenise)
        generation = Generation(service, asyncio.get_running_loop(), ended)
        request = Request(
            id=generation.id,
            prompt=prompt,
            max_tokens=ask.max_tokens or room_behind(service.engine, len(prompt)),
            emit=generation.emit,
            sampling=ask.sampling,
            stop_tokens=service.stop_tokens,
            namespace=NAMESPACE,
            agent=agent,
            deadline=deadline,
        )
        generation.on_done = lambda: self._text.submit(transcripts.learn, NAMESPACE, agent, [[*prompt, *generation.tokens]])
        engine.submit(request)
        return generation

    async def forget(self, service: Service, agent: str) -> None:
        """Forget an agent's texts, too."""
        await self._on_text_thread(lambda: service.transcripts.forget(NAMESPACE, agent))

    async def _on_text_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._text, function)


def room_behind(engine: Engine, num_prompt: int) -> int:
    """The longest answer there is room for, where a client sets no bound."""
    most = min(engine.context, engine.memory.residency.pool.num_slots * PAGE_TOKENS)
    if num_prompt >= most:
        raise ContextLengthExceeded(f"the prompt has {num_prompt} tokens; prompt and answer together may have {most}", param="messages")
    return most - num_prompt


class Generation:
    """One answer in the making. Iterate `pieces`, then look at `done`. `ended` is called on the engine's thread."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
        self.id = secrets.token_hex(12)
        self.tokens: list[int] = []
        self.done: Done | None = None
        self.on_done: Callable[[], object] = lambda: None
        self._tokenizer = service.tokenizer
        self._cancel: Callable[[str], None] = service.engine.cancel
        self._loop = loop
        self._tell_ended = ended
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False
        self._detokenizer = service.tokenizer.detokenizer()

    def emit(self, event: Event) -> None:
        """Called on the engine's thread."""
        if isinstance(event, (Done, Failed)):
            self._tell_ended()
            self._tell_ended = lambda: None
            self._cancel = lambda _: None  # however slowly the answer is read, its model may be unloaded
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
            self._cancel(self.id)

    def report(self, agent: str | None) -> dict[str, Any]:
        """The `rewake` object of the answer."""
        assert self.done is not None
        match = self.done.match
        difference = None
        if match.first_difference is not None:
            token, stored, given = match.first_difference
            decode = self._tokenizer.decode
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
