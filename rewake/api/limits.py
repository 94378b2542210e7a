"""How much a caller may ask for: requests a minute, and bytes of a body."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.types import Message, Receive

from rewake.errors import BodyTooLarge, BodyTooSlow, RateLimited
from rewake.keys import Key

__all__ = ["MOST_BODY", "Rates", "read_body", "replayed"]

MOST_BODY = 32 * 2**20  # bytes: some eight million tokens, which fit into no model's context
BODY_PATIENCE = 30.0  # seconds in which more of a body has to come
MOST_KEYS = 10_000  # whose rates are known; keys that have not asked for longest have their whole minute again


class Rates:
    """Token buckets (a burst of a whole minute's requests, then evenly), one for each key."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # of a key: requests, and when that was

    def take(self, key: Key) -> None:
        """Count one request. Raises RateLimited."""
        most = key.limits.requests
        if most is None:
            return
        now = self._now()
        left, at = self._left.pop(key.id, (float(most), now))
        left = min(float(most), left + (now - at) * most / 60)
        allowed = left >= 1
        self._left[key.id] = (left - allowed, now)
        while len(self._left) > MOST_KEYS:
            self._left.popitem(last=False)
        if not allowed:
            raise RateLimited(f"this key may make {most} requests a minute", retry_after=math.ceil((1 - left) * 60 / most))


async def read_body(receive: Receive, declared: str | None, most: int, patience: float = BODY_PATIENCE) -> bytes | None:
    """The whole body; None if the client has gone. Raises BodyTooLarge, before it is read if it says so, and BodyTooSlow."""
    if declared is not None and declared.isdecimal() and int(declared) > most:
        raise too_large(most)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        try:
            async with asyncio.timeout(patience):
                message = await receive()
        except TimeoutError:
            raise BodyTooSlow(f"no more of the body has come for {patience:.0f} seconds") from None
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > most:
            raise too_large(most)
    return b"".join(parts)


def too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body has more than the {most} bytes that are taken")


def replayed(body: bytes, receive: Receive) -> Receive:
    """As `receive` was before the body was read."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again
