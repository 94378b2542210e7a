"""Rewake: a local LLM server whose agents never re-read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewake.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> Any:
    """The client is imported when somebody asks for it: the package is imported by everything."""
    if name == "Client":
        from rewake.client import Client

        return Client
    raise AttributeError(f"module 'rewake' has no attribute {name!r}")
