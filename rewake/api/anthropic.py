"""The Anthropic protocol: messages, and the counting of their tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from rewake.api.anthropic_fields import CountRequest, MessagesRequest
from rewake.api.generation import Generation, Generator, check_agent_id
from rewake.api.streams import AgentHeader, Whole, asker, collect, done_of, event_stream, parts_of, sse
from rewake.errors import RequestError
from rewake.text.answer import Piece, Said, Thought
from rewake.text.tools import Call

__all__ = ["PATH", "error_body", "router"]

PATH = "/v1/messages"
Json = dict[str, Any]
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: RequestError) -> Json:
    message = f"{error.param}: {error.message}" if error.param and not error.message.startswith(error.param) else error.message
    return {"type": "error", "error": {"type": KINDS.get(error.status, "api_error"), "message": message}}


class Message:
    """Builds the objects of one message."""

    def __init__(self, generation: Generation, model: str, agent: str | None) -> None:
        self.generation = generation
        self.model = model
        self.agent = agent
        self.num_calls = 0

    def head(self, content: list[Json], usage: Json, **ending: Any) -> Json:
        base = {"id": f"msg_{self.generation.id}", "type": "message", "role": "assistant", "model": self.model}
        return {**base, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage, **ending}

    def whole(self, whole: Whole) -> Json:
        content: list[Json] = []
        if whole.thought:
            content.append(self.block(Thought(whole.thought)))
        if whole.said or not (whole.calls or whole.thought):
            content.append(self.block(Said(whole.said)))
        content += [self.block(call) for call in whole.calls]
        return self.head(content, self.usage(), **self.ending(), rewake=self.report())

    def block(self, piece: Piece) -> Json:
        if isinstance(piece, Said):
            return {"type": "text", "text": piece.text}
        if isinstance(piece, Thought):
            return {"type": "thinking", "thinking": piece.text, "signature": ""}
        self.num_calls += 1
        dialect = self.generation.tokenizer.dialect
        assert dialect is not None
        return {"type": "tool_use", "id": piece.id or dialect.call_id(), "name": piece.name, "input": json.loads(piece.arguments)}

    def ending(self) -> Json:
        reason = done_of(self.generation).reason
        stop = self.generation.text.stop
        if stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        return {"stop_reason": "tool_use" if self.num_calls else "end_turn", "stop_sequence": None}

    def usage(self) -> Json:
        """Input that was remembered counts apart, as Anthropic has it: all three kinds add up to the prompt."""
        done = done_of(self.generation)
        return {
            "input_tokens": done.match.computed_tokens,
            "cache_read_input_tokens": done.match.reused_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": done.num_generated,
        }

    def report(self) -> Json:
        return self.generation.report(self.agent)


class Blocks:
    """The events of a stream's content blocks: each is opened, filled and closed before the next."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.index = -1
        self._kind: type[Piece] | None = None

    def events(self, piece: Piece) -> list[str]:
        if isinstance(piece, Call):
            block = self.message.block(piece)
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
            return [*self.close(), *self._open({**block, "input": {}}, Call), self._delta(delta)]
        events = []
        if self._kind is not type(piece):
            empty = Said("") if isinstance(piece, Said) else Thought("")
            events = [*self.close(), *self._open(self.message.block(empty), type(piece))]
        said = {"type": "text_delta", "text": piece.text}
        return [*events, self._delta(said if isinstance(piece, Said) else {"type": "thinking_delta", "thinking": piece.text})]

    def close(self) -> list[str]:
        if self._kind is None:
            return []
        self._kind = None
        return [event("content_block_stop", index=self.index)]

    def _open(self, block: Json, kind: type[Piece]) -> list[str]:
        self.index += 1
        self._kind = kind
        return [event("content_block_start", index=self.index, content_block=block)]

    def _delta(self, delta: Json) -> str:
        return event("content_block_delta", index=self.index, delta=delta)


def event(kind: str, **data: Any) -> str:
    return sse({"type": kind, **data}, kind)


async def stream(message: Message) -> AsyncIterator[str]:
    """Events; what the input was is known for sure at the end, when `message_delta` says it again."""
    blocks = Blocks(message)
    usage = {"input_tokens": len(message.generation.prompt.ids), "output_tokens": 0}
    try:
        yield event("message_start", message=message.head([], usage))
        yield event("ping")
        async for _, part in parts_of([message.generation]):
            if part is None:
                yield event("ping")
                continue
            for piece in part.pieces:
                for text in blocks.events(piece):
                    yield text
        if blocks.index < 0:
            for text in blocks.events(Said("")):
                yield text
        for text in blocks.close():
            yield text
        yield event("message_delta", delta=message.ending(), usage=message.usage(), rewake=message.report())
        yield event("message_stop")
    except RequestError as error:
        yield sse(error_body(error), "error")
    finally:
        message.generation.cancel()


def router(generator: Generator) -> APIRouter:
    """The routes. Keys, versions and betas are headers that ask for nothing here."""
    routes = APIRouter(prefix=PATH)

    @routes.post("", response_model=None)
    async def create(body: MessagesRequest, request: Request, x_agent_id: AgentHeader = None) -> JSONResponse | StreamingResponse:
        model = generator.services.find(body.model)
        agent = check_agent_id(asker(x_agent_id, body.agent_id))
        (generation,) = await generator.start(body.ask(agent))
        message = Message(generation, model, agent)
        if body.stream:
            return event_stream(stream(message))
        (whole,) = await collect([generation], request)
        return JSONResponse(message.whole(whole))

    @routes.post("/count_tokens")
    async def count(body: CountRequest, x_agent_id: AgentHeader = None) -> Json:
        generator.services.find(body.model)
        agent = check_agent_id(asker(x_agent_id, body.agent_id))
        return {"input_tokens": await generator.count(body.ask(agent))}

    return routes
