"""The HTTP server's life: it ends with a signal, and streams that run then end with an error event."""

from __future__ import annotations

import signal
import sys
from types import FrameType

import uvicorn

from rewake.api.app import create_app
from rewake.service import Service

__all__ = ["run"]

SECONDS_TO_SAY_GOODBYE = 10


class Server(uvicorn.Server):
    """uvicorn, but the engine is told of the first signal, too."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.engine.begin_stop()
        super().handle_exit(sig, frame)


def run(service: Service) -> None:
    """Serve until a signal comes. The caller closes the service."""
    # uvicorn raises the signal again when it is done; that must not end the process before memories are saved
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(
        create_app(service),
        host=service.config.host,
        port=service.config.port,
        log_level="warning",
        timeout_graceful_shutdown=SECONDS_TO_SAY_GOODBYE,
    )
    Server(config, service).run()
