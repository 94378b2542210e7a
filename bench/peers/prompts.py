"""The token ids every peer is given: random ones, or text, never the same twice so that nobody's cache helps by chance.

A prompt is named, and the name decides its ids: all peers get the same. Random ids cost what text costs (the work does
not depend on which tokens they are), and no token of 100 ... 49,000 is special to SmolLM2.
"""

from __future__ import annotations

import random
from pathlib import Path

__all__ = ["Prompts"]


class Prompts:
    """Random ids, or with `data`, pieces of the text files in that folder, each used once."""

    def __init__(self, data: Path | None = None) -> None:
        self._text = read_text(data) if data else None
        self._used = 0
        self._named: dict[tuple[str, int], list[int]] = {}

    def take(self, name: str, size: int) -> list[int]:
        if (name, size) not in self._named:
            self._named[name, size] = self._random(name, size) if self._text is None else self._piece(size)
        return self._named[name, size]

    def _random(self, name: str, size: int) -> list[int]:
        return random.Random(f"{name}/{size}").choices(range(100, 49_000), k=size)

    def _piece(self, size: int) -> list[int]:
        assert self._text is not None
        start, self._used = self._used, self._used + size
        if self._used > len(self._text):
            raise SystemExit(f"--data: its text has only {len(self._text)} tokens")
        return self._text[start : self._used]


def read_text(folder: Path) -> list[int]:
    """All text files below `folder`, as tokens of the default model."""
    from tokenizers import Tokenizer

    from rewake.models import DEFAULT_MODEL, resolve

    files = sorted(p for p in folder.rglob("*") if p.suffix in (".txt", ".raw", ".tokens"))
    if not files:
        raise SystemExit(f"--data: no .txt, .raw or .tokens file in {folder}")
    tokenizer = Tokenizer.from_file(str(resolve(DEFAULT_MODEL) / "tokenizer.json"))
    return list(tokenizer.encode("\n".join(f.read_text(errors="replace") for f in files), add_special_tokens=False).ids)
