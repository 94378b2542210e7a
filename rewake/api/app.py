"""The application: routes, and how errors look on the wire."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from rewake.api import agents, anthropic, events, metrics, openai, window
from rewake.api.auth import Access
from rewake.api.document import describe_all
from rewake.api.gate import Gate
from rewake.api.generation import Generator
from rewake.api.verbs import on_loaded
from rewake.errors import InternalError, InvalidRequest, NotFound, RequestError, Unauthorized
from rewake.memory.memory import AgentMemory
from rewake.services import Services

__all__ = ["create_app"]


class Health(BaseModel):
    status: str


HEALTH: dict[int | str, dict[str, Any]] = {200: {"model": Health}, 503: {"model": Health}}


def create_app(services: Services, access: Access | None = None) -> ASGIApp:
    """The routes, behind the gate. Raises ConfigError where `Access` does."""
    access = access or Access(services.config)
    counts: Counter[int] = Counter()
    gate: ASGIApp = Gate(routes(services, counts), access, error_response, counts)
    if access.origins:
        gate = CORSMiddleware(
            gate, allow_origins=sorted(access.origins), allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-ID"]
        )
    return gate


def routes(services: Services, answers: Counter[int]) -> FastAPI:
    app = FastAPI(title="Rewake", version=version("rewake"), docs_url=None, redoc_url=None)
    app.state.generator = generator = Generator(services)
    app.include_router(openai.router(generator))
    app.include_router(anthropic.router(generator))
    app.include_router(agents.router())
    app.include_router(metrics.router(services, answers))
    app.include_router(events.router(generator))
    app.include_router(window.router())

    def health(reason: str | None) -> JSONResponse:
        if reason is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": reason}, 503, {"Retry-After": str(services.retry_after)})

    @app.get("/health", responses=HEALTH)
    @app.get("/health/ready", responses=HEALTH)
    async def ready() -> JSONResponse:
        """Whether requests are taken; one for a model that is not loaded now has it loaded."""
        return health(services.why_not_ready)

    @app.get("/health/live", responses=HEALTH)
    async def live() -> JSONResponse:
        """Whether the process should be left alone; an engine that stays down will not come back by itself."""
        return health(None if services.is_alive else "the engine does not run")

    @app.get("/health/books", responses={200: {"model": Health}, 500: {"model": Health}})
    async def books() -> JSONResponse:
        """Whether all slots, references and reservations of each loaded model's memory add up: 500, and what does not, if not."""
        wrong = await discrepancies(services)
        return JSONResponse({"status": wrong or "ok"}, 200 if wrong is None else 500)

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> JSONResponse:
        return error_response(request.url.path, error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return await request_error(request, describe(error))

    @app.exception_handler(Exception)
    async def our_fault(request: Request, _: Exception) -> JSONResponse:
        return await request_error(request, InternalError("something went wrong here: see the server's log"))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        known = NotFound if error.status_code == 404 else InvalidRequest
        told = known(f"{request.method} {request.url.path}: {error.detail}")
        return JSONResponse(error_body(request.url.path, told), error.status_code, error.headers)

    describe_all(app, lambda: services.names)
    return app


def error_response(path: str, error: RequestError) -> JSONResponse:
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(path, error), error.status, headers)


def error_body(path: str, error: RequestError) -> dict[str, Any]:
    """In the form of the protocol that is spoken at `path`."""
    return anthropic.error_body(error) if path.startswith(anthropic.PATH) else openai.error_body(error)


async def discrepancies(services: Services) -> str | None:
    """What does not add up, and of which model where there are several."""
    found = {name: await on_loaded(services, name, lambda engine: discrepancy(engine.memory)) for name in services.names}
    wrong = {name: what for name, what in found.items() if what is not None}
    return "; ".join(f"{name}: {what}" if len(found) > 1 else what for name, what in wrong.items()) or None


def discrepancy(memory: AgentMemory) -> str | None:
    try:
        memory.check()
    except AssertionError as error:
        return str(error) or "the books do not add up"
    return None


def names_of(found: Any, body: Any) -> list[str]:
    """The way to a field that an error is about, without the kinds of values that were tried for it."""
    names = []
    for number, part in enumerate(found["loc"][1:], 2):
        if (isinstance(body, dict) and part in body) or (isinstance(body, list) and isinstance(part, int) and part < len(body)):
            body = body[part]
            names.append(str(part))
        elif number == len(found["loc"]) and found["type"] == "missing":
            names.append(str(part))
    return names


def describe(error: RequestValidationError) -> InvalidRequest:
    """The first thing that is wrong, and the field it is wrong with. Of several things a value could be, the one that it is most like."""
    if isinstance(error.body, bytes):
        return InvalidRequest("the body is not said to be JSON: send the header content-type: application/json")
    ways = [(found, names_of(found, error.body)) for found in error.errors()]
    start = ways[0][1]
    worst, names = max((way for way in ways if way[1][: len(start)] == start), key=lambda way: len(way[1]))
    field = ".".join(names if worst["loc"][0] == "body" else map(str, worst["loc"]))
    if worst["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {worst['ctx']['error']}, at character {worst['loc'][1]}")
    if worst["type"] == "extra_forbidden":
        return InvalidRequest(f"{field}: this field is unknown or not supported", param=field)
    return InvalidRequest(f"{field}: {worst['msg']}" if field else worst["msg"], param=field or None)
