"""What a window shows: agents, the batch and the budgets, as they are now; and what an agent remembers, as messages.

Snapshots are taken on the engine's thread between two steps, at most so often that they take a twentieth of its time, and only while
somebody looks. Everybody sees their own namespace, and nothing of others.
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
from rewake.api.verbs import on_engine
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
    """The latest snapshot of each namespace; those who look at the same time share it."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.engine = generator.service.engine
        self._taken: dict[str, tuple[float, Json]] = {}  # until when it is new enough, and what it says
        self._taking: dict[str, asyncio.Lock] = {}

    async def snapshot(self, namespace: str) -> Json:
        async with self._taking.setdefault(namespace, asyncio.Lock()):
            until, known = self._taken.get(namespace, (0.0, {}))
            if time.monotonic() < until:
                return known
            took, now = await on_engine(self.engine, lambda: timed(self.engine, namespace))
            for agent in now["agents"]:
                turns = self.generator.recent.of(namespace, agent["agent"])
                agent["last"] = turns[-1] if turns else None
                agent["ttft_ms"] = [turn["ttft_ms"] for turn in turns if turn["ttft_ms"] is not None]
            self._taken[namespace] = time.monotonic() + max(EVERY, took / SHARE), now
            return now

    async def events(self, namespace: str) -> AsyncGenerator[str, None]:
        """Server-sent events: a snapshot whenever something has changed, until the server goes."""
        sent, quiet = None, 0.0
        while True:
            try:
                if (reason := self.engine.why_not_ready) is not None:
                    raise ShuttingDown(reason)
                now = await self.snapshot(namespace)
            except RequestError as error:
                yield f"event: error\ndata: {json.dumps({'message': error.message})}\n\n"
                return
            if now != sent:
                sent, quiet = now, 0.0
                yield f"event: snapshot\ndata: {json.dumps(now, separators=(',', ':'))}\n\n"
            elif quiet >= KEEP_ALIVE:
                quiet = 0.0
                yield ": keep-alive\n\n"
            wait = max(0.05, self._taken[namespace][0] - time.monotonic())
            quiet += wait
            await asyncio.sleep(wait)


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
    async def events() -> StreamingResponse:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(snapshots.events(namespace()), media_type="text/event-stream", headers=headers)

    @routes.get("/messages/{agent:path}")
    async def messages(agent: str) -> Json:
        """What the agent's latest branch says, as the messages it came from."""
        check_agent_id(agent, "agent")
        text = await generator.transcript(namespace(), agent)
        if text is None:
            raise NotFound(f"no agent {agent!r} is remembered", param="agent")
        found = generator.service.tokenizer.messages(text) if text else []
        if found is None:
            raise InvalidRequest(f"what {agent!r} remembers is not a chat, as this model's template writes it", param="agent")
        return {"agent": agent, "messages": found}

    return routes
