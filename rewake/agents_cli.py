"""`rewake agents`: what can be done to the agents of a running server."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rewake.client import Client
from rewake.config import Config, add_flags
from rewake.terminal import count, duration, parse_duration, say, size, when

__all__ = ["SERVER_FLAGS", "add_agents", "add_model", "address", "connect"]

SERVER_FLAGS = {"host": "address of the server to talk to", "port": "port of the server to talk to"}

Flags = dict[str, Any]
Verb = Callable[[Client, Flags], None]


def address(config: Config) -> str:
    return f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{config.port}"


def connect(config: Config, flags: Flags) -> Client:
    return Client(address(config), flags["of_model"])


def add_model(parser: argparse.ArgumentParser) -> None:
    """Not a setting: the server's first model is the default, whatever is configured here."""
    parser.add_argument("--model", dest="of_model", metavar="NAME", help="one of the models that the server runs (its first)")


def add_agents(parser: argparse.ArgumentParser) -> None:
    """The verbs, each with its arguments and its own help."""
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str, run: Verb, help: str, *, agent: bool = True) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        made.set_defaults(run=lambda config, flags: run_verb(run, config, flags))
        if agent:
            made.add_argument("agent", metavar="NAME")
        add_flags(made, tuple(SERVER_FLAGS), SERVER_FLAGS)
        add_model(made)
        return made

    verb("ls", ls, "list all agents", agent=False)
    verb("show", show, "show all there is to know of an agent, but its words")
    made = verb("create", create, "create an agent that remembers nothing yet")
    made.add_argument("--pinned", action="store_true", help="never evict it")
    made.add_argument("--ttl", metavar="TIME", default="never", help="forget it so long after its last use: 90s, 15m, 12h, 7d (never)")
    made = verb("fork", fork, "create an agent that remembers what another does; pages are shared")
    made.add_argument("to", metavar="NEW", help="name of the new agent")
    add_length(made, required=False)
    add_length(verb("rewind", rewind, "go back to an earlier turn; what came after stays as an older branch"), required=True)
    verb("pin", pin, "keep an agent, whatever the budgets say")
    verb("unpin", unpin, "let an agent go when room is needed and it is worth least")
    verb("ttl", ttl, "set how long after its last use an agent is forgotten").add_argument(
        "time", metavar="TIME", help="90s, 15m, 12h, 7d, or never"
    )
    verb("wake", wake, "read an agent's pages into memory, before its next turn")
    verb("cancel", cancel, "stop what an agent is doing; what it has computed is remembered")
    verb("export", export, "write an agent into one file, to take to another machine").add_argument("file", metavar="FILE")
    made = verb("import", take_in, "take in an agent that was exported with the same model and --kv", agent=False)
    made.add_argument("file", metavar="FILE")
    made.add_argument("--as", dest="name", metavar="NAME", help="what to call it (as it was called where it was exported)")
    verb("forget", forget, "forget an agent, in memory and on disk")


def add_length(parser: argparse.ArgumentParser, *, required: bool) -> None:
    length = parser.add_mutually_exclusive_group(required=required)
    length.add_argument("--turn", type=int, metavar="N", help="up to the end of answer number N; 0 is before the first")
    length.add_argument("--tokens", type=int, metavar="N", help="up to the first N tokens")


def run_verb(verb: Verb, config: Config, flags: Flags) -> int:
    with connect(config, flags) as client:
        verb(client, flags)
    return 0


def ls(client: Client, _: Flags) -> None:
    rows = client.list()
    if not rows:
        say("no agents yet")
        return
    width = max(5, *(len(row["agent"]) for row in rows))
    say(f"{'agent':{width}}  {'state':5} {'tokens':>8} {'turns':>6} {'in memory':>10} {'on disk':>10} {'pinned':>6}  last used")
    for row in rows:
        say(
            f"{row['agent']:{width}}  {row['state']:5} {row['tokens']:8} {len(row['turns']):6} {size(row['bytes_in_memory']):>10}"
            f" {size(row['bytes_on_disk']):>10} {'yes' if row['pinned'] else 'no':>6}  {when(row['used'])}"
        )


def show(client: Client, flags: Flags) -> None:
    tell(client.show(flags["agent"]))


def tell(agent: dict[str, Any]) -> None:
    """Every field, as people read it."""
    shown = {
        **agent,
        "turns": f"{len(agent['turns'])}, ending at tokens {', '.join(map(str, agent['turns']))}" if agent["turns"] else "0",
        "bytes_in_memory": size(agent["bytes_in_memory"]),
        "bytes_on_disk": size(agent["bytes_on_disk"]),
        "pinned": "yes" if agent["pinned"] else "no",
        "ttl": duration(agent["ttl"]),
        "created": when(agent["created"]),
        "used": when(agent["used"]),
    }
    for key, value in shown.items():
        say(f"{key.replace('_', ' '):16} {value}")


def create(client: Client, flags: Flags) -> None:
    tell(client.create(flags["agent"], pinned=flags["pinned"], ttl=parse_duration(flags["ttl"])))


def fork(client: Client, flags: Flags) -> None:
    made = client.fork(flags["agent"], flags["to"], turn=flags["turn"], tokens=flags["tokens"])
    say(f"{made['agent']} remembers {count(made['tokens'], 'token')} of {flags['agent']}; shared pages: {made['pages_shared']}")


def rewind(client: Client, flags: Flags) -> None:
    made = client.rewind(flags["agent"], turn=flags["turn"], tokens=flags["tokens"])
    say(f"{made['agent']} is at {count(made['tokens'], 'token')}, {count(len(made['turns']), 'turn')}")


def pin(client: Client, flags: Flags) -> None:
    client.update(flags["agent"], pinned=True)
    say(f"{flags['agent']} is pinned")


def unpin(client: Client, flags: Flags) -> None:
    client.update(flags["agent"], pinned=False)
    say(f"{flags['agent']} is no longer pinned")


def ttl(client: Client, flags: Flags) -> None:
    span = client.update(flags["agent"], ttl=parse_duration(flags["time"]))["ttl"]
    say(
        f"{flags['agent']} is never forgotten for its age"
        if span is None
        else f"{flags['agent']} is forgotten {duration(span)} after its last use"
    )


def wake(client: Client, flags: Flags) -> None:
    woken = client.wake(flags["agent"])
    say(f"{woken['agent']} is {woken['state']}; pages read: {woken['loaded_pages']}")


def cancel(client: Client, flags: Flags) -> None:
    stopped = client.cancel(flags["agent"])
    say(f"{stopped['agent']}: {count(stopped['cancelled'], 'request')} stopped")


def export(client: Client, flags: Flags) -> None:
    say(f"{flags['agent']} is in {flags['file']}, {size(client.export(flags['agent'], flags['file']))}")


def take_in(client: Client, flags: Flags) -> None:
    made = client.import_(flags["file"], flags["name"])
    say(f"{made['agent']} remembers {count(made['tokens'], 'token')}, {count(len(made['turns']), 'turn')}")


def forget(client: Client, flags: Flags) -> None:
    client.forget(flags["agent"])
    say(f"{flags['agent']} is forgotten")
