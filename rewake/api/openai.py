"""The OpenAI protocol: chat completions, completions and models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from rewake.api.generation import Ask, Generation, Generator, Part, check_agent_id
from rewake.api.openai_fields import ChatRequest, CompletionRequest
from rewake.api.streams import AgentHeader, Whole, asker, collect, done_of, event_stream, parts_of, sse
from rewake.errors import RequestError
from rewake.request import Generated
from rewake.text.answer import Said, Thought
from rewake.text.grammar import Grammars
from rewake.text.tools import Call

__all__ = ["ChatRequest", "CompletionRequest", "error_body", "router"]

Json = dict[str, Any]


def error_body(error: RequestError) -> Json:
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


class Answers:
    """Builds the objects of one response, with all its choices."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, generations: Sequence[Generation], model: str, agent: str | None, per_prompt: int = 1) -> None:
        """`per_prompt` answers were asked for behind each prompt."""
        self.tokenizer, self.grammars = generations[0].tokenizer, generations[0].grammars
        self.generations = generations
        self.agent = agent
        self.per_prompt = per_prompt
        self.num_calls = [0] * len(generations)
        self.base = {"id": f"{self.prefix}-{generations[0].id}", "created": int(time.time()), "model": model}

    # ---- whole

    def whole(self, wholes: Sequence[Whole]) -> Json:
        choices = [self.choice(index, whole) for index, whole in enumerate(wholes)]
        return {**self.base, "object": self.kind, "choices": choices, "usage": self.usage(), "rewake": self.report()}

    def choice(self, index: int, whole: Whole) -> Json:
        message: Json = {"role": "assistant", "content": whole.said if whole.said or not whole.calls else None, "refusal": None}
        if whole.thought:
            message["reasoning_content"] = whole.thought
        if whole.calls:
            message["tool_calls"] = [self.call(index, call) for call in whole.calls]
        finish = self.finish(index)
        return {"index": index, "message": message, "logprobs": self.logprobs(whole.tokens), "finish_reason": finish}

    # ---- in chunks

    def chunk(self, index: int, delta: Json, finish: str | None = None, tokens: Sequence[Generated] = (), **more: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": self.logprobs(tokens), "finish_reason": finish}
        return sse({**self.base, "object": self.chunk_kind, "choices": [choice], **more})

    def first(self, index: int, **more: Any) -> str:
        return self.chunk(index, {"role": "assistant", "content": ""}, **more)

    def last(self, index: int, **more: Any) -> str:
        return self.chunk(index, {}, self.finish(index), **more)

    def chunks(self, index: int, part: Part, **more: Any) -> list[str]:
        """Those of a part; the tokens go with the last."""
        deltas = [self.delta(index, piece) for piece in part.pieces] or [{"content": ""}]
        tokens: list[Sequence[Generated]] = [()] * (len(deltas) - 1)
        return [self.chunk(index, delta, None, of, **more) for delta, of in zip(deltas, [*tokens, part.tokens], strict=True)]

    def delta(self, index: int, piece: Said | Thought | Call) -> Json:
        if isinstance(piece, Said):
            return {"content": piece.text}
        if isinstance(piece, Thought):
            return {"reasoning_content": piece.text}
        return {"tool_calls": [{"index": self.num_calls[index], **self.call(index, piece)}]}

    def ending(self, **more: Any) -> str:
        return sse({**self.base, "object": self.chunk_kind, "choices": [], **more})

    # ---- both

    def call(self, index: int, call: Call) -> Json:
        self.num_calls[index] += 1
        dialect = self.tokenizer.dialect
        assert dialect is not None
        return {"id": call.id or dialect.call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def finish(self, index: int) -> str:
        reason = done_of(self.generations[index]).reason
        return "tool_calls" if reason == "stop" and self.num_calls[index] else reason

    def logprobs(self, tokens: Sequence[Generated]) -> Json | None:
        given = [logprob_of(self.grammars, t) for t in tokens if t.logprobs is not None]
        return {"content": given, "refusal": None} if given else None

    def usage(self) -> Json:
        """A prompt counts once, however many answers it has."""
        done = [done_of(generation) for generation in self.generations]
        prompts = [d.match for d in done[:: self.per_prompt]]
        prompt, completion = sum(m.prompt_tokens for m in prompts), sum(d.num_generated for d in done)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(m.reused_tokens for m in prompts)},
        }

    def report(self) -> Json:
        return self.generations[0].report(self.agent)


