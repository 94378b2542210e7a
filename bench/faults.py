"""Ten thousand seeded faults: what was acknowledged is there, and no answer is over bytes that are not what was appended.

In process: two or three agents talk to an engine whose fake model "attends" by reading every row back from the pages,
so that one foreign, stale or damaged row changes the answer. One step of the file system breaks, or one file; the rest
of the world is real: threads, SQLite, files. `tests/faults.py` has the kinds, and what each of them means.
  kill, power cut, torn     the directory, copied at that step (and robbed of all that was not synced), is opened anew:
                            every turn that had been acknowledged as saved is asked for again, and computes one token
  EIO, ENOSPC, short        the process goes on; saving resumes; then it is killed
  bad files, broken reads   what depends on the file is computed again, once; all else computes one token
Real kills: `bench/kills.py`. SIGKILL to `rewake serve` while agents stream, from outside or at a step of a write; logits
of all steps are compared, bit for bit, with those of a process that was never killed.

What a fault costs is a start: some 40 ms in process, about a second for a real server. Directories of the former are in
memory (/dev/shm, if there is one): what a disk does on its own is modelled, not waited for. Not covered: disks that
lie about a sync, a file system that loses its own metadata, a bit that flips in the arena.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from bench.common import Bar, finish, flags, table
from bench.kills import Chain, Zygote
from tests.faults import CELLS, FILES, READS, Toll, seeded, trial

WORKERS = 2
EACH, EACH_QUICK = 175, 6  # faults of every cell
CHAINS, CHAINS_QUICK = 52, 2
KILLS, KILLS_QUICK = 9, 5  # of a chain
REAL = "SIGKILL of a server"
Cells = dict[tuple[str, str], int]


def one(fault: tuple[str, str, int]) -> tuple[tuple[str, str], Toll]:
    logging.disable(logging.CRITICAL)  # every fault is worth a warning; ten thousand are not
    return fault[:2], trial(*fault)


def run_in_process(count: int, seed: int) -> tuple[Cells, Toll]:
    cells: Counter[tuple[str, str]] = Counter()
    toll = Toll()
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        for done, (cell, found) in enumerate(pool.imap_unordered(one, seeded(count, seed), chunksize=8), start=1):
            cells[cell] += not found.missed
            toll.include(found)
            if done % 1000 == 0:
                print(f"{done} of {count} faults in process", file=sys.stderr)
    return {cell: cells[cell] for cell in CELLS}, toll


def run_chains(
    zygote: Zygote, model: Path, folder: Path, numbers: Iterable[int], kills: int, seed: int, chains: list[Chain], taken: Counter[str]
) -> None:
    for number in numbers:
        place = folder / f"chain{number}"
        place.mkdir()
        chain = Chain(zygote, model, place, number, random.Random(f"{seed} / {number}"), taken)
        try:
            chain.run(kills)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a result)
            chain.toll.add("crashes", f"{place}: {type(error).__name__}: {error}")
        chains.append(chain)
        print(f"{len(chains)} chains of {kills} kills", file=sys.stderr)


def run_kills(num_chains: int, kills: int, seed: int) -> list[Chain]:
    """Chains on as many threads as there are zygotes; a chain that found something keeps its folder."""
    folder = Path(tempfile.mkdtemp(prefix="rewake-faults-"))
    code = "import sys; from pathlib import Path; from bench.kills import make_model; make_model(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(folder / "tiny")], check=True, stderr=subprocess.DEVNULL)
    zygotes = [Zygote() for _ in range(WORKERS)]
    chains: list[Chain] = []
    taken: Counter[str] = Counter()
    threads = [
        threading.Thread(
            target=run_chains, args=(zygote, folder / "tiny", folder, range(i, num_chains, WORKERS), kills, seed, chains, taken)
        )
        for i, zygote in enumerate(zygotes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for zygote in zygotes:
        zygote.close()
    if all(chain.toll.is_clean for chain in chains):
        shutil.rmtree(folder)
    return chains


def show(cells: Cells) -> None:
    """Kinds down, steps across: one table for writes, one for reads, one for files."""
    of_files = {cell for cell in cells if cell[1] in (*FILES, "manifest")}
    of_reads = {cell for cell in cells if cell[1] in READS}
    for part in (cells.keys() - of_files - of_reads, of_reads, of_files):
        kinds = [kind for kind in dict.fromkeys(kind for kind, _ in cells) if any(k == kind for k, _ in part)]
        steps = [step for step in dict.fromkeys(step for _, step in cells) if any(s == step for _, s in part)]
        table([{"fault": kind, **{step: cells.get((kind, step), "") for step in steps}} for kind in kinds])
        print()


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="another ten thousand (0)")
    args: argparse.Namespace = parser.parse_args()
    each, num_chains, kills = (EACH_QUICK, CHAINS_QUICK, KILLS_QUICK) if args.quick else (EACH, CHAINS, KILLS)
    started = time.perf_counter()
    cells, toll = run_in_process(each * len(CELLS), args.seed * 1_000_000)
    in_process = time.perf_counter() - started
    print(f"{sum(cells.values())} faults in process took {in_process:.0f} s: clean: {toll.is_clean}", file=sys.stderr)
    chains = run_kills(num_chains, kills, args.seed)
    real: Counter[str] = Counter()
    for chain in chains:
        real.update(chain.kills)
        toll.include(chain.toll)
    cells |= {(REAL, step): n for step, n in sorted(real.items())}
    show(cells)
    asked, shorter, steps = (sum(getattr(c, what) for c in chains) for what in ("asked", "shorter", "steps"))
    print(f"{sum(len(c.promises) for c in chains)} turns of real servers were acknowledged; they were asked for {asked} times behind kills")
    print(f"({shorter} times the agent grew a shorter branch of its own); {steps} recorded steps were computed again")
    print(f"in process {in_process:.0f} s, real servers {time.perf_counter() - started - in_process:.0f} s")
    for story in islice(toll.stories, 40):
        print(story)
    rows = [{"fault": kind, "step": step, "faults": n} for (kind, step), n in cells.items()]
    bars = [
        Bar("faults", "wrong bytes attended", toll.wrong, 0, most=True),
        Bar("faults", "acknowledged turns lost", toll.lost, 0, most=True),
        Bar("faults", "crashes", toll.crashes, 0, most=True),
        Bar("faults", "turns not saved though the fault was over", toll.unsaved, 0, most=True),
        Bar("faults", "faults", sum(cells.values()), 10_000),
        Bar("faults", "faults of the rarest kind and step", min(cells.values()), 50),
        Bar("faults", "SIGKILLs of a real server", sum(real.values()), 300),
    ]
    return finish("faults", rows, bars, args)


if __name__ == "__main__":
    raise SystemExit(main())
