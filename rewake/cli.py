"""The command line: serve, pull, models, calibrate, chat, agents, keys, play, doctor, replay."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from rewake.agents_cli import SERVER_FLAGS, add_agents, add_model, address, connect
from rewake.client import Client
from rewake.config import Config, add_flags, load_config
from rewake.errors import ConfigError, InvalidRequest, NotFound, RewakeError, Unauthorized
from rewake.keys_cli import add_keys
from rewake.logs import begin_logging
from rewake.planes import PagePlanes
from rewake.play_cli import PLAY_FLAGS, add_play, play
from rewake.spec import CacheGroup
from rewake.terminal import count, say, size

__all__ = ["main"]

CHAT_TOKENS, CHAT_TEMPERATURE = 512, 0.2  # of an answer in `chat`: small models ramble, and more so when warm
AGENT_SIZES = (4096, 8192, 16384, 32768)  # tokens
MODEL_FLAGS = ("model", "weights", "kv", "kv_loss", "memory", "threads")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it did what was asked, 1 with a message if not, 2 for wrong usage."""
    flags = vars(parser().parse_args(arguments))
    command: Callable[[Config, dict[str, Any]], int] = flags.pop("run")
    try:
        config = load_config(flags)
        begin_logging(config.log_level, config.log_format)
        return command(config, flags)
    except Unauthorized as error:
        say(f"rewake: {error}; the command line takes it from REWAKE_API_KEY", file=sys.stderr)
        return 1
    except (RewakeError, httpx.HTTPError) as error:
        say(f"rewake: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read this has seen enough: `rewake models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still writes when it ends
        return 141


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="rewake", description="A local LLM server whose agents never re-read.")
    top.add_argument("--version", action="version", version=version("rewake"))
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str,
        run: Callable[[Config, dict[str, Any]], int],
        help: str,
        only: tuple[str, ...] = (),
        helps: Mapping[str, str] = MappingProxyType({}),
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        made.set_defaults(run=run)
        add_flags(made, only, helps)
        return made

    command("serve", serve, "serve the protocols of OpenAI and Anthropic on this machine")
    pull_parser = command("pull", pull, "fetch models as they are now, and convert them if need be", ("model",))
    pull_parser.add_argument("names", nargs="*", metavar="MODEL", help="as for --model")
    command("models", list_models, "list the models that are on this machine", ("log_level",))
    about = "measure a model: centre its keys, so that they lose less in few bits, and tell what each codec loses"
    calibrate_parser = command("calibrate", calibrate, about, ("model", "weights", "threads", "kv_loss"))
    calibrate_parser.add_argument("--text", type=Path, metavar="FILE", help="what to measure on (text the model itself writes)")
    calibrate_parser.add_argument("--again", action="store_true", help="even if it was done before")
    chat_parser = command("chat", chat, "talk to an agent of a running server", tuple(SERVER_FLAGS), SERVER_FLAGS)
    chat_parser.add_argument("--agent", required=True, metavar="NAME", help="whom you talk to; a talk that it remembers goes on")
    chat_parser.add_argument("--new", action="store_true", help="begin a new talk; the old one stays as an older branch")
    add_model(chat_parser)
    about = "list, fork, rewind, pin, export, import or forget agents of a running server"
    add_agents(commands.add_parser("agents", help=about, description=about[0].upper() + about[1:] + "."))
    about = "make, list, limit, rotate or revoke the API keys of a server"
    add_keys(commands.add_parser("keys", help=about, description=about[0].upper() + about[1:] + "."))
    add_play(command("play", play, "play a scenario: agents in rooms and phases, on a running server or one of its own", PLAY_FLAGS))
    command("doctor", doctor, "tell what would run here, and why", ("data", "context", *MODEL_FLAGS))
    replay_parser = command("replay", replay_recording, "compute a recording of `serve --record` again and compare every bit", MODEL_FLAGS)
    replay_parser.add_argument("recording", metavar="FILE")
    return top


