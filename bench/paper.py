"""One page of results: what the other benches measured, beside the tables of arXiv 2603.04428.

Reads `bench/results/*.json`, which the benches write with `--json`, and writes docs/results.md and its plots. It measures nothing:
what is not there is said to be missing, and each table says on which machine and at which commit its numbers were seen.
The paper's models have 8 to 16 billion parameters and ran on a GPU of 273 GB/s: its milliseconds are not ours; its ratios are what
is compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import show

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images"
Row = Mapping[str, Any]
PHASES = ("Interrogation of Marco", "Interrogation of Danny", "The yard", "Final reckoning", "The verdict")  # of examples/scenarios
SIZES = ("llama-3.1-8b", "gemma-3-12b", "deepseek-v2-lite")
MEASURED_BY = {  # the command that makes each result
    "ttft": "bench.ttft",
    **{name: f"bench.ttft --geometry {name}" for name in SIZES},
    "longctx": "bench.longctx",
    "together": "bench.concurrency --only together",
    "arrivals": "bench.concurrency --only arrival --only staggered",
    "robin": "bench.concurrency --only robin",
    "steps": "bench.peers --check steps",
    "steps-avx2": "bench.peers --check steps",
    "capacity": "bench.capacity",
    "quality-smollm2": "bench.quality",
    "quality-gemma3": "bench.quality --model gemma3-270m",
    "workflows": "bench.workflows --articles DIR",
    "ablation": "bench.ablation",
}

PAPER_TTFT = {  # milliseconds at 1k, 4k, 16k: cold, warm (from disk), hot
    "Gemma 3 12B": ((3964, 475, 683), (15736, 577, 719), (74219, 795, 934)),
    "DeepSeek-V2-Lite": ((1043, 234, 345), (3970, 271, 366), (19396, 434, 490)),
    "Llama 3.1 8B": ((2500, 260, 412), (10235, 290, 429), (47629, 431, 526)),
}
PAPER_PAIRS = {  # system tokens/s of two agents at 1k, 4k: cold, warm, hot
    "Gemma 3 12B": ((10.4, 22.6, 22.1), (3.5, 19.6, 19.3)),
    "DeepSeek-V2-Lite": ((35.5, 63.0, 73.1), (13.5, 52.6, 61.6)),
    "Llama 3.1 8B": ((16.6, 37.8, 38.3), (5.9, 34.5, 43.3)),
}
PAPER_STAGGERED = {"Gemma 3 12B": (16.7, 34.1), "DeepSeek-V2-Lite": (3.9, 6.8), "Llama 3.1 8B": (10.3, 20.2)}  # B's TTFT, s: alone, batched
PAPER_LOSS = {"Gemma 3 12B": -0.7, "DeepSeek-V2-Lite": 3.0, "Llama 3.1 8B": 2.8}  # % of perplexity with 4 bits


class Results:
    """The newest result of each bench, by the name of its file."""

    def __init__(self, folder: Path) -> None:
        self.found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}

    def rows(self, name: str, **equal: Any) -> list[Row]:
        """Rows of a result in which all these fields are so."""
        rows = self.found.get(name, {}).get("rows", [])
        return [row for row in rows if all(row.get(key) == value for key, value in equal.items())]

    def source(self, name: str) -> str:
        found, command = self.found.get(name), f"python -m {MEASURED_BY[name]} --json bench/results/{name}.json"
        return f"*`{command}` at {found['commit']}, {found['machine']}.*" if found else f"*Not measured: `{command}`.*"


def markdown(rows: Iterable[Row], columns: Sequence[str] | None = None) -> str:
    rows = list(rows)
    if not rows:
        return ""
    names = list(columns or dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(show(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def ttft(results: Results) -> list[str]:
    theirs = [
        {"model": model, "context": size, "cold ms": cold, "warm ms": warm, "hot ms": hot, "cold / warm": cold / warm}
        for model, at in PAPER_TTFT.items()
        for size, (cold, warm, hot) in zip(("1k", "4k", "16k"), at, strict=True)
    ]
    return [
        "An agent knows N tokens and is given 16 more; *restored*: its pages are read from disk; *restart*: in a new process.",
        markdown(results.rows("ttft")),
        *(["![TTFT](images/ttft.svg)"] if results.rows("ttft") else []),
        "The paper's table 3 (warm: from disk):",
        markdown(theirs),
    ]


def sizes(results: Results) -> list[str]:
    return [
        "The paper's models with random weights of 4 bits, beside its own times, which are from a GPU.",
        markdown({k: v for k, v in row.items() if v} for name in SIZES for row in results.rows(name)),
    ]


def long_context(results: Results) -> list[str]:
    return [
        "Gemma 3 270M, whose sliding layers hold their window only. The paper: 95x from disk, 136x from memory.",
        markdown(results.rows("longctx")),
    ]


def pairs(results: Results) -> list[str]:
    theirs = [
        {"model": model, "context": size, "cold": cold, "warm": warm, "hot": hot}
        for model, at in PAPER_PAIRS.items()
        for size, (cold, warm, hot) in zip(("1k", "4k"), at, strict=True)
    ]
    rows = results.rows("together", group="together")
    return [
        "Tokens a second of N agents that decode together, and two agents at once (answers of 64 tokens, from the requests to their end):",
        markdown([r for r in rows if "agents" in r], ("depth", "agents", "tokens/s", "/ one")),
        *(["![Batch throughput](images/together.svg)"] if rows else []),
        markdown([r for r in rows if "state" in r], ("two agents", "state", "system tokens/s", "per agent", "mean ttft ms")),
        "The paper's table 4, tokens a second of both:",
        markdown(theirs),
    ]


def staggered(results: Results) -> list[str]:
    theirs = [
        {"model": m, "B alone s": alone, "B while A is computed s": both, "ratio": both / alone}
        for m, (alone, both) in PAPER_STAGGERED.items()
    ]
    return [
        "A and B are new with 4k tokens; B comes at a quarter of A's time. It should wait for the rest of A, then take its own time.",
        markdown(results.rows("arrivals", group="staggered")),
        "B, remembered, arrives while A decodes:",
        markdown(results.rows("arrivals", group="arrival")),
        "The paper's figure 3:",
        markdown(theirs),
    ]


def robin(results: Results) -> list[str]:
    return [
        "Ten agents of 4k take turns, memory holds three of them; then everybody is started anew. Milliseconds are to the first token.",
        markdown(results.rows("robin")),
    ]


def peers(results: Results) -> list[str]:
    def rows(name: str) -> str:
        return markdown([{k: v for k, v in row.items() if k != "about"} for row in results.rows(name)])

    return [
        "SmolLM2-135M on two threads, all engines in one run. Codec and weights are named.",
        rows("steps"),
        "On a processor without AVX-512, as many laptops are:",
        rows("steps-avx2"),
    ]


def capacity(results: Results) -> list[str]:
    return ["Agents that fit into 10.2 GiB, counted by filling pages (the paper calculates them).", markdown(results.rows("capacity"))]


def quality(results: Results) -> list[str]:
    parts: list[str] = []
    for name, model in (("quality-smollm2", "SmolLM2-135M"), ("quality-gemma3", "Gemma 3 270M")):
        rows = results.rows(name)
        parts += [
            f"{model}. {results.source(name)}",
            markdown([r for r in rows if "window" in r]),
            markdown([r for r in rows if "recall" in r]),
        ]
    return [*parts, "The paper's table 9 has " + ", ".join(f"{loss:+.1f} % for {model}" for model, loss in PAPER_LOSS.items()) + "."]


def workflows(results: Results) -> list[str]:
    rows = results.rows("workflows")
    return [
        "Means over a phase's turns, persistent against cleared before each phase, the same texts in both; `new` are the tokens that the"
        " persistent mode computes of its prompts. The paper: 1.9x in the last phase, 23 % of the time saved (table 7), experts 24x"
        " (table 8).",
        markdown(rows),
        *(["![Phases](images/phases.svg)"] if rows else []),
    ]


def ablation(results: Results) -> list[str]:
    """What each piece is worth: the same numbers, with and without it."""
    rows: list[Row] = []

    def add(piece: str, what: str, with_it: float, without: float) -> None:
        better = max(with_it, without) / max(min(with_it, without), 1)
        rows.append({"piece": piece, "measured": what, "with": with_it, "without": without, "ratio": better})

    of = {row["without"]: row for row in results.rows("ablation")}
    if of:
        for piece, what in (("persistence", "turn ms"), ("4 bits", "agents in memory"), ("batching", "four at once, tokens/s")):
            add(piece, what, of["nothing"][what], of[piece][what])
    for at in results.rows("ttft", context=4000):
        add("persistence", "TTFT at 4k, ms", at["restored ms"], at["cold ms"])
    turns = {row["engine"]: row for row in results.rows("robin") if "all rounds s" in row}
    if {"rewake", "rewake no-persist"} <= set(turns):
        add("persistence", "ten agents in turn, TTFT ms", *(turns[name]["later p50 ms"] for name in ("rewake", "rewake no-persist")))
    for model, held in of_16_bits(results).items():
        add("4 bits", f"{model}: agents of 4k in 10.2 GiB", *held)
    together = {row["agents"]: row["tokens/s"] for row in results.rows("together", group="together", depth=1024)}
    if {1, 8} <= set(together):
        add("batching", "8 agents at 1k, tokens/s", together[8], together[1])
    for row in results.rows("workflows"):
        if row["phase"] == PHASES[-1]:
            add("phases", f"{row['model']}: TTFT in the last of five, ms", row["persistent ms"], row["cleared ms"])
    return [
        "Eight agents, memory for four in 4 bits, and one piece taken away:",
        markdown(results.rows("ablation")),
        "The same, with what the benches above have measured (the paper's table 6: persistence 27x, 4 bits 4x as many agents, batching 2x,"
        " phases 1.9x):",
        markdown(rows),
    ]


def of_16_bits(results: Results) -> dict[str, tuple[float, float]]:
    """How many agents of 4k fit in 4 and in 16 bits, by model."""
    found: dict[str, dict[str, float]] = {}
    for row in results.rows("capacity"):
        found.setdefault(row["model"], {})[row["kv"]] = row["4k"]
    return {model: (held["q4"], held["bf16"]) for model, held in found.items() if {"q4", "bf16"} <= set(held)}


SECTIONS: tuple[tuple[str, tuple[str, ...], Callable[[Results], list[str]]], ...] = (
    ("Time to the first token", ("ttft",), ttft),
    ("The paper's sizes", SIZES, sizes),
    ("Long contexts", ("longctx",), long_context),
    ("Many agents at once", ("together",), pairs),
    ("Staggered arrivals", ("arrivals",), staggered),
    ("More agents than memory", ("robin",), robin),
    ("Beside other engines", ("steps", "steps-avx2"), peers),
    ("Capacity", ("capacity",), capacity),
    ("Quality", (), quality),
    ("Phases and routing", ("workflows",), workflows),
    ("What each piece is worth", ("ablation",), ablation),
)


def page(results: Results) -> str:
    parts = ["# Results", (__doc__ or "").split("\n\n", 1)[1].strip()]
    for title, sources, section in SECTIONS:
        parts += [f"## {title}", *section(results), *(results.source(name) for name in sources)]
    bars = [
        {
            "bench": name,
            "bar": f"{bar['group']}: {bar['name']}",
            "value": bar["value"],
            "limit": bar["limit"],
            "": "ok" if bar["ok"] else "**missed**",
        }
        for name, found in results.found.items()
        for bar in found["bars"]
    ]
    return "\n\n".join(part for part in (*parts, "## All bars", markdown(bars)) if part) + "\n"


def plot(results: Results, images: Path) -> None:
    """Needs matplotlib, which `pip install rewake[bench]` brings."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rewake"  # the same numbers, the same file
    from matplotlib import pyplot

    images.mkdir(parents=True, exist_ok=True)

    def save(name: str, title: str, x: str, y: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, log: bool) -> None:
        if not lines:
            return
        figure, axes = pyplot.subplots(figsize=(6, 3.5))
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(title=title, xlabel=x, ylabel=y, **({"xscale": "log", "yscale": "log"} if log else {}))
        axes.legend()
        figure.tight_layout()
        figure.savefig(images / name, metadata={"Date": None})
        pyplot.close(figure)

    states = ("cold", "hot", "restored", "restart")
    of_ttft = {state: [(row["context"], row[f"{state} ms"]) for row in results.rows("ttft")] for state in states}
    save("ttft.svg", "Time to the first token", "tokens known", "ms", {k: v for k, v in of_ttft.items() if v}, log=True)
    depths: dict[str, list[tuple[float, float]]] = {}
    for row in results.rows("together", group="together"):
        if "agents" in row:
            depths.setdefault(f"{row['depth']} tokens each", []).append((row["agents"], row["tokens/s"]))
    phases: dict[str, list[tuple[float, float]]] = {}
    for row in results.rows("workflows"):
        if row["phase"] in PHASES:
            for mode in ("cleared", "persistent"):
                phases.setdefault(f"{row['model']}, {mode}", []).append((1 + PHASES.index(row["phase"]), row[f"{mode} ms"]))
    save("phases.svg", "Five phases of an interrogation", "phase", "ms to the first token", phases, log=False)
    save("together.svg", "Decoding together", "agents", "tokens/s in all", depths, log=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="(%(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE, help="(%(default)s)")
    args = parser.parse_args()
    results = Results(args.results)
    plot(results, args.page.parent / "images")
    args.page.write_text(page(results), encoding="utf-8")
    print(f"{args.page}: {len(results.found)} results")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
