"""plan(), by tables."""

from __future__ import annotations

import pytest

from rewake.scheduler import Need, Part, plan


@pytest.mark.parametrize(
    ("needs", "parts"),
    [
        ([], ()),
        ([Need(10, 1)], (Part(0, 1),)),
        ([Need(0, 100)], (Part(0, 100),)),
        ([Need(0, 4096)], (Part(0, 512),)),
        # a prompt that must be cut is cut at multiples of the chunk
        ([Need(100, 4096)], (Part(0, 412),)),
        # one that need not is not
        ([Need(500, 16)], (Part(0, 16),)),
        # decode tokens come first and do not count
        ([Need(0, 512), Need(9, 1), Need(700, 1)], (Part(1, 1), Part(2, 1), Part(0, 512))),
        # what one prompt leaves, the next may use
        ([Need(0, 200), Need(0, 600)], (Part(0, 200), Part(1, 312))),
        ([Need(0, 600), Need(0, 5)], (Part(0, 512),)),
    ],
)
def test_plan(needs: list[Need], parts: tuple[Part, ...]) -> None:
    assert plan(needs, chunk=512) == parts
