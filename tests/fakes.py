"""A tiny, honest backend, and engines to drive in tests.

`EchoBackend` "attends" by reading every row back from the pages: its token, its position, and a digest of all that was
before it and of the model that computed it. Its next token is a hash of all tokens it has read. So any foreign, stale,
missing, misplaced or damaged row changes the answer, which `expected` computes without pages; a row of another agent
or model with the same token at the same position does, too.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rewake.backends.base import NOWHERE, Backend, Batch, Output, Row
from rewake.engine import Engine
from rewake.planes import PagePlanes, Plane
from rewake.quant import CODECS, PAGE_TOKENS, YOUNG_TOKENS, PageLayout
from rewake.request import Done, Event, Failed, Generated, Match, Request, Sampling
from rewake.spec import CacheGroup, ModelCacheSpec
from rewake.store.crypto import Cipher
from rewake.store.directory import UNLIMITED, Directory
from rewake.store.files import Files

VOCAB = 1000
MOST_POSITIONS = 8192
WRONG = 1  # the next token if a row is not what was appended; `expected` never gives it
ROW = np.dtype([("token", "<i4"), ("position", "<i4"), ("history", "<u8")])  # of K; V is the same with every bit turned over
TWICE = np.uint64(2**32 + 1)  # times 32 bits
WEIGHTS = np.random.default_rng(0).integers(1, 2**63, MOST_POSITIONS, np.uint64) | np.uint64(1)
LAYOUT = PageLayout(layers=1, kv_heads=1, k_dim=8, v_dim=8, codec=CODECS["bf16"])
PLANES = PagePlanes.single(LAYOUT)
SIGNATURE = b"echo"


def planes_of(window: int | None, young: bool) -> PagePlanes:
    """A page of one layer that sees everything, and of two that see a window; with what they have beside that while they are young."""
    base = [Plane("full", (0,), LAYOUT, None, None)]
    if window is not None:
        base.append(Plane("sliding", (1, 2), LAYOUT, window - 1, window - 1))
    over = []
    for plane in base:
        reach = YOUNG_TOKENS if plane.reach is None else min(YOUNG_TOKENS, plane.reach)
        over.append(replace(plane, slot=replace(LAYOUT, residuals=True), reach=reach, keeps_segments=True))
    return PagePlanes((*base, *(over if young else ())))


def expected(tokens: Sequence[int]) -> int:
    """The fake's next token behind `tokens`, 2 to VOCAB - 1."""
    digest = hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).digest()
    return 2 + int.from_bytes(digest[:4], "little") % (VOCAB - 2)


def expected_answer(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected(tokens))
    return tokens[len(prompt) :]


