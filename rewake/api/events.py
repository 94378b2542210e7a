"""What a window shows: agents, the batch and the budgets, as they are now; and what an agent remembers, as messages.

Snapshots are taken on the engine's thread between two steps, at most so often that they take a twentieth of its time, and only while
somebody looks. Everybody sees their own namespace, and nothing of others. They are of one model, the server's first unless another one
is named; to look at it neither loads it nor keeps it loaded.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from rewake.api.auth import namespace
from rewake.api.generation import Generator, check_agent_id
from rewake.api.streams import event_stream
from rewake.api.verbs import on_loaded
from rewake.engine import Engine
from rewake.errors import InvalidRequest, NotFound, RequestError, ShuttingDown
from rewake.memory.stats import used_by
from rewake.sequence import Sequence

__all__ = ["router"]

Json = dict[str, Any]
EVERY = 0.5  # seconds between snapshots
SHARE = 0.05  # of the engine's time that snapshots may take
MOST_AGENTS = 200  # in a snapshot, the latest used
KEEP_ALIVE = 10.0  # seconds without an event before a comment is sent


class Snapshots:
    """The latest snapshot of each model and namespace; those who look at the same time share it."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.services = generator.services
        self._taken: dict[tuple[str, str], tuple[float, Json]] = {}  # until when it is new enough, and what it says
        self._taking: dict[tuple[str, str], asyncio.Lock] = {}

    async def snapshot(self, model: str, namespace: str) -> Json | None:
        """None if the model is not loaded now."""
        async with self._taking.setdefault((model, namespace), asyncio.Lock()):
            until, known = self._taken.get((model, namespace), (0.0, {}))
            if known and time.monotonic() < until:
                return known
            taken = await on_loaded(self.services, model, lambda engine: timed(engine, namespace))
            if taken is None:
                self._taken[model, namespace] = time.monotonic() + EVERY, {}
                return None
            took, now = taken
            for agent in now["agents"]:
                turns = self.generator.recent[model].of(namespace, agent["agent"])
                agent["last"] = turns[-1] if turns else None
                agent["ttft_ms"] = [turn["ttft_ms"] for turn in turns if turn["ttft_ms"] is not None]
            self._taken[model, namespace] = time.monotonic() + max(EVERY, took / SHARE), now
            return now

    async def events(self, model: str, namespace: str) -> AsyncGenerator[str, None]:
        """Server-sent events: a snapshot whenever something has changed, until the server goes; or that the model is not loaded."""
        unloaded = {"message": f"{model} is not loaded now: it is when somebody asks it"}
        sent: Json | None = {}
        quiet = 0.0
        while True:
            try:
                if (reason := self.services.why_not_ready) is not None:
                    raise ShuttingDown(reason)
                now = await self.snapshot(model, namespace)
            except RequestError as error:
                yield event("error", {"message": error.message})
                return
            if now != sent:
                sent, quiet = now, 0.0
                yield event("unloaded", unloaded) if now is None else event("snapshot", now)
            elif quiet >= KEEP_ALIVE:
                quiet = 0.0
                yield ": keep-alive\n\n"
            wait = max(0.05, self._taken[model, namespace][0] - time.monotonic())
            quiet += wait
            await asyncio.sleep(wait)


def event(name: str, data: Json) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def timed(engine: Engine, namespace: str) -> tuple[float, Json]:
    """On the engine's thread: how long it took, and what there is."""
    started = time.perf_counter()
    now = snapshot(engine, namespace)
    return time.perf_counter() - started, now


def snapshot(engine: Engine, namespace: str) -> Json:
    memory = engine.memory
    own = [request for request in (*engine.waiting, *engine.opening.values()) if request.namespace == namespace]
    return {
        "agents": [{**asdict(agent), "turns": len(agent.turns)} for agent in memory.agents.latest(namespace, MOST_AGENTS)],
        "num_agents": sum(space == namespace and name is not None for space, name in memory.agents.tree.agents),
        "running": [at_work(sequence) for sequence in engine.running if sequence.request.namespace == namespace],
        "waiting": [request.agent for request in own],
        "saving": [request.agent for request in engine.closing if request.namespace == namespace],
        "budgets": asdict(used_by(memory.ledger, namespace)),
        "context": engine.context,
    }


def at_work(sequence: Sequence) -> Json:
    """`done` of `tokens` have K/V; a prompt is being read until the first token is there."""
    return {
        "agent": sequence.request.agent,
        "phase": "reading" if sequence.is_prefilling else "writing",
        "done": sequence.num_stored,
        "tokens": len(sequence.tokens),
        "generated": sequence.num_generated,
        "match": sequence.match.kind,
        "reused": sequence.match.reused_tokens,
    }


def router(generator: Generator) -> APIRouter:
    routes = APIRouter(prefix="/v1/rewake")
    snapshots = Snapshots(generator)

    @routes.get("/events", include_in_schema=False)  # it does not end
    async def events(model: str | None = None) -> StreamingResponse:
        return event_stream(snapshots.events(generator.services.find(model), namespace()))

    @routes.get("/messages/{agent:path}")
    async def messages(agent: str, model: str | None = None) -> Json:
        """What the agent's latest branch says, as the messages it came from."""
        check_agent_id(agent, "agent")
        async with generator.using(model) as service:
            text = await generator.transcript(service, namespace(), agent)
            if text is None:
                raise NotFound(f"no agent {agent!r} is remembered", param="agent")
            found = service.tokenizer.messages(text) if text else []
        if found is None:
            raise InvalidRequest(f"what {agent!r} remembers is not a chat, as this model's template writes it", param="agent")
        return {"agent": agent, "messages": found}

    return routes
