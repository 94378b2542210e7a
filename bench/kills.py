"""Real servers that are really killed: SIGKILL from outside at any moment, or by the process itself at a step of a write.

What is killed is `rewake serve`, in a process of its own, with a real model (a tiny random Llama, so that a start takes a
second and not four), the real tokenizer, and HTTP between us. A zygote that has imported everything, and has no
threads, forks them: what a child runs is the command line's own `main`.

A chain is one directory whose server is killed again and again, while three agents stream. Behind each kill the next
server must know every turn whose last chunk said `saved: true`: the latest of each agent and some older ones are asked for.
All servers of a chain record their steps into one file; at its end a process that never evicts and was never killed
computes every step again, and every logit must be equal.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rewake.memory.tree import OWN_BRANCH
from rewake.models import DEFAULT_MODEL, resolve
from rewake.planes import slot_bytes
from rewake.quant import CODECS, PageLayout
from rewake.store.files import Files
from tests.faults import STEPS, Toll
from tests.server import free_port

AGENTS = ("ada", "bob", "cyd")
LAYERS, HIDDEN, HEAD = 2, 64, 64
PAGES = 16  # in memory: less than the agents have, so that some are on disk only
PATIENCE = 10.0  # seconds until a step that does not come is waited for no longer
LONGEST = 8  # messages of a talk, before it begins anew
CODEC_OF = ("q4", "bf16", "q4", "k8v4")  # of chains in turn
IMPORTED = (
    *("rewake.cli", "rewake.service", "rewake.api.app", "rewake.api.server", "rewake.backends.torch.model"),
    *("transformers.models.llama.modeling_llama", "uvicorn.lifespan.on", "uvicorn.loops.auto", "uvicorn.protocols.http.auto"),
)
WORDS = "river stone cloud lamp paper engine garden window violin harbour copper meadow signal".split()


def make_model(folder: Path) -> None:
    """A random Llama with the default model's tokenizer. It says words of plain text only: all other tokens score 0."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = resolve(DEFAULT_MODEL)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if "token" in file.name or file.suffix in (".jinja", ".txt"):
            shutil.copy(file, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(0)
    shape = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS, "head_dim": HEAD}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape, **heads)).to(torch.bfloat16)
    plain = torch.tensor(
        [str(tokenizer.decode([i])).strip().isalpha() and str(tokenizer.decode([i])).isascii() for i in range(len(tokenizer))]
    )
    model.lm_head.weight.data[~plain] = 0
    model.lm_head.weight.data *= 20
    model.save_pretrained(folder)


# ---- the zygote: reads commands, forks servers


class LastStep(Files):
    """The process's last step is the `nth` of its kind once `armed` is there."""

    step, nth, before, armed = "", 0, True, Path()
    count = 0

    def _last(self, step: str, do: Any) -> Any:
        mine = type(self)
        due = step == mine.step and mine.armed.exists()
        mine.count += due
        if due and mine.count == mine.nth and mine.before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = do()
        if due and mine.count == mine.nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def _step(name: str) -> Any:
    def step(self: LastStep, *arguments: Any) -> Any:
        return self._last(name, lambda: getattr(Files, name)(self, *arguments))

    return step


for _name in STEPS:
    setattr(LastStep, _name, _step(_name))


def zygote() -> None:
    """Serve commands from standard input, one a line; answers go to standard output, in order."""
    for module in IMPORTED:
        importlib.import_module(module)
    assert threading.active_count() == 1
    for line in sys.stdin:
        command = json.loads(line)
        if "wait" in command:
            answer = os.waitpid(command["wait"], 0)[1]
        else:
            answer = os.fork()
            if answer == 0:
                child(**command)
        print(answer, flush=True)


