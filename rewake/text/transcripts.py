"""Text that was seen before gets the ids it had before.

A text a model produced may tokenise differently when a client sends it back, and then nothing behind that place could
be reused. So transcripts are remembered as segments between special tokens, which no token crosses: a segment whose
text is known, behind the same segments, is given its stored ids, and only the rest is tokenised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rewake.text.tokenizer import Segment, Tokenizer

__all__ = ["Transcripts"]

MOST_AGENTS = 256  # others are asked for again: see `knows`
MOST_TOKENS = 500_000  # of one agent (or of all who do not say who they are), before its old segments are let go


@dataclass
class Node:
    """What was seen behind the same segments: text to (ids, what follows)."""

    next: dict[str, tuple[tuple[int, ...], Node]] = field(default_factory=dict)
    num_tokens: int = 0  # at a root: in all segments below


class Transcripts:
    """Known segments of every agent, the latest used agents first to be kept. Used by one thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._roots: OrderedDict[tuple[str, str | None], Node] = OrderedDict()

    def knows(self, namespace: str, agent: str | None) -> bool:
        return (namespace, agent) in self._roots

    def learn(self, namespace: str, agent: str | None, transcripts: Iterable[Sequence[int]]) -> None:
        """Remember the segments of whole transcripts, given as ids."""
        for ids in transcripts:
            root = self._root(namespace, agent)
            root.num_tokens += self._add(root, self._segments(ids))
            if root.num_tokens > MOST_TOKENS:
                self.forget(namespace, agent)
        self._root(namespace, agent)

    def forget(self, namespace: str, agent: str | None) -> None:
        self._roots.pop((namespace, agent), None)

    def encode(self, namespace: str, agent: str | None, text: str) -> list[int]:
        """The ids of `text`: stored ones as far as it is known, fresh ones from there."""
        node: Node | None = self._root(namespace, agent)
        ids: list[int] = []
        for piece in self.tokenizer.split(text):
            known = node.next.get(piece) if node is not None else None
            special = self.tokenizer.special_id(piece)
            if known is not None:
                ids += known[0]
            elif special is not None:
                ids.append(special)
            else:
                ids += self.tokenizer.encode(piece)
            node = known[1] if known is not None else None
        return ids

    def _root(self, namespace: str, agent: str | None) -> Node:
        root = self._roots.setdefault((namespace, agent), Node())
        self._roots.move_to_end((namespace, agent))
        while len(self._roots) > MOST_AGENTS:
            self._roots.popitem(last=False)
        return root

    def _add(self, node: Node, segments: Iterable[Segment]) -> int:
        """How many tokens are new."""
        added = 0
        for text, ids in segments:
            added += 0 if text in node.next else len(ids)
            _, node = node.next.setdefault(text, (ids, Node()))
        return added

    def _segments(self, ids: Sequence[int]) -> Iterable[Segment]:
        special = self.tokenizer.special_ids
        run: list[int] = []
        for token in ids:
            if token not in special:
                run.append(token)
                continue
            if run:
                yield self.tokenizer.decode(run), tuple(run)
            yield self.tokenizer.decode([token]), (token,)
            run = []
        if run:
            yield self.tokenizer.decode(run), tuple(run)
