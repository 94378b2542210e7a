"""An agent in one file, to take to another machine: a tar of safetensors files, with `agent.json` in front.

    agent.json              format, signature, name, tokens, turns, and each file's checksum
    0000.safetensors ...    the first plane of each page, as it lies in a directory of memories; the last may have fewer rows
    0000.1.safetensors ...  other planes, if a page has more than one: those that are still there

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
from rewake.planes import PagePlanes
from rewake.quant import PAGE_TOKENS
from rewake.spec import ModelCacheSpec
from rewake.store.directory import checksum, file_header

__all__ = ["FORMAT", "Bytes", "PlanesOfPage", "Portable", "read_portable", "write_portable"]

Bytes = npt.NDArray[np.uint8]
PlanesOfPage = Callable[[int], dict[int, Bytes]]  # the bytes of each plane of the page of that number

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


def write_portable(path: Path, about: Portable, planes: PagePlanes, pages: Iterable[dict[int, Bytes]]) -> None:
    """Write the file; `pages` are the bytes of whole pages' planes. Raises OSError."""
    with ExitStack() as stack:
        parts = {
            (page, plane): segment_of(data, planes, plane, about.rows(page))
            for page, found in enumerate(pages)
            for plane, data in found.items()
        }
        sums: dict[int, dict[int, str]] = {plane: {} for plane in planes.all}
        for (page, plane), part in parts.items():
            sums[plane][page] = checksum(part.data).hex()
        text = {
            "format": FORMAT,
            "signature": about.signature.hex(),
            "name": about.name,
            "created": about.created,
            "tokens": list(about.tokens),
            "turns": list(about.turns),
            "num_computed": about.num_computed,
            "xxh3_128": list(sums.pop(0).values()),
            **({"planes": sums} if sums else {}),
        }
        tar = stack.enter_context(tarfile.open(path, "w"))
        add(tar, "agent.json", json.dumps(text).encode())
        for (page, plane), part in parts.items():
            header = file_header(planes.planes[plane], about.rows(page), {"page": str(page)})
            add(tar, file_name(page, plane), header + part.tobytes())


def file_name(page: int, plane: int) -> str:
    return f"{page:04}.{plane}.safetensors" if plane else f"{page:04}.safetensors"


def segment_of(data: Bytes, planes: PagePlanes, plane: int, rows: int) -> Bytes:
    """The first rows of a whole plane."""
    segment = np.empty(planes.planes[plane].num_bytes(rows), np.uint8)
    planes.planes[plane].copy_rows(list(planes.planes[plane].split(data)), 0, segment, rows, out=True)
    return segment


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def read_portable(file: IO[bytes], planes: PagePlanes, spec: ModelCacheSpec | None = None) -> tuple[Portable, PlanesOfPage]:
    """What `write_portable` wrote, all of it checked, and the planes of its whole pages by number. Raises InvalidRequest.

    With `spec`, transcripts that no sequence of that model can have are refused, too.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            text = json.loads(content_of(tar, "agent.json", MOST_TEXT))
            about, sums = parse(text), sums_of(text, planes)
            if spec is not None:
                check_possible(about, spec)
            if len(text["xxh3_128"]) != about.num_pages:
                raise InvalidRequest(f"it says it has {len(text['xxh3_128'])} pages, and has {about.num_pages}")
            segments = {
                (page, plane): content_of(tar, file_name(page, plane), planes.planes[plane].num_bytes() + MOST_TEXT) for page, plane in sums
            }
    except InvalidRequest:
        raise
    except (tarfile.TarError, EOFError, KeyError, ValueError, TypeError, OverflowError, RecursionError, AttributeError) as error:
        raise InvalidRequest(f"it is not a file that `rewake agents export` wrote: {error}") from error
    return about, whole_pages(about, sums, segments, planes)


def sums_of(text: dict[str, Any], planes: PagePlanes) -> dict[tuple[int, int], bytes]:
    """The checksum of each plane of each page. Raises InvalidRequest if there are not those that every later token attends to."""
    num_pages = len(text["xxh3_128"])
    sums = {(page, 0): bytes.fromhex(s) for page, s in enumerate(text["xxh3_128"])}
    for plane in planes.all[1:]:
        for page, s in text["planes"][str(plane)].items():
            if not 0 <= int(page) < num_pages:
                raise InvalidRequest(f"it has planes of a page {page}, which it has not")
            sums[int(page), plane] = bytes.fromhex(s)
    for number, rule in enumerate(planes.planes):
        if any((page, number) not in sums for page in range(num_pages) if rule.reach_in(page) is None):
            raise InvalidRequest("some of its pages are not whole")
    return sums


def check_possible(about: Portable, spec: ModelCacheSpec) -> None:
    """An id the tokenizer does not know could not be shown; a transcript beyond the longest one could never go on."""
    if len(about.tokens) > spec.max_positions:
        raise InvalidRequest(f"it has {len(about.tokens)} tokens; this model's longest context is {spec.max_positions}")
    if max(about.tokens, default=0) >= spec.vocab_size:
        raise InvalidRequest("its tokens are not those of this model")


def whole_pages(
    about: Portable, sums: dict[tuple[int, int], bytes], segments: dict[tuple[int, int], bytes], planes: PagePlanes
) -> PlanesOfPage:
    data: dict[tuple[int, int], memoryview] = {}
    for (page, plane), segment in segments.items():
        begin = 8 + int.from_bytes(segment[:8], "little")
        part = data[page, plane] = memoryview(segment)[begin:]
        if len(part) != planes.planes[plane].num_bytes(about.rows(page)):
            raise InvalidRequest(f"its page {page} is not of the shape this model's pages have: it is of another model, or another --kv")
        if checksum(part) != sums[page, plane]:
            raise InvalidRequest(f"its page {page} is damaged")

    def whole(number: int) -> dict[int, Bytes]:
        found = {}
        for number_of_plane, plane in enumerate(planes.planes):
            if (number, number_of_plane) in data:
                found[number_of_plane] = np.zeros(plane.num_bytes(), np.uint8)
                segment = np.frombuffer(data[number, number_of_plane], np.uint8)
                plane.copy_rows(list(plane.split(found[number_of_plane])), 0, segment, about.rows(number), out=False)
        return found

    return whole


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