def serve(config: Config, _: dict[str, Any]) -> int:
    from rewake.api.auth import Access
    from rewake.api.server import listen, run
    from rewake.heap import share_heaps
    from rewake.services import Services

    share_heaps()  # before there are threads
    access = Access(config)
    with listen(config) as socket:  # first: a port that is taken is no reason to load a model
        say(f"Loading {config.model} ...")
        services = Services(config)
        try:
            service = services.loaded[services.default]
            for key, value in service.backend.describe().items():
                say(f"{key:8} {value}")
            say(f"{'memory':8} {budget(service.backend.planes, service.config.memory)}")
            if more := services.names[1:]:
                say(f"{'models':8} {', '.join(more)} when asked for; {services.max_loaded} loaded at once, {size(config.memory)} for all")
            where = f"in {config.data}{', encrypted' if config.encrypt else ''}"
            say(f"{'agents':8} {where if config.persist else 'only in memory (--no-persist)'}")
            del service  # it may be unloaded
            say(f"{'window':8} {address(config)}/ui")
            say(f"Serving {', '.join(services.names)} on {address(config)}/v1")
            run(services, socket, access)
        finally:
            services.close()
    return 0


def budget(planes: PagePlanes, memory: int) -> str:
    slots = memory // planes.slot_bytes
    if planes.num_slots > 1 or planes.fleeting:
        taken = f"a page of 256 tokens takes {planes.num_slots}, fewer when it is old"
        return f"{size(memory)}: {slots} slots of {size(planes.slot_bytes)}; {taken}"
    return f"{size(memory)}: {slots} pages of 256 tokens, {size(planes.page_bytes)} each ({slots * 256} tokens)"


def pull(config: Config, flags: dict[str, Any]) -> int:
    from rewake.models import pull

    for name in flags["names"] or config.models:
        say(str(pull(name)))
    return 0


def list_models(config: Config, _: dict[str, Any]) -> int:
    from rewake.cache import models_path
    from rewake.models import WHEELS, kept

    there = kept()
    for name, folder in there:
        taken = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        say(f"{name or '(a local GGUF file)':40} {size(taken):>10}  {folder}")
    for name in sorted(set(WHEELS) - {name for name, _ in there}):
        say(f"{name:40} {'':>10}  not fetched yet")
    say(f"They are kept in {models_path()} (REWAKE_MODELS); --model also takes folders, .gguf files and org/name from the Hub.")
    return 0


def calibrate(config: Config, flags: dict[str, Any]) -> int:
    from rewake.backends.torch.calibrate import calibrate
    from rewake.backends.torch.loader import load_model
    from rewake.calibration import choose, find, folder
    from rewake.models import resolve
    from rewake.text.tokenizer import Tokenizer

    file = flags["text"]
    given = None if file is None else read_text(file)
    path = resolve(config.model)
    loaded = load_model(path, config.threads, config.weights)
    known = find(loaded.fingerprint)
    if known and not flags["again"]:
        say(f"This model has been measured on {known.text}; --again does it anew.")
    else:
        text = None if given is None else Tokenizer(path).encode(given)
        known = calibrate(loaded, text, "" if file is None else file.name, say)
        say(f"Kept in {known.save(folder())}.")
        say(STALE)
    for coding, loss in known.losses.items():
        say(f"{coding:8} {loss.perplexity:+.2%} (+-{loss.error:.2%}) perplexity, {loss.agreement:.1%} equal best tokens, KL {loss.kl:.4f}")
    coding, why = choose(known.losses, config.kv_loss)
    say(f"--kv auto takes {coding}: it {why}")
    return 0


STALE = """Memories of this model that were made before are kept, but do not fit and are not used from now on: agents read once more.
Removing the file brings them back, and hides those made in between."""


def read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a text that can be read: {error}") from error


