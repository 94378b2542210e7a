"""The engine: one thread that admits requests, computes steps, and hands out what comes of them.

    receive     requests, cancellations, finished loads and saves: functions other threads posted
    admit       match, reserve, load (memory.agents); a request joins at any step
    schedule    plan() decides what the step computes
    forward     one ragged batch through the model; attention reads the coded pages
    append      new rows are in the pages: full pages settle, tokens go out
    persist     ended turns are recorded and saved; `Done` follows the commit

Everything it owns is touched by its thread alone. Knows no HTTP, no text and no tensors.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from rewake.backends.base import Backend, Batch, Output, Row
from rewake.errors import ContextLengthExceeded, InternalError, InvalidRequest, Overloaded, ShuttingDown
from rewake.memory.ledger import Trace
from rewake.memory.memory import AgentMemory
from rewake.request import Done, Failed, FinishReason, Generated, Request
from rewake.scheduler import Need, Part, plan
from rewake.sequence import Sequence
from rewake.store.base import Store

__all__ = ["Engine"]

log = logging.getLogger(__name__)

T = TypeVar("T")
MOST_WAITING = 1000  # requests in the queue before new ones are turned away
StepTrace = Callable[[Batch, Output], None]


class Engine:
    """Runs requests on one backend, with one memory."""

    def __init__(
        self,
        backend: Backend,
        signature: bytes,
        store: Store | None,
        *,
        context: int = 0,
        max_running: int = 16,
        chunk: int = 512,
        trace: Trace | None = None,
        step_trace: StepTrace | None = None,
    ) -> None:
        """`context` bounds prompt + answer (0: the model's own bound). The traces are told of all that pages depend on."""
        self.backend = backend
        self.context = min(context or backend.spec.max_positions, backend.spec.max_positions)
        self.max_running = max_running
        self.chunk = chunk
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # before the memory: what it forgets at once is posted
        self.memory = AgentMemory(backend.arena, backend.layout, signature, store, self.post, trace)
        self.waiting: deque[Request] = deque()
        self.opening: dict[str, Request] = {}
        self.running: list[Sequence] = []
        self.closing: list[Request] = []
        self._store = store
        self._step_trace = step_trace or (lambda *_: None)
        self._cancelled: set[str] = set()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rewake-engine", daemon=True)

    # ---- for other threads

    def start(self) -> Engine:
        self._thread.start()
        return self

    def submit(self, request: Request) -> None:
        """Queue a request; what becomes of it goes to `request.emit`. Raises RequestError if it cannot be taken."""
        self._check(request)
        if len(self.waiting) >= MOST_WAITING:
            raise Overloaded(f"{len(self.waiting)} requests are waiting already")
        self.post(lambda: self.waiting.append(request))

    def _check(self, request: Request) -> None:
        """Refuse, before any work, what cannot be answered."""
        if self._stopping or not self.is_alive:
            raise ShuttingDown("the server is shutting down" if self._failure is None else "the engine has failed: see the log")
        if not request.prompt:
            raise InvalidRequest("the prompt is empty", param="messages")
        if len(request.prompt) + request.max_tokens > self.context:
            raise ContextLengthExceeded(
                f"{len(request.prompt)} prompt tokens and up to {request.max_tokens} new ones are more than the context of {self.context}",
                param="messages",
            )
        self.memory.check_fits(request)

    def cancel(self, request_id: str) -> None:
        """Stop a request within a step, keeping what it has computed. It ends with `Done`, reason "cancelled"."""
        self.post(lambda: self._cancelled.add(request_id))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function between two steps, where it may look at the memory and change it."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 (whatever it is, the caller gets it)
                future.set_exception(error)

        if self.is_alive:
            self.post(run)
        else:
            future.set_exception(ShuttingDown("the engine does not run"))
        return future

    def post(self, function: Callable[[], None]) -> None:
        """Have the engine's thread run a function before its next step."""
        self._inbox.put(function)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def begin_stop(self) -> None:
        """Take no more requests and cancel what runs, keeping what it has computed; does not wait."""
        self.post(self._stop)

    def stop(self) -> None:
        """As `begin_stop`, then wait until all is saved and the thread has ended."""
        self.begin_stop()
        self._thread.join()
        self.memory.ledger.close()
        if self._store is not None:
            self._store.close()

    def _stop(self) -> None:
        self._stopping = True
        self._cancelled |= {r.id for r in self.waiting} | set(self.opening) | {s.request.id for s in self.running}

    # ---- the thread

    def _run(self) -> None:
        try:
            computed = False
            while not (self._stopping and self.is_idle):
                computed = self.step(wait=not computed)
        except BaseException as error:  # the edge of the thread: everybody who waits must be told
            log.exception("the engine has failed")
            self._failure = error
            while not self._inbox.empty():  # requests that came meanwhile
                self._inbox.get()()
            for request in (*self.waiting, *self.opening.values(), *(s.request for s in self.running), *self.closing):
                request.emit(Failed(InternalError("the engine has failed: see the log")))

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.opening or self.running or self.closing)

    def step(self, wait: bool = False) -> bool:
        """The life of every request, once around; whether anything was computed. May `wait` for something to do."""
        self._receive(wait)
        self._drop_cancelled()
        self._admit()
        self.memory.agents.expire_now_and_then()
        # tokens go on while the disk is behind; prompts, whose pages would have to wait for it, do not
        chunk = 0 if self.memory.ledger.is_backed_up else self.chunk
        parts = plan([Need(s.next_position, s.num_pending) for s in self.running], chunk)
        if not parts:
            return False
        batch = self._batch(parts)
        started = time.perf_counter()
        try:
            output = self.backend.forward(batch)
        except Exception:
            log.exception("a step has failed: its requests are answered with an error")
            self._fail([self.running[part.index] for part in parts])
            return True
        self.memory.note_computed(sum(p.num_tokens for p in parts), time.perf_counter() - started)
        self._step_trace(batch, output)
        self._append(parts, batch, output)
        return True

    def _receive(self, wait: bool) -> None:
        """Run what was posted; sleep until there is something (or an agent expires), if nothing else is left to do."""
        if wait:
            with suppress(queue.Empty):
                self._inbox.get(timeout=self.memory.agents.expire())()
        while not self._inbox.empty():
            self._inbox.get()()

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self.running if s.request.id in self._cancelled]:
            self._close(sequence, "cancelled")
        for request in [r for r in self.waiting if r.id in self._cancelled]:
            self.waiting.remove(request)
            request.emit(Failed(ShuttingDown("the request was cancelled before it began")))
        self._cancelled &= set(self.opening)

    def _admit(self) -> None:
        """Open waiting requests in their order, one at a time for each agent, as long as there is room."""
        at_work = [*self.closing, *(s.request for s in self.memory.open_sequences)]
        busy = {(request.namespace, request.agent) for request in at_work}
        for request in list(self.waiting):
            if len(self.memory.open_sequences) >= self.max_running:
                return
            who = (request.namespace, request.agent)
            if request.agent is not None and who in busy:
                continue
            self.opening[request.id] = request
            self.waiting.remove(request)
            if not self.memory.open(request, lambda sequence, request=request: self._opened(request, sequence)):  # type: ignore[misc]
                del self.opening[request.id]
                self.waiting.appendleft(request)
                return
            busy.add(who)

    def _opened(self, request: Request, sequence: Sequence | None) -> None:
        del self.opening[request.id]
        if sequence is None:  # a file was damaged: match again
            self.waiting.appendleft(request)
        else:
            self.running.append(sequence)

    def _batch(self, parts: tuple[Part, ...]) -> Batch:
        rows = []
        for part in parts:
            sequence = self.running[part.index]
            start = sequence.next_position
            end = start + part.num_tokens
            self.memory.grow(sequence, end)
            rows.append(
                Row(
                    tokens=tuple(sequence.tokens[start:end]),
                    start=start,
                    first_append=sequence.num_stored,
                    slots=tuple(sequence.slots()),
                    names=tuple(sequence.page_names()),
                    sampler=sequence.request.id,
                    sampling=sequence.request.sampling if end == len(sequence.tokens) else None,
                )
            )
        return Batch(tuple(rows))

    def _append(self, parts: tuple[Part, ...], batch: Batch, output: Output) -> None:
        """The rows are in the pages: settle what is full, and go on with what was sampled."""
        sampled = iter(output.tokens)
        sequences = [self.running[part.index] for part in parts]
        for sequence, row in zip(sequences, batch.rows, strict=True):
            self.memory.advance(sequence, row.end)
            if row.sampling is not None:
                self._take_token(sequence, next(sampled))

    def _take_token(self, sequence: Sequence, token: int) -> None:
        sequence.tokens.append(token)
        sequence.num_generated += 1
        if token in sequence.request.stop_tokens:
            self._close(sequence, "stop")
            return
        sequence.request.emit(Generated(token))
        if sequence.num_generated >= sequence.request.max_tokens:
            self._close(sequence, "length")

    def _fail(self, sequences: list[Sequence]) -> None:
        """Rows a failed step may have written lie behind what is recorded: nobody attends to them."""
        for sequence in sequences:
            error = Failed(InternalError("the step that computed this request has failed: see the server's log"))
            self._end(sequence, lambda _, error=error: error, is_turn=False)  # type: ignore[misc]

    def _close(self, sequence: Sequence, reason: FinishReason) -> None:
        is_turn = reason != "cancelled"
        self._end(sequence, lambda saved: Done(reason, sequence.match, sequence.num_generated, saved), is_turn=is_turn)

    def _end(self, sequence: Sequence, event: Callable[[bool], Done | Failed], *, is_turn: bool) -> None:
        """Remember what was computed; the event goes out when it is known whether that is saved."""
        self.running.remove(sequence)
        self.backend.forget_sampler(sequence.request.id)
        self.closing.append(sequence.request)

        def closed(saved: bool) -> None:
            self.closing.remove(sequence.request)
            sequence.request.emit(event(saved))

        self.memory.close(sequence, closed, is_turn=is_turn)
