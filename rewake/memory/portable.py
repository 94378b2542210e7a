"""An agent in one file, to take to another machine: a tar of safetensors files, with `agent.json` in front.

    agent.json              format, signature, name, tokens, turns, and each page's checksum
    0000.safetensors ...    pages, as they lie in a directory of memories; the last may have fewer rows

Not encrypted, whatever the directory is: it is for its owner. Knows bytes; no tree and no arena.
"""

from __future__ import annotations

import io
import json
import tarfile
from array import array
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rewake.errors import InvalidRequest
from rewake.memory.tree import TOKEN
from rewake.quant import PAGE_TOKENS, PageLayout
from rewake.spec import ModelCacheSpec
from rewake.store.directory import checksum, file_header

__all__ = ["FORMAT", "Portable", "read_portable", "write_portable"]

FORMAT = "rewake-agent-1"
MOST_TEXT = 64 * 2**20  # bytes of `agent.json`, and of a page's header: nobody's transcript needs as much


@dataclass(frozen=True)
class Portable:
    """What stands in `agent.json`. The pages have K/V of the first `num_computed` tokens."""

    signature: bytes
    name: str
    created: float
    tokens: array[int]
    turns: array[int]
    num_computed: int

    def rows(self, page: int) -> int:
        return min(PAGE_TOKENS, self.num_computed - page * PAGE_TOKENS)

    @property
    def num_pages(self) -> int:
        return -(-self.num_computed // PAGE_TOKENS)


def write_portable(path: Path, about: Portable, layout: PageLayout, pages: Iterable[npt.NDArray[np.uint8]]) -> None:
    """Write the file; `pages` are the bytes of whole pages. Raises OSError."""
    with ExitStack() as stack:
        parts = [segment_of(page, layout, about.rows(i)) for i, page in enumerate(pages)]
        text = {
            "format": FORMAT,
            "signature": about.signature.hex(),
            "name": about.name,
            "created": about.created,
            "tokens": list(about.tokens),
            "turns": list(about.turns),
            "num_computed": about.num_computed,
            "xxh3_128": [checksum(part.data).hex() for part in parts],
        }
        tar = stack.enter_context(tarfile.open(path, "w"))
        add(tar, "agent.json", json.dumps(text).encode())
        for i, part in enumerate(parts):
            add(tar, f"{i:04}.safetensors", file_header(layout.with_rows(about.rows(i)), {"page": str(i)}) + part.tobytes())


def segment_of(page: npt.NDArray[np.uint8], layout: PageLayout, rows: int) -> npt.NDArray[np.uint8]:
    segment = np.empty(layout.with_rows(rows).page_bytes, np.uint8)
    layout.copy_rows(page, 0, segment, rows, out=True)
    return segment


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def read_portable(file: IO[bytes], layout: PageLayout, spec: ModelCacheSpec | None = None) -> tuple[Portable, Callable[[int], bytes]]:
    """What `write_portable` wrote, all of it checked, and the bytes of its whole pages by number. Raises InvalidRequest.

    With `spec`, transcripts that no sequence of that model can have are refused, too.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            text = json.loads(content_of(tar, "agent.json", MOST_TEXT))
            about, sums = parse(text), [bytes.fromhex(s) for s in text["xxh3_128"]]
            if spec is not None:
                check_possible(about, spec)
            most = layout.page_bytes + MOST_TEXT
            segments = [content_of(tar, f"{i:04}.safetensors", most) for i in range(about.num_pages)]
    except InvalidRequest:
        raise
    except (tarfile.TarError, EOFError, KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"it is not a file that `rewake agents export` wrote: {error}") from error
    return about, whole_pages(about, sums, segments, layout)


def check_possible(about: Portable, spec: ModelCacheSpec) -> None:
    """An id the tokenizer does not know could not be shown; a transcript beyond the longest one could never go on."""
    if len(about.tokens) > spec.max_positions:
        raise InvalidRequest(f"it has {len(about.tokens)} tokens; this model's longest context is {spec.max_positions}")
    if max(about.tokens, default=0) >= spec.vocab_size:
        raise InvalidRequest("its tokens are not those of this model")


def whole_pages(about: Portable, sums: list[bytes], segments: list[bytes], layout: PageLayout) -> Callable[[int], bytes]:
    if len(sums) != len(segments):
        raise InvalidRequest(f"it says it has {len(sums)} pages, and has {len(segments)}")
    data = []
    for i, (segment, expected) in enumerate(zip(segments, sums, strict=True)):
        begin = 8 + int.from_bytes(segment[:8], "little")
        data.append(memoryview(segment)[begin:])
        if len(data[-1]) != layout.with_rows(about.rows(i)).page_bytes:
            raise InvalidRequest(f"its page {i} is not of the shape this model's pages have: it is of another model, or another --kv")
        if checksum(data[-1]) != expected:
            raise InvalidRequest(f"its page {i} is damaged")

    def page(number: int) -> bytes:
        whole = np.zeros(layout.page_bytes, np.uint8)
        layout.copy_rows(whole, 0, np.frombuffer(data[number], np.uint8), about.rows(number), out=False)
        return whole.tobytes()

    return page


def parse(text: dict[str, Any]) -> Portable:
    if text["format"] != FORMAT:
        raise InvalidRequest(f"its format is {text['format']!r}; this version of rewake reads {FORMAT!r}")
    tokens, turns = array(TOKEN, text["tokens"]), array(TOKEN, text["turns"])
    about = Portable(bytes.fromhex(text["signature"]), str(text["name"]), float(text["created"]), tokens, turns, int(text["num_computed"]))
    behind = len(tokens) - about.num_computed // PAGE_TOKENS * PAGE_TOKENS
    if not 0 <= about.num_computed <= len(tokens) or behind > PAGE_TOKENS or not are_turns(turns, len(tokens)):
        raise InvalidRequest("its numbers of tokens, rows and turns do not agree")
    if min(tokens, default=0) < 0:
        raise InvalidRequest("it has tokens below 0")
    return about


def are_turns(turns: array[int], length: int) -> bool:
    """Whether they are lengths of a transcript, each beyond the one before."""
    return all(a < b for a, b in pairwise([0, *turns])) and (not turns or turns[-1] <= length)


def content_of(tar: tarfile.TarFile, name: str, most: int) -> bytes:
    """All of a member that is a plain file: links may lead in circles, and holes are larger than what was sent."""
    member = tar.getmember(name)
    if member.type != tarfile.REGTYPE or member.issparse() or member.size > most:
        raise InvalidRequest(f"{name} in it is not a file of the kind that `rewake agents export` writes")
    content = tar.extractfile(member)
    assert content is not None
    return content.read()