def child(arguments: list[str], log: str, last_step: dict[str, Any] | None) -> None:
    """As `rewake` itself would run; never returns."""
    import rewake.cli
    import rewake.store.directory

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if last_step is not None:
        LastStep.step, LastStep.nth, LastStep.before = last_step["step"], last_step["nth"], last_step["before"]
        LastStep.armed = Path(last_step["armed"])
        rewake.store.directory.Files = LastStep  # type: ignore[misc]
    code = 1
    try:
        code = rewake.cli.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


class Zygote:
    """The other end: forks, and waits for what was forked."""

    def __init__(self) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.kills"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def tell(self, command: dict[str, Any]) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


# ---- a chain of servers on one directory


@dataclass(frozen=True)
class Promise:
    """A turn whose last chunk said that it is saved."""

    agent: str
    messages: tuple[dict[str, str], ...]
    text: str
    known: int  # tokens that have K/V: the last one was sampled, but never computed on
    num_generated: int


@dataclass
class Chain:
    """One directory, and what its agents have been promised."""

    zygote: Zygote
    model: Path
    folder: Path
    number: int
    rng: random.Random
    taken: Counter[str]  # kills at each step, or about to be, of all chains
    toll: Toll = field(default_factory=Toll)
    promises: list[Promise] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)
    asked: int = 0
    shorter: int = 0  # times an agent went on from a shorter branch of its own: up to 64 tokens are computed again rather than copied
    steps: int = 0  # computed again by the replay

    @property
    def codec(self) -> str:
        return CODEC_OF[self.number % len(CODEC_OF)]

    @property
    def base_flags(self) -> list[str]:
        layout = PageLayout(LAYERS, 1, HEAD, HEAD, CODECS[self.codec])
        return ["--model", str(self.model), "--kv", self.codec, "--threads", "1", "--memory", str(PAGES * slot_bytes(layout.page_bytes))]

    @property
    def recording(self) -> Path:
        return self.folder / "steps.jsonl"

    @contextmanager
    def server(self, last_step: dict[str, Any] | None = None) -> Iterator[tuple[httpx.Client, int]]:
        port = free_port()
        flags = [*self.base_flags, "--port", str(port), "--data", str(self.folder / "data"), "--record", str(self.recording)]
        pid = self.zygote.tell({"arguments": ["serve", *flags], "log": str(self.folder / "log"), "last_step": last_step})
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as http:
            for _ in range(3000):
                with suppress(httpx.TransportError):
                    if http.get("/health").is_success:
                        break
                time.sleep(0.01)
            else:
                raise RuntimeError("the server does not start")
            yield http, pid

    def run(self, kills: int) -> None:
        """So many kills, the first from outside, the others at the step that has had the fewest."""
        for i in range(kills):
            last_step = None
            if i:
                step = min(STEPS, key=lambda step: (self.taken[step], self.rng.random()))
                self.taken[step] += 1
                nth = self.rng.randrange(1, 3 if step in ("remove", "sync_folder") else 14)
                last_step = {"step": step, "nth": nth, "before": self.rng.random() < 0.5}
                last_step["armed"] = str(self.folder / f"armed{i}")
            with self.server(last_step) as (http, pid):
                self.verify(http)
                self.talk_until_killed(http, pid, last_step)
        with self.server() as (http, pid):
            self.verify(http)
            os.kill(pid, signal.SIGTERM)
            if status := self.zygote.tell({"wait": pid}):
                self.toll.add("crashes", f"{self.folder.name}: the server was to end, and did with {status}")
        self.replay()

    def verify(self, http: httpx.Client) -> None:
        """The latest promises, and some older ones. Asked for more, only what is new is computed; asked the same again, one token is."""
        latest = {p.agent: p for p in self.promises}
        for promise in latest.values():
            more = [*promise.messages, said("assistant", promise.text), said("user", self.words(5))]
            _, report = chat(http, promise.agent, more, 2)
            reused = report["reused_tokens"] if report is not None else 0
            self.shorter += promise.known - OWN_BRANCH <= reused < promise.known
            self.expect(reused >= promise.known - OWN_BRANCH, promise, report)
        for promise in [*latest.values(), *self.rng.sample(self.promises, min(3, len(self.promises)))]:
            _, report = chat(http, promise.agent, list(promise.messages), promise.num_generated)
            self.expect(report is not None and report["computed_tokens"] == 1, promise, report)

    def expect(self, kept: bool, promise: Promise, report: dict[str, Any] | None) -> None:
        self.asked += 1
        if not kept:
            self.toll.add("lost", f"{self.folder.name}: {promise.agent}: {promise.known} tokens were known: {report}")

    def talk_until_killed(self, http: httpx.Client, pid: int, last_step: dict[str, Any] | None) -> None:
        """All agents stream. If the process does not come to its last step, it is killed from outside all the same."""
        gone, where = threading.Event(), "at any moment"
        seeds = {agent: self.rng.random() for agent in AGENTS}
        threads = [threading.Thread(target=self.talk, args=(http, agent, seeds[agent], gone)) for agent in AGENTS]
        if last_step is not None:
            Path(last_step["armed"]).touch()
        for thread in threads:
            thread.start()
        if last_step is None:
            time.sleep(self.rng.uniform(0.01, 1.2))
        elif gone.wait(PATIENCE):  # a client has lost its connection
            where = last_step["step"]
        else:
            self.taken[last_step["step"]] -= 1
        os.kill(pid, signal.SIGKILL)  # it is not waited for yet: even if it is dead, the id is its own
        gone.set()
        for thread in threads:
            thread.join(60)
        status = self.zygote.tell({"wait": pid})
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            self.toll.add("crashes", f"{self.folder.name}: the server ended with {status} before it was killed")
        self.kills[where] = self.kills.get(where, 0) + 1

    def talk(self, http: httpx.Client, agent: str, seed: float, gone: threading.Event) -> None:
        """Turn after turn, until the server is gone."""
        rng = random.Random(seed)
        while not gone.is_set():
            last = next((p for p in reversed(self.promises) if p.agent == agent), None)
            before = [*last.messages, said("assistant", last.text)] if last and len(last.messages) < LONGEST and rng.random() < 0.8 else []
            messages = [*before, said("user", " ".join(rng.choices(WORDS, k=rng.choice((3, 20, 120, 250)))))]
            try:
                text, report = chat(http, agent, messages, rng.choice((3, 12, 30)))
            except httpx.TransportError:
                gone.set()
                return
            if report is None:
                self.toll.add("crashes", f"{self.folder.name}: {agent} was not answered: {text}")
            elif report["saved"]:
                known = report["prompt_tokens"] + report["completion_tokens"] - 1
                self.promises.append(Promise(agent, tuple(messages), text, known, report["completion_tokens"]))
            else:
                self.toll.add("unsaved", f"{self.folder.name}: {agent}")

    def words(self, count: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=count))

    def replay(self) -> None:
        """Claim 1: the steps of all servers, computed by one that was never killed and never evicts."""
        log = self.folder / "replay"
        pid = self.zygote.tell({"arguments": ["replay", str(self.recording), *self.base_flags], "log": str(log), "last_step": None})
        status = self.zygote.tell({"wait": pid})
        if status:
            self.toll.add("wrong", f"{self.folder.name}: {log.read_text()[-500:]}")
        else:
            self.steps = json.loads(log.read_text().splitlines()[-1])["steps"]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(http: httpx.Client, agent: str, messages: list[dict[str, str]], max_tokens: int) -> tuple[str, dict[str, Any] | None]:
    """The text and the last chunk's report; None if the stream ended with an error instead. Raises TransportError when the server dies."""
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": max_tokens}
    text, report = "", None
    with http.stream("POST", "/v1/chat/completions", json={"model": "tiny", "agent_id": agent, **body}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return event["error"]["message"], None
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                if "rewake" in event:
                    report = {**event["rewake"], "completion_tokens": event["usage"]["completion_tokens"]}
            elif response.is_error:
                text += line
    return text, report


if __name__ == "__main__":
    zygote()
