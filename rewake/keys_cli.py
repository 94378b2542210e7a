"""`rewake keys`: make, list, limit, rotate and revoke the keys of a server. Works on the file alone; a running server notices."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from rewake.config import Config, add_flags, parse_bytes
from rewake.errors import ConfigError
from rewake.keys import Key, KeyFile, Limits
from rewake.terminal import say, size, when

__all__ = ["add_keys"]

FILE = user_config_path("rewake") / "keys.json"
HELP = {"keys": f"the file of keys ({FILE}); serve with the same"}

Flags = dict[str, Any]
Verb = Callable[[KeyFile, Flags], None]


def add_keys(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run: Verb, help: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        made.set_defaults(run=lambda config, flags: run_verb(run, config, flags))
        add_flags(made, ("keys",), HELP)
        return made

    made = verb("create", create, "make a key; it is shown once, and kept nowhere but as a hash")
    made.add_argument("name", metavar="NAME", help="whose it is: for people")
    made.add_argument("--namespace", help="whose memories it sees (new ones; `default` has those made without keys)")
    made.add_argument("--operator", action="store_true", help="may also read /metrics and /health/books")
    add_limits(made)
    verb("ls", ls, "list all keys")
    made = verb("limit", limit, "set what a key may ask for; what is not given is not limited")
    add_limits(made)
    by_key = [
        made,
        verb("rotate", rotate, "make another key in the place of one; its memories stay"),
        verb("revoke", revoke, "take a key no longer; its memories stay on disk"),
    ]
    for made in by_key:
        made.add_argument("key", metavar="KEY", help="its id or name")


def add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, metavar="N", help="a minute")
    parser.add_argument("--body", metavar="SIZE", help="bytes of a request, such as 1MiB")
    parser.add_argument("--context", type=int, dest="max_context", metavar="N", help="tokens of prompt and answer")


def run_verb(verb: Verb, config: Config, flags: Flags) -> int:
    verb(KeyFile(Path(config.keys).expanduser() if config.keys else FILE), flags)
    return 0


def limits_of(flags: Flags) -> Limits:
    limits = Limits(flags["requests"], None if flags["body"] is None else parse_bytes(flags["body"]), flags["max_context"])
    for name in ("requests", "body", "context"):
        if (value := getattr(limits, name)) is not None and value < 1:
            raise ConfigError(f"--{name} is {value}: it must be at least 1")
    return limits


def create(file: KeyFile, flags: Flags) -> None:
    key, text = file.create(flags["name"], flags["namespace"], limits_of(flags), flags["operator"])
    tell(key, text, file)


def rotate(file: KeyFile, flags: Flags) -> None:
    tell(*file.rotate(flags["key"]), file)


def tell(key: Key, text: str, file: KeyFile) -> None:
    say(text)
    say(f"is {key.name}'s key ({key.id}, namespace {key.namespace}); nobody can show it again. Serve with --keys {file.path}")


def ls(file: KeyFile, _: Flags) -> None:
    keys = file.keys()
    if not keys:
        say(f"no keys in {file.path}")
        return
    width = max(4, *(len(key.name) for key in keys))
    spaces = max(9, *(len(key.namespace) for key in keys))
    say(f"{'id':10}  {'name':{width}}  {'namespace':{spaces}}  {'a minute':>8} {'body':>9} {'context':>8} {'operator':>8}  created")
    for key in keys:
        limits = key.limits
        body = "-" if limits.body is None else size(limits.body)
        say(
            f"{key.id:10}  {key.name:{width}}  {key.namespace:{spaces}}  {limits.requests or '-':>8} {body:>9} {limits.context or '-':>8}"
            f" {'yes' if key.operator else 'no':>8}  {when(key.created)}"
        )


def limit(file: KeyFile, flags: Flags) -> None:
    key = file.limit(flags["key"], limits_of(flags))
    say(f"{key.name} ({key.id}) is limited as said")


def revoke(file: KeyFile, flags: Flags) -> None:
    key = file.revoke(flags["key"])
    say(f"{key.name}'s key ({key.id}) is no longer taken; what namespace {key.namespace} remembers stays")
