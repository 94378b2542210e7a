"""How the C library hands out memory. Knows glibc only; elsewhere nothing is changed."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

__all__ = ["MOST_HEAPS", "share_heaps"]

MOST_HEAPS = 2
M_ARENA_MAX = -8  # malloc.h


def share_heaps() -> None:
    """Have all threads of this process allocate from two heaps, unless MALLOC_ARENA_MAX says something else.

    glibc gives nearly every thread one of its own, which keeps the most that this thread has ever had: with twenty threads that is three
    times what is free in two, and it takes a thousand requests until each of them has seen its largest one. Ours seldom allocate at the
    same time, as they hold Python's lock for it.
    """
    if sys.platform == "linux" and "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, MOST_HEAPS)
