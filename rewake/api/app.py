"""The application: routes, and how errors look on the wire."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rewake.api import agents, metrics, openai
from rewake.api.generation import Generator
from rewake.errors import InternalError, InvalidRequest, NotFound, Overloaded, RequestError
from rewake.services import Services

__all__ = ["create_app"]


def create_app(services: Services) -> FastAPI:
    app = FastAPI(title="Rewake", version=version("rewake"), docs_url=None, redoc_url=None)
    app.state.generator = generator = Generator(services)
    app.include_router(openai.router(generator))
    app.include_router(agents.router())
    app.include_router(metrics.router(services))

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> JSONResponse:
        """Whether requests are taken; one for a model that is not loaded now has it loaded."""
        reason = services.why_not_ready
        return JSONResponse({"status": reason or "ok"}, 200 if reason is None else 503)

    @app.get("/health/live")
    async def live() -> JSONResponse:
        """Whether the process should be left alone; an engine that stays down will not come back by itself."""
        alive = services.is_alive
        return JSONResponse({"status": "ok" if alive else "the engine does not run"}, 200 if alive else 503)

    @app.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> JSONResponse:
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, Overloaded) else None
        return JSONResponse(openai.error_body(error), error.status, headers)

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
        return JSONResponse(openai.error_body(told), error.status_code)

    return app


def describe(error: RequestValidationError) -> InvalidRequest:
    """The first thing that is wrong, and the field it is wrong with."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{field}: this field is unknown or not supported", param=field)
    return InvalidRequest(f"{field}: {first['msg']}" if field else first["msg"], param=field or None)
