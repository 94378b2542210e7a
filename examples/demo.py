"""Four agents read long texts, the server is killed with SIGKILL, and they wake up. Run it with `make demo`."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

import httpx

MODEL = "smollm2-135m"
AGENTS = ("coder", "writer", "reviewer", "planner")
WORDS = "river stone cloud lamp paper engine garden window violin harbour copper meadow signal".split()
NUM_SENTENCES = 150


def main() -> int:
    with tempfile.TemporaryDirectory() as data:
        port = free_port()
        talks = {name: [{"role": "user", "content": text_for(name)}] for name in AGENTS}
        cold, hot, restored = {}, {}, {}
        server = start(data, port)
        for name, talk in talks.items():
            print(f"{name} reads a story of {NUM_SENTENCES} sentences ...", flush=True)
            cold[name] = say(port, name, talk)[0]
        for name, talk in talks.items():
            hot[name] = say(port, name, talk)[0]
        print("kill -9", flush=True)
        server.send_signal(signal.SIGKILL)
        server.wait()
        server = start(data, port)
        how = {}
        for name, talk in talks.items():
            restored[name], how[name] = say(port, name, talk)
        server.terminate()
        server.wait()
    print("\nTime to the first token: of the first turn (cold), of the second (hot), and of the third, after the kill (restored)")
    print(f"{'agent':10} {'tokens':>7} {'cold':>9} {'hot':>9} {'restored':>9} {'speed-up':>9}")
    for name in AGENTS:
        row = f"{cold[name]:6.0f} ms {hot[name]:6.0f} ms {restored[name]:6.0f} ms {cold[name] / restored[name]:8.1f}x"
        report = how[name]
        print(f"{name:10} {report['prompt_tokens']:7} {row}   {report['loaded_tokens']} from disk, {report['computed_tokens']} computed")
    return 0


def text_for(name: str) -> str:
    rng = random.Random(name)
    told = (
        f"The {rng.choice(WORDS)} stood near the {rng.choice(WORDS)}, and the {rng.choice(WORDS)} was quiet." for _ in range(NUM_SENTENCES)
    )
    return f"The story of the {name}. " + " ".join(told)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(data: str, port: int) -> subprocess.Popen[bytes]:
    print("starting the server ...", flush=True)
    command = [sys.executable, "-m", "rewake", "serve", "--data", data, "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while server.poll() is None:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health").raise_for_status()
            return server
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit("the server did not start: run `make serve` to see why")


def say(port: int, agent: str, talk: list[dict[str, str]]) -> tuple[float, dict[str, int]]:
    """One turn of up to 12 tokens: milliseconds to its first token, and the server's report. The talk grows by it."""
    body = {"messages": talk, "agent_id": agent, "stream": True, "max_tokens": 12, "temperature": 0, "model": MODEL}
    started, first, text, report = time.perf_counter(), 0.0, "", {}
    with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=None) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            report = event.get("rewake", report)
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                if not first and (piece or choice["finish_reason"]):  # an answer may be empty
                    first = (time.perf_counter() - started) * 1000
                text += piece
    talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
    return first, report


if __name__ == "__main__":
    raise SystemExit(main())
