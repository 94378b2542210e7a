"""Several models on one server: loaded when asked for, unloaded when not, and nothing is lost on the way."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rewake.backends.base import Batch
from rewake.config import Config
from rewake.engine import Engine
from rewake.errors import ConfigError, InternalError, ModelError, NotFound, ShuttingDown
from rewake.request import Request, Sampling
from rewake.service import Service
from rewake.services import Services
from rewake.store.directory import Directory
from rewake.store.shared import Shared
from tests.fakes import LAYOUT, PLANES, WRONG, EchoBackend, Pending, expected_answer
from tests.test_engine import prompt

pytestmark = pytest.mark.usefixtures("short_collections")

NAMES = ("ant", "bee", "cat")
PAGES = 60  # of the arena, for all models


class World:
    """Folders that stand for models, and how each is opened: with an engine on the honest fake, whose rows depend on the model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arenas: dict[str, list[weakref.ref[Any]]] = {name: [] for name in NAMES}
        self.before_step: Callable[[Batch], None] = lambda batch: None
        self.broken: set[str] = set()
        self.before_open: Callable[[str], None] = lambda name: None
        for name in NAMES:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text("{}")
        models = [str(folder / name) for name in NAMES]
        self.config = Config(model=models[0], data=folder / "data", more_models=tuple(models[1:]), memory=PAGES * LAYOUT.page_bytes)

    def open(self, config: Config, shared: Shared) -> Service:
        name = Path(config.model).name
        self.before_open(name)
        if name in self.broken:
            raise ModelError("its weights are gone")
        signature = name.encode()
        store = Directory(config.data, signature, PLANES, budget=config.disk, free_floor=0, shared=shared, model=name)
        backend = EchoBackend(config.memory // LAYOUT.page_bytes, signature)
        backend.before_step = lambda batch: self.before_step(batch)
        engine = Engine(backend, signature, store).start()
        engine.memory.residency.gate.always = True
        self.arenas[name].append(weakref.ref(backend.arena))
        return Service(config, Path(config.model), backend, None, None, engine, frozenset(), None)  # type: ignore[arg-type]

    def services(self, **changes: Any) -> Services:
        return Services(replace(self.config, **changes), self.open)

    def bytes_of_arenas(self) -> int:
        return sum(arena.nbytes for arenas in self.arenas.values() for ref in arenas if (arena := ref()) is not None)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def services(world: World) -> Iterator[Services]:
    made = world.services(max_loaded=1)
    yield made
    made.close()


def submit(services: Services, name: str, tokens: list[int], agent: str = "a", max_tokens: int = 4) -> Pending:
    """As the API does: the model is used until the answer has ended."""
    service = services.use(name).result(60)
    pending = Pending()

    def emit(event: Any) -> None:
        ended = not hasattr(event, "token")
        pending.emit(event)
        if ended:
            services.release(name)

    try:
        service.engine.submit(Request(f"{random.random()}", tuple(tokens), max_tokens, emit, Sampling(temperature=0), agent=agent))
    except BaseException:
        services.release(name)
        raise
    return pending


def ask(services: Services, name: str, tokens: list[int], agent: str = "a", max_tokens: int = 4) -> Pending:
    pending = submit(services, name, tokens, agent, max_tokens)
    assert pending.result(60).saved
    return pending


def test_models_are_swapped_and_each_wakes_its_own_memory(world: World, services: Services) -> None:
    """The same agent, the same tokens: what another model has computed is never attended to."""
    text = prompt(700)
    for turn in range(3):
        for name in NAMES:
            pending = ask(services, name, text)
            assert list(services.loaded) == [name]
            assert pending.tokens == expected_answer(text, 4)
            assert pending.match.kind == ("exact" if turn else "miss")
            assert pending.match.computed_tokens == (1 if turn else 700)
    assert world.bytes_of_arenas() == PAGES * LAYOUT.page_bytes, "the arenas of models that are not loaded are given back"


def test_models_that_are_loaded_at_once_share_the_memory(world: World) -> None:
    services = world.services()
    assert list(services.loaded) == ["ant"], "the first is loaded at once, others when they are asked for"
    for name in NAMES:
        ask(services, name, prompt(300))
    assert list(services.loaded) == list(NAMES) and world.bytes_of_arenas() == PAGES * LAYOUT.page_bytes
    services.close()


def test_what_is_at_work_ends_before_its_model_leaves(world: World, services: Services) -> None:
    go, begun = threading.Event(), threading.Event()

    def wait(batch: Batch) -> None:
        begun.set()
        assert go.wait(30)

    world.before_step = wait
    at_work = submit(services, "ant", prompt(300), max_tokens=20)
    assert begun.wait(30)
    other = services.use("bee")
    while not services._served["ant"].leaving:
        time.sleep(0.01)
    late = services.use("ant")
    assert not other.done() and not late.done(), "its place is not free yet; and it takes nothing new, or the other would wait for ever"
    go.set()
    assert at_work.result(30).num_generated == 20 and at_work.result().saved
    assert at_work.tokens == expected_answer(prompt(300), 20)
    assert other.result(30).config.model.endswith("bee") and not late.done()
    services.release("bee")
    assert late.result(30).config.model.endswith("ant")
    services.release("ant")
    again = ask(services, "ant", prompt(300) + at_work.tokens)
    assert again.match.reused_tokens >= 300 + 19 and again.match.loaded_tokens > 0


def test_a_model_that_nobody_asks_for_is_unloaded_and_comes_back(world: World) -> None:
    services = world.services(idle_unload=1)
    first = ask(services, "ant", prompt(400))
    deadline = time.monotonic() + 30
    while services.loaded or world.bytes_of_arenas():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert services.why_not_ready is None and services.is_alive, "it would be loaded for whoever asks"
    with pytest.raises(Exception, match="in use by another"):
        Directory(world.config.data, b"other", PLANES)  # between two models, too
    again = ask(services, "ant", prompt(400) + first.tokens + [7])
    assert again.match.kind == "extend" and again.match.computed_tokens == 2
    services.close()
    Directory(world.config.data, b"other", PLANES).close()


def test_one_that_was_at_work_while_the_wait_began_is_unloaded_too(world: World) -> None:
    """One that was loaded for a request is used from its first moment on: how long is left is known only once that is over."""
    services = world.services(max_loaded=1, idle_unload=1)
    services.use("bee").result(30)
    time.sleep(0.3)  # the wait begins
    services.release("bee")
    deadline = time.monotonic() + 30
    while services.loaded:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    services.close()


def test_one_that_is_used_is_not_idle(world: World) -> None:
    services = world.services(idle_unload=1)
    services.use("ant").result(30)
    time.sleep(1.5)
    assert list(services.loaded) == ["ant"]
    services.release("ant")
    services.close()


def test_what_cannot_be_loaded_is_an_error_for_who_asks_and_nobody_else(world: World, services: Services) -> None:
    world.broken.add("bee")
    ask(services, "ant", prompt(300))
    with pytest.raises(InternalError, match="'bee' cannot be loaded: its weights are gone"):
        services.use("bee").result(30)
    assert ask(services, "ant", prompt(300)).match.kind == "exact"
    world.broken.clear()
    assert ask(services, "bee", prompt(300)).match.kind == "miss"


def test_two_names_for_the_same_weights_are_refused(world: World) -> None:
    services = world.services()
    (world.folder / "other").mkdir()
    (world.folder / "other" / "ant").mkdir()
    (world.folder / "other" / "ant" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="called the same: ant, ant"):
        world.services(more_models=(str(world.folder / "other" / "ant"),))
    services._served["bee"].config = services._served["ant"].config  # what `bee` says is what `ant` is
    with pytest.raises(InternalError, match="two of the models that are served are the same"):
        services.use("bee").result(30)
    ask(services, "cat", prompt(300))
    services.close()


def test_who_has_gone_is_not_waited_for(world: World, services: Services) -> None:
    opening, go = threading.Event(), threading.Event()

    def slowly(name: str) -> None:
        opening.set()
        assert go.wait(30)

    world.before_open = slowly
    gone, waiting = services.use("bee"), services.use("bee")
    assert opening.wait(30) and gone.cancel()
    go.set()
    assert waiting.result(30)
    services.release("bee")
    ask(services, "ant", prompt(10))
    assert list(services.loaded) == ["ant"], "nobody held the other one"


def test_unknown_models_are_refused_and_none_means_the_first(services: Services) -> None:
    assert services.find(None) == services.find("ant") == "ant" and services.find("cat") == "cat"
    with pytest.raises(NotFound, match="this server runs 'ant', 'bee', 'cat'"):
        services.find("dog")


def test_a_wrong_name_is_an_error_at_the_start(world: World) -> None:
    with pytest.raises(ModelError, match="neither"):
        world.services(more_models=(str(world.folder),))
    world.services().close()  # nothing of it is left: the directory can be opened


def test_stopping_ends_what_is_at_work_and_tells_who_waits(world: World, services: Services) -> None:
    begun = threading.Event()
    world.before_step = lambda batch: begun.set() or time.sleep(0.01)  # type: ignore[func-returns-value]
    at_work = submit(services, "ant", prompt(300), max_tokens=10)
    assert begun.wait(30)
    waiting = services.use("bee")
    services.begin_stop(30)
    with pytest.raises(ShuttingDown):
        waiting.result(30)
    with pytest.raises(ShuttingDown):
        services.use("ant").result()
    assert services.why_not_ready == "the server is shutting down"
    assert at_work.result(30).num_generated == 10 and at_work.result().saved
    services.close()
    again = world.services(max_loaded=1)
    assert ask(again, "ant", prompt(300) + at_work.tokens).match.loaded_tokens > 0
    again.close()


@pytest.mark.parametrize("max_loaded", [1, 2, 3])
def test_random_days_of_many_agents_on_several_models(world: World, max_loaded: int) -> None:
    """Nothing foreign is attended to, no acknowledged turn is lost: not when swapped, not after a restart."""
    services = world.services(max_loaded=max_loaded, idle_unload=1)
    known: dict[tuple[str, str], list[int]] = {}
    failures: list[BaseException] = []

    def live(agent: str) -> None:
        rng = random.Random(agent)
        try:
            for _ in range(12):
                name = rng.choice(NAMES)
                text = known.get((name, agent), []) + prompt(rng.choice([5, 200, 300]), seed=rng.randrange(10**6))
                pending = ask(services, name, text, agent, max_tokens=rng.choice([1, 4]))
                assert WRONG not in pending.tokens
                assert pending.tokens == expected_answer(text, len(pending.tokens))
                before = known.get((name, agent))
                assert pending.match.reused_tokens >= (len(before) - 1 if before else 0)
                known[name, agent] = text + pending.tokens
                if rng.random() < 0.1:
                    time.sleep(1.2)
        except BaseException as error:  # noqa: BLE001 (of another thread)
            failures.append(error)

    threads = [threading.Thread(target=live, args=(f"agent{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert world.bytes_of_arenas() <= PAGES * LAYOUT.page_bytes
    services.close()
    services = world.services(max_loaded=max_loaded)
    for (name, agent), text in sorted(known.items()):
        assert ask(services, name, [*text, 5], agent).match.reused_tokens >= len(text) - 1
    for service in services.loaded.values():
        service.engine.call(service.engine.memory.check).result(30)
    services.close()
