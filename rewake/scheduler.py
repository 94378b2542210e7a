"""Who is admitted next, and what the next step computes. Pure functions of numbers; knows no pages, models or clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

__all__ = ["Need", "Part", "admission_order", "num_too_many", "plan", "seconds_to_go"]

FINE = 64  # where a prompt is cut if not at a multiple of the chunk


@dataclass(frozen=True)
class Need:
    """A running sequence: `num_pending` tokens to compute, the first at `position`. One is a decode step.

    `rank` is the clock when it came, plus what it had to compute then; the clock counts prompt tokens computed for anybody. By it, a short
    prompt goes before a long one that came at the same time, but not before one that has been waiting for as long as it takes.
    """

    position: int
    num_pending: int
    rank: int = 0
    namespace: str = ""


@dataclass(frozen=True)
class Part:
    """`num_tokens` of sequence number `index` are computed in this step."""

    index: int
    num_tokens: int


def plan(needs: Seq[Need], chunk: int) -> tuple[Part, ...]:
    """Every decode token, then prompts until `chunk` prompt tokens are in the step.

    Namespaces have equal shares of these, and what one does not use the others may; in a namespace the lowest rank goes first.
    A prompt that must be cut is cut at absolute multiples of `chunk` where that is possible, so that equal prompts are computed
    in equal pieces and their pages come out the same.
    """
    parts = [Part(i, 1) for i, need in enumerate(needs) if need.num_pending == 1]
    prompts = sorted((i for i, need in enumerate(needs) if need.num_pending > 1), key=lambda i: (needs[i].rank, i))
    wanted: Counter[str] = Counter()
    for i in prompts:
        wanted[needs[i].namespace] += needs[i].num_pending
    left = fair_shares(wanted, chunk)
    for i in prompts:
        need = needs[i]
        num_tokens = cut(need, left[need.namespace], chunk)
        if num_tokens:
            parts.append(Part(i, num_tokens))
            left[need.namespace] -= num_tokens
    return tuple(parts)


def cut(need: Need, left: int, chunk: int) -> int:
    """How many tokens of a prompt are computed with `left` to be had: all, or up to a good place to cut."""
    if not left:
        return 0
    if need.num_pending <= left:
        return need.num_pending
    for multiple in (chunk, FINE):
        num_tokens = (need.position + left) // multiple * multiple - need.position
        if num_tokens > left // 2:  # else a good cut would waste most of the step
            return num_tokens
    return left


def fair_shares(wanted: Mapping[str, int], total: int) -> dict[str, int]:
    """Split `total` so that nobody has more than is wanted, and who has less than somebody else has all that is wanted."""
    shares: dict[str, int] = {}
    for number, (name, want) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[name] = min(want, total // (len(wanted) - number))
        total -= shares[name]
    return shares


def num_too_many(waiting: Mapping[str, int], namespace: str, most: int) -> int:
    """How many of its own requests that wait must go before a namespace may have one more among `most`; 0: it may have it now.

    A queue that is full has equal parts, one for each namespace that waits. Who has less than its part has it, though others have filled
    the queue before it came: none of those is put out. So of k namespaces that come one after the other, there are up to
    `most` * (1 + 1/2 + ... + 1/k) requests.
    """
    if sum(waiting.values()) < most:
        return 0
    part = max(1, most // len({*waiting, namespace}))
    return max(0, waiting.get(namespace, 0) + 1 - part)


def seconds_to_go(number: int, num_namespaces: int, admitted: Seq[float], now: float) -> float:
    """How long so many of a namespace's requests take to leave the queue: namespaces do in turn, as often as of late.

    `admitted` are the times at which requests left it, since there is a queue; if there is none yet, one a second is supposed.
    """
    between = (now - admitted[0]) / len(admitted) if admitted else 1.0
    return number * num_namespaces * between


def admission_order(waiting: Seq[str], at_work: Iterable[str]) -> list[int]:
    """Indices of `waiting` requests, given by namespace in order of arrival: whose namespace has the fewest at work goes first."""
    counts = Counter(at_work)
    queues: dict[str, list[int]] = {}
    for i, namespace in enumerate(waiting):
        queues.setdefault(namespace, []).append(i)
    order: list[int] = []
    while queues:
        namespace = min(queues, key=lambda n: (counts[n], queues[n][0]))
        order.append(queues[namespace].pop(0))
        counts[namespace] += 1
        if not queues[namespace]:
            del queues[namespace]
    return order
