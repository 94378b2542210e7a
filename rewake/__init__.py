"""Rewake: a local LLM server whose agents never re-read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewake.client import Client
    from rewake.workflows import Agent

__all__ = ["Agent", "Client"]


def __getattr__(name: str) -> Any:
    """The client is imported when somebody asks for it: the package is imported by everything."""
    if name == "Client":
        from rewake.client import Client

        return Client
    if name == "Agent":
        from rewake.workflows import Agent

        return Agent
    raise AttributeError(f"module 'rewake' has no attribute {name!r}")
