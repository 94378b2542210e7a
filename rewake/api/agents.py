"""Agents over HTTP: create, list, show, pin, fork, rewind, wake, cancel, export, import, forget.

An agent is of one model: the one that the query names (`?model=NAME`), else the server's first.

An id may hold slashes, so what is done to an agent stands behind it: `POST /v1/agents/{agent}/fork` forks `agent`, one
called `x/fork` too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import FileResponse
from pydantic import Field
from starlette.types import Receive, Scope, Send

from rewake.api.auth import caller, namespace
from rewake.api.fields import Strict
from rewake.api.generation import MOST_AGENT_ID, Generator, check_agent_id
from rewake.api.verbs import done, on_engine, on_loaded, report_of
from rewake.errors import BodyTooLarge, InternalError, InvalidRequest
from rewake.memory.agents import Agents, AgentSummary
from rewake.memory.portable import read_portable
from rewake.service import Service
from rewake.services import Services

__all__ = ["router"]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
FILE = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}
SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


AgentId = Annotated[str, Field(json_schema_extra={"minLength": 1, "maxLength": MOST_AGENT_ID})]  # for the document; see check_agent_id


class Create(Strict):
    agent: AgentId
    pinned: bool = False
    ttl: Seconds | None = None


class Update(Strict):
    """What is not given stays as it is; a `ttl` of null means for ever."""

    pinned: bool = False
    ttl: Seconds | None = None

    def changes(self) -> dict[str, bool | float | None]:
        if not self.model_fields_set:
            raise InvalidRequest("give pinned, ttl, or both", param="pinned")
        return {name: getattr(self, name) for name in self.model_fields_set}


class Fork(Strict):
    to: AgentId
    turn: int | None = None
    tokens: int | None = None


class Rewind(Strict):
    turn: int | None = None
    tokens: int | None = None

    def check(self) -> None:
        if self.turn is None and self.tokens is None:
            raise InvalidRequest("give turn or tokens: how far to go back to", param="turn")


class Nothing(Strict):
    """A verb without settings; it may be sent with an empty object."""


class Import(Strict):
    agent: AgentId | None = None
    model: str | None = None


class AgentList(Strict):
    object: Literal["list"] = "list"
    data: list[AgentSummary]


class Forgotten(Strict):
    agent: str
    forgotten: Literal[True] = True


class Cancelled(Strict):
    agent: str
    cancelled: int


class Woken(Strict):
    agent: str
    loaded_pages: int
    state: str


class Exported(FileResponse):
    """A file that is gone once it is sent, or once the client is."""

    media_type = "application/x-tar"

    def __init__(self, path: Path, name: str, folder: ExitStack) -> None:
        super().__init__(path, filename=name)
        self.folder = folder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.folder:
            await super().__call__(scope, receive, send)


def checked(agent: str, param: str = "agent") -> str:
    check_agent_id(agent, param)
    return agent


def file_name(agent: str) -> str:
    """What a browser may call the exported file: the id stands in it only where that is safe on every system."""
    return f"rewake-{agent}.tar" if SAFE_NAME.fullmatch(agent) else "rewake-agent.tar"


async def receive_file(request: Request, path: Path, most: int) -> None:
    """Write the body into a file. Raises InvalidRequest for more than `most` bytes."""
    size = 0
    with open(path, "wb") as file:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise BodyTooLarge(f"the file has more than the {most} bytes that memories may take on disk (--disk), or this key may send")
            await asyncio.to_thread(file.write, chunk)


class Verbs:
    """What is done to agents of one model, awaited."""

    def __init__(self, generator: Generator, service: Service, model: str) -> None:
        self.generator = generator
        self.service = service
        self.engine = service.engine
        self.recent = generator.recent[model]

    @property
    def agents(self) -> Agents:
        """Of the memory there is now: an engine that has failed begins again with another. For the engine's thread: there it stays."""
        return self.engine.memory.agents

    async def listed(self) -> list[AgentSummary]:
        space = namespace()  # here: the engine's thread knows no callers
        return await on_engine(self.engine, lambda: self.agents.list(space))

    async def summary(self, agent: str) -> AgentSummary:
        space = namespace()
        return await on_engine(self.engine, lambda: self.agents.show(space, agent))

    async def changed(self, agent: str) -> AgentSummary:
        """The summary of one whose transcripts are others now: its texts are learnt again when they are needed."""
        await self.generator.forget(self.service, agent)
        return await self.summary(agent)

    async def done(self, verb: Callable[..., None], *arguments: Any, **fields: Any) -> None:
        """Call a verb of the `Agents` there are then, which reports in the end whether it has gone well."""
        space = namespace()
        await done(self.engine, lambda told: verb(self.agents, space, *arguments, done=told, **fields))

    async def forget(self, agent: str) -> None:
        space = namespace()
        error: Exception | None = await report_of(self.engine, lambda told: self.agents.forget(space, agent, told))
        await self.generator.forget(self.service, agent)
        self.recent.forget(space, agent)
        if error is not None:
            raise InternalError(f"the agent is gone from memory, but not from disk, and will be back after a restart: {error}")

    async def wake(self, agent: str) -> int:
        space = namespace()
        return await report_of(self.engine, lambda told: self.agents.wake(space, agent, told))

    async def take_in(self, path: Path, name: str | None) -> str:
        """Import a file, as `name` or as it says itself; how the agent is called now."""
        with open(path, "rb") as file:
            exported, pages = await asyncio.to_thread(read_portable, file, self.service.backend.planes, self.service.backend.spec)
        agent = checked(exported.name) if name is None else name
        await self.done(Agents.take_in, agent, exported, pages)
        return agent


