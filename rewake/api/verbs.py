"""The bridge between a request's coroutine and what the engine does between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from rewake.engine import Engine
from rewake.errors import InternalError, RequestError, ShuttingDown
from rewake.memory.memory import AgentMemory
from rewake.services import Services

__all__ = ["done", "on_engine", "on_loaded", "report_of"]

T = TypeVar("T")
LOOK_EVERY = 1.0  # seconds between looks whether the engine still runs: what it is asked behind its last step, it never does


async def on_engine(engine: Engine, function: Callable[[], T]) -> T:
    """What `function` returns, or raises, on the engine's thread."""
    return await outcome(engine, engine.call(function))


async def on_loaded(services: Services, model: str, function: Callable[[Engine], T]) -> T | None:
    """As `on_engine`, for what neither loads a model nor keeps it loaded; None if it is not loaded now. Raises ShuttingDown."""
    service = services.loaded.get(model)
    if service is None:
        return None
    engine = service.engine
    try:
        return await on_engine(engine, lambda: function(engine))
    except ShuttingDown:
        if services.why_not_ready is not None:
            raise
        return None  # it is unloaded just now


async def report_of(engine: Engine, verb: Callable[[Callable[[T], None]], None]) -> T:
    """Start something that takes longer than a step: `verb` is given whom to tell; what it tells."""
    told: Future[T] = Future()
    told.set_running_or_notify_cancel()  # a client that leaves must not cancel it: the engine's thread would stumble over it

    def start() -> AgentMemory:
        verb(told.set_result)
        return engine.memory

    return await outcome(engine, told, await on_engine(engine, start))


async def done(engine: Engine, verb: Callable[[Callable[[Exception | None], None]], None]) -> None:
    """As `report_of`, for what tells an error or nothing. What is not the client's fault is ours."""
    error = await report_of(engine, verb)
    if isinstance(error, RequestError):
        raise error
    if error is not None:
        raise InternalError(str(error)) from error


async def outcome(engine: Engine, future: Future[T], memory: AgentMemory | None = None) -> T:
    """What comes of it; an error if the engine, or the `memory` that would tell, is gone before it is known."""
    waiting = asyncio.wrap_future(future)
    while not waiting.done():
        await asyncio.wait({waiting}, timeout=LOOK_EVERY)
        if not waiting.done() and not engine.is_alive:
            raise ShuttingDown("the server is shutting down: it is not known whether this was done")
        if not waiting.done() and memory not in (None, engine.memory):
            raise InternalError("the engine has failed: it is not known whether this was done")
    return waiting.result()
