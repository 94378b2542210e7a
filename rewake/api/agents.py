"""Agents over HTTP: list, show, forget."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from rewake.api.generation import NAMESPACE
from rewake.engine import Engine

__all__ = ["router"]


def router(engine: Engine) -> APIRouter:
    routes = APIRouter(prefix="/v1/agents")
    memory = engine.memory

    @routes.get("")
    async def agents() -> dict[str, Any]:
        found = await asyncio.wrap_future(engine.call(lambda: memory.agents(NAMESPACE)))
        return {"object": "list", "data": [asdict(a) for a in found]}

    @routes.get("/{agent:path}")
    async def agent(agent: str) -> dict[str, Any]:
        return asdict(await asyncio.wrap_future(engine.call(lambda: memory.agent(NAMESPACE, agent))))

    @routes.delete("/{agent:path}")
    async def forget(agent: str) -> dict[str, Any]:
        """Answers when the files are gone."""
        gone: Future[None] = Future()
        await asyncio.wrap_future(engine.call(lambda: memory.forget(NAMESPACE, agent, lambda: gone.set_result(None))))
        await asyncio.wrap_future(gone)
        return {"agent": agent, "forgotten": True}

    return routes
