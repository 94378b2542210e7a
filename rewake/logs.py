"""How the log looks: text for people, or an object a line for programs. Every record names the request it belongs to, if there is one."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

__all__ = ["begin_logging", "request_id"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


class Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        number = request_id.get()
        return super().format(record) + (f" [{number}]" if number else "")


class Json(logging.Formatter):
    """Its fields: time, level, logger, message; request, where there is one; those a record has in `about`; exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if number := request_id.get():
            fields["request"] = number
        fields |= getattr(record, "about", {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=True)


def begin_logging(level: str, form: str) -> None:
    """Log to the standard error output: ours from `level` on, warnings of others."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else Text())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("rewake").setLevel(level.upper())
