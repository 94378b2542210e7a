"""What every request passes before a route sees it, and what is noted of it behind that.

    number it  ->  who asks  ->  how often  ->  read its body  ->  the route  ->  one line in the log

Knows no protocol: how an error looks, it is told.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rewake.api.auth import Access, Caller, caller
from rewake.api.limits import MOST_BODY, Rates, read_body, replayed
from rewake.errors import Forbidden, RequestError
from rewake.keys import Key
from rewake.logs import request_id

__all__ = ["Gate"]

log = logging.getLogger("rewake.access")

OPEN = ("/", "/health", "/health/live", "/health/ready", "/openapi.json", "/ui", "/ui/")  # without a key; the page asks for one
OPERATORS = ("/metrics", "/health/books")  # what is everybody's
QUIET = (*OPEN, *OPERATORS)  # asked for all the time: logged for debugging only
STREAMED = "/v1/agents/import"  # its body is a file, which its route writes to disk, and bounds
ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
GONE = 499  # for the log: the client had gone before there was an answer

Answer = Callable[[str, RequestError], Response]  # path, error


class Gate:
    """ASGI middleware. `answers` counts by status."""

    def __init__(self, app: ASGIApp, access: Access, answer: Answer, answers: Counter[int]) -> None:
        self.app = app
        self.access = access
        self.answer = answer
        self.answers = answers
        self.rates = Rates()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, headers = time.perf_counter(), Headers(scope=scope)
        number = number_of(headers)
        request_id.set(number)
        status = GONE

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                value = number.encode()
                message["headers"] = [*message["headers"], (b"x-request-id", value), (b"request-id", value)]
            await send(message)

        try:
            await self._pass(scope, receive, numbered, headers, started)
        finally:
            self.answers[status] += 1
            note(scope, status, time.perf_counter() - started)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, headers: Headers, started: float) -> None:
        path, most = scope["path"], MOST_BODY
        try:
            if path not in OPEN:
                key = self._admit(path, headers)
                caller.set(Caller(key, started))
                most = min(key.limits.body or most, most)
            if path != STREAMED:
                body = await read_body(receive, headers.get("content-length"), most)
                if body is None:
                    return
                receive = replayed(body, receive)
        except RequestError as error:
            await self.answer(path, error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _admit(self, path: str, headers: Headers) -> Key:
        key = self.access.key_of(headers)
        self.rates.take(key)
        if path in OPERATORS and not key.operator:
            raise Forbidden("this is for keys of operators: `rewake keys create NAME --operator`")
        return key


def note(scope: Scope, status: int, seconds: float) -> None:
    """One line: who asked for what, and how it went. No words of theirs."""
    level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
    if not log.isEnabledFor(level):
        return
    asks = caller.get(None)
    about = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": round(seconds * 1000, 1),
        "key": asks.key.id if asks else None,
    }
    log.log(level, "%s %r %d in %.0f ms", scope["method"], scope["path"], status, seconds * 1000, extra={"about": about})


def number_of(headers: Headers) -> str:
    """What the client calls its request, if that can stand in a header and a log; else a name nobody else has."""
    given = headers.get("x-request-id", "")
    return given if ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
