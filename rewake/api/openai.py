"""The OpenAI protocol: chat completions and models. Every field is obeyed, a documented no-op, or refused."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from rewake.api.fields import Strict
from rewake.api.generation import Ask, Generation, Generator, check_agent_id
from rewake.errors import InternalError, InvalidRequest, RequestError
from rewake.request import Sampling
from rewake.text.toolcalls import parse_arguments

__all__ = ["ChatRequest", "error_body", "router"]

HALF_PAIR = re.compile("[\ud800-\udfff]")
KEEP_ALIVE = 10.0  # seconds of silence before a stream sends a comment, so that clients do not give up on a long prefill


def only(*values: Any) -> AfterValidator:
    """For fields that are known and not there yet: takes what means "off"."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            raise PydanticCustomError("unsupported", "not supported yet")
        return value

    return AfterValidator(check)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str = Field(min_length=1)
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: CalledFunction

    def rendered(self, field: str) -> dict[str, Any]:
        try:
            arguments = parse_arguments(self.function.arguments)
        except ValueError as error:
            raise InvalidRequest(f"the arguments of a call are the text of a JSON object: {error}", param=f"{field}.arguments") from error
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(Strict):
    """`developer` is what newer clients call `system`. Calls of tools, and what these answered, are history only."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # what clients send back from an answer; only what means "none"
    name: Annotated[Any, only()] = None
    refusal: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None

    def rendered(self, field: str) -> dict[str, Any]:
        """As chat templates take it. `field` is what the message is called in errors."""
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest("only the assistant calls tools", param=f"{field}.tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise InvalidRequest("messages of the role tool, and only they, name the call they answer", param=f"{field}.tool_call_id")
        if self.content is None and not self.tool_calls:
            raise InvalidRequest("a message has content; only a call of tools may be without", param=f"{field}.content")
        content = "\n".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.rendered(f"{field}.tool_calls.{i}.function") for i, call in enumerate(self.tool_calls)]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if HALF_PAIR.search(json.dumps(message, ensure_ascii=False)):
            raise InvalidRequest("a message holds half of a surrogate pair: it is not text", param=field)
        return message


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatRequest(Strict):
    """What can be asked for. Fields that take one value are accepted because clients send them; other values are refused."""

    model: str
    messages: list[Message] = Field(min_length=1)
    agent_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    timeout: float | None = Field(None, gt=0)  # ours: seconds until the request is given up
    # not there yet: only what means "off"
    n: Annotated[Any, only(1)] = None
    stop: Annotated[Any, only([])] = None
    logprobs: Annotated[Any, only(False)] = None
    presence_penalty: Annotated[Any, only(0, 0.0)] = None
    frequency_penalty: Annotated[Any, only(0, 0.0)] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    # no-ops: they ask for nothing that could be done differently here
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto"] | None = None
    prompt_cache_key: str | None = None

    def ask(self, agent: str | None) -> Ask:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options are for streams: set stream, too", param="stream_options")
        if self.max_tokens is not None and self.max_completion_tokens is not None and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ: give one", param="max_tokens")
        sampling = Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
        )
        messages = [message.rendered(f"messages.{i}") for i, message in enumerate(self.messages)]
        return Ask(messages, agent, sampling, self.max_completion_tokens or self.max_tokens, self.timeout, self.model)


def error_body(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


class Answer:
    """Builds the objects of one answer."""

    def __init__(self, generation: Generation, model: str, agent: str | None) -> None:
        self.generation = generation
        self.agent = agent
        self.base = {"id": f"chatcmpl-{generation.id}", "created": int(time.time()), "model": model}

    def chunk(self, delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> str:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        return sse({**self.base, "object": "chat.completion.chunk", "choices": choices, **more})

    def whole(self, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish_reason}
        return {**self.base, "object": "chat.completion", "choices": [choice], **self.usage(), **self.report()}

    @property
    def finish_reason(self) -> str:
        assert self.generation.done is not None
        if self.generation.done.reason == "cancelled":
            raise InternalError("the request was cancelled: the server is shutting down")
        return self.generation.done.reason

    def usage(self) -> dict[str, Any]:
        done = self.generation.done
        assert done is not None
        prompt, completion = done.match.prompt_tokens, done.num_generated
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
                "prompt_tokens_details": {"cached_tokens": done.match.reused_tokens},
            }
        }

    def report(self) -> dict[str, Any]:
        return {"rewake": self.generation.report(self.agent)}


def sse(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def stream(answer: Answer, include_usage: bool) -> AsyncIterator[str]:
    """Server-sent events; a failure after the first one ends the stream with an error event."""
    no_usage = {"usage": None} if include_usage else {}
    try:
        yield answer.chunk({"role": "assistant", "content": ""}, **no_usage)
        async for piece in answer.generation.pieces(KEEP_ALIVE):
            yield ": keep-alive\n\n" if piece is None else answer.chunk({"content": piece}, **no_usage)
        if include_usage:
            yield answer.chunk({}, answer.finish_reason, **no_usage)
            yield answer.chunk(None, **answer.usage(), **answer.report())
        else:
            yield answer.chunk({}, answer.finish_reason, **answer.report())
        yield "data: [DONE]\n\n"
    except RequestError as error:
        yield sse(error_body(error))
    finally:
        answer.generation.cancel()


async def collect(generation: Generation, request: Request) -> str:
    """The whole text; a client that goes away meanwhile cancels it."""

    async def read() -> str:
        return "".join([piece async for piece in generation.pieces() if piece is not None])

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    reading, leaving = asyncio.create_task(read()), asyncio.create_task(gone())
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            raise InvalidRequest("the client has gone")  # nobody reads this
        return await reading
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


def router(generator: Generator) -> APIRouter:
    routes = APIRouter(prefix="/v1")
    started = int(time.time())

    def listed(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "rewake"}

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        """All that can be asked for; the first is the default."""
        return {"object": "list", "data": [listed(name) for name in generator.services.names]}

    @routes.get("/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return listed(generator.services.find(name))

    @routes.post("/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request, x_agent_id: str | None = Header(None)) -> JSONResponse | StreamingResponse:
        model = generator.services.find(body.model)
        agent = check_agent_id(asker(x_agent_id, body.agent_id))
        generation = await generator.start(body.ask(agent))
        answer = Answer(generation, model, agent)
        if not body.stream:
            return JSONResponse(answer.whole(await collect(generation, request)))
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream(answer, include_usage), media_type="text/event-stream", headers=headers)

    return routes
