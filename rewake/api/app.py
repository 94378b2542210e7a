"""The application: routes, and how errors look on the wire."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rewake.api import agents, anthropic, metrics, openai
from rewake.api.generation import Generator
from rewake.errors import InternalError, InvalidRequest, NotFound, Overloaded, RequestError
from rewake.service import Service

__all__ = ["create_app", "model_id"]


def model_id(service: Service) -> str:
    """What clients call the model: its name, without the folders a local one lies in."""
    name = service.config.model
    return service.path.resolve().name if name.startswith((".", "/", "~")) else name


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="Rewake", version=version("rewake"), docs_url=None, redoc_url=None)
    generator = Generator(service)
    app.include_router(openai.router(generator, model_id(service)))
    app.include_router(anthropic.router(generator, model_id(service)))
    app.include_router(agents.router(generator))
    app.include_router(metrics.router(service.engine))

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        """Whether requests are taken."""
        reason = service.engine.why_not_ready
        return JSONResponse({"status": reason or "ok"}, 200 if reason is None else 503)

    @app.get("/health/live")
    async def live() -> JSONResponse:
        """Whether the process should be left alone; an engine that stays down will not come back by itself."""
        alive = service.engine.is_alive
        return JSONResponse({"status": "ok" if alive else "the engine does not run"}, 200 if alive else 503)

    @app.exception_handler(RequestError)
    async def request_error(request: Request, error: RequestError) -> JSONResponse:
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, Overloaded) else None
        return JSONResponse(error_body(request, error), error.status, headers)

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
        return JSONResponse(error_body(request, told), error.status_code)

    return app


def error_body(request: Request, error: RequestError) -> dict[str, Any]:
    """In the form of the protocol that was spoken."""
    return anthropic.error_body(error) if request.url.path.startswith(anthropic.PATH) else openai.error_body(error)


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
    ways = [(found, names_of(found, error.body)) for found in error.errors()]
    start = ways[0][1]
    worst, names = max((way for way in ways if way[1][: len(start)] == start), key=lambda way: len(way[1]))
    field = ".".join(names if worst["loc"][0] == "body" else map(str, worst["loc"]))
    if worst["type"] == "extra_forbidden":
        return InvalidRequest(f"{field}: this field is unknown or not supported", param=field)
    return InvalidRequest(f"{field}: {worst['msg']}" if field else worst["msg"], param=field or None)
