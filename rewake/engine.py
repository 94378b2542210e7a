"""The engine: one thread that admits requests, computes steps, and hands out what comes of them.

    receive     requests, cancellations, finished loads and saves: functions other threads posted
    admit       match, reserve, load (memory.memory); a request joins at any step
    schedule    plan() decides what the step computes
    forward     one ragged batch through the model; attention reads the coded pages
    append      new rows are in the pages: full pages settle, tokens go out
    persist     ended turns are recorded and saved; `Done` follows the commit

Everything it owns is touched by its thread alone. Knows no HTTP, no text and no tensors.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from rewake.backends.base import Backend, Batch, Output, Row
from rewake.counts import Counts
from rewake.errors import (
    RESTART,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestError,
    ShuttingDown,
)
from rewake.memory.ledger import Trace
from rewake.memory.memory import AgentMemory
from rewake.memory.tree import OWN_BRANCH, common_length
from rewake.request import Done, Failed, FinishReason, Generated, Request
from rewake.scheduler import Need, admission_order, num_too_many, plan, seconds_to_go
from rewake.sequence import Sequence
from rewake.store.base import Store

__all__ = ["Engine"]

log = logging.getLogger(__name__)

T = TypeVar("T")
MOST_LOOKED_AT = 64  # waiting requests that are considered in one step
MOST_OVERTAKEN = 32  # how often later requests may be admitted before one for which there is no room yet
RECENT_ADMISSIONS = 32  # by which it is told when there will be a place
UNNOTICED = 0.02  # seconds between two tokens more, that no reader sees
MOST_RETRY_AFTER = 600  # seconds
MOST_BEGINNINGS, WITHIN = 3, 60.0  # how often the engine begins again, in how many seconds, before it stays down
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
        max_waiting: int = 256,
        chunk: int = 512,
        trace: Trace | None = None,
        step_trace: StepTrace | None = None,
    ) -> None:
        """`context` bounds prompt + answer (0: the model's own bound). The traces are told of all that pages depend on."""
        self.backend = backend
        self.context = min(context or backend.spec.max_positions, backend.spec.max_positions)
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.chunk = chunk
        self._signature = signature
        self._store = store
        self._trace = trace
        self._step_trace = step_trace or (lambda *_: None)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # before the memory: what it forgets at once is posted
        self._cancelled: set[str] = set()
        self._stopping = False
        self._drain_until = math.inf
        self._failure: BaseException | None = None
        self._has_ended = False  # nothing that is posted from here on is ever run
        self._entry = threading.Lock()  # who comes in, and whether anybody still does
        self._coming: list[Request] = []  # posted, and not yet among those that wait
        self._admissions: deque[float] = deque(maxlen=RECENT_ADMISSIONS)  # when, of late, since somebody has to wait
        self._beginnings: list[float] = []
        self.counts = Counts()
        self._clock = 0  # prompt tokens computed
        self._step_seconds = 0.0
        self._begin()
        self._thread = threading.Thread(target=self._run, name="rewake-engine", daemon=True)

    def _begin(self) -> None:
        """Nothing is at work, and the memory is what the store has."""
        number = len(self._beginnings)

        def post(function: Callable[[], None]) -> None:
            self.post(lambda: function() if len(self._beginnings) == number else None)  # not for the memory before

        self.memory = AgentMemory(
            self.backend.arena, self.backend.planes, self._signature, self._store, post, self._trace, most_step=self.chunk
        )
        self._nobody()

    def _nobody(self) -> None:
        """No request is at work."""
        self.waiting: list[Request] = []
        self.opening: dict[str, Request] = {}
        self.running: list[Sequence] = []
        self.closing: list[Request] = []
        self._overtaken: dict[str, int] = {}

    # ---- for other threads

    def start(self) -> Engine:
        self._thread.start()
        return self

    def submit(self, request: Request) -> None:
        """Queue a request; what becomes of it goes to `request.emit`. Raises RequestError if it cannot be taken."""
        self._check(request)
        with self._entry:
            if self._has_ended:
                raise ShuttingDown("the engine does not run", retry_after=self.retry_after)
            self._check_place(request.namespace)
            self._coming.append(request)
            self.post(lambda: self._come(request))

    def _check_place(self, namespace: str) -> None:
        """Raises Overloaded if so many wait that a namespace may not have one more."""
        waiting = Counter(r.namespace for r in (*self.waiting, *self._coming))
        too_many = num_too_many(waiting, namespace, self.max_waiting)
        if too_many:
            seconds = seconds_to_go(too_many, len(waiting), tuple(self._admissions), time.monotonic())
            told = f"{waiting[namespace]} requests are waiting already (--max-waiting)"  # its own: others' are none of its business
            raise Overloaded(told, retry_after=max(1, min(MOST_RETRY_AFTER, math.ceil(seconds))))

    def _come(self, request: Request) -> None:
        with self._entry:
            self._coming.remove(request)
            self.waiting.append(request)

    def _check(self, request: Request) -> None:
        """Refuse, before any work, what cannot be answered."""
        if (reason := self.why_not_ready) is not None:
            raise ShuttingDown(reason, retry_after=self.retry_after)
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

    def cancel_agent(self, namespace: str, agent: str) -> int:
        """As `cancel`, for all that an agent is asked; how many requests that are. For the engine's thread."""
        ids = {r.id for r in self._at_work if (r.namespace, r.agent) == (namespace, agent)}
        self._cancelled |= ids
        return len(ids)

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

        with self._entry:
            if self.is_alive and not self._has_ended:
                self.post(run)
                return future
        future.set_exception(ShuttingDown("the engine does not run", retry_after=self.retry_after))
        return future

    def post(self, function: Callable[[], None]) -> None:
        """Have the engine's thread run a function before its next step."""
        self._inbox.put(function)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def why_not_ready(self) -> str | None:
        """Why no request is taken now; None if they are."""
        if self._stopping and self._failure is None:
            return "the server is shutting down"
        return None if self.is_alive else "the engine has failed: see the log"

    @property
    def retry_after(self) -> int:
        """Where no requests are taken, seconds after which another server may be there: when this one has gone, if it goes."""
        left = self._drain_until - time.monotonic()
        return RESTART + math.ceil(max(0.0, WITHIN if left == math.inf else left))

    def begin_stop(self, drain_seconds: float = 0.0) -> None:
        """Take no more requests; those at work have `drain_seconds`, then they are cancelled, keeping what they have computed.

        Does not wait.
        """

        def stop() -> None:
            self._stopping = True
            self._drain_until = min(self._drain_until, time.monotonic() + drain_seconds)

        self.post(stop)

    def stop(self) -> None:
        """As `begin_stop`, then wait until all is saved and the thread has ended."""
        self.begin_stop()
        self._thread.join()
        self.memory.ledger.close()
        if self._store is not None:
            self._store.close()

    @property
    def _at_work(self) -> tuple[Request, ...]:
        return (*self.waiting, *self.opening.values(), *(s.request for s in self.running))

    # ---- the thread

    def _run(self) -> None:
        while True:
            try:
                computed = False
                while not (self._stopping and self.is_idle):
                    computed = self.step(wait=not computed)
                break
            except BaseException as error:  # the edge of the thread: everybody who waits must be told
                log.exception("the engine has failed")
                self._answer_all(InternalError("the engine has failed: see the log"))
                if not self._begin_again():
                    self._failure = error
                    break
        with self._entry:
            self._has_ended = True
        self._answer_all(ShuttingDown(self.why_not_ready or "the engine does not run"))  # who came at the last moment

    def _answer_all(self, error: InternalError | ShuttingDown) -> None:
        while not self._inbox.empty():  # requests that came meanwhile
            with suppress(Exception):  # of a memory that is no longer sound
                self._inbox.get()()
        requests = (*self._at_work, *self.closing)
        self._nobody()
        for request in requests:
            self.backend.forget_sampler(request.id)
            request.emit(Failed(error))

    def _begin_again(self) -> bool:
        """Start from what is on disk, as after a crash; False if that has been done too often, or cannot be done."""
        now = time.monotonic()
        if sum(now - at < WITHIN for at in self._beginnings) >= MOST_BEGINNINGS:
            log.error("the engine has failed %d times in a minute: it stays down", MOST_BEGINNINGS + 1)
            return False
        self.memory.ledger.close()
        self._beginnings.append(now)
        try:
            self._begin()
        except Exception:
            log.exception("the engine cannot begin again: it stays down")
            return False
        log.warning("the engine goes on with what is on disk")
        return True

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.opening or self.running or self.closing)

    def step(self, wait: bool = False) -> bool:
        """The life of every request, once around; whether anything was computed. May `wait` for something to do."""
        self._receive(wait)
        self._drop_cancelled()
        self._admit()
        self._wait_for_short_loads()
        work = self._schedule()
        if work:
            self._compute(work)
        return bool(work)

    def _receive(self, wait: bool) -> None:
        """Run what was posted; if nothing else is left to do, sleep until there is something, or somebody's time is over."""
        self.memory.agents.expire_now_and_then()
        if wait:
            now = time.monotonic()
            self._run_posted(min([self.memory.agents.seconds_to_look(), *(at - now for at in self._deadlines() if at > now)]))
        while not self._inbox.empty():
            self._inbox.get()()

    def _run_posted(self, timeout: float) -> None:
        with suppress(queue.Empty):
            self._inbox.get(timeout=None if timeout == math.inf else max(0.0, timeout))()

    def _deadlines(self) -> Iterable[float]:
        return [r.deadline for r in self._at_work if r.deadline is not None] + [self._drain_until]

    def _drop_cancelled(self) -> None:
        """What was cancelled, and whose time is over; when the server has waited long enough to go, everybody's is."""
        now = time.monotonic()
        is_over = now >= self._drain_until
        gone = {r.id for r in self._at_work} if is_over else self._cancelled
        for sequence in list(self.running):
            if sequence.request.id in gone:
                self._close(sequence, "cancelled")
            elif (sequence.request.deadline or math.inf) <= now:
                self._end(sequence, lambda _: Failed(DeadlineExceeded("its deadline has passed; what was computed is remembered")))
        for request in list(self.waiting):
            if request.id in gone:
                why = ShuttingDown("the server is shutting down") if is_over else Cancelled("the request was cancelled before it began")
                self._turn_away(request, why)
            elif (request.deadline or math.inf) <= now:
                self._turn_away(request, DeadlineExceeded("its deadline has passed before it began"))
        self._cancelled &= set(self.opening)

    def _turn_away(self, request: Request, error: RequestError) -> None:
        self.waiting.remove(request)
        self._overtaken.pop(request.id, None)
        request.emit(Failed(error))

    # ---- admitting

    def _admit(self) -> None:
        """Open waiting requests: namespaces in turn, one at a time for each agent, as long as there is room."""
        at_work = [*self.closing, *(s.request for s in self.memory.open_sequences)]
        busy = {(request.namespace, request.agent) for request in at_work}
        order = admission_order([r.namespace for r in self.waiting], [r.namespace for r in at_work])
        for request in [self.waiting[i] for i in order[:MOST_LOOKED_AT]]:
            if len(self.memory.open_sequences) >= self.max_running:
                return
            who = (request.namespace, request.agent)
            if (request.agent is not None and who in busy) or self._is_led(request):
                busy.add(who)  # in order: what comes after it waits, too
                continue
            busy.add(who)  # whether there is room for it or not
            if not self._open(request) and self._must_not_be_overtaken(request):
                return
        if not self.waiting:
            self._admissions.clear()

    def _open(self, request: Request) -> bool:
        place = self.waiting.index(request)
        del self.waiting[place]
        self.opening[request.id] = request
        if self.memory.open(request, lambda sequence: self._opened(request, sequence)):
            self._admissions.append(time.monotonic())
            self._overtaken.pop(request.id, None)
            return True
        del self.opening[request.id]
        self.waiting.insert(place, request)
        return False

    def _must_not_be_overtaken(self, request: Request) -> bool:
        """There is no room for it yet. Smaller ones may go before it, but not for ever."""
        self._overtaken[request.id] = self._overtaken.get(request.id, 0) + 1
        return self._overtaken[request.id] > MOST_OVERTAKEN

    def _is_led(self, request: Request) -> bool:
        """Whether somebody is computing what this prompt begins with: then it waits for that instead of computing it, too."""
        for leader in self.memory.open_sequences:
            if leader.request.namespace == request.namespace and leader.is_prefilling:
                known = max(leader.num_stored, leader.match.reused_tokens)
                if common_length(leader.request.prompt, request.prompt) - known > OWN_BRANCH:
                    return True
        return False

    def _opened(self, request: Request, sequence: Sequence | None) -> None:
        del self.opening[request.id]
        if sequence is None:  # a file was damaged: match again
            self.waiting.insert(0, request)
        else:
            self.counts.matched(sequence.match)
            sequence.rank = self._clock + sequence.num_pending
            self.running.append(sequence)

    def _wait_for_short_loads(self) -> None:
        """Pages that are there before another step would be over are worth waiting for, up to the time of one step.

        Without them their sequence would wait for a whole step of the others; with them the others' tokens are at most two steps apart.
        Where steps are shorter than anybody notices, so may the wait be longer.
        """
        patience = max(self._step_seconds, UNNOTICED)
        if self.memory.seconds_to_load() > patience:
            return
        until = time.monotonic() + patience
        while self.opening and self.running and (left := until - time.monotonic()) > 0:
            self._run_posted(left)

    # ---- computing

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """Who computes how many tokens in this step."""
        # tokens go on while the disk is behind; prompts, whose pages would have to wait for it, do not
        chunk = 0 if self.memory.ledger.is_backed_up else self.chunk
        needs = [Need(s.next_position, s.num_pending, s.rank, s.request.namespace) for s in self.running]
        work = [(self.running[part.index], part.num_tokens) for part in plan(needs, chunk)]
        return [work[i] for i in self.memory.with_room([(s, s.next_position + count) for s, count in work])]

    def _compute(self, work: list[tuple[Sequence, int]]) -> None:
        """One forward. If it fails, its halves are tried alone, so that only those fail that must."""
        batch = self._batch(work)
        started = time.perf_counter()
        try:
            output = self.backend.forward(batch)
        except Exception:
            log.exception("a step of %d sequences has failed", len(work))
            if len(work) == 1:
                self._fail(work[0][0])
                return
            middle = len(work) // 2
            self._compute(work[:middle])
            self._compute(work[middle:])
            return
        self._step_seconds = time.perf_counter() - started
        num_tokens = sum(n for _, n in work)
        self._clock += sum(n for s, n in work if s.is_prefilling)
        self.memory.note_computed(num_tokens, self._step_seconds)
        self._step_trace(batch, output)
        self._count(batch, output, num_tokens)
        self._append(batch, output, [sequence for sequence, _ in work])

    def _batch(self, work: list[tuple[Sequence, int]]) -> Batch:
        rows = []
        for sequence, num_tokens in work:
            start = sequence.next_position
            end = start + num_tokens
            self.memory.grow(sequence, end)
            rows.append(
                Row(
                    tokens=tuple(sequence.tokens[start:end]),
                    start=start,
                    first_append=sequence.num_stored,
                    tables=sequence.tables(self.backend.planes),
                    names=tuple(sequence.page_names()),
                    sampler=sequence.request.id,
                    sampling=sequence.request.sampling if end == len(sequence.tokens) else None,
                )
            )
        return Batch(tuple(rows))

    def _count(self, batch: Batch, output: Output, num_tokens: int) -> None:
        """The step, for the monitor, before its tokens are taken."""
        self.counts.computed(self._step_seconds, num_tokens, len(output.tokens))
        now, sampled = time.perf_counter(), {row.sampler for row in batch.rows if row.sampling is not None}
        for sequence in self.running:
            if sequence.is_prefilling and sequence.request.id in sampled:
                self.counts.ttft.observe(now - sequence.request.arrived)

    def _append(self, batch: Batch, output: Output, sequences: list[Sequence]) -> None:
        """The rows are in the pages: settle what is full, and go on with what was sampled."""
        sampled = enumerate(output.tokens)
        for sequence, row in zip(sequences, batch.rows, strict=True):
            self.memory.advance(sequence, row.end)
            if row.sampling is not None:
                number, token = next(sampled)
                self._take_token(sequence, Generated(token, output.logprobs.get(number)))

    def _take_token(self, sequence: Sequence, sampled: Generated) -> None:
        request = sequence.request
        sequence.tokens.append(sampled.token)
        sequence.num_generated += 1
        if sampled.token in request.stop_tokens:
            self._close(sequence, "stop")
            return
        keep = request.watch(sampled.token) if request.watch is not None else None
        request.emit(sampled)
        if keep is not None:
            self.memory.shorten(sequence, len(request.prompt) + keep)
            self._close(sequence, "stop")
        elif sequence.num_generated >= request.max_tokens:
            self._close(sequence, "length")

    # ---- ending

    def _fail(self, sequence: Sequence) -> None:
        """Rows a failed step may have written lie behind what is recorded: nobody attends to them."""
        error = InternalError("the step that computed this request has failed: see the server's log")
        self._end(sequence, lambda _: Failed(error))

    def _close(self, sequence: Sequence, reason: FinishReason) -> None:
        is_turn = reason != "cancelled"
        self._end(sequence, lambda saved: Done(reason, sequence.match, sequence.num_generated, saved), is_turn=is_turn)

    def _end(self, sequence: Sequence, event: Callable[[bool], Done | Failed], *, is_turn: bool = False) -> None:
        """Remember what was computed; the event goes out when it is known whether that is saved."""
        self.running.remove(sequence)
        self.backend.forget_sampler(sequence.request.id)
        self.closing.append(sequence.request)

        def closed(saved: bool) -> None:
            self.closing.remove(sequence.request)
            sequence.request.emit(event(saved))

        self.memory.close(sequence, closed, is_turn=is_turn)
