"""The bridge between one HTTP request and the engine's thread: text in, pieces of an answer and an ending out."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rewake.api.auth import caller, namespace
from rewake.api.recent import Recent
from rewake.config import Config
from rewake.engine import Engine
from rewake.errors import Cancelled, ContextLengthExceeded, InvalidRequest, RequestError, ShuttingDown
from rewake.quant import PAGE_TOKENS
from rewake.request import Constraint, Done, Event, Failed, Generated, Request, Sampling
from rewake.service import Service
from rewake.services import Services
from rewake.text.answer import AnswerText, Piece
from rewake.text.stops import StopWatch
from rewake.text.tools import Choice, Tool

__all__ = ["MOST_AGENT_ID", "Ask", "Chat", "Form", "Generation", "Generator", "Part", "check_agent_id"]

log = logging.getLogger(__name__)

T = TypeVar("T")
MOST_AGENT_ID = 256  # characters


@dataclass(frozen=True)
class Chat:
    """Messages as chat templates take them, and the tools that the model is told of. `go_on`: the last message is to be continued."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    go_on: bool = False


@dataclass(frozen=True)
class Form:
    """A JSON schema that the answer has to obey, and the field of the request it came in."""

    schema: Mapping[str, Any]
    field: str


@dataclass(frozen=True)
class Ask:
    """What a client wants, protocol aside. `prompt` is a chat, a text, or token ids; of `n` answers the first is remembered."""

    prompt: Chat | str | tuple[int, ...]
    agent: str | None
    sampling: Sampling
    max_tokens: int | None
    timeout: float | None = None  # seconds
    n: int = 1
    stop: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    choice: Choice = Choice()
    form: Form | None = None
    model: str | None = None  # None: the server's first
    namespace: str = field(default_factory=namespace)  # the caller's


@dataclass(frozen=True)
class Prompt:
    """`opened`: whether it opens the model's thoughts; None for a model that does not think, and where nobody asks it in a chat."""

    ids: tuple[int, ...]
    opened: bool | None = None


def check_agent_id(agent: str | None, param: str = "agent_id") -> str | None:
    """An id is any short printable text; it never becomes a path. Raises InvalidRequest, which names the field it came in."""
    if agent is None:
        return None
    if not agent or len(agent) > MOST_AGENT_ID or not agent.isprintable() or agent in (".", ".."):
        raise InvalidRequest(f"an agent id is 1 to {MOST_AGENT_ID} printable characters, and not . or ..", param=param)
    return agent


