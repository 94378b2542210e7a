"""What bodies of requests have in common."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from rewake.errors import InvalidRequest

__all__ = ["Stops", "Strict", "Text", "check_text", "only", "stops"]

HALF_PAIR = re.compile("[\ud800-\udfff]")
MOST_STOPS, MOST_STOP = 16, 256  # strings, characters in each


class Strict(BaseModel):
    """Unknown fields are refused, and no value is taken for another type's."""

    model_config = ConfigDict(extra="forbid", strict=True)


def only(*values: Any) -> AfterValidator:
    """For fields that are known, and can mean only one thing here: takes what means "off"."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(v) and value == v for v in values):
            raise PydanticCustomError("unsupported", "not supported yet")
        return value

    return AfterValidator(check)


def is_text(value: str) -> str:
    if HALF_PAIR.search(value):
        raise PydanticCustomError("surrogate", "it holds half of a surrogate pair: it is not text")
    return value


Text = Annotated[str, AfterValidator(is_text)]
Stop = Annotated[Text, Field(min_length=1, max_length=MOST_STOP)]
Stops = Annotated[list[Stop], Field(max_length=MOST_STOPS)]


def stops(given: str | list[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def check_text(value: Any, field: str) -> None:
    """Raises InvalidRequest if JSON holds what is no text, or is nested too deeply."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest("it is nested too deeply", param=field) from error
    if HALF_PAIR.search(text):
        raise InvalidRequest("it holds half of a surrogate pair: it is not text", param=field)
