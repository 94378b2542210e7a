"""How the last turns of each agent went: a short history for whoever looks, in memory only."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewake.api.generation import Generation

__all__ = ["Recent"]

MOST_TURNS = 24  # of an agent
MOST_AGENTS = 1024


class Recent:
    """The latest turns by namespace and agent; nothing is kept of who has no name."""

    def __init__(self) -> None:
        self._turns: OrderedDict[tuple[str, str], deque[dict[str, Any]]] = OrderedDict()

    def add(self, namespace: str, agent: str | None, generation: Generation) -> None:
        if agent is None or generation.done is None:
            return
        turns = self._turns.setdefault((namespace, agent), deque(maxlen=MOST_TURNS))
        self._turns.move_to_end((namespace, agent))
        match = generation.done.match
        turns.append(
            {
                "match": match.kind,
                "ttft_ms": None if generation.ttft is None else round(generation.ttft * 1000, 1),
                "reused": match.reused_tokens,
                "loaded": match.loaded_tokens,
                "computed": match.computed_tokens,
                "generated": generation.done.num_generated,
            }
        )
        while len(self._turns) > MOST_AGENTS:
            self._turns.popitem(last=False)

    def of(self, namespace: str, agent: str) -> list[dict[str, Any]]:
        return list(self._turns.get((namespace, agent), ()))

    def forget(self, namespace: str, agent: str) -> None:
        self._turns.pop((namespace, agent), None)