def doctor(config: Config, _: dict[str, Any]) -> int:
    from rewake.models import resolve
    from rewake.service import load_backend

    path = resolve(config.model)
    backend = load_backend(config, path)
    planes = backend.planes
    longest, coding = backend.spec.max_positions, (planes.codec, planes.group_size)
    full = backend.spec.context_bytes(longest, *coding)
    facts = {
        "model": f"{config.model} in {path}",
        **backend.describe(),
        "token": f"takes {planes.token_bytes} bytes",
        "memory": budget(planes, config.memory) + " (--memory)",
        "context": f"{context(config.context, longest)}; the model's longest takes {size(full)}",
        "data": f"{config.data}" + ("" if config.data.exists() else " (not there yet)"),
    }
    for key, value in facts.items():
        say(f"{key:8} {value}")
    for group in backend.spec.groups:
        say(f"{'layers':8} {describe_group(group)}; {group.layout(*coding).token_bytes} bytes a token")
    fitting = (f"{2**30 // backend.spec.context_bytes(tokens, *coding)} at {tokens // 1024}k" for tokens in AGENT_SIZES)
    say(f"{'fit':8} agents in a GiB: {', '.join(fitting)}")
    return 0


def describe_group(group: CacheGroup) -> str:
    """Layers that cache alike, and what of."""
    heads = f"{group.kv_heads} KV heads, K {group.k_dim}, V {group.v_dim}"
    kinds = {
        "full": f"full attention: {heads}",
        "sliding": f"a window of {group.window} tokens: {heads}",
        "latent": f"latents: {group.k_dim} values a token, V the first {group.latent_dim} of them",
    }
    return f"{len(group.layers)} with {kinds[group.kind]}"


def context(asked: int, longest: int) -> str:
    """What `serve` would do."""
    if asked > longest:
        return f"{longest} tokens, not {asked}"
    return f"{asked or longest} tokens"


def replay_recording(config: Config, flags: dict[str, Any]) -> int:
    from rewake.models import resolve
    from rewake.replay import num_pages, replay
    from rewake.service import load_backend

    path = Path(flags["recording"])
    pages = num_pages(path)
    model = resolve(config.model)
    planes = load_backend(config, model).planes
    backend = load_backend(replace(config, memory=pages * planes.num_slots * planes.slot_bytes), model)
    steps = list(replay(path, backend))
    different = [s for s in steps if not s.same]
    for step in different[:10]:
        say(f"step {step.number}: recorded {step.recorded}, computed {step.computed}")
    say(json.dumps({"steps": len(steps), "different": len(different)}))
    return 1 if different else 0


def chat(config: Config, flags: dict[str, Any]) -> int:
    with connect(config, flags) as client:
        model, agent = client.model(), flags["agent"]
        say(f"You talk to {agent} ({model}). An empty line ends it.")
        messages = [] if flags["new"] else recall(client, agent)
        while text := ask():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": answer(client, model, agent, messages)})
    return 0


def recall(client: Client, agent: str) -> list[dict[str, Any]]:
    """The talk so far, to go on from; its last words are shown."""
    try:
        known = client.show(agent)
    except NotFound:
        known = {"tokens": 0}
    if not known["tokens"]:
        say("Nothing is remembered of it yet.")
        return []
    about = f"{count(known['tokens'], 'token')} of {count(len(known['turns']), 'turn')} are remembered ({known['state']})"
    try:
        messages = list(client.messages(agent))
    except InvalidRequest:  # a completion, or another template's
        say(f"{about}, but not as a chat: this is a new one.")
        return []
    while messages and messages[-1]["role"] != "assistant":  # a question that was never answered
        messages.pop()
    say(f"{about}." + (" You go on from:" if messages else ""))
    for message in messages[-2:]:
        say(("> " if message["role"] == "user" else "") + (message["content"] or ""))
    return messages


def ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        say()
        return ""


def answer(client: Client, model: str, agent: str, messages: list[dict[str, Any]]) -> str:
    """Print an answer as it comes, and how it was woken."""
    started, first, text = time.perf_counter(), None, ""
    for event in client.chat(messages, agent=agent, model=model, max_tokens=CHAT_TOKENS, temperature=CHAT_TEMPERATURE):
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
