"""Rewake beside other engines, on the same token ids and two threads. See the modules of bench.peers for the physics.

Each peer has an environment of its own, built on first use (minutes) and kept in the user's cache directory; nothing is
installed elsewhere. A peer that cannot be built or run here is reported with the reason, and its bars are not measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.common import finish, flags
from bench.peers import kernels, steps
from bench.peers.base import Peer
from bench.peers.llama_cpp import LlamaCpp, LlamaCppQ4
from bench.peers.ours import Ours
from bench.peers.prompts import Prompts
from bench.peers.transformers import Transformers
from bench.peers.vllm import Vllm

OTHERS = {peer.name: peer for peer in (Vllm, Transformers, LlamaCpp, LlamaCppQ4)}
GROUPS = {"kernels": kernels.measure, "steps": steps.measure}


def chosen(names: str) -> list[Peer]:
    """Ours first, always; the others by name."""
    wanted = [name for name in names.split(",") if name and name != Ours.name]
    unknown = [name for name in wanted if name not in OTHERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no peer {', '.join(unknown)}: there are {', '.join(OTHERS)}")
    return [OTHERS[name]() for name in OTHERS if name in wanted]


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--peers", type=chosen, default=",".join(OTHERS), metavar="A,B", help=f"beside ours, of {', '.join(OTHERS)} (all)")
    parser.add_argument("--kv", default="q4", help="our codec (q4)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prompts from the text files there (random ids)")
    args = parser.parse_args()
    if args.check and args.check not in GROUPS:
        parser.error(f"--check: no group {args.check!r}: there are {', '.join(GROUPS)}")
    rows, bars = [], []
    for name, measure in GROUPS.items():
        if args.check in (None, "", name):
            of_group, its_bars = measure([Ours(args.kv), *args.peers], Prompts(args.data), args.kv, args.quick)
            rows += [{"group": name, **row} for row in of_group]
            bars += its_bars
    return finish("peers", rows, bars, args)


if __name__ == "__main__":
    raise SystemExit(main())
