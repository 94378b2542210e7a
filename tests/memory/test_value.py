"""What goes first, and whether pages are read or computed: pure functions of numbers."""

from __future__ import annotations

import math

from rewake.memory.gate import LoadGate
from rewake.memory.value import ByValue, worth


def gone(shelf: ByValue[str]) -> list[str]:
    order = []
    while len(shelf):
        order.append(shelf.first_to_go())
        shelf.remove(order[-1])
    return order


def test_among_equals_the_least_recently_used_goes_first() -> None:
    shelf: ByValue[str] = ByValue()
    for name in "abca":
        shelf.add(name, 1.0)
    assert gone(shelf) == ["b", "c", "a"]


def test_what_is_cheap_to_have_back_goes_before_what_is_dear_and_pins_go_last() -> None:
    shelf: ByValue[str] = ByValue()
    for name, cost in (("pinned", math.inf), ("unsaved", 256.0), ("saved", 8.0), ("anonymous", 0.8)):
        shelf.add(name, cost)
    assert gone(shelf) == ["anonymous", "saved", "unsaved", "pinned"]


def test_what_is_dear_but_never_used_again_goes_in_the_end() -> None:
    shelf: ByValue[str] = ByValue()
    shelf.add("dear", 100.0)
    for i in range(1000):
        shelf.add(f"cheap{i}", 1.0)
        if len(shelf) > 3:
            shelf.remove(victim := shelf.first_to_go())
            if victim == "dear":
                break
    assert 200 < i < 400


def test_a_thing_is_on_the_shelf_once_however_often_it_is_used() -> None:
    shelf: ByValue[str] = ByValue()
    for _ in range(1000):
        shelf.add("a", 1.0)
        shelf.add("b", 1.0)
    assert len(shelf) == 2 and sorted(shelf) == ["a", "b"] and "a" in shelf
    shelf.remove("a")
    shelf.remove("a")
    assert gone(shelf) == ["b"]


def test_the_worth_of_a_branch() -> None:
    base = worth(1000, 10_000, 100, anonymous=False, is_head=True)
    assert worth(1000, 10_000, 1000, anonymous=False, is_head=True) < base, "longer idle"
    assert worth(1000, 20_000, 100, anonymous=False, is_head=True) < base, "larger"
    assert worth(8000, 80_000, 100, anonymous=False, is_head=True) > base, "attention makes long ones dearer"
    assert worth(1000, 10_000, 100, anonymous=True, is_head=True) < worth(1000, 10_000, 100, anonymous=False, is_head=False) < base


def test_the_gate_reads_until_reading_has_shown_to_be_slower() -> None:
    gate = LoadGate()
    assert gate.pays(10**9, 1)
    gate.note_computed(512, 0.5)
    assert gate.pays(10**9, 1)
    gate.note_read(10**6, 0.001)
    assert gate.pays(10**6, 10)
    for _ in range(20):
        gate.note_read(10**6, 1.0)
    assert not gate.pays(10**6, 256)
    refusals = next(i for i in range(100) if gate.pays(10**6, 256))
    assert 3 < refusals < 50, "a disk that was slow is tried again"
    gate.always = True
    assert gate.pays(10**12, 1)


def test_a_read_that_is_waited_for_is_expected_as_fast_as_the_fastest_of_late() -> None:
    gate = LoadGate()
    assert gate.soonest(10**6) == 0, "nothing is known yet: it is tried"
    gate.note_read(10**6, 0.002)
    for _ in range(3):
        gate.note_read(10**6, 0.050)  # beside a step that has all cores
    assert gate.soonest(10**6) == 0.002
    for _ in range(8):
        gate.note_read(10**6, 0.050)
    assert gate.soonest(2 * 10**6) == 0.1, "it has become slow"
