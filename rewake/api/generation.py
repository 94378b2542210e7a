"""The bridge between one HTTP request and the engine's thread: text in, pieces of text and an ending out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rewake.api.recent import Recent
from rewake.errors import ContextLengthExceeded, InvalidRequest
from rewake.quant import PAGE_TOKENS
from rewake.request import Done, Event, Failed, Generated, Request, Sampling
from rewake.service import Service

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
        self.recent = Recent()
        self._text = ThreadPoolExecutor(1, thread_name_prefix="rewake-text")

    async def start(self, ask: Ask) -> Generation:
        """Tokenise, and hand over to the engine. Raises RequestError for what cannot be answered."""
        started = time.perf_counter()
        engine, transcripts = self.service.engine, self.service.transcripts
        deadline = time.monotonic() + ask.timeout if ask.timeout is not None else None
        agent = ask.agent
        if not transcripts.knows(NAMESPACE, agent):
            stored = await asyncio.wrap_future(engine.call(lambda: engine.memory.agents.transcripts(NAMESPACE, agent)))
            await self._on_text_thread(lambda: transcripts.learn(NAMESPACE, agent, stored))

        def tokenise() -> tuple[int, ...]:
            return tuple(transcripts.encode(NAMESPACE, agent, self.service.tokenizer.render(ask.messages)))

        prompt = await self._on_text_thread(tokenise)
        generation = Generation(self.service, asyncio.get_running_loop(), started)
        request = Request(
            id=generation.id,
            prompt=prompt,
            max_tokens=ask.max_tokens or self._room_behind(len(prompt)),
            emit=generation.emit,
            sampling=ask.sampling,
            stop_tokens=self.service.stop_tokens,
            namespace=NAMESPACE,
            agent=agent,
            deadline=deadline,
        )

        def ended() -> None:
            self._text.submit(transcripts.learn, NAMESPACE, agent, [[*prompt, *generation.tokens]])
            self.recent.add(NAMESPACE, agent, generation)

        generation.on_done = ended
        engine.submit(request)
        return generation

    def _room_behind(self, num_prompt: int) -> int:
        """The longest answer there is room for, where a client sets no bound."""
        engine = self.service.engine
        most = min(engine.context, engine.memory.residency.pool.num_slots * PAGE_TOKENS)
        if num_prompt >= most:
            raise ContextLengthExceeded(f"the prompt has {num_prompt} tokens; prompt and answer together may have {most}", param="messages")
        return most - num_prompt

    async def transcript(self, namespace: str, agent: str) -> str | None:
        """All the agent remembers, as text; None if there is no such agent."""
        engine = self.service.engine

        def latest() -> Sequence[int] | None:
            known = (namespace, agent) in engine.memory.agents.tree.agents
            return next(iter(engine.memory.agents.transcripts(namespace, agent, 1)), ()) if known else None

        ids = await asyncio.wrap_future(engine.call(latest))
        return None if ids is None else await self._on_text_thread(lambda: self.service.tokenizer.decode(ids))

    async def forget(self, agent: str) -> None:
        """Forget an agent's texts, too."""
        await self._on_text_thread(lambda: self.service.transcripts.forget(NAMESPACE, agent))

    async def _on_text_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._text, function)


class Generation:
    """One answer in the making. Iterate `pieces`, then look at `done`."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, started: float) -> None:
        self.id = secrets.token_hex(12)
        self.tokens: list[int] = []
        self.done: Done | None = None
        self.on_done: Callable[[], object] = lambda: None
        self._service = service
        self._loop = loop
        self.ttft: float | None = None  # seconds to the first token
        self._started = started
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
                    if self.ttft is None:
                        self.ttft = time.perf_counter() - self._started
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
