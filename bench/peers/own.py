"""What only concerns ourselves: attention alone, how a decode step grows with depth, and the restore.

Attention reads every stored byte of K and V once a token: 6,480 bytes a token of context with q4 (30 layers, 3 KV heads
x 64), 26.5 MB at depth 4,096. A whole step adds to that only what else depends on depth: nothing that should.

A restore reads an agent's files, checks each one's XXH3 and has the rows at their place in the arena. It cannot be faster
than `readinto` of the same bytes into memory that is already there, which is what it is compared with: the same files, the
same two threads, one file a task, opened and closed in both, in turn. From page cache that is two passes over memory, and
the checksum a third; with the cache dropped, the disk decides, and the checksum hides behind it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.base import THREADS
from bench.peers.ours import generate, open_ours
from bench.peers.prompts import Prompts
from rewake.memory.residency import Residency
from rewake.memory.tree import Branch, Page
from rewake.service import Service
from rewake.store.base import StoredFile

__all__ = ["attention", "depth", "restore"]

Row = dict[str, Any]
DEPTHS = (64, 7000)
AGENTS = (4096, 7000)
DECODED = 33


def attention(kv: str, quick: bool) -> Row:
    """Decode attention over a random arena, all layers of one token in turn; the kernels the engine would choose."""
    from bench.attention import Case
    from rewake.backends.torch.kernels import load_kernels

    kernels, why = load_kernels(THREADS)
    case = Case(kv, 4096)
    case.attend(kernels)  # type: ignore[arg-type]
    times = [milliseconds(lambda: case.attend(kernels)) for _ in range(20 if quick else 100)]  # type: ignore[arg-type]
    median = statistics.median(times)
    return {
        "what": "decode attention at 4096, ms a token",
        "kv": kv,
        "ms": median,
        "GB/s": case.bytes_read / median / 1e6,
        "how": f"{kernels.name}: {why}",
    }


def depth(kv: str, prompts: Prompts, quick: bool) -> Row:
    """Median time of the engine's decode steps at both depths, a run of one after a run of the other."""
    with tempfile.TemporaryDirectory() as data:
        service = open_ours(kv, Path(data))
        contexts = {size: prompts.take("depth", size) for size in DEPTHS}
        steps: dict[int, list[float]] = {size: [] for size in DEPTHS}
        for repetition in range(4 if quick else 12):
            for size, context in contexts.items():
                (times,) = generate(service, [context + prompts.take(f"depth {repetition}", 2)], DECODED)
                if repetition:  # the first computes the context
                    steps[size] += np.diff(times).tolist()
        service.close()
    low, high = (statistics.median(steps[size]) for size in DEPTHS)
    return {"what": "decode step, 64 -> 7000", "kv": kv, "ms": high - low, "how": f"{low:.2f} ms at 64, {high:.2f} ms at 7000"}


def restore(kv: str, prompts: Prompts, quick: bool) -> list[Row]:
    """Our read of an agent's pages against a plain one, both from page cache and with it dropped."""
    with tempfile.TemporaryDirectory() as data:
        service = open_ours(kv, Path(data))
        for size in AGENTS:
            generate(service, [prompts.take("restore", size)], 1, agent=str(size))
        rows = [row for size in AGENTS for row in Restore(service, str(size), Path(data)).rows(5 if quick else 15)]
        service.close()
    return rows


class Restore:
    """One agent's pages: what they are on disk, and slots to read them to."""

    def __init__(self, service: Service, agent: str, data: Path) -> None:
        self.kv, self.agent, self.data, self.service = service.config.kv, agent, data, service
        memory = service.engine.memory
        self.residency: Residency = memory.residency
        branch = memory.tree.branches_of("default", agent)[0]
        of_agent: list[Page | Branch] = [*branch.parent.path(), branch]
        self.residents = [r for r in of_agent if r.files]
        self.files = [file for resident in self.residents for file in resident.files]
        self.size = sum(file.size for file in self.files)
        self.threads = ThreadPoolExecutor(THREADS)

    def rows(self, repetitions: int) -> list[Row]:
        slots = self.service.engine.call(lambda: [self.residency.take(0) for _ in self.residents]).result()
        size = self.residency.planes.page_bytes
        targets = [[self.residency.arena[slot : slot + size] for slot in own] for own in slots]
        buffers = [np.zeros(file.size, np.uint8) for file in self.files]
        runs: dict[str, Callable[[], None]] = {
            "plain": lambda: self.all(self.plain, self.files, buffers),
            "ours": lambda: self.all(self.read, self.residents, targets),
        }
        rows = []
        for state, before in (("page cache", self.keep), ("dropped", self.drop)):
            times: dict[str, list[float]] = {name: [] for name in runs}
            for repetition in range(repetitions + 1):
                for name in sorted(runs, reverse=repetition % 2 == 0):
                    before()
                    took = milliseconds(runs[name])
                    if repetition:
                        times[name].append(took)
            rows.append(self.row(state, statistics.median(times["plain"]), statistics.median(times["ours"])))
        self.service.engine.call(lambda: self.give(slots)).result()
        self.threads.shutdown()
        return rows

    def row(self, state: str, plain: float, ours: float) -> Row:
        dropped = state == "page cache" or self.is_dropped()
        return {
            "what": f"restore of {self.agent}, {state}",
            "kv": self.kv,
            "ms": ours,
            "GB/s": self.size / ours / 1e6,
            "of plain": plain / ours if dropped else float("nan"),
            "how": f"{len(self.files)} files, {self.size / 1e6:.1f} MB, {THREADS} threads; plain {plain:.2f} ms"
            + ("" if dropped else "; the file system keeps its cache"),
        }

    def all(self, read: Callable[[Any, Any], None], sources: list[Any], targets: list[Any]) -> None:
        for _ in self.threads.map(read, sources, targets):
            pass

    def plain(self, file: StoredFile, buffer: np.ndarray) -> None:
        with open(self.data / file.name, "rb", buffering=0) as opened:
            opened.seek(file.offset)
            got = opened.readinto(buffer.data)
        assert got == file.size

    def read(self, resident: Page | Branch, target: list[np.ndarray]) -> None:
        self.residency.read(resident.files, 0, target)

    def give(self, slots: list[tuple[int, ...]]) -> None:
        self.residency.give(dict(enumerate(slots)))

    def keep(self) -> None:
        """Nothing: what was just read or written is in page cache."""

    def drop(self) -> None:
        """Have the kernel forget the files' bytes; they must be on disk for that."""
        for file in self.files:
            fd = os.open(self.data / file.name, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def is_dropped(self) -> bool:
        """Whether dropping works here: then a read that may not wait for the disk gets nothing."""
        self.drop()
        fd = os.open(self.data / self.files[0].name, os.O_RDONLY)
        try:
            return os.preadv(fd, [bytearray(4096)], self.files[0].offset, os.RWF_NOWAIT) < 4096
        except BlockingIOError:
            return True
        except OSError:  # not known on this file system
            return True
        finally:
            os.close(fd)


def milliseconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1000
