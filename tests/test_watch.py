"""Answers that end with a token that is watched for: what is remembered ends before what the stop string's tokens spell."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rewake.quant import PAGE_TOKENS
from tests.fakes import EngineHarness, expected_answer


def ending_at(number: int, keep: int) -> Callable[[int], int | None]:
    """Watches for the token `number`, and then wants `keep` tokens remembered."""
    seen = 0

    def watch(token: int) -> int | None:
        nonlocal seen
        seen += 1
        return keep if seen == number else None

    return watch


@pytest.mark.parametrize(("number", "keep"), [(1, 0), (1, 1), (5, 2), (5, 4), (5, 5), (20, 3)])
@pytest.mark.parametrize("length", [3, 200, PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 700])
def test_the_next_turn_extends_what_was_kept(harness: EngineHarness, length: int, number: int, keep: int) -> None:
    """W5, R3: it ends with the very token, and nothing behind what is kept is ever attended to; restarted or not."""
    prompt = list(range(2, 2 + length % 900)) or [2]
    answer = expected_answer(prompt, number)
    pending = harness.ask(prompt, "ada", 50, watch=ending_at(number, keep))
    done = pending.result()
    assert pending.tokens == answer and done.reason == "stop" and done.num_generated == number and done.saved
    harness.check()
    crosses = (length + number - 1) // PAGE_TOKENS > (length + keep) // PAGE_TOKENS  # a page was full before it was known
    for restarted in (False, True):
        follow = [*prompt, *answer[:keep], 5, 6 + restarted, 7]
        if restarted:
            harness.restart()
        again = harness.ask(follow, "ada", 3)
        assert again.tokens == expected_answer(follow, 3)
        assert again.match.reused_tokens >= length + max(0, keep - 1)
        assert again.match.kind == "extend" or crosses or restarted
    assert harness.backend.num_wrong == 0


def test_what_was_kept_is_on_disk(harness: EngineHarness) -> None:
    prompt = list(range(2, 102))
    answer = expected_answer(prompt, 9)
    harness.ask(prompt, "ada", 50, watch=ending_at(9, 4))
    harness.restart()
    again = harness.ask([*prompt, *answer[:4], 5], "ada", 1)
    assert again.match.kind == "extend" and again.match.loaded_tokens == again.match.reused_tokens == 104