class EchoBackend:
    """See the module. `before_step` can make a step fail or wait; `num_wrong` counts answers over rows that were not right.

    K and V of a row depend on `model` as those of a real one depend on its weights. With a `window`, two more layers see that many
    tokens; with `young`, rows have twins that are read for as long as residuals are.

    With `drifts`, a row's V is never quite the same twice, as a real one's codes depend on the rest of their step: those of a plane and
    of what refines it must come from one and the same step, and no two versions of a row may be mixed.
    """

    def __init__(self, num_pages: int, model: bytes = b"", window: int | None = None, young: bool = False, drifts: bool = False) -> None:
        self.spec = ModelCacheSpec((CacheGroup("full", (0,), 1, 1, 8, 8),), VOCAB, 100_000)
        self.planes = planes_of(window, young)
        self.arena = np.zeros(num_pages * self.planes.num_slots * LAYOUT.page_bytes, np.uint8)
        self.before_step: Callable[[Batch], None] = lambda batch: None
        self.num_computed = 0
        self.num_wrong = 0
        self._drift = np.random.default_rng() if drifts else None
        self._beginning = np.frombuffer(hashlib.sha256(model).digest()[:8], np.uint64)

    def forward(self, batch: Batch) -> Output:
        self.before_step(batch)
        tokens = []
        for row in batch.rows:
            self._append(row)
            self.num_computed += len(row.tokens)
            if row.sampling is not None:
                tokens.append(self._attend(row))
        return Output(tuple(tokens), np.array(tokens, np.float32)[:, None])

    def _append(self, row: Row) -> None:
        """Rows from `first_append` on; what was before them is what the pages say."""
        start = max(row.start, row.first_append)
        if start >= row.end:
            return
        new = np.empty(row.end - start, ROW)
        new["token"], new["position"] = row.tokens[start - row.start :], np.arange(start, row.end)
        first = self._beginning if not start else self._history_behind(self._rows(row.tables[0], start - 1, start))
        new["history"] = np.concatenate([first, self._history_behind(new, first)[:-1]])
        twins = ~new.view(np.uint64).reshape(-1, 2)
        if self._drift is not None:
            twins[:, 1] ^= self._drift.integers(0, 2**32, len(new), np.uint64) * TWICE
        at = start
        while at < row.end:
            end = min(row.end, (at // PAGE_TOKENS + 1) * PAGE_TOKENS)
            for table in row.tables:
                k, v = self._page(table[at // PAGE_TOKENS])
                part = slice(at % PAGE_TOKENS, (end - 1) % PAGE_TOKENS + 1)
                k[part] = new[at - start : end - start]
                v.view(np.uint64).reshape(-1, 2)[part] = twins[at - start : end - start]
            at = end

    def _history_behind(self, rows: Any, before: Any = None) -> Any:
        """A multilinear hash of the tokens up to and with each row, modulo 2**64."""
        terms = (rows["token"].astype(np.uint64) + np.uint64(1)) * WEIGHTS[rows["position"] % MOST_POSITIONS]
        return (rows["history"] if before is None else before) + np.cumsum(terms, dtype=np.uint64)

    def _page(self, slot: int) -> tuple[Any, Any]:
        page = self.arena[slot : slot + LAYOUT.page_bytes].view(ROW)
        return page[:PAGE_TOKENS], page[PAGE_TOKENS:]

    def _rows(self, slots: Sequence[int], start: int, end: int) -> Any:
        """K of rows [start, end) of one page."""
        return self._page(slots[start // PAGE_TOKENS])[0][start % PAGE_TOKENS : (end - 1) % PAGE_TOKENS + 1]

    def _attend(self, row: Row) -> int:
        k, v = self._all_rows(row.tables[0], 0, row.end)
        history = np.concatenate([self._beginning, self._history_behind(k, self._beginning)[:-1]])
        right = self._are_twins(k, v) and (k["position"] == np.arange(row.end)).all() and (k["history"] == history).all()
        tables = iter(row.tables)
        seen: list[dict[int, Any]] = []  # of each slot so far, V of each page
        for plane in self.planes.planes:
            for _ in range(plane.num_slots):
                table = next(tables)
                seen.append({})
                for page in range(-(-row.end // PAGE_TOKENS)):
                    if plane.is_needed(page, row.start):
                        at, end = page * PAGE_TOKENS, min(row.end, (page + 1) * PAGE_TOKENS)
                        again, v = self._all_rows(table, at, end)
                        if plane.slot.residuals:
                            refined = seen[len(seen) - 1 - len(row.tables) // 2][page]
                            right = right and (self._are_middles(again, v) or (v == refined).all())
                            if self._are_middles(again, v):
                                continue
                        right = right and (again == k[at:end]).all() and self._are_twins(again, v)
                        seen[-1][page] = v
        if not right:
            self.num_wrong += 1
            return WRONG
        return expected(k["token"].tolist())

    def _are_middles(self, k: Any, v: Any) -> bool:
        """Whether these are residuals of a page whose own are nowhere any more: the middle of each step."""
        return (k.view(np.uint8) == 0x88).all() and (v.view(np.uint8) == 0x88).all()

    def _are_twins(self, k: Any, v: Any) -> bool:
        """Whether V is that of K, but for its drift, which stands there twice."""
        drift = v.reshape(-1, 2) ^ ~k.view(np.uint64).reshape(-1, 2)
        return not drift[:, 0].any() and bool((drift[:, 1] == (drift[:, 1] >> np.uint64(32)) * TWICE).all())

    def _all_rows(self, table: Sequence[int], start: int, end: int) -> tuple[Any, Any]:
        """K of rows [start, end), and V as 64-bit numbers."""
        first = start // PAGE_TOKENS
        places = table[first : -(-end // PAGE_TOKENS)]
        assert NOWHERE not in places, "a page that a query attends to is not in the arena"
        pages = [self._page(slot) for slot in places]
        part = slice(start - first * PAGE_TOKENS, end - first * PAGE_TOKENS)
        return np.concatenate([k for k, _ in pages])[part], np.concatenate([v for _, v in pages])[part].view(np.uint64)

    def forget_sampler(self, sampler: str) -> None: ...

    def facts(self) -> dict[str, Any]:
        return {"fake": True}

    def describe(self) -> dict[str, str]:
        return {"backend": "fake"}


class Pending:
    """A submitted request; `result` waits for it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.first_token = threading.Event()
        self._ended = threading.Event()
        self._end: Done | Failed | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, Generated):
            self.tokens.append(event.token)
            self.first_token.set()
        else:
            self._end = event
            self._ended.set()

    def result(self, timeout: float = 120) -> Done:
        assert self._ended.wait(timeout), "no answer"
        if isinstance(self._end, Failed):
            raise self._end.error
        assert self._end is not None
        return self._end

    @property
    def is_saved(self) -> bool:
        """Whether it has been acknowledged as saved by now."""
        return isinstance(self._end, Done) and self._end.saved

    @property
    def match(self) -> Match:
        return self.result().match


class EngineHarness:
    """An engine that can be killed and restarted on one directory."""

    def __init__(
        self,
        data: Path | None,
        backend: Backend | None = None,
        *,
        num_pages: int = 64,
        signature: bytes = SIGNATURE,
        max_running: int = 16,
        always_load: bool = True,
        cipher: Cipher | None = None,
        disk: int = UNLIMITED,
        files: Files | None = None,
        window: int | None = None,
        young: bool = False,
        drifts: bool = False,
        **engine: Any,
    ) -> None:
        self.data = data
        self.signature = signature
        self.num_pages = num_pages
        self.cipher = cipher
        self.always_load = always_load  # this backend computes faster than any disk reads
        self.disk = disk
        self.files = files
        self.options = {"max_running": max_running, **engine}
        self._next = 0
        self.shape: dict[str, Any] = {"window": window, "young": young, "drifts": drifts}
        self.start(backend or EchoBackend(num_pages, **self.shape))

    def start(self, backend: Backend) -> None:
        self.backend: Any = backend
        store = (
            Directory(self.data, self.signature, backend.planes, budget=self.disk, free_floor=0, files=self.files, cipher=self.cipher)
            if self.data is not None
            else None
        )
        self.engine = Engine(backend, self.signature, store, **self.options).start()
        self.memory = self.engine.memory
        self.memory.residency.gate.always = self.always_load

    def restart(self, backend: Backend | None = None) -> None:
        self.close()
        self.start(backend or EchoBackend(self.num_pages, **self.shape))

    def close(self) -> None:
        self.check()
        self.engine.stop()

    def check(self) -> None:
        self.engine.call(self.memory.check).result(30)

    def submit(self, prompt: Sequence[int], agent: str | None = None, max_tokens: int = 4, **request: Any) -> Pending:
        pending = Pending()
        self._next += 1
        pending_id = f"r{self._next}"
        pending.id = pending_id  # type: ignore[attr-defined]
        sampling = request.pop("sampling", Sampling(temperature=0))
        self.engine.submit(Request(pending_id, tuple(prompt), max_tokens, pending.emit, sampling, agent=agent, **request))
        return pending

    def ask(self, prompt: Sequence[int], agent: str | None = None, max_tokens: int = 4, **request: Any) -> Pending:
        """Submit and wait."""
        pending = self.submit(prompt, agent, max_tokens, **request)
        pending.result()
        return pending

    def evict_all(self) -> None:
        """Drop everything cached from the arena, as memory pressure would."""

        def drop() -> None:
            for piece in list(self.memory.residency.cached):
                if piece in self.memory.residency.cached:  # it may have gone with another
                    self.memory.residency.drop(piece)

        self.engine.call(drop).result(30)