class Held:
    """A model that is in use: released when all who share it have given it back, on whatever threads."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release
        self._users = 1
        self._lock = threading.Lock()

    def take(self) -> None:
        with self._lock:
            self._users += 1

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self._release()


class Generator:
    """Starts generations, on the model that is asked for. Tokenisation runs on a thread of its own, which also owns the transcripts."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.recent = {name: Recent() for name in services.names}
        self._text = ThreadPoolExecutor(1, thread_name_prefix="rewake-text")

    @asynccontextmanager
    async def using(self, model: str | None) -> AsyncIterator[Service]:
        """The service of a model, or of the first, loaded if need be, which stays loaded within the `with`. Raises RequestError."""
        name = self.services.find(model)
        service = await self._use(name)
        try:
            yield service
        finally:
            self.services.release(name)

    async def _use(self, name: str) -> Service:
        """To be released once."""
        future = self.services.use(name)
        if future.done():
            return future.result()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # who asked has gone; what it was given all the same goes back
            future.add_done_callback(lambda f: None if f.cancelled() or f.exception() else self.services.release(name))
            raise

    async def start(self, ask: Ask) -> list[Generation]:
        """Tokenise, and hand over to the engine of the model, which stays loaded until all `ask.n` answers have ended.

        Raises RequestError for what cannot be answered.
        """
        name = self.services.find(ask.model)
        service = await self._use(name)
        held = Held(lambda: self.services.release(name))
        try:
            return await self._start(name, service, ask, held)
        finally:
            held.give_back()

    async def _start(self, name: str, service: Service, ask: Ask, held: Held) -> list[Generation]:
        deadline = time.monotonic() + ask.timeout if ask.timeout is not None else None
        note(service.config, "asked", ask.prompt.messages if isinstance(ask.prompt, Chat) else ask.prompt)
        check_tokens(service, (token for token, _ in ask.sampling.logit_bias), "logit_bias")
        prompt = await self._tokenise(service, ask)
        constraints = await asyncio.to_thread(constraints_of, service, ask, prompt.opened)
        started: list[Generation] = []
        try:
            for number, constraint in enumerate(constraints):
                generation = Generation(service, asyncio.get_running_loop(), ask, prompt, held.give_back)
                if number == 0:
                    generation.on_done = self._learning(name, service, ask)
                submit(service, request_of(service, ask, number, generation, constraint, deadline), held)
                started.append(generation)
        except BaseException:
            for generation in started:
                generation.cancel()
            raise
        return started

    async def count(self, ask: Ask) -> int:
        """How many tokens the prompt has."""
        async with self.using(ask.model) as service:
            return len((await self._tokenise(service, ask)).ids)

    async def _tokenise(self, service: Service, ask: Ask) -> Prompt:
        """The prompt's ids; known texts have the ids they had."""
        space, agent = ask.namespace, ask.agent
        engine, transcripts = service.engine, service.transcripts
        if not transcripts.knows(space, agent):
            stored = await asyncio.wrap_future(engine.call(lambda: engine.memory.agents.transcripts(space, agent)))
            await self._on_text_thread(lambda: transcripts.learn(space, agent, stored))
        return await self._on_text_thread(lambda: encode(service, ask))

    def _learning(self, name: str, service: Service, ask: Ask) -> Callable[[Generation], object]:
        # not the engine: it may be unloaded by then
        config, tokenizer, transcripts, space, agent = service.config, service.tokenizer, service.transcripts, ask.namespace, ask.agent

        def done(generation: Generation) -> None:
            note(config, "answered", tokenizer.decode(generation.tokens))
            self._text.submit(transcripts.learn, space, agent, [[*generation.prompt.ids, *generation.kept]])
            self.recent[name].add(space, agent, generation)

        return done

    async def transcript(self, service: Service, namespace: str, agent: str) -> str | None:
        """All the agent remembers, as text; None if there is no such agent."""
        engine = service.engine

        def latest() -> Sequence[int] | None:
            known = (namespace, agent) in engine.memory.agents.tree.agents
            return next(iter(engine.memory.agents.transcripts(namespace, agent, 1)), ()) if known else None

        ids = await asyncio.wrap_future(engine.call(latest))
        return None if ids is None else await self._on_text_thread(lambda: service.tokenizer.decode(ids))

    async def forget(self, service: Service, agent: str) -> None:
        """Forget an agent's texts, too."""
        space = namespace()
        await self._on_text_thread(lambda: service.transcripts.forget(space, agent))

    async def _on_text_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._text, function)


def submit(service: Service, request: Request, held: Held) -> None:
    """The model is held until the answer has ended. Raises RequestError if the request cannot be taken."""
    held.take()
    try:
        service.engine.submit(request)
    except BaseException:
        held.give_back()
        raise


def note(config: Config, what: str, words: Any) -> None:
    """In the log, with --log-prompts only."""
    if config.log_prompts:
        log.info("%s: %s", what, json.dumps(words))


def encode(service: Service, ask: Ask) -> Prompt:
    """For the text thread."""
    tokenizer, transcripts = service.tokenizer, service.transcripts
    if isinstance(ask.prompt, tuple):
        check_tokens(service, ask.prompt, "prompt")
        return Prompt(ask.prompt)
    if isinstance(ask.prompt, str):
        if not (text := tokenizer.raw(ask.prompt)):
            raise InvalidRequest("the prompt is empty", param="prompt")
        return Prompt(tuple(transcripts.encode(ask.namespace, ask.agent, text)))
    text = tokenizer.render(ask.prompt.messages, ask.prompt.tools, go_on=ask.prompt.go_on)
    opened = text.rstrip().endswith("<think>") if tokenizer.thinks and not ask.prompt.go_on else None
    return Prompt(tuple(transcripts.encode(ask.namespace, ask.agent, text)), opened)


def check_tokens(service: Service, tokens: Iterable[int], field: str) -> None:
    vocab = service.backend.spec.vocab_size
    if any(not 0 <= token < vocab for token in tokens):
        raise InvalidRequest(f"tokens are numbers from 0 to {vocab - 1}", param=field)


def constraints_of(service: Service, ask: Ask, opened: bool | None) -> list[Constraint | None]:
    """What each answer is held to. Not for the event loop: a grammar takes milliseconds."""
    grammars = service.grammars
    if ask.sampling.logprobs is not None:
        grammars.warm_up()  # which knows the bytes of tokens
    if ask.form is not None:
        grammar, field = grammars.of_schema(ask.form.schema, opened, ask.form.field), ask.form.field
    elif ask.tools and (of_tools := grammars.of_tools(ask.tools, ask.choice, opened)) is not None:
        grammar, field = of_tools, "tools"
    else:
        return [None] * ask.n
    return [grammars.form(grammar, field) for _ in range(ask.n)]


