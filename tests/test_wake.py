"""The promise, on real weights: an agent that was evicted, restarted or killed goes on as if it never had been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rewake.planes import slot_bytes
from rewake.quant import CODECS, PAGE_TOKENS
from rewake.service import signature
from tests.fakes import EngineHarness
from tests.server import ServerProcess
from tests.shadow import WORDS, ShadowBackend, story, torch_backend


def test_killed_evicted_and_restarted_agents_continue_bit_for_bit(tmp_path: Path, kv: str) -> None:
    """Claim 1: a process that never evicts replays the recorded steps of both servers, and every logit is equal."""
    recording = tmp_path / "steps.jsonl"
    slots, size = {"q4": (7, 1_658_880), "q4+": (12, 1_658_880), "bf16": (7, 5_898_240)}[kv]
    budget = slots * slot_bytes(size)  # three agents of three pages do not fit
    talks = {f"agent{i}": [{"role": "user", "content": story(i, 45)}] for i in range(3)}
    with ServerProcess(tmp_path / "data", "--kv", kv, "--memory", str(budget), "--record", str(recording)) as server:
        for _ in range(2):
            for agent, messages in talks.items():
                text, report = server.chat(agent, messages, max_tokens=8)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        assert report["match"] == "extend" and report["loaded_tokens"] > 0, "the budget was to force evictions"

        text, report = server.chat("agent0", talks["agent0"], max_tokens=8)
        server.kill()  # right behind the last chunk
        assert report["saved"]
        server.start()
        again, woken = server.chat("agent0", talks["agent0"], max_tokens=8)
        assert woken["match"] == "exact" and woken["computed_tokens"] == 1 and woken["loaded_tokens"] == woken["reused_tokens"]
        assert again == text
        turn = [*talks["agent0"], {"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
        _, next_turn = server.chat("agent0", turn, max_tokens=8)
        assert next_turn["match"] == "extend"
        known = report["prompt_tokens"] + report["completion_tokens"] - 1  # the last generated token was not computed on
        assert next_turn["reused_tokens"] == known
        for agent in ("agent1", "agent2"):
            _, report = server.chat(agent, talks[agent], max_tokens=8)
            assert report["match"] == "extend" and report["loaded_tokens"] > 0

    command = [sys.executable, "-m", "rewake", "replay", str(recording), "--kv", kv, "--threads", "2"]
    replayed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert json.loads(replayed.stdout.splitlines()[-1])["steps"] > 50


def test_other_settings_find_the_same_memories(tmp_path: Path) -> None:
    """R9, R2, and claim 1: context, rows a step, chunk, threads, budgets and port are others; the second began where the first was."""
    talks = {name: [{"role": "user", "content": story(i, 30)}] for i, name in enumerate(("first", "second"))}
    with ServerProcess(tmp_path / "data", "--memory", "200MiB", "--context", "4096", "--max-running", "8") as server:
        answers = {name: server.chat(name, messages, max_tokens=8)[0] for name, messages in talks.items()}
        server.stop()
        server.flags = (
            "--memory",
            "120MiB",
            "--context",
            "2048",
            "--max-running",
            "2",
            "--chunk",
            "128",
            "--disk",
            "2GiB",
            "--threads",
            "1",
        )
        server.start()
        for name, messages in talks.items():
            text, report = server.chat(name, messages, max_tokens=8)
            assert (report["match"], report["computed_tokens"]) == ("exact", 1) and report["loaded_tokens"] == report["reused_tokens"]
            assert text == answers[name]


def test_sigterm_in_the_middle_of_an_answer_ends_it_with_an_error_and_keeps_what_was_computed(tmp_path: Path) -> None:
    """D3, A8."""
    messages = [{"role": "user", "content": "Count to one thousand, slowly."}]
    with ServerProcess(tmp_path / "data", "--drain", "0") as server:
        events = []
        for event in server.stream("a", messages, max_tokens=4000):
            events.append(event)
            if len(events) == 5:
                server.process.terminate()
        assert "shutting down" in events[-1]["error"]["message"]
        assert server.process.wait(30) == 0
        server.start()
        _, report = server.chat("a", messages, max_tokens=1)
        assert report["match"] == "exact" and report["loaded_tokens"] > 0
        assert server.http.get("/v1/agents/a").json()["tokens"] > report["prompt_tokens"]


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGKILL], ids=lambda second: second.name)
def test_a_second_signal_ends_it_at_once_and_harms_nothing(tmp_path: Path, second: signal.Signals) -> None:
    """D3: the first one lets answers go on; what was acknowledged before is there."""
    messages = [{"role": "user", "content": "Tell me a long story about a river and a stone."}]
    with ServerProcess(tmp_path / "data", "--drain", "60") as server:
        text, report = server.chat("a", messages, max_tokens=10)
        assert report["saved"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Tell me another long story, about a lamp."}]
        with suppress(httpx.TransportError):
            for number, _ in enumerate(server.stream("a", messages, max_tokens=4000)):
                if number in (5, 8):
                    server.process.send_signal(signal.SIGTERM if number == 5 else second)
                assert number < 2000
        assert number >= 8, "the first signal did not stop the answer"
        assert server.process.wait(5) != 0
        server.start()
        _, report = server.chat("a", messages, max_tokens=1)
        assert report["match"] in ("extend", "exact") and report["loaded_tokens"] > 30


@pytest.fixture
def forty(tmp_path: Path, real_model: Any, kv: str) -> Iterator[EngineHarness]:
    backend = ShadowBackend(torch_backend(real_model, kv, 4 * 2))
    sign = signature(backend.facts())
    made = EngineHarness(tmp_path, backend, signature=sign, trace=backend.trace)
    yield made
    made.close()


def test_forty_agents_under_a_budget_for_four(forty: EngineHarness) -> None:
    """Claim 2: what is attended is exactly what was appended, whatever was evicted and loaded meanwhile."""
    rng = np.random.default_rng(0)
    prompts = {f"agent{i}": rng.integers(20, 49000, 300).tolist() for i in range(40)}
    pendings = {name: forty.submit(prompt, name, max_tokens=4) for name, prompt in prompts.items()}
    answers = {}
    for name, pending in pendings.items():
        assert pending.result(600).num_generated == 4
        answers[name] = pending.tokens
    loaded = 0
    for name in list(prompts)[::4]:
        pending = forty.ask(prompts[name] + answers[name] + [100 + int(name[5:])], name, max_tokens=4)
        assert pending.match.kind == "extend" and pending.match.computed_tokens == 2
        loaded += pending.match.loaded_tokens > 0
    assert loaded >= 6, "most of them had to come back from disk"
    assert forty.backend.num_compared > 12_000


def test_a_flipped_byte_is_noticed_and_recomputed(tmp_path: Path, real_model: Any, kv: str) -> None:
    """W2, and claim 1: the answer's bits are those before the damage, as the steps that make them are."""
    backend = torch_backend(real_model, kv, 8)
    harness = EngineHarness(tmp_path, backend, signature=signature(backend.facts()))
    prompt = np.random.default_rng(1).integers(20, 49000, 600).tolist()
    answer = harness.ask(prompt, "a", max_tokens=6).tokens
    harness.evict_all()
    page = sorted(p for p in tmp_path.glob("pages/*/*.safetensors") if ".1." not in p.name)[0]  # codes, not what refines them
    content = bytearray(page.read_bytes())
    content[len(content) // 2] ^= 1
    page.write_bytes(content)
    pending = harness.ask(prompt, "a", max_tokens=6)
    assert pending.match.computed_tokens >= 600 - PAGE_TOKENS
    assert len(list(tmp_path.glob("quarantine/*"))) == 1
    if pending.match.reused_tokens == 0:
        assert pending.tokens == answer
    assert harness.ask(prompt, "a", max_tokens=6).match.computed_tokens == 1
    harness.close()


def test_q4_pages_are_0_281_of_fp16_by_file_size(tmp_path: Path, real_model: Any) -> None:
    backend = torch_backend(real_model, "q4", 8)
    harness = EngineHarness(tmp_path, backend, signature=signature(backend.facts()))
    harness.ask(list(range(20, 20 + PAGE_TOKENS)), "a", max_tokens=1)
    harness.close()
    (page,) = tmp_path.glob("pages/*/*.safetensors")
    with open(page, "rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    group = backend.spec.group
    fp16 = PAGE_TOKENS * len(group.layers) * group.kv_heads * (group.k_dim + group.v_dim) * 2
    assert (page.stat().st_size - header) / fp16 == 0.28125
    assert CODECS["q4"].k_bits == 4


def test_sixteen_agents_at_once_never_tell_anothers_secret(tmp_path: Path) -> None:
    """W1: together, under eviction pressure, and after a restart."""
    secrets = [f"{WORDS[i % len(WORDS)]}{i}x{i * 7919 % 1000}" for i in range(16)]
    budget = 14 * slot_bytes(1_658_880)  # sixteen agents of two pages do not fit

    def ask(server: ServerProcess, i: int) -> str:
        told = f"My secret word is {secrets[i]}. {story(i, 12)} Repeat my secret word."
        return server.chat(f"agent{i}", [{"role": "user", "content": told}], max_tokens=16)[0]

    with ServerProcess(tmp_path / "data", "--memory", str(budget)) as server, ThreadPoolExecutor(16) as pool:
        for _ in range(2):
            for _ in range(2):
                for i, text in enumerate(pool.map(lambda i: ask(server, i), range(16))):
                    others = [s for s in secrets if s in text and s != secrets[i] and s not in secrets[i]]
                    assert text and not others, f"agent{i} has said {others}"
            server.kill()
            server.start()
