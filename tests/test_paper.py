"""The page of results says what was measured, where, and how to measure what is missing."""

from __future__ import annotations

import json
from pathlib import Path

from bench.paper import MEASURED_BY, PAGE, RESULTS, Results, ablation, page

TABLES = (
    "Time to the first token",
    "The paper's sizes",
    "Many agents at once",
    "Staggered arrivals",
    "Capacity",
    "Quality",
    "Phases and routing",
    "What each piece is worth",
)


def test_the_page_is_the_one_of_the_results_beside_it() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(Results(RESULTS)), "python -m bench.paper writes it"


def test_every_table_is_there_and_what_is_missing_names_its_command(tmp_path: Path) -> None:
    text = page(Results(tmp_path))
    assert all(f"## {title}\n" in text for title in TABLES)
    assert all(f"Not measured: `python -m {command} --json bench/results/{name}.json`" in text for name, command in MEASURED_BY.items())


def test_no_result_is_left_out() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} <= MEASURED_BY.keys()


def test_the_ablation_takes_each_piece_away(tmp_path: Path) -> None:
    of = {"nothing": (4, 30, 300), "persistence": (4, 3000, 300), "4 bits": (1, 60, 100), "batching": (4, 30, 100)}
    kinds = ("agents in memory", "turn ms", "four at once, tokens/s")
    rows = [{"without": piece, **dict(zip(kinds, values, strict=True))} for piece, values in of.items()]
    for name, rows_of in (
        ("ablation", rows),
        ("capacity", [{"model": "M", "kv": kv, "4k": held} for kv, held in (("q4", 12), ("bf16", 3))]),
        ("workflows", [{"model": "m", "phase": "The verdict", "cleared ms": 900, "persistent ms": 100}]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({"bench": name, "commit": "c", "machine": "m", "rows": rows_of, "bars": []}))
    table = ablation(Results(tmp_path))[-1].splitlines()[2:]
    assert [(line.split(" | ")[0].removeprefix("| "), line.split(" | ")[-1].removesuffix(" |")) for line in table] == [
        ("persistence", "100"),
        ("4 bits", "4"),
        ("batching", "3"),
        ("4 bits", "4"),
        ("phases", "9"),
    ]
