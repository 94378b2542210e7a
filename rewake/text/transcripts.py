"""Text that was seen before gets the ids it had before.

A text a model produced may tokenise differently when a client sends it back, and then nothing behind that place could
be reused. So transcripts are remembered as segments between special tokens, which no token crosses: a segment whose
text is known, behind the same segments, is given its stored ids. Of one that is not, the start that it shares with a
stored one keeps the stored ids, and only the rest is tokenised.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rewake.text.history import History, Key, Place, to_ids
from rewake.text.tokenizer import Tokenizer
from rewake.text.tools import Dialect, calls_in

__all__ = ["Transcripts"]

MOST_AGENTS = 256  # others are asked for again: see `knows`
MOST_TOKENS = 500_000  # of one agent (or of all who do not say who they are), before its oldest segments are let go
MOST_IN_ALL = 4_000_000  # of all agents, some 20 MB: the least recently used are asked for again, too
DIGEST = 16  # bytes: texts are kept as ids and digests, which is half the memory; nobody finds two texts with one BLAKE2b


class Calls(NamedTuple):
    """Tool calls in a text that was sent: what they say, whatever the order and spacing of their JSON. See `tools.calls_in`."""

    dialect: Dialect
    behind: bool
    said: Any


class Transcripts:
    """Known segments of every agent, the latest used agents first to be kept. Used by one thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._special = np.array(sorted(tokenizer.cut_ids), np.int32)
        self._histories: OrderedDict[tuple[str, str | None], History] = OrderedDict()

    def knows(self, namespace: str, agent: str | None) -> bool:
        return (namespace, agent) in self._histories

    def learn(self, namespace: str, agent: str | None, transcripts: Iterable[Sequence[int]]) -> None:
        """Remember the segments of whole transcripts, given as ids, the most important first."""
        history = self._history(namespace, agent)
        for number, ids in enumerate(transcripts):
            if number and history.num_tokens > MOST_TOKENS:
                break
            self._add(history, to_ids(ids))
        if history.num_tokens > MOST_TOKENS:
            history.shrink(MOST_TOKENS * 3 // 4)  # more than is needed, so that it is not needed again at once
        while len(self._histories) > 1 and self.num_tokens > MOST_IN_ALL:
            self._histories.popitem(last=False)

    @property
    def num_tokens(self) -> int:
        return sum(history.num_tokens for history in self._histories.values())

    def forget(self, namespace: str, agent: str | None) -> None:
        self._histories.pop((namespace, agent), None)

    def encode(self, namespace: str, agent: str | None, text: str) -> list[int]:
        """The ids of `text`: stored ones as far as it is known, fresh ones from there."""
        history = self._history(namespace, agent)
        place: Place | None = history.start()
        ids, at = to_ids(), 0
        pieces = self.tokenizer.split(text)
        for piece, behind in zip(pieces, [*pieces, ""][1:], strict=True):
            special = self.tokenizer.special_id(piece)
            known = history.follow(place, key_of(piece) if special is None else special) if place is not None else None
            if known is not None:
                ids.extend(known.ids)
            elif special is not None:
                ids.append(special)
            elif place is None:
                ids.extend(self.tokenizer.encode(piece))
            else:
                calls, is_answer = self._calls(text, at, piece), self.tokenizer.begins_answer(text, at)
                if is_answer and self._was_empty(history, place, piece, behind):
                    known = place
                else:
                    segment, known = self._encode_unknown(history, place, piece, calls, is_answer)
                    ids.extend(segment)
            place = known
            at += len(piece)
        return ids.tolist()

    def _history(self, namespace: str, agent: str | None) -> History:
        history = self._histories.setdefault((namespace, agent), History())
        self._histories.move_to_end((namespace, agent))
        while len(self._histories) > MOST_AGENTS:
            self._histories.popitem(last=False)
        history.begin()
        return history

    # ---- text to ids

    def _encode_unknown(
        self, history: History, place: Place, text: str, calls: Calls | None, is_answer: bool
    ) -> tuple[array[int], Place | None]:
        """Ids for a text that was not seen at `place`, and where to go on if it means what was seen there."""
        stored = history.alternatives(place)
        for key, ids in stored:
            if is_answer and self.tokenizer.is_answer(text, ids):
                return ids, history.follow(place, key)
            if calls is not None and calls.said == calls_in(calls.dialect, self.tokenizer.decode(ids), calls.behind):
                return ids, history.follow(place, key)
        fresh = to_ids(self.tokenizer.encode(text))
        for key, ids in stored:
            if ids == fresh:  # the tokenizer normalises text, to composed characters for example
                return ids, history.follow(place, key)
        return self._splice([ids for _, ids in stored], fresh, text), None

    def _calls(self, text: str, at: int, piece: str) -> Calls | None:
        """What the piece of `text` at `at` calls, if it is an answer or stands in one."""
        dialect = self.tokenizer.dialect
        behind = self.tokenizer.begins_calls(text, at)
        if dialect is None or not (behind or self.tokenizer.begins_answer(text, at)):
            return None
        said = calls_in(dialect, piece, behind)
        return None if said is None else Calls(dialect, behind, said)

    def _was_empty(self, history: History, place: Place, text: str, behind: str) -> bool:
        """Whether an answer of nothing ended here at once, where the template puts something before each answer."""
        end = self.tokenizer.special_id(behind)
        return end is not None and self.tokenizer.is_answer(text, ()) and history.follow(place, end) is not None

    def _splice(self, stored: list[array[int]], fresh: array[int], text: str) -> array[int]:
        """`fresh`, with its start replaced by that of the stored ids that share most of the text.

        Both are cut where both have a token's end at a word's end, so that no word begins in one and ends in the other.
        """
        stored = [ids for i, ids in enumerate(stored) if not any(later[: len(ids)] == ids for later in stored[:i])]
        reaches = [self._reach(ids, text, len(text)) for ids in stored]
        again = self._reach(fresh, text, max((max(reach) for reach in reaches), default=0))
        best, start = 0, fresh[:0]
        for ids, reach in zip(stored, reaches, strict=True):
            cut = max(at for at in reach if at in again and ends_word(text, at))
            if cut > best:
                best, start = cut, ids[: reach[cut]]
        return start + fresh[again[best] :]

    def _reach(self, ids: array[int], text: str, end: int) -> dict[int, int]:
        """Where in `text`, up to about `end`, some of the first ids spell exactly what stands before, and how many of them do."""
        detokenizer = self.tokenizer.detokenizer()
        at, reach = 0, {0: 0}
        for count, token in enumerate(ids, 1):
            piece = detokenizer.push(token)
            if at >= end or not text.startswith(piece, at):
                break
            if piece:  # nothing comes out inside a character
                at += len(piece)
                reach[at] = count
        return reach

    # ---- ids to segments

    def _add(self, history: History, ids: array[int]) -> None:
        """Remember a transcript. What is known by its ids is not turned into text again."""
        place = history.start()
        segments = self._segments(ids)
        for segment in segments:
            known = history.follow_ids(place, segment) or history.follow(place, self._key(segment))
            if known is None:
                history.add(place, ((self._key(s), s) for s in (segment, *segments)))
                return
            place = known

    def _segments(self, ids: array[int]) -> Iterator[array[int]]:
        start = 0
        for at in np.flatnonzero(np.isin(np.frombuffer(ids, np.int32), self._special)).tolist():
            if at > start:
                yield ids[start:at]
            yield ids[at : at + 1]
            start = at + 1
        if start < len(ids):
            yield ids[start:]

    def _key(self, segment: array[int]) -> Key:
        if segment[0] in self.tokenizer.cut_ids:
            return segment[0]
        return key_of(self.tokenizer.decode(segment))


def key_of(text: str) -> Key:
    """What stands for a text: itself, or its digest if that is shorter."""
    return text if len(text) <= DIGEST else hashlib.blake2b(text.encode(), digest_size=DIGEST).digest()


def ends_word(text: str, at: int) -> bool:
    """Whether a cut at `at` leaves words whole."""
    return at in (0, len(text)) or text[at].isspace() or text[at - 1].isspace()
