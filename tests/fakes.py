"""A tiny, honest backend, and engines to drive in tests.

`EchoBackend` "attends" by reading every token and position back from the pages, and its next token is a hash of all
it has read: any foreign, stale, missing or misplaced row changes the answer, which `expected` computes without pages.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rewake.backends.base import Backend, Batch, Output
from rewake.engine import Engine
from rewake.quant import CODECS, PAGE_TOKENS, PageLayout
from rewake.request import Done, Event, Failed, Generated, Match, Request, Sampling
from rewake.spec import CacheGroup, ModelCacheSpec
from rewake.store.crypto import Cipher
from rewake.store.directory import UNLIMITED, Directory
from rewake.store.files import Files

VOCAB = 1000
ROW = 16  # bytes of K of one row: the token and its position
LAYOUT = PageLayout(layers=1, kv_heads=1, k_dim=8, v_dim=8, codec=CODECS["bf16"])
SIGNATURE = b"echo"


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
    """See the module. `before_step` can make a step fail or wait."""

    def __init__(self, num_pages: int) -> None:
        self.spec = ModelCacheSpec((CacheGroup("full", (0,), 1, 1, 8, 8),), VOCAB, 100_000, ())
        self.layout = LAYOUT
        self.arena = np.zeros(num_pages * LAYOUT.page_bytes, np.uint8)
        self.before_step: Callable[[Batch], None] = lambda batch: None
        self.num_computed = 0

    def forward(self, batch: Batch) -> Output:
        self.before_step(batch)
        tokens = []
        for row in batch.rows:
            for i, token in enumerate(row.tokens):
                if (position := row.start + i) >= row.first_append:
                    self._row(row.slots, position)[:8] = np.frombuffer(struct.pack("<ii", token, position), np.uint8)
            self.num_computed += len(row.tokens)
            if row.sampling is not None:
                tokens.append(self._attend(row.slots, row.end))
        return Output(tuple(tokens), np.array(tokens, np.float32)[:, None])

    def _row(self, slots: Sequence[int], position: int) -> Any:
        at = slots[position // PAGE_TOKENS] + position % PAGE_TOKENS * ROW
        return self.arena[at : at + ROW]

    def _attend(self, slots: Sequence[int], length: int) -> int:
        seen = [struct.unpack("<ii", self._row(slots, p)[:8].tobytes()) for p in range(length)]
        if [position for _, position in seen] != list(range(length)):
            return 1  # a token `expected` never gives
        return expected([token for token, _ in seen])

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
        self.start(backend or EchoBackend(num_pages))

    def start(self, backend: Backend) -> None:
        self.backend: Any = backend
        store = (
            Directory(self.data, self.signature, backend.layout, budget=self.disk, free_floor=0, files=self.files, cipher=self.cipher)
            if self.data is not None
            else None
        )
        self.engine = Engine(backend, self.signature, store, **self.options).start()
        self.memory = self.engine.memory
        self.memory.residency.gate.always = self.always_load

    def restart(self, backend: Backend | None = None) -> None:
        self.close()
        self.start(backend or EchoBackend(self.num_pages))

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
            for resident in list(self.memory.residency.cached):
                if resident.slot is not None:
                    self.memory.residency.drop(resident)

        self.engine.call(drop).result(30)