class Completions(Answers):
    """The same for plain completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, generations: Sequence[Generation], model: str, agent: str | None, per_prompt: int = 1) -> None:
        super().__init__(generations, model, agent, per_prompt)
        self.offsets = [0] * len(generations)

    def choice(self, index: int, whole: Whole) -> Json:
        return self.text_choice(index, whole.said, self.finish(index), whole.tokens)

    def text_choice(self, index: int, text: str, finish: str | None, tokens: Sequence[Generated]) -> Json:
        return {"index": index, "text": text, "logprobs": self.text_logprobs(index, tokens), "finish_reason": finish}

    def chunk(self, index: int, delta: Json, finish: str | None = None, tokens: Sequence[Generated] = (), **more: Any) -> str:
        choice = self.text_choice(index, delta.get("content", ""), finish, tokens)
        return sse({**self.base, "object": self.chunk_kind, "choices": [choice], **more})

    def text_logprobs(self, index: int, tokens: Sequence[Generated]) -> Json | None:
        given = [(t.token, t.logprobs) for t in tokens if t.logprobs is not None]
        if not given:
            return None
        name, offsets = self.grammars.token_name, []
        for token, _ in given:
            offsets.append(self.offsets[index])
            self.offsets[index] += len(self.grammars.token_bytes(token).decode(errors="ignore"))
        return {
            "tokens": [name(token) for token, _ in given],
            "token_logprobs": [logprobs.chosen for _, logprobs in given],
            "top_logprobs": [{name(other): value for other, value in logprobs.top} for _, logprobs in given],
            "text_offset": offsets,
        }


def logprob_of(grammars: Grammars, sampled: Generated) -> Json:
    assert sampled.logprobs is not None

    def entry(token: int, logprob: float) -> Json:
        return {"token": grammars.token_name(token), "logprob": logprob, "bytes": list(grammars.token_bytes(token))}

    top = [entry(token, logprob) for token, logprob in sampled.logprobs.top]
    return {**entry(sampled.token, sampled.logprobs.chosen), "top_logprobs": top}


async def stream(answers: Answers, include_usage: bool) -> AsyncIterator[str]:
    """Server-sent events; a failure after the first one ends the stream with an error event."""
    no_usage = {"usage": None} if include_usage else {}
    left = len(answers.generations)
    try:
        for index in range(left):
            if not isinstance(answers, Completions):
                yield answers.first(index, **no_usage)
        async for index, part in parts_of(answers.generations):
            if part is None:
                yield ": keep-alive\n\n"
            elif part.pieces or part.tokens:
                for chunk in answers.chunks(index, part, **no_usage):
                    yield chunk
            else:
                left -= 1
                report = {"rewake": answers.report()} if not left and not include_usage else {}
                yield answers.last(index, **no_usage, **report)
        if include_usage:
            yield answers.ending(usage=answers.usage(), rewake=answers.report())
        yield "data: [DONE]\n\n"
    except RequestError as error:
        yield sse(error_body(error))
    finally:
        for generation in answers.generations:
            generation.cancel()


async def start_all(generator: Generator, asks: Sequence[Ask]) -> list[Generation]:
    """The answers to several prompts, or none of them. Raises RequestError."""
    generations: list[Generation] = []
    try:
        for ask in asks:
            generations += await generator.start(ask)
    except RequestError as error:
        for generation in generations:
            generation.cancel()
        error.param = "prompt" if error.param == "messages" else error.param
        raise
    return generations


async def respond(answers: Answers, body: ChatRequest | CompletionRequest, request: Request) -> JSONResponse | StreamingResponse:
    if body.stream:
        return event_stream(stream(answers, body.include_usage))
    return JSONResponse(answers.whole(await collect(answers.generations, request)))


def router(generator: Generator) -> APIRouter:
    routes = APIRouter(prefix="/v1")
    started = int(time.time())

    def listed(name: str) -> Json:
        return {"id": name, "object": "model", "created": started, "owned_by": "rewake"}

    @routes.get("/models")
    async def models() -> Json:
        """All that can be asked for; the first is the default."""
        return {"object": "list", "data": [listed(name) for name in generator.services.names]}

    @routes.get("/models/{name:path}")
    async def one_model(name: str) -> Json:
        return listed(generator.services.find(name))

    @routes.post("/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request, x_agent_id: AgentHeader = None) -> JSONResponse | StreamingResponse:
        model = generator.services.find(body.model)
        agent = check_agent_id(asker(x_agent_id, body.agent_id))
        generations = await generator.start(body.ask(agent))
        return await respond(Answers(generations, model, agent, body.n or 1), body, request)

    @routes.post("/completions", response_model=None)
    async def complete(body: CompletionRequest, request: Request, x_agent_id: AgentHeader = None) -> JSONResponse | StreamingResponse:
        model = generator.services.find(body.model)
        agent = check_agent_id(asker(x_agent_id, body.agent_id))
        generations = await start_all(generator, body.asks(agent))
        return await respond(Completions(generations, model, agent, body.n or 1), body, request)

    return routes