def request_of(
    service: Service, ask: Ask, number: int, generation: Generation, constraint: Constraint | None, deadline: float | None
) -> Request:
    """That of answer `number`; the first is the agent's."""
    seed, ids = ask.sampling.seed, generation.prompt.ids
    return Request(
        id=generation.id,
        prompt=ids,
        max_tokens=room(service, len(ids), ask.max_tokens),
        emit=generation.emit,
        sampling=replace(ask.sampling, constraint=constraint, seed=None if seed is None else seed + number),
        stop_tokens=service.stop_tokens,
        namespace=ask.namespace,
        agent=ask.agent if number == 0 else None,
        deadline=deadline,
        watch=generation.watch,
        arrived=caller.get().arrived,
    )


def room(service: Service, num_prompt: int, asked: int | None) -> int:
    """How long the answer may get: as asked, else as long as there is room for. Raises ContextLengthExceeded."""
    engine = service.engine
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


@dataclass(frozen=True)
class Part:
    """What has become known of an answer since the last part: its pieces, and the tokens that are through with them."""

    pieces: list[Piece]
    tokens: list[Generated]


class Generation:
    """One answer in the making. Iterate `parts`, then look at `done`. `ended` is called once, on the engine's thread."""

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, ask: Ask, prompt: Prompt, ended: Callable[[], object]) -> None:
        self.tokenizer = tokenizer = service.tokenizer
        self.grammars = service.grammars
        calls = tokenizer.dialect if ask.tools and ask.choice.mode != "none" else None
        reading = calls.reading(frozenset(tool.name for tool in ask.tools)) if calls is not None else None
        self.id = secrets.token_hex(12)
        self.prompt = prompt
        self.text = AnswerText(tokenizer.detokenizer(), ask.stop, prompt.opened, reading)
        self.watch = StopWatch(tokenizer.detokenizer(), ask.stop) if ask.stop else None
        self.tokens: list[int] = []
        self.done: Done | None = None
        self.on_done: Callable[[Generation], object] = lambda _: None
        self._engine: Engine | None = service.engine  # until it has ended: however slowly the answer is read, its model may be unloaded
        self._going: str | None = None  # why the engine took no more requests when it ended
        self._tell_ended = ended
        self._loop = loop
        self.ttft: float | None = None  # seconds to the first token
        self._started = caller.get().arrived
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ended = False
        self._pending: list[Generated] = []

    def emit(self, event: Event) -> None:
        """Called on the engine's thread."""
        if not isinstance(event, Generated) and self._engine is not None:
            self._going = self._engine.why_not_ready
            self._engine = None
            self._tell_ended()
        with suppress(RuntimeError):  # the loop is closed: the server is going, and nobody listens
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    @property
    def kept(self) -> list[int]:
        """The tokens that are remembered: those before a stop string."""
        return self.tokens if self.text.stop is None else self.tokens[: self.text.num_whole]

    async def parts(self) -> AsyncIterator[Part]:
        """The answer as it comes. Raises RequestError. Leaving early, however, cancels the request."""
        try:
            while isinstance(event := await self._events.get(), Generated):
                if self.ttft is None:
                    self.ttft = time.perf_counter() - self._started
                self.tokens.append(event.token)
                self._pending.append(event)
                if pieces := self.text.push(event.token):
                    yield self._part(pieces, self.text.num_whole)
            self._ended = True
            if isinstance(event, Failed):
                raise event.error
            if event.reason == "cancelled":  # by somebody else: a client that has left does not read this
                raise self._why_cancelled()
            self.done = event
            self.on_done(self)
            last = self._part(self.text.finish(), len(self.kept))
            if last.pieces or last.tokens:
                yield last
        finally:
            self.cancel()

    def _part(self, pieces: list[Piece], num_told: int) -> Part:
        """`num_told` of the answer's tokens are through with it."""
        cut = max(0, num_told - (len(self.tokens) - len(self._pending)))
        tokens, self._pending = self._pending[:cut], self._pending[cut:]
        return Part(pieces, tokens)

    def _why_cancelled(self) -> RequestError:
        if self._going is not None:
            return ShuttingDown(f"{self._going}; what was computed is remembered")
        return Cancelled("the request was cancelled; what was computed is remembered")

    def cancel(self) -> None:
        engine = self._engine  # which the engine's thread may take away at any time
        if not self._ended and engine is not None:
            engine.cancel(self.id)

    def report(self, agent: str | None) -> dict[str, Any]:
        """The `rewake` object of the answer."""
        assert self.done is not None
        match = self.done.match
        difference = None
        if match.first_difference is not None:
            token, stored, given = match.first_difference
            decode = self.tokenizer.decode
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
