"""The command line: serve, pull, chat, agents, doctor, replay."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from rewake.config import Config, add_flags, load_config
from rewake.errors import ConfigError, RewakeError
from rewake.memory.pool import slot_bytes

__all__ = ["main"]

CHAT_TOKENS, CHAT_TEMPERATURE = 512, 0.2  # of an answer in `chat`: small models ramble, and more so when warm
MODEL_FLAGS = ("model", "kv", "memory", "threads")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it did what was asked, 1 with a message if not, 2 for wrong usage."""
    flags = vars(parser().parse_args(arguments))
    command: Callable[[Config, dict[str, Any]], int] = flags.pop("run")
    try:
        config = load_config(flags)
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("rewake").setLevel(config.log_level.upper())
        return command(config, flags)
    except (RewakeError, httpx.HTTPError) as error:
        say(f"rewake: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="rewake", description="A local LLM server whose agents never re-read.")
    top.add_argument("--version", action="version", version=version("rewake"))
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Config, dict[str, Any]], int], help: str, only: tuple[str, ...] = ()) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        made.set_defaults(run=run)
        add_flags(made, only)
        return made

    command("serve", serve, "serve the OpenAI protocol on this machine")
    command("pull", pull, "fetch a model, and convert it if need be", ("model",))
    chat_parser = command("chat", chat, "talk to an agent of a running server", ("host", "port"))
    chat_parser.add_argument("--agent", required=True, metavar="NAME", help="whose memory is used; the talk itself starts anew")
    agents_parser = command("agents", agents, "list, show or forget agents of a running server", ("host", "port"))
    agents_parser.add_argument("action", choices=("ls", "show", "forget"))
    agents_parser.add_argument("agent", nargs="?", metavar="NAME")
    command("doctor", doctor, "tell what would run here, and why", ("data", "context", *MODEL_FLAGS))
    replay_parser = command("replay", replay_recording, "compute a recording of `serve --record` again and compare every bit", MODEL_FLAGS)
    replay_parser.add_argument("recording", metavar="FILE")
    return top


def say(text: str = "", **to: Any) -> None:
    print(text, flush=True, **to)  # noqa: T201 (this is the command line's voice)


def serve(config: Config, _: dict[str, Any]) -> int:
    from rewake.api.app import model_id
    from rewake.api.server import run
    from rewake.service import open_service

    say(f"Loading {config.model} ...")
    service = open_service(config)
    try:
        for key, value in service.backend.describe().items():
            say(f"{key:8} {value}")
        say(f"{'memory':8} {budget(service.backend.layout.page_bytes, config.memory)}")
        where = f"in {config.data}{', encrypted' if config.encrypt else ''}"
        say(f"{'agents':8} {where if config.persist else 'only in memory (--no-persist)'}")
        say(f"Serving {model_id(service)} on http://{config.host}:{config.port}/v1")
        run(service)
    finally:
        service.close()
    return 0


def budget(page_bytes: int, memory: int) -> str:
    pages = memory // slot_bytes(page_bytes)
    return f"{memory} bytes: {pages} pages of 256 tokens, {page_bytes} bytes each ({pages * 256} tokens)"


def pull(config: Config, _: dict[str, Any]) -> int:
    from rewake.models import resolve

    say(str(resolve(config.model)))
    return 0


def doctor(config: Config, _: dict[str, Any]) -> int:
    from rewake.models import resolve
    from rewake.service import load_backend

    path = resolve(config.model)
    backend = load_backend(config, path)
    layout = backend.layout
    full = backend.spec.context_bytes(backend.spec.max_positions, layout.codec, layout.group_size)
    facts = {
        "model": f"{config.model} in {path}",
        **backend.describe(),
        "codec": f"{layout.codec.name}: {layout.token_bytes} bytes a token (--kv)",
        "memory": budget(layout.page_bytes, config.memory) + " (--memory)",
        "context": f"{config.context or backend.spec.max_positions} tokens; the model's longest takes {full} bytes",
        "data": f"{config.data}" + ("" if config.data.exists() else " (not there yet)"),
    }
    for key, value in facts.items():
        say(f"{key:8} {value}")
    return 0


