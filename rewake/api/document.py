"""The OpenAPI document: what FastAPI writes of the routes, and what they have in common, which it does not know.

Every route may answer with an error of one form; keys stand in one of two headers; some answers may be streams; a model is one of those
that are served. Routes are not asked to say so again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from rewake import errors
from rewake.api.gate import OPEN

__all__ = ["describe_all"]

Json = dict[str, Any]
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
OF_ANTHROPIC = "/v1/messages"
KEYS: Json = {"bearer": {"type": "http", "scheme": "bearer"}, "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
TEXT: Json = {"type": "string"}
TEXT_OR_NULL: Json = {"anyOf": [{"type": "string"}, {"type": "null"}]}
FORMS: Json = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {"message": TEXT, "type": TEXT, "param": TEXT_OR_NULL, "code": TEXT_OR_NULL},
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "required": ["type", "message"], "properties": {"type": TEXT, "message": TEXT}},
        },
    },
}
REQUEST_ID: Json = {"description": "What the request is called in the log.", "schema": TEXT}


def describe_all(app: FastAPI, models: Callable[[], Sequence[str]]) -> None:
    """Have `app` serve the whole document; `models` are the ids that are served."""

    def document() -> Json:
        if app.openapi_schema is not None:
            return app.openapi_schema
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        components = made.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):  # of FastAPI's own, which we do not send
            schemas.pop(name, None)
        schemas |= FORMS
        components["securitySchemes"] = KEYS
        for path, operation in operations(made):
            complete(path, operation)
            name_models(operation, schemas, models())
        app.openapi_schema = made
        return made

    app.openapi = document  # type: ignore[method-assign]


def operations(document: Json) -> Iterator[tuple[str, Json]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


def complete(path: str, operation: Json) -> None:
    """Errors, keys, streams and the request's number."""
    answers = operation["responses"]
    answers.pop("422", None)
    if path not in OPEN:
        form = "AnthropicError" if path.startswith(OF_ANTHROPIC) else "Error"
        for status, about in statuses().items():
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{form}"}}}
            answers.setdefault(status, {"description": about, "content": content})
        operation["security"] = [{}, *({name: []} for name in KEYS)]  # without --keys, none is needed
    for status in {"429", "503"} & answers.keys():
        answers[status]["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    if path in STREAMED:
        about = "Server-sent events, where `stream` is set. One that fails after it has begun ends with an event that has an `error`."
        answers["200"]["description"] = about
        answers["200"].setdefault("content", {})["text/event-stream"] = {"schema": TEXT}
    for answer in answers.values():
        answer.setdefault("headers", {})["X-Request-ID"] = REQUEST_ID


def statuses() -> dict[str, str]:
    """Of all errors there are, and what they mean."""
    found: dict[str, list[str]] = {}
    for name in errors.__all__:
        error = getattr(errors, name)
        if issubclass(error, errors.RequestError) and error is not errors.RequestError:
            found.setdefault(str(error.status), []).append(error.__doc__.splitlines()[0])
    return {status: " Or: ".join(about) for status, about in sorted(found.items())}


def name_models(operation: Json, schemas: Json, models: Sequence[str]) -> None:
    """Where a body names a model, it is one of `models`."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
        asked = schemas.get(name, {}).get("properties", {}).get("model")
        if asked is not None and asked.get("type") == "string":
            asked["enum"] = list(models)
