"""What one asker has said and was told: a tree of runs of segments, each segment a key and its token ids.

    [system | user 1 | answer 1] ── [user 2 | answer 2]
                                └── [user 2, edited | another answer]

Segments of which each was always followed by the next lie in one run, so that a history costs little more than its
ids. Knows neither text nor tokenizer.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["TOKEN", "History", "Key", "Place", "to_ids"]

TOKEN = "i"  # array code: signed 32-bit
MOST_ALTERNATIVES = 16  # of what followed a place: as many branches as are recalled of an agent

Key = int | str | bytes  # a special token, a short text, or a longer text's digest


def to_ids(ids: Iterable[int] = ()) -> array[int]:
    return array(TOKEN, ids)


@dataclass(eq=False, slots=True)
class Run:
    """Segments in a row: their keys, their ids, where in these each one ends; and the runs that followed the last one."""

    keys: list[Key] = field(default_factory=list)
    ids: array[int] = field(default_factory=to_ids)
    ends: array[int] = field(default_factory=to_ids)
    next: dict[Key, Run] = field(default_factory=dict)
    used: int = 0

    def segment(self, index: int) -> array[int]:
        return self.ids[self.ends[index - 1] if index else 0 : self.ends[index]]

    def extend(self, segments: Iterable[tuple[Key, array[int]]]) -> None:
        for key, ids in segments:
            self.keys.append(key)
            self.ids.extend(ids)
            self.ends.append(len(self.ids))

    def split(self, index: int) -> None:
        """Let the segments from `index` on become a run of their own."""
        cut = self.ends[index - 1] if index else 0
        ends = to_ids(end - cut for end in self.ends[index:])
        tail = Run(self.keys[index:], self.ids[cut:], ends, self.next, self.used)
        self.keys, self.ids, self.ends = self.keys[:index], self.ids[:cut], self.ends[:index]
        self.next = {tail.keys[0]: tail}


class Place(NamedTuple):
    """Behind the first `passed` segments of a run."""

    run: Run
    passed: int

    @property
    def ids(self) -> array[int]:
        """Those of the segment that ends here."""
        return self.run.segment(self.passed - 1)


class History:
    """The tree. `start` a walk, `follow` what is known, `add` what is not."""

    def __init__(self) -> None:
        self.root = Run()
        self.num_tokens = 0
        self._now = 0

    def begin(self) -> None:
        """What is used from here on was used later than all that was used before."""
        self._now += 1

    def start(self) -> Place:
        return self._visit(self.root, 0)

    def follow(self, place: Place, key: Key) -> Place | None:
        """The place behind the segment `key`, if that was seen here."""
        run, passed = place
        if passed < len(run.keys):
            return self._visit(run, passed + 1) if run.keys[passed] == key else None
        child = run.next.get(key)
        return self._visit(child, 1) if child is not None else None

    def follow_ids(self, place: Place, ids: array[int]) -> Place | None:
        """The same for a segment whose ids are known and whose key is not; only where there is one way to go."""
        run, passed = place
        return self._visit(run, passed + 1) if passed < len(run.keys) and run.segment(passed) == ids else None

    def alternatives(self, place: Place) -> list[tuple[Key, array[int]]]:
        """Texts that were seen here, the latest used first."""
        run, passed = place
        if passed < len(run.keys):
            seen = [(run.keys[passed], run.segment(passed))]
        else:
            latest = heapq.nlargest(MOST_ALTERNATIVES, run.next.values(), key=lambda child: child.used)
            seen = [(child.keys[0], child.segment(0)) for child in latest]
        return [(key, ids) for key, ids in seen if not isinstance(key, int)]

    def add(self, place: Place, segments: Iterable[tuple[Key, array[int]]]) -> None:
        """Remember that these came behind `place`, where the first of them was not known."""
        run, passed = place
        if passed < len(run.keys):
            run.split(passed)
        longer = Run(used=self._now) if run.next or run is self.root else run
        before = len(longer.ids)
        longer.extend(segments)
        self.num_tokens += len(longer.ids) - before
        if longer is not run:
            run.next[longer.keys[0]] = longer

    def shrink(self, most: int) -> None:
        """Let go of the least recently used ends until `most` tokens are left; what is in use now stays."""
        parents = {child: run for run in self._runs() for child in run.next.values()}
        ends = [(run.used, number, run) for number, run in enumerate(parents) if not run.next]
        heapq.heapify(ends)
        while self.num_tokens > most and ends and ends[0][0] < self._now:
            _, number, run = heapq.heappop(ends)
            parent = parents[run]
            del parent.next[run.keys[0]]
            self.num_tokens -= len(run.ids)
            if not parent.next and parent is not self.root:
                heapq.heappush(ends, (parent.used, number, parent))

    def _runs(self) -> Iterator[Run]:
        stack = [self.root]
        while stack:
            run = stack.pop()
            stack.extend(run.next.values())
            yield run

    def _visit(self, run: Run, passed: int) -> Place:
        run.used = self._now
        return Place(run, passed)
