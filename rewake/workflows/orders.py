"""Who is called up by what a moderator has said. Pure functions of texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["called_up", "lines_of"]

WORD = re.compile(r"[^\W\d_]{4,}")  # shorter ones say little about a subject


def called_up(said: str, names: Mapping[str, str], most: int, question: str = "", about: Mapping[str, str] | None = None) -> list[str]:
    """The keys of `names` whose names are mentioned in what was `said`, the first `most` in order.

    If there are fewer, those come behind them who know most `about` the question: small models do not always name anybody.
    """
    places = {key: found.start() for key, name in names.items() if (found := mention(name, said))}
    chosen = sorted(places, key=lambda key: places[key])[:most]
    asked = words(question)
    known = {key: len(asked & words(f"{name} {(about or {}).get(key, '')}")) for key, name in names.items()}
    rest = sorted((key for key in names if key not in chosen), key=lambda key: -known[key])  # stable: the first listed of equals
    return [*chosen, *rest][:most]


def mention(name: str, text: str) -> re.Match[str] | None:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text, re.IGNORECASE)


def words(text: str) -> set[str]:
    """Words by their first letters, so that "regression" and "regressions" are one."""
    return {word[:6] for word in WORD.findall(text.casefold())}


def lines_of(speaker: str, others: Sequence[str], text: str) -> str:
    """What others hear of an answer: without the speaker's name before it, and without lines put into others' mouths."""
    text = re.sub(rf"^\s*{re.escape(speaker)}\s*:", "", text, flags=re.IGNORECASE)
    if others:
        text = re.split(rf"\n\s*(?:{'|'.join(map(re.escape, others))})\s*:", text, maxsplit=1, flags=re.IGNORECASE)[0]
    return text.strip()
