"""The models of one server: each is loaded when it is asked for, and unloaded when nobody does, or another one needs its place.

    use      a request has a model, which stays loaded until it is released: at once if it is loaded, else in its turn
    load     one thread loads and unloads, one model at a time, in the order in which they were asked for
    unload   the model that was not used for longest; it takes no more requests, ends those it has, saves, and gives its arena back

`--memory` is shared equally by as many models as may be loaded, `--disk` by all that are served. Knows no engine from inside, and no HTTP.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from rewake.config import Config
from rewake.errors import RESTART, ConfigError, InternalError, NotFound, ShuttingDown
from rewake.models import label, resolve
from rewake.service import Service, open_service
from rewake.store.shared import Shared

__all__ = ["Services"]

log = logging.getLogger(__name__)

MOST_LOOKS, BETWEEN = 20, 0.05  # seconds between looks whether an arena is gone


@dataclass(eq=False)
class Served:
    """A model that can be asked for. `leaving`: it is loaded, and takes no more requests."""

    name: str
    config: Config
    service: Service | None = None
    users: int = 0
    used: float = 0.0  # seconds of the monotonic clock
    leaving: bool = False
    waiting: list[Future[Service]] = field(default_factory=list)


class Services:
    """Open with the first model loaded; it is the one that is meant where none is named."""

    def __init__(self, config: Config, open: Callable[[Config, Shared], Service] = open_service) -> None:
        """Fetch all models, and load the first. Raises ConfigError, ModelError and StoreError, as `open_service` does."""
        self.config = config
        self._open = open
        names = [label(model) for model in config.models]
        if len(set(names)) < len(names):
            raise ConfigError(f"two of the models are called the same: {', '.join(names)}")
        self.max_loaded = min(config.max_loaded or len(names), len(names))
        memory, disk = config.memory // self.max_loaded, config.disk // len(names)
        self._served = {
            name: Served(name, replace(config, model=model, more_models=(), memory=memory, disk=disk))
            for name, model in zip(names, config.models, strict=True)
        }
        for model in config.models[1:]:
            resolve(model)  # a wrong name is an error now, and nobody's request waits for a download
        self._shared = Shared(config.data, names)
        self._shared.is_kept = True  # between two models, too
        self._changed = threading.Condition()
        self._wanted: deque[Served] = deque()
        self._stopping = False
        self._drain = 0.0
        first = self._served[self.default]
        try:
            first.service, first.used = self._open(first.config, self._shared), time.monotonic()
        except BaseException:
            self._shared.close()
            raise
        self._thread = threading.Thread(target=self._run, name="rewake-models", daemon=True)
        self._thread.start()

    # ---- for all threads

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._served)

    @property
    def default(self) -> str:
        return self.names[0]

    @property
    def loaded(self) -> dict[str, Service]:
        """Those that are loaded now. They may be unloaded at any time: to ask them for more than how they are, `use` them."""
        return {name: service for name, served in self._served.items() if (service := served.service) is not None}

    def find(self, name: str | None) -> str:
        """The name of the model that is asked for. Raises NotFound."""
        if name is None:
            return self.default
        if name not in self._served:
            runs = ", ".join(map(repr, self.names))
            raise NotFound(f"no model {name!r} here: this server runs {runs}", param="model", code="model_not_found")
        return name

    def use(self, name: str) -> Future[Service]:
        """The service of a model, to be released once by the same name. Fails with RequestError if it cannot be loaded."""
        served, future = self._served[name], Future[Service]()
        with self._changed:
            if self._stopping:
                future.set_exception(ShuttingDown("the server is shutting down", retry_after=self.retry_after))
            elif served.service is not None and not served.leaving:
                self._grant(served, [future])
            else:
                served.waiting.append(future)
                if served not in self._wanted:
                    self._wanted.append(served)
                self._changed.notify_all()
        return future

    def release(self, name: str) -> None:
        with self._changed:
            served = self._served[name]
            assert served.users > 0, f"{name} is not used"
            served.users, served.used = served.users - 1, time.monotonic()
            if not served.users:
                self._changed.notify_all()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and all(service.engine.is_alive for service in self.loaded.values())

    @property
    def why_not_ready(self) -> str | None:
        """Why no requests are taken now; None if they are."""
        if self._stopping:
            return "the server is shutting down"
        return next((reason for s in self.loaded.values() if (reason := s.engine.why_not_ready) is not None), None)

    @property
    def retry_after(self) -> int:
        """Where no requests are taken, seconds after which another server may be there."""
        return max((s.engine.retry_after for s in self.loaded.values()), default=RESTART)

    def begin_stop(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests, and load nothing more; those at work have `drain_seconds`. Does not wait for them."""
        with self._changed:
            self._stopping, self._drain = True, drain_seconds
            for service in self.loaded.values():
                service.engine.begin_stop(drain_seconds)
            self._changed.notify_all()

    def close(self) -> None:
        """As `begin_stop`, then wait until all is saved."""
        self.begin_stop()
        self._thread.join()
        for service in self.loaded.values():
            service.close()
        self._shared.close()

    # ---- the thread

    def _run(self) -> None:
        while not self._stopping:
            wanted = self._next()
            if wanted is not None:
                self._load(wanted)
            for served in [] if self._stopping else self._idle():
                log.info("unloading %s: nobody has asked for it for %d s", served.name, self.config.idle_unload)
                self._unload(served)
        with self._changed:
            for served in self._served.values():
                self._refuse(served, ShuttingDown("the server is shutting down"))

    def _next(self) -> Served | None:
        """The model that was asked for first; None if none is until another one has been idle for long enough, or all is over."""
        with self._changed:
            while not (self._stopping or self._wanted or self._idle()):
                self._changed.wait(self._seconds_to_idle())  # asked anew each time: what was in use when the wait began is not any more
            return self._wanted.popleft() if self._wanted and not self._stopping else None

    def _load(self, served: Served) -> None:
        try:
            self._make_place()
            log.info("loading %s", served.name)
            started = time.monotonic()
            service = self._open(served.config, self._shared)
            log.info("%s is loaded, in %.1f s", served.name, time.monotonic() - started)
        except Exception as error:  # the edge of the thread: somebody waits for it
            if not isinstance(error, ShuttingDown):
                log.exception("%s cannot be loaded", served.name)
                error = InternalError(f"the model {served.name!r} cannot be loaded: {error}")
            with self._changed:
                self._refuse(served, error)
            return
        with self._changed:
            served.service, served.used = service, time.monotonic()
            if self._stopping:
                service.engine.begin_stop(self._drain)
            else:
                self._grant(served, served.waiting)
                served.waiting = []

    def _make_place(self) -> None:
        """Have one model less than may be loaded. Raises ShuttingDown if the server stops before there is place."""
        while len(self.loaded) >= self.max_loaded:
            leaving = self._least_recently_used()
            log.info("unloading %s: another model is asked for", leaving.name)
            self._unload(leaving)

    def _least_recently_used(self) -> Served:
        """A model that takes no more requests, and has none. Raises ShuttingDown."""
        with self._changed:
            found = min((s for s in self._served.values() if s.service is not None), key=lambda s: (s.users > 0, s.used))
            found.leaving = True  # else those who ask for it all the time would keep it here
            self._changed.wait_for(lambda: self._stopping or not found.users)
            if self._stopping:
                raise ShuttingDown("the server is shutting down")
        return found

    def _unload(self, served: Served) -> None:
        """What it has computed is saved when this returns, and its memory is given back."""
        with self._changed:
            if served.users or served.service is None or self._stopping:  # somebody was faster
                return
            service, served.service, served.leaving = served.service, None, False
        arena = weakref.ref(service.backend.arena)
        service.close()
        del service
        wait_until_gone(arena)

    def _idle(self) -> list[Served]:
        """Those nobody has asked for in `idle_unload` seconds."""
        before = time.monotonic() - self.config.idle_unload
        loaded = [s for s in self._served.values() if s.service is not None]
        return [s for s in loaded if self.config.idle_unload and not s.users and s.used <= before]

    def _seconds_to_idle(self) -> float | None:
        """Until the next one may have been idle for long enough; None if that does not come by itself."""
        waiting = [s.used for s in self._served.values() if s.service is not None and not s.users]
        return max(0.0, min(waiting) + self.config.idle_unload - time.monotonic()) if waiting and self.config.idle_unload else None

    # ---- with the lock held

    def _grant(self, served: Served, futures: list[Future[Service]]) -> None:
        assert served.service is not None
        for future in futures:
            if future.set_running_or_notify_cancel():  # else: who asked has gone
                served.users += 1
                future.set_result(served.service)

    def _refuse(self, served: Served, error: Exception) -> None:
        for future in served.waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        served.waiting = []


def wait_until_gone(arena: weakref.ref[Any]) -> None:
    """Engine, memory and store know each other, and who has just been answered may still hold them for a moment."""
    for _ in range(MOST_LOOKS):
        gc.collect()
        if arena() is None:
            return
        time.sleep(BETWEEN)
    log.warning("the arena of a model that was unloaded is still held by somebody")