async def verbs_of(request: Request, model: str | None = None) -> AsyncIterator[Verbs]:
    """For one request, during which the model stays loaded."""
    generator: Generator = request.app.state.generator
    async with generator.using(model) as service:
        yield Verbs(generator, service, generator.services.find(model))


Asked = Annotated[Verbs, Depends(verbs_of)]


def router() -> APIRouter:
    routes = APIRouter(prefix="/v1/agents")
    for add in (add_records, add_files, add_transcripts):
        add(routes)
    return routes


def add_records(routes: APIRouter) -> None:
    @routes.get("")
    async def list_agents(verbs: Asked) -> AgentList:
        return AgentList(data=await verbs.listed())

    @routes.post("", status_code=201)
    async def create(body: Create, verbs: Asked) -> AgentSummary:
        await verbs.done(Agents.create, checked(body.agent), pinned=body.pinned, ttl=body.ttl)
        return await verbs.changed(body.agent)

    @routes.get("/{agent:path}")
    async def show(agent: AgentId, verbs: Asked) -> AgentSummary:
        return await verbs.summary(checked(agent))

    @routes.patch("/{agent:path}")
    async def update(agent: AgentId, body: Update, verbs: Asked) -> AgentSummary:
        await verbs.done(Agents.update, checked(agent), **body.changes())
        return await verbs.summary(agent)

    @routes.delete("/{agent:path}")
    async def forget(agent: AgentId, verbs: Asked) -> Forgotten:
        """Answers when the files are gone."""
        await verbs.forget(checked(agent))
        return Forgotten(agent=agent)


def add_files(routes: APIRouter) -> None:
    @routes.post("/import", status_code=201, openapi_extra=FILE)
    async def take_in(request: Request, query: Annotated[Import, Query()], verbs: Asked) -> AgentSummary:
        """The body is a file that `export` wrote; the agent is called as in it, unless another name is given."""
        name = None if query.agent is None else checked(query.agent)
        with TemporaryDirectory(prefix="rewake-import-") as folder:
            path = Path(folder) / "agent.tar"
            await receive_file(request, path, caller.get().limits.body or verbs.service.config.disk)
            return await verbs.changed(await verbs.take_in(path, name))

    @routes.post("/{agent:path}/export", response_class=Exported, status_code=200)
    async def export(agent: AgentId, verbs: Asked, nothing: Nothing | None = None) -> Exported:
        with ExitStack() as stack:
            path = Path(stack.enter_context(TemporaryDirectory(prefix="rewake-export-"))) / "agent.tar"
            await verbs.done(Agents.export, checked(agent), path)
            return Exported(path, file_name(agent), stack.pop_all())


def add_transcripts(routes: APIRouter) -> None:
    @routes.post("/{agent:path}/fork", status_code=201)
    async def fork(agent: AgentId, body: Fork, verbs: Asked) -> AgentSummary:
        await verbs.done(Agents.fork, checked(agent), checked(body.to, "to"), tokens=body.tokens, turn=body.turn)
        return await verbs.changed(body.to)

    @routes.post("/{agent:path}/rewind")
    async def rewind(agent: AgentId, body: Rewind, verbs: Asked) -> AgentSummary:
        body.check()
        await verbs.done(Agents.rewind, checked(agent), tokens=body.tokens, turn=body.turn)
        return await verbs.changed(agent)

    @routes.post("/{agent:path}/cancel")
    async def cancel(request: Request, agent: AgentId, model: str | None = None, nothing: Nothing | None = None) -> Cancelled:
        """Stop what the agent is asked, within a step; what was computed is remembered. Whoever asked gets an error."""
        services: Services = request.app.state.generator.services
        space, name = namespace(), checked(agent)
        # a model that is about to be unloaded has something at work, too; one that is not loaded has not
        cancelled = await on_loaded(services, services.find(model), lambda engine: engine.cancel_agent(space, name))
        return Cancelled(agent=agent, cancelled=cancelled or 0)

    @routes.post("/{agent:path}/wake")
    async def wake(agent: AgentId, verbs: Asked, nothing: Nothing | None = None) -> Woken:
        """A hint that the agent's next turn is near. As much of it is read as there is room for."""
        num_loaded = await verbs.wake(checked(agent))
        return Woken(agent=agent, loaded_pages=num_loaded, state=(await verbs.summary(agent)).state)
