"""What bodies of requests have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Strict"]


class Strict(BaseModel):
    """Unknown fields are refused, and no value is taken for another type's."""

    model_config = ConfigDict(extra="forbid", strict=True)
