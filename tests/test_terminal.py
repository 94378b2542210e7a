"""Sizes and times as people read and write them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rewake.cli import context
from rewake.errors import ConfigError
from rewake.terminal import count, duration, parse_duration, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 KB"), (1_660_000, "1.7 MB"), (4 * 2**30, "4.3 GB"), (10**13, "10000.0 GB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("1.5h", 5400), ("7d", 604_800), ("never", None)])
def test_spans_of_time(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds
    assert parse_duration(duration(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "soon", "5 weeks", "1e9"])
def test_what_is_no_span_of_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="span of time"):
        parse_duration(text)


def test_counts_have_a_plural() -> None:
    assert (count(1, "turn"), count(0, "turn")) == ("1 turn", "0 turns")


def test_doctor_caps_the_context_as_serve_does() -> None:
    assert context(999_999, 8192) == "8192 tokens, not 999999"
    assert context(0, 8192) == "8192 tokens" and context(512, 8192) == "512 tokens"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`rewake models | head -1`: no traceback, and the status that shells give a command whose pipe was closed."""
    with subprocess.Popen([sys.executable, "-m", "rewake", "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 141)
