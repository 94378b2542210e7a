"""What every benchmark shares: its flags, the machine's name, bars, and how results are printed."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bar:
    """A number that must be reached: at least `limit`, or at most, if `most`. NaN was not measured, and is missed."""

    group: str
    name: str
    value: float
    limit: float
    most: bool = False

    @property
    def ok(self) -> bool:
        return self.value <= self.limit if self.most else self.value >= self.limit


def flags(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and sizes: a look, not a result")
    parser.add_argument("--check", nargs="?", const="", metavar="GROUP", help="exit 1 and name every bar (of GROUP) that is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON line to FILE, too")
    return parser


def machine() -> str:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), name)
        extensions = next((line for line in lines if line.startswith("flags")), "").split()
        name += "".join(f" {short}" for short in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if short in extensions)
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Columns as wide as their widest cell."""
    columns = list(rows[0])
    cells = [columns] + [[show(row.get(c, "")) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def show(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 100 else f"{value:.0f}" if isinstance(value, float) else str(value)


def finish(name: str, rows: Sequence[dict[str, Any]], bars: Sequence[Bar], args: argparse.Namespace) -> int:
    """Print bars and the JSON line; 1 if a bar that is checked was missed."""
    print()
    for bar in bars:
        sign = "<=" if bar.most else ">="
        print(f"{'ok    ' if bar.ok else 'MISSED'} {bar.group}: {bar.name}: {bar.value:.4g} ({sign} {bar.limit:g})")
    result = {
        "bench": name,
        "machine": machine(),
        "commit": commit(),
        "rows": list(rows),
        "bars": [
            {"group": b.group, "name": b.name, "value": None if math.isnan(b.value) else b.value, "limit": b.limit, "ok": b.ok}
            for b in bars
        ],
    }
    line = json.dumps(result)
    if args.json:
        args.json.write_text(line + "\n")
    missed = [b for b in bars if not b.ok and args.check in ("", b.group)] if args.check is not None else []
    for bar in missed:
        print(f"missed: {bar.group}: {bar.name}: {bar.value:.4g}, limit {bar.limit:g}", file=sys.stderr)
    print(line, flush=True)
    return 1 if missed else 0
