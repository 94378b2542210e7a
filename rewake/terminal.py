"""What the command line prints, and how: sizes, times and spans of time, as people write them."""

from __future__ import annotations

import re
import time
from typing import Any

from rewake.errors import ConfigError

__all__ = ["count", "duration", "parse_duration", "say", "size", "when"]

SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def say(text: str = "", **to: Any) -> None:
    print(text, flush=True, **to)  # noqa: T201 (this is the command line's voice)


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def size(num_bytes: float) -> str:
    """`1.7 MB`: powers of 1000, as disks are sold."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"


def when(seconds: float) -> str:
    """A time since 1970, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def duration(seconds: float | None) -> str:
    """The largest unit that says it exactly; None is for ever."""
    if seconds is None:
        return "never"
    unit = next((u for u in ("d", "h", "m") if seconds >= SPANS[u] and seconds % SPANS[u] == 0), "s")
    return f"{seconds / SPANS[unit]:g}{unit}"


def parse_duration(text: str) -> float | None:
    """`90`, `90s`, `15m`, `12h`, `7d`, or `never`. Raises ConfigError."""
    if text == "never":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if not match or float(match[1]) == 0:
        raise ConfigError(f"{text!r} is not a span of time: write seconds, or a number with s, m, h or d, or never")
    return float(match[1]) * SPANS[match[2] or "s"]
