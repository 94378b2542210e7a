"""Tool calls: one file for each way to write them; which one a model has, its chat template shows."""

from __future__ import annotations

from rewake.text.tools.base import Call, Choice, Dialect, Reading, Tool, calls_in, read
from rewake.text.tools.hermes import Hermes
from rewake.text.tools.llama3 import Llama3
from rewake.text.tools.mistral import Mistral

__all__ = ["DIALECTS", "Call", "Choice", "Dialect", "Reading", "Tool", "calls_in", "dialect_of", "read"]

DIALECTS: tuple[Dialect, ...] = (Hermes(), Llama3(), Mistral(), Mistral(named=True), Mistral(named=True, identified=True))


def dialect_of(shown: str) -> Dialect | None:
    """The one in which a template has shown the probe's call."""
    return next((dialect for dialect in DIALECTS if dialect.writes(shown)), None)