def replay_recording(config: Config, flags: dict[str, Any]) -> int:
    from rewake.models import resolve
    from rewake.replay import num_pages, replay
    from rewake.service import load_backend

    path = Path(flags["recording"])
    if not path.is_file():
        raise ConfigError(f"{path} is not a file")
    model = resolve(config.model)
    page_bytes = load_backend(config, model).layout.page_bytes
    backend = load_backend(replace(config, memory=max(num_pages(path), 1) * slot_bytes(page_bytes)), model)
    steps = list(replay(path, backend))
    different = [s for s in steps if not s.same]
    for step in different[:10]:
        say(f"step {step.number}: recorded {step.recorded}, computed {step.computed}")
    say(json.dumps({"steps": len(steps), "different": len(different)}))
    return 1 if different else 0


class Server:
    """A running server, as the commands see it."""

    def __init__(self, config: Config) -> None:
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"http://{host}:{config.port}"
        self.client = httpx.Client(base_url=self.url, timeout=httpx.Timeout(10, read=None), trust_env=False)  # no proxy to ourselves

    def request(self, method: str, path: str, **arguments: Any) -> Any:
        try:
            response = self.client.request(method, path, **arguments)
        except httpx.ConnectError:
            raise ConfigError(f"no server at {self.url}: start one with `rewake serve`, or name its --port") from None
        return self.checked(response).json()

    def checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_error:
            response.read()
            try:
                raise ConfigError(response.json()["error"]["message"])
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{self.url} is not a rewake server, or not well: {response.status_code}") from None
        return response

    def stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in self.checked(response).iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ConfigError(event["error"]["message"])
                    yield event


def chat(config: Config, flags: dict[str, Any]) -> int:
    server = Server(config)
    model = server.request("GET", "/v1/models")["data"][0]["id"]
    say(f"You talk to {flags['agent']} ({model}). An empty line ends it.")
    messages: list[dict[str, str]] = []
    while text := ask():
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answer(server, model, flags["agent"], messages)})
    return 0


def ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def answer(server: Server, model: str, agent: str, messages: list[dict[str, str]]) -> str:
    """Print an answer as it comes, and how it was woken."""
    started, first, text = time.perf_counter(), None, ""
    body = {
        "model": model,
        "agent_id": agent,
        "messages": messages,
        "stream": True,
        "max_tokens": CHAT_TOKENS,
        "temperature": CHAT_TEMPERATURE,
    }
    for event in server.stream(body):
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            if piece and first is None:
                first = time.perf_counter() - started
            text += piece
            say(piece, end="")
        if "rewake" in event:
            how = event["rewake"]
            waited = f"{(first or 0) * 1000:.0f} ms to the first token"
            say(f"\n  [{how['match']}: {how['reused_tokens']} tokens reused, {how['computed_tokens']} computed, {waited}]")
    return text


def agents(config: Config, flags: dict[str, Any]) -> int:
    server, name = Server(config), flags["agent"]
    if flags["action"] == "ls":
        rows = server.request("GET", "/v1/agents")["data"]
        say(f"{'agent':24} {'tokens':>8} {'branches':>8} {'in memory':>10} {'on disk':>8} {'MB on disk':>10}  last used")
        for row in rows:
            used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["used"]))
            say(
                f"{row['agent']:24} {row['tokens']:8} {row['branches']:8} {row['pages_in_memory']:10}"
                f" {row['pages_on_disk']:8} {row['bytes_on_disk'] / 1e6:10.1f}  {used}"
            )
        return 0
    if not name:
        raise ConfigError(f"`rewake agents {flags['action']}` needs the agent's name")
    method = "GET" if flags["action"] == "show" else "DELETE"
    for key, value in server.request(method, f"/v1/agents/{quote(name, safe='')}").items():
        say(f"{key:16} {value}")
    return 0
