"""The HTTP server's life: it ends with a signal, and streams that run then end with an error event."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from rewake.api.app import create_app
from rewake.api.auth import Access
from rewake.config import Config
from rewake.errors import ConfigError
from rewake.services import Services

__all__ = ["in_background", "listen", "run"]

BACKLOG = 2048  # as uvicorn has it

SECONDS_TO_SAY_GOODBYE = 5  # for what is left to send when the engine has nothing left to compute


class Server(uvicorn.Server):
    """uvicorn, but the engines are told of the first signal, too: answers have `--drain` seconds to end. A second signal ends it all."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self.services = services

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # as a kill would: what was acknowledged is on disk, the rest is absent
        # not here: what the signal has interrupted may be what has to be waited for
        threading.Thread(target=self.services.begin_stop, args=(self.services.config.drain,)).start()
        super().handle_exit(sig, frame)


def listen(config: Config) -> socket.socket:
    """Take the port. Who connects before anything is served waits. Raises ConfigError if somebody else has it."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = "it is in use: stop who uses it, or choose another --port" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}") from error


def run(services: Services, listening: socket.socket, access: Access) -> None:
    """Serve on a socket that listens, until a signal comes. The caller closes the services."""
    # uvicorn raises the signal again when it is done; that must not end the process before memories are saved
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(
        create_app(services, access),
        log_config=None,  # as ours
        log_level="warning",
        access_log=False,  # the gate keeps one
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=services.config.drain + SECONDS_TO_SAY_GOODBYE,
    )
    Server(config, services).run([listening])


@contextmanager
def in_background(services: Services) -> Iterator[str]:
    """Serve on any free port of this machine, on a thread, as long as the `with` lasts. The caller closes the services."""
    server = uvicorn.Server(uvicorn.Config(create_app(services), log_level="warning", timeout_graceful_shutdown=SECONDS_TO_SAY_GOODBYE))
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listening:
        thread = threading.Thread(target=server.run, args=([listening],), name="rewake-http")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
