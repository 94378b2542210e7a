"""plan(), admission_order() and num_too_many(), by tables."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rewake.scheduler import Need, Part, admission_order, fair_shares, num_too_many, plan, seconds_to_go


@pytest.mark.parametrize(
    ("needs", "parts"),
    [
        ([], ()),
        ([Need(10, 1)], (Part(0, 1),)),
        ([Need(0, 100)], (Part(0, 100),)),
        ([Need(0, 4096)], (Part(0, 512),)),
        # a prompt that must be cut is cut at multiples of the chunk
        ([Need(100, 4096)], (Part(0, 412),)),
        # or of 64, where that would leave most of the step empty
        ([Need(500, 4096)], (Part(0, 460),)),
        # one that need not is not
        ([Need(500, 16)], (Part(0, 16),)),
        # decode tokens come first and do not count
        ([Need(0, 512), Need(9, 1), Need(700, 1)], (Part(1, 1), Part(2, 1), Part(0, 512))),
        # what one prompt leaves, the next may use
        ([Need(0, 200), Need(0, 600)], (Part(0, 200), Part(1, 256))),
        ([Need(0, 600), Need(0, 5)], (Part(0, 512),)),
        # a short prompt goes before a long one that came with it
        ([Need(0, 6000, rank=6000), Need(0, 12, rank=12)], (Part(1, 12), Part(0, 448))),
        # but not before one that has waited for as long as it takes
        ([Need(512, 5488, rank=6000), Need(0, 12, rank=9000)], (Part(0, 512),)),
        # two equal ones: who came first
        ([Need(1024, 3072, rank=4096), Need(0, 4096, rank=5120)], (Part(0, 512),)),
        # namespaces share evenly, whoever came first
        ([Need(0, 4096, 4096, "a"), Need(0, 4096, 4097, "a"), Need(0, 4096, 9000, "b")], (Part(0, 256), Part(2, 256))),
        # and what one does not want, the other may have
        ([Need(0, 4096, 4096, "a"), Need(0, 40, 9000, "b")], (Part(0, 448), Part(1, 40))),
    ],
)
def test_plan(needs: list[Need], parts: tuple[Part, ...]) -> None:
    assert plan(needs, chunk=512) == parts


def test_no_prompt_starves_whatever_comes_after_it() -> None:
    """A prompt of n tokens is through when 2n tokens were computed, however many short ones arrive."""
    rng = random.Random(0)
    clock, long = 0, Need(0, 8192, rank=8192)
    short: list[Need] = []
    while long.num_pending > 1:
        short += [Need(0, n, rank=clock + n) for n in rng.choices(range(2, 400), k=2)]
        needs = [long, *short]
        done = {p.index: p.num_tokens for p in plan(needs, 512)}
        assert 512 - 64 < sum(done.values()) <= 512
        clock += sum(done.values())
        rest = [Need(n.position + done.get(i, 0), n.num_pending - done.get(i, 0), n.rank) for i, n in enumerate(needs)]
        long, short = rest[0], [n for n in rest[1:] if n.num_pending > 0]
    assert clock <= 2 * 8192


def test_a_step_is_never_empty_while_somebody_has_something_to_compute() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        needs = [Need(rng.randrange(3000), rng.choice([1, 2, 65, 700, 5000]), rng.randrange(9000), rng.choice("abc")) for _ in range(6)]
        chunk = rng.choice([1, 7, 64, 512])
        parts = plan(needs, chunk)
        assert len({p.index for p in parts}) == len(parts)
        assert all(0 < p.num_tokens <= needs[p.index].num_pending for p in parts)
        prompts = [p for p in parts if needs[p.index].num_pending > 1]
        assert sum(p.num_tokens for p in prompts) <= chunk
        assert prompts or all(n.num_pending == 1 for n in needs)


def test_with_nothing_to_spend_on_prompts_tokens_go_on() -> None:
    assert plan([Need(0, 600), Need(9, 1)], chunk=0) == (Part(1, 1),)


def test_fair_shares() -> None:
    assert fair_shares({"a": 100, "b": 100}, 500) == {"a": 100, "b": 100}
    assert fair_shares({"a": 1000, "b": 10, "c": 1000}, 510) == {"b": 10, "a": 250, "c": 250}
    assert fair_shares({}, 5) == {}


@pytest.mark.parametrize(
    ("waiting", "at_work", "order"),
    [
        ("aaa", "", [0, 1, 2]),
        # who floods the queue waits for who does not
        ("aaaab", "", [0, 4, 1, 2, 3]),
        ("aaaab", "a", [4, 0, 1, 2, 3]),
        ("abab", "bb", [0, 2, 1, 3]),
        ("", "ab", []),
    ],
)
def test_admission_order(waiting: str, at_work: str, order: list[int]) -> None:
    assert admission_order(waiting, at_work) == order


@pytest.mark.parametrize(
    ("waiting", "namespace", "too_many"),
    [
        ({}, "a", 0),
        ({"a": 7}, "a", 0),
        ({"a": 8}, "a", 1),
        # who comes to a queue that another has filled has a part of his own, and the other has to get down to his
        ({"a": 8}, "b", 0),
        ({"a": 8, "b": 3}, "b", 0),
        ({"a": 8, "b": 4}, "b", 1),
        ({"a": 8, "b": 4}, "a", 5),
        ({"a": 8, "b": 4}, "c", 0),
        # what others do not use may be had
        ({"a": 6, "b": 1}, "a", 0),
        # more namespaces than places
        ({str(n): 1 for n in range(9)}, "a", 0),
        ({str(n): 1 for n in range(9)}, "1", 1),
    ],
)
def test_a_queue_of_eight_is_divided(waiting: dict[str, int], namespace: str, too_many: int) -> None:
    assert num_too_many(waiting, namespace, 8) == too_many


def test_a_divided_queue_is_bounded() -> None:
    """Whoever comes in whatever order, and nobody is turned away who has nothing waiting."""
    rng = random.Random(2)
    for count in (1, 2, 5, 40):
        waiting: Counter[str] = Counter()
        for _ in range(5000):
            namespace = str(rng.randrange(1 + rng.randrange(count)))
            if not num_too_many(waiting, namespace, 64):
                waiting[namespace] += 1
            assert waiting[namespace]
        assert waiting.total() <= 64 * sum(1 / k for k in range(1, count + 1)) + count


@pytest.mark.parametrize(
    ("number", "num_namespaces", "admitted", "seconds"),
    [
        (1, 1, [], 1),
        (1, 1, [90, 95], 5),
        (3, 2, [90, 95], 30),
        # nothing has left for long: it is not expected sooner than that
        (1, 1, [10, 10, 10], 30),
    ],
)
def test_when_there_will_be_a_place(number: int, num_namespaces: int, admitted: list[float], seconds: float) -> None:
    assert seconds_to_go(number, num_namespaces, admitted, now=100) == seconds
