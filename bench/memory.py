"""What keeping memories costs, and how soon they are there again.

  amplification  bytes written for 50 turns of 100 tokens on a context of 3,072 (on 4,096 they would not fit the model's
                 8,192), against the bytes of the new tokens' K/V alone.
                 A row is written once with its turn, and once more when its page is full, unless both happen at once: at most 2,
                 plus headers (some 20 KB a file) and the manifest
  gap            the longest time between two tokens of an answer of 600, with saving on and off: the writer has its own
                 thread, and the engine hands over pages without copying them
  ready          from nothing to a memory that takes requests, for 1,000 agents with 20,000 pages: the manifest is read, no page is
  match          a chat of 32k tokens in 160 messages, all but the last remembered: messages in, token ids and pages out; among
                 those 1,000 agents; once where the server has seen the text, once right after its start
  idle           what 200 agents of 4,096 tokens cost each outside the arena: their token ids twice (pages, transcripts), keys, records
  restore        bytes a second from the page cache to the arena, checked, for a context of 4,096

Times are medians, of interleaved repetitions where two are compared.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import Bar, finish, flags, table
from bench.ttft import evict
from rewake.config import Config
from rewake.memory.memory import AgentMemory
from rewake.memory.tree import TOKEN, PrefixTree
from rewake.planes import PagePlanes
from rewake.quant import CODECS, PAGE_TOKENS, PageLayout
from rewake.request import Done, Event, Failed, Generated, Request, Sampling
from rewake.service import Service, open_service
from rewake.store.base import AgentRecord, BranchRecord, Commit, PageRecord
from rewake.store.directory import Directory
from rewake.text.tokenizer import Tokenizer
from rewake.text.transcripts import Transcripts

NAMESPACE, SIGNATURE = "default", b"bench"
SMALL = PageLayout(1, 1, 64, 64, CODECS["q4"])  # where pages only have to be there: 20,000 real ones would take 33 GB
PLANES = PagePlanes.single(SMALL)


def ids(seed: object, count: int) -> list[int]:
    return random.Random(str(seed)).choices(range(100, 49_000), k=count)


# ---- with a model


def ask(service: Service, prompt: list[int], agent: str, max_tokens: int) -> tuple[list[int], list[float], Done]:
    """The answer's tokens, when each came, and how it ended."""
    import queue

    events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
    name = f"{agent}-{time.perf_counter()}"
    emit: Callable[[Event], None] = lambda event: events.put((time.perf_counter(), event))  # noqa: E731
    service.engine.submit(Request(name, tuple(prompt), max_tokens, emit, Sampling(temperature=0), agent=agent))
    tokens: list[int] = []
    times: list[float] = []
    while True:
        at, event = events.get()
        if isinstance(event, Generated):
            tokens.append(event.token)
            times.append(at)
        elif isinstance(event, Failed):
            raise event.error
        else:
            return tokens, times, event


