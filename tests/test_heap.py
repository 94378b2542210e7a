"""How many heaps a process of many threads has. Counted in a process of its own, as they never go."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from rewake.heap import MOST_HEAPS

COUNT = """
import ctypes, sys, threading
from rewake.heap import share_heaps

share_heaps()
c = ctypes.CDLL(None)
c.malloc.restype = c.fopen.restype = ctypes.c_void_p
together = threading.Barrier(12)

def allocate():
    together.wait()
    for _ in range(100):
        c.malloc(ctypes.c_size_t(5000))
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(c.fopen(b"/dev/stdout", b"w"))
c.malloc_info(0, file)
c.fclose(file)
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_info"), reason="glibc's heaps")
@pytest.mark.parametrize("asked", [None, "1"])
def test_threads_share_heaps(asked: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    environment |= {} if asked is None else {"MALLOC_ARENA_MAX": asked}
    told = subprocess.run([sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=True).stdout
    assert 1 <= told.count("<heap nr=") <= (MOST_HEAPS if asked is None else int(asked))
