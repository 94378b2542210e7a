"""Which model a request has, and for how long: until all its answers have ended, and no longer."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rewake.api.auth import EVERYBODY, Caller, caller
from rewake.api.generation import Ask, Chat, Generation, Generator
from rewake.config import Config
from rewake.errors import Cancelled, ContextLengthExceeded, NotFound
from rewake.request import Sampling
from rewake.services import Services

pytestmark = pytest.mark.usefixtures("short_collections")

CHAT = Chat([{"role": "user", "content": "Tell me of a river, a stone and a lamp."}])


@pytest.fixture
def services(tiny: Path, tmp_path: Path) -> Iterator[Services]:
    made = Services(Config(model=str(tiny), data=tmp_path / "data", memory=2**24, threads=1, idle_unload=1))
    yield made
    made.close()


def ask(n: int, max_tokens: int, model: str | None = None) -> Ask:
    caller.set(Caller(EVERYBODY, time.perf_counter()))
    return Ask(CHAT, None, Sampling(temperature=0), max_tokens, n=n, model=model)


def users(services: Services) -> int:
    return services._served[services.default].users


async def read(generation: Generation) -> int:
    with suppress(Cancelled):
        async for _ in generation.parts():
            pass
    return len(generation.tokens)


async def wait_until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.02)


def test_all_answers_of_a_request_hold_the_model(services: Services) -> None:
    async def answers() -> None:
        first, second = await Generator(services).start(ask(2, 800))
        second.cancel()
        assert await read(second) < 800
        assert users(services) == 1, "the other one is still at work"
        await read(first)
        assert users(services) == 0

    asyncio.run(answers())


def test_what_is_refused_holds_nothing(services: Services) -> None:
    async def refused() -> None:
        generator = Generator(services)
        with pytest.raises(ContextLengthExceeded):
            await generator.start(ask(3, 10**6))
        with pytest.raises(NotFound, match="this server runs"):
            await generator.start(ask(1, 4, "gpt-4"))
        assert await generator.count(ask(1, 4)) > 10
        assert users(services) == 0

    asyncio.run(refused())


def test_an_answer_that_nobody_reads_keeps_no_model_in_memory(services: Services) -> None:
    """It is read however slowly, from what has come; the arena is given back meanwhile."""
    arena = weakref.ref(services.loaded[services.default].backend.arena)

    async def slowly() -> None:
        generator = Generator(services)
        (generation,) = await generator.start(ask(1, 8))
        await wait_until(lambda: not services.loaded)
        await wait_until(lambda: gc.collect() is not None and arena() is None)
        assert await read(generation) == 8 and generation.report(None)["match"] == "miss"
        assert len(await generator.start(ask(1, 1))) == 1, "and it is loaded again for who asks"

    asyncio.run(slowly())
