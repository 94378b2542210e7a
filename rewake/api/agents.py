"""Agents over HTTP: list, show, forget."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from rewake.api.generation import NAMESPACE, Generator
from rewake.errors import InternalError

__all__ = ["router"]


def router(generator: Generator) -> APIRouter:
    routes = APIRouter(prefix="/v1/agents")
    engine = generator.service.engine
    memory = engine.memory

    @routes.get("")
    async def agents() -> dict[str, Any]:
        found = await asyncio.wrap_future(engine.call(lambda: memory.agents.list(NAMESPACE)))
        return {"object": "list", "data": [asdict(a) for a in found]}

    @routes.get("/{agent:path}")
    async def agent(agent: str) -> dict[str, Any]:
        return asdict(await asyncio.wrap_future(engine.call(lambda: memory.agents.show(NAMESPACE, agent))))

    @routes.delete("/{agent:path}")
    async def forget(agent: str) -> dict[str, Any]:
        """Answers when the files are gone."""
        gone: Future[Exception | None] = Future()
        await asyncio.wrap_future(engine.call(lambda: memory.agents.forget(NAMESPACE, agent, gone.set_result)))
        await generator.forget(agent)
        if error := await asyncio.wrap_future(gone):
            raise InternalError(f"the agent is gone from memory, but not from disk, and will be back after a restart: {error}")
        return {"agent": agent, "forgotten": True}

    return routes
