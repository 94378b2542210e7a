"""From generations to what goes over the wire: whole answers, several in one stream, keep-alives, and clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import Header, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rewake.api.generation import Generation, Part
from rewake.errors import InvalidRequest
from rewake.request import Done, Generated
from rewake.text.answer import Said, Thought
from rewake.text.tools import Call

__all__ = ["KEEP_ALIVE", "AgentHeader", "EventStream", "Whole", "asker", "collect", "done_of", "event_stream", "parts_of", "sse"]

T = TypeVar("T")
AgentHeader = Annotated[str | None, Header(alias="x-agent-id")]
KEEP_ALIVE = 10.0  # seconds of silence before a stream sends a sign of life, so that clients do not give up on a long prefill


@dataclass
class Whole:
    """All of one answer."""

    said: str = ""
    thought: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[Generated] = field(default_factory=list)

    def add(self, part: Part) -> None:
        self.tokens += part.tokens
        for piece in part.pieces:
            if isinstance(piece, Said):
                self.said += piece.text
            elif isinstance(piece, Thought):
                self.thought += piece.text
            else:
                self.calls.append(piece)


def done_of(generation: Generation) -> Done:
    """How it ended."""
    assert generation.done is not None
    return generation.done


async def parts_of(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Part | None]]:
    """Parts of several answers as they come, each with its answer's number; None, after silence.

    An answer's last part has no pieces and no tokens. Raises RequestError; leaving early, however, cancels all of them.
    """
    queue: asyncio.Queue[tuple[int, Part | Exception]] = asyncio.Queue()

    async def read(number: int, generation: Generation) -> None:
        try:
            async for part in generation.parts():
                queue.put_nowait((number, part))
            queue.put_nowait((number, Part([], [])))
        except Exception as error:  # noqa: BLE001 (whatever it is, the reader gets it)
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(read(number, generation)) for number, generation in enumerate(generations)]
    left = len(tasks)
    try:
        while left:
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    number, part = await queue.get()
            except TimeoutError:
                yield 0, None
                continue
            if isinstance(part, Exception):
                raise part
            left -= not part.pieces and not part.tokens
            yield number, part
    finally:
        for task in tasks:
            task.cancel()
        for generation in generations:
            generation.cancel()


async def collect(generations: Sequence[Generation], request: Request) -> list[Whole]:
    """Whole answers; a client that goes away meanwhile cancels them."""

    async def read() -> list[Whole]:
        wholes = [Whole() for _ in generations]
        async for number, part in parts_of(generations):
            if part is not None:
                wholes[number].add(part)
        return wholes

    return await unless_gone(read(), request)


async def unless_gone(reading: Coroutine[Any, Any, T], request: Request) -> T:
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.create_task(reading), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            raise InvalidRequest("the client has gone")  # nobody reads this
        return await task
    finally:
        leaving.cancel()


def asker(header: str | None, field: str | None) -> str | None:
    """Who asks: the header X-Agent-ID, else the field; UTF-8 in a header arrives as Latin-1."""
    if header is not None:
        with suppress(UnicodeError):
            header = header.encode("latin-1").decode()
        if field not in (None, header):
            raise InvalidRequest("X-Agent-ID and agent_id differ: give one", param="agent_id")
    return field if header is None else header


def sse(data: dict[str, Any], event: str | None = None) -> str:
    """A server-sent event. All that is no ASCII is escaped: some readers cut lines at characters that are none of JSON's."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """Ends when its client leaves.

    What the library does then leaves an exception that holds its own frames, and by them the whole request, until the next full
    collection: with many clients that leave, megabytes.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self.stream_response(send))
        leaving = asyncio.create_task(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            sending.cancel()  # nothing, if it is done
            with suppress(asyncio.CancelledError):
                await sending


def event_stream(events: AsyncIterator[str]) -> EventStream:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return EventStream(events, media_type="text/event-stream", headers=headers)