def written_by_process() -> int:
    """Bytes handed to the file system by this process, the manifest's and its log's included; Linux only."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar"):
            return int(line.split()[1])
    raise RuntimeError("no wchar in /proc/self/io")


def amplification(service: Service, turns: int) -> dict[str, Any]:
    text = ids("context", 3072)
    store = service.engine._store
    assert store is not None
    answer, _, _ = ask(service, text, "amplified", 4)
    text += answer
    new_tokens, by_store, by_process = 0, store.bytes_written, written_by_process()
    for turn in range(turns):
        text += ids(turn, 90)
        answer, _, done = ask(service, text, "amplified", 10)
        assert done.saved and done.match.computed_tokens == 91, done
        text += answer
        new_tokens += 100
    alone = new_tokens * service.backend.planes.token_bytes
    return {
        "turns": turns,
        "new tokens' bytes": alone,
        "written": store.bytes_written - by_store,
        "with the manifest": written_by_process() - by_process,
        "amplification": (written_by_process() - by_process) / alone,
    }


def gaps(services: dict[str, Service], repetitions: int, tokens: int) -> dict[str, float]:
    """Milliseconds: the median of the longest gap of an answer, with and without saving, and the median step."""
    longest: dict[str, list[float]] = {name: [] for name in services}
    steps: list[float] = []
    for repetition in range(repetitions):
        for name, service in services.items():
            _, times, _ = ask(service, ids(("gap", repetition), 900), f"gap{repetition}", tokens)
            between = [(b - a) * 1000 for a, b in pairwise(times[4:])]
            longest[name].append(max(between))
            steps.append(statistics.median(between))
    return {**{f"longest gap, {name} ms": statistics.median(g) for name, g in longest.items()}, "median step ms": statistics.median(steps)}


def restore(service: Service, repetitions: int) -> dict[str, Any]:
    text = ids("restore", 4096)
    ask(service, text, "restored", 2)
    times = []
    pages = (4096 + 1) // PAGE_TOKENS
    for _ in range(repetitions):
        evict(service)
        started = time.perf_counter()
        woken = wake(service, "restored")
        times.append(time.perf_counter() - started)
        assert woken >= pages, woken
    rate = woken * service.backend.planes.page_bytes / statistics.median(times)
    return {"tokens": 4096, "ms": statistics.median(times) * 1000, "GB/s": rate / 1e9}


def wake(service: Service, agent: str) -> int:
    from concurrent.futures import Future

    woken: Future[int] = Future()
    service.engine.call(lambda: service.engine.memory.agents.wake(NAMESPACE, agent, woken.set_result)).result()
    return woken.result()


# ---- without one


def fill(path: Path, agents: int, pages: int, first: list[int]) -> None:
    """A directory of `agents` with `pages` each; the first of them remembers `first`, whatever that takes."""
    store = Directory(path, SIGNATURE, PLANES)
    tree = PrefixTree(SIGNATURE)
    data = memoryview(bytes(SMALL.page_bytes))
    for number in range(agents):
        tokens = array(TOKEN, first if number == 0 else ids(number, pages * PAGE_TOKENS))
        records, parent = [], tree.root(NAMESPACE)
        for at in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
            page = tree.add_page(NAMESPACE, parent, tokens[at : at + PAGE_TOKENS])
            name = f"pages/{page.key.hex()[:2]}/{page.key.hex()}.safetensors"
            file = store.write(name, [data], 0, PAGE_TOKENS, {"namespace": NAMESPACE, "tokens": page.tokens.tobytes().hex()})
            records.append(PageRecord(page.key, parent.key, len(records) + 1, NAMESPACE, page.tokens.tobytes(), (file,)))
            parent = page
        rest, turns = tokens[len(records) * PAGE_TOKENS :], array(TOKEN, [len(tokens)]).tobytes()
        branch = BranchRecord(f"{number:032x}", NAMESPACE, f"agent{number}", parent.key, rest.tobytes(), (), 0.0, float(number), turns)
        agent = AgentRecord(f"{number:032x}", NAMESPACE, f"agent{number}", 0.0, float(number))
        store.commit(Commit(pages=tuple(records), branches=(branch,), agents=(agent,)))
    store.close()


class NoSync:
    """Building a directory is not what is measured."""

    def __enter__(self) -> None:
        from rewake.store.files import Files

        self.sync, Files.sync = Files.sync, lambda self, fd: None  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        from rewake.store.files import Files

        Files.sync = self.sync  # type: ignore[method-assign]


def opened(path: Path) -> AgentMemory:
    arena = np.zeros(16 * SMALL.page_bytes, np.uint8)
    return AgentMemory(arena, PLANES, SIGNATURE, Directory(path, SIGNATURE, PLANES), lambda function: None)


def close(memory: AgentMemory) -> None:
    memory.ledger.close()
    assert memory.ledger.store is not None
    memory.ledger.store.close()


def chat_of(tokens: int, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Messages of about `tokens` tokens, a user's and an assistant's in turn."""
    rng = random.Random(0)
    words = [w for w in (tokenizer.decode([i]).strip() for i in rng.sample(range(1000, 20_000), 4000)) if w.isalpha()]
    messages: list[dict[str, Any]] = []
    while len(messages) < 160:
        text = " ".join(rng.choices(words, k=tokens // 160 - 6))  # what stands around a message takes some
        messages.append({"role": ("user", "assistant")[len(messages) % 2], "content": text})
    return messages


def ready_and_match(path: Path, tokenizer: Tokenizer, agents: int, repetitions: int) -> list[dict[str, Any]]:
    messages = chat_of(32_000, tokenizer)
    first = tokenizer.encode(tokenizer.render(messages))
    with NoSync():
        fill(path, agents, 20, first)
    ready, seen, fresh = [], [], []
    for repetition in range(repetitions):
        started = time.perf_counter()
        memory = opened(path)
        ready.append(time.perf_counter() - started)
        transcripts = Transcripts(tokenizer)
        for times in (fresh, seen):
            question = [*messages, {"role": "user", "content": f"And then? {repetition} {times is seen}"}]
            started = time.perf_counter()
            if not transcripts.knows(NAMESPACE, "agent0"):
                transcripts.learn(NAMESPACE, "agent0", memory.agents.transcripts(NAMESPACE, "agent0"))
            prompt = array(TOKEN, transcripts.encode(NAMESPACE, "agent0", tokenizer.render(question)))
            prefix = memory.tree.longest_prefix(NAMESPACE, prompt, "agent0")
            times.append(time.perf_counter() - started)
            assert prefix.length >= len(first) // PAGE_TOKENS * PAGE_TOKENS and len(prompt) > len(first) > 30_000
        num_pages = sum(hasattr(r, "children") for r in memory.tree.residents())
        close(memory)
    return [
        {"what": f"ready, {agents} agents, {num_pages} pages", "ms": statistics.median(ready) * 1000},
        {"what": f"match, {len(first)} tokens, text seen before", "ms": statistics.median(seen) * 1000},
        {"what": f"match, {len(first)} tokens, first after a start", "ms": statistics.median(fresh) * 1000},
    ]


def idle(path: Path, tokenizer: Tokenizer, agents: int) -> float:
    """KB an agent."""
    with NoSync():
        fill(path, agents, 16, ids(0, 4096))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    memory = opened(path)
    arena = len(memory.residency.arena)
    transcripts = Transcripts(tokenizer)
    for number in range(agents):
        name = f"agent{number}"
        transcripts.learn(NAMESPACE, name, memory.agents.transcripts(NAMESPACE, name))
    cost = (tracemalloc.get_traced_memory()[0] - before - arena) / agents / 1000
    tracemalloc.stop()
    close(memory)
    return cost


def main() -> int:
    args = flags(__doc__).parse_args()
    turns, repetitions, agents, tokens = (10, 2, 100, 300) if args.quick else (50, 7, 1000, 600)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        config = replace(Config(), data=path / "data")
        services = {"saving": open_service(config), "not saving": open_service(replace(config, persist=False))}
        amplified = amplification(services["saving"], turns)
        settling = open_service(replace(config, kv="q4+", data=path / "settling"))
        settled = amplification(settling, turns)
        settling.close()
        gap = gaps(services, repetitions, tokens)
        restored = restore(services["saving"], repetitions)
        tokenizer = services["saving"].tokenizer
        for service in services.values():
            service.close()
        times = ready_and_match(path / "many", tokenizer, agents, repetitions)
        kilobytes = idle(path / "idle", tokenizer, 200)
    for rows in ([amplified], [settled], [gap], times, [{"idle agent of 4,096 tokens, KB outside the arena": kilobytes}], [restored]):
        table(rows)
        print()
    ready, seen, fresh = (row["ms"] for row in times)
    bars = [
        Bar("memory", "bytes written / new tokens' bytes, q4", amplified["amplification"], 2.1, most=True),
        Bar("memory", "bytes written / new tokens' bytes in q4, q4+", settled["amplification"], 3.0, most=True),
        Bar(
            "memory",
            "longest gap with saving, less that without, in decode steps",
            (gap["longest gap, saving ms"] - gap["longest gap, not saving ms"]) / gap["median step ms"],
            1,
            most=True,
        ),
        Bar("memory", "ready with 1,000 agents and 20,000 pages, ms", ready, 1000, most=True),
        Bar("memory", "32k EXTEND match, text seen, ms", seen, 20, most=True),
        Bar("memory", "32k EXTEND match, after a start, ms", fresh, 20, most=True),
        Bar("memory", "idle 4k agent outside the arena, KB", kilobytes, 100, most=True),
    ]
    return finish("memory", [amplified, settled, gap, *times, {"idle KB": kilobytes}, restored], bars, args)


if __name__ == "__main__":
    raise SystemExit(main())
