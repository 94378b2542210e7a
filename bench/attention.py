"""How fast attention over coded pages is, against what memory and the multipliers allow.

Physics. A decode step reads every stored byte of K and V once: q4 stores 4.5 bits a value, so a layer of 3 KV heads x
64 at depth 4,096 is 884 KB, 30 us at 30 GB/s; nothing that reads the cache can be faster. Multiplications are few there
(4.7 M a layer, 24 us on two cores of 32 16-bit products a cycle at 3 GHz) but count once several query rows share the
cache: 16 rows at 4,096 are 75 M products a layer, 0.4 ms on those cores, and a 512-token chunk 32 times that. The shape
is SmolLM2-135M's: 30 layers, 3 KV heads, 3 query heads each, 64 wide. Every figure is over all 30 layers in turn,
so that one layer's pages are not simply found in the nearest cache again; "cold" rows push everything out in between.

    python -m bench.attention [--quick] [--check] [--json FILE] [--threads N] [--isa NAME]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from bench.common import Bar, finish, flags
from rewake.backends.torch.kernels import native
from rewake.backends.torch.kernels.base import LayerAttention, RaggedBatch
from rewake.backends.torch.kernels.native import NativeKernels
from rewake.quant import CODECS, PAGE_TOKENS, PageLayout

LAYERS, KV_HEADS, SHARE, DIM = 30, 3, 3, 64
LIMITS = {  # group "kernels"; milliseconds over all layers, two threads, best instruction set
    "decode 4096 q4, ms a token": 3.0,
    "decode 64 -> 7000 q4, ms added": 6.0,
}


@dataclass
class Case:
    """A step at some depth: `seqs` sequences of `depth` tokens, `rows` query rows each, every page in `codec`."""

    codec: str
    depth: int
    rows: int = 1
    seqs: int = 1

    def __post_init__(self) -> None:
        self.layout = PageLayout(LAYERS, KV_HEADS, DIM, DIM, CODECS[self.codec])
        pages = -(-self.depth // PAGE_TOKENS)
        self.layouts = {self.layout.codec.index: self.layout}
        self.arena = np.tile(random_page(self.layout), self.seqs * pages)
        tokens = self.rows * self.seqs
        self.batch = RaggedBatch(
            (np.arange(self.seqs * pages) * self.layout.page_bytes).reshape(self.seqs, pages),
            np.full((self.seqs, pages), self.layout.codec.index, np.uint8),
            (np.arange(self.seqs + 1) * self.rows).astype(np.int32),
            np.full(self.seqs, self.depth, np.int32),
            np.zeros(tokens, np.int64),
            np.arange(tokens, dtype=np.int32) % PAGE_TOKENS,
            np.full(tokens, self.layout.codec.index, np.uint8),
        )
        self.layers = [LayerAttention(i, DIM**-0.5) for i in range(LAYERS)]
        self.q = torch.randn(tokens, KV_HEADS * SHARE, DIM).bfloat16()
        self.kv = torch.randn(tokens, KV_HEADS, DIM).bfloat16()

    @property
    def bytes_read(self) -> int:
        return self.layout.token_bytes * self.depth * self.seqs

    @property
    def products(self) -> int:
        seen = self.rows * self.depth - self.rows * (self.rows - 1) // 2
        return 2 * DIM * KV_HEADS * SHARE * LAYERS * seen * self.seqs

    def attend(self, kernels: NativeKernels) -> None:
        for layer in self.layers:
            kernels.attend(self.arena, self.layouts, self.batch, layer, self.q)

    def append(self, kernels: NativeKernels) -> None:
        for layer in self.layers:
            kernels.append(self.arena, self.layouts, self.batch, layer, self.kv, self.kv)


def random_page(layout: PageLayout) -> np.ndarray:
    rng = np.random.default_rng(0)
    page = rng.integers(0, 256, layout.page_bytes, np.uint8)
    for _, field, at in layout.arrays():
        part = page[at : at + layout.field_bytes(field)]
        if field.dtype == "BF16" and not field.name.endswith("values"):
            part.view(np.uint16)[:] = 0x3E00 if field.name.endswith("scales") else 0xBF80  # 0.125 and -1
        elif field.dtype == "BF16":
            part.view(np.uint16)[:] = (part.view(np.uint16) & 0x80FF) | 0x3F00
    return page


def seconds(run: Callable[[], object], budget: float, before: Callable[[], object] = lambda: None) -> tuple[float, float]:
    """Least and median time of one run, over about `budget` seconds of them."""
    run()
    times: list[float] = []
    while sum(times) < budget or len(times) < 5:
        before()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times), median(times)


def memory_speed() -> float:
    x = torch.zeros(1 << 25, dtype=torch.int64)
    return x.numel() * 8 / seconds(lambda: x.sum(), 0.3)[0]


def row_of(name: str, case: Case, isa: str, times: tuple[float, float], bandwidth: float) -> dict[str, object]:
    least, typical = times
    return {
        "name": name,
        "codec": case.codec,
        "isa": isa,
        "layer_us": typical / LAYERS * 1e6,
        "layer_us_least": least / LAYERS * 1e6,
        "step_ms": typical * 1e3,
        "gb_per_s": case.bytes_read / typical / 1e9,
        "of_bandwidth": case.bytes_read / typical / bandwidth,
        "g_products_per_s": case.products / typical / 1e9,
    }


def line_of(row: dict[str, object]) -> str:
    figures = [float(str(row[name])) for name in ("layer_us", "layer_us_least", "step_ms", "gb_per_s", "of_bandwidth", "g_products_per_s")]
    us, least, ms, gb, share, products = figures
    return f"{row['name']:24} {row['codec']:5} {row['isa']:9} {us:9.1f} {least:8.1f} {ms:8.2f} {gb:6.1f} {share:6.0%} {products:8.1f}"


def cases(quick: bool) -> list[tuple[str, Case]]:
    codecs = ("q4", "k8v4", "q8", "bf16")
    depths = (64, 4096, 7000) if quick else (64, 1024, 4096, 7000)
    listed = [(f"decode {d}", Case(c, d)) for c in (codecs[:1] if quick else codecs) for d in depths]
    listed += [("decode 8 x 1024", Case(c, 1024, 1, 8)) for c in (("q4",) if quick else codecs[:3])]
    listed += [("16 rows at 4096", Case(c, 4096, 16)) for c in (("q4",) if quick else codecs)]
    for past in (4096,) if quick else (0, 1024, 4096):
        listed += [(f"512 rows after {past}", Case(c, past + 512, 512)) for c in (("q4",) if quick else ("q4", "bf16"))]
    return listed


def measure(quick: bool, isas: list[str], threads: int) -> list[dict[str, object]]:
    bandwidth, budget, rows = memory_speed(), 0.15 if quick else 0.4, []
    flood = torch.zeros(1 << 24, dtype=torch.int64)
    print(f"memory streams at {bandwidth / 1e9:.1f} GB/s; {threads} threads; medians over all {LAYERS} layers\n")
    print(f"{'case':24} {'codec':5} {'isa':9} {'us/layer':>9} {'least':>8} {'ms/step':>8} {'GB/s':>6} {'of mem':>6} {'G prod/s':>8}")
    for name, case in cases(quick):
        for isa in isas:
            if isa == "portable" and case.products > 1e10:
                continue  # minutes, and nobody's path
            kernels = NativeKernels(isa, threads)
            attend, append = partial(case.attend, kernels), partial(case.append, kernels)
            runs: list[tuple[str, Callable[[], None], Callable[[], object]]] = [(name, attend, lambda: None)]
            if case.rows == 1 and case.depth == 4096:
                runs.append((f"{name} cold", attend, lambda: flood.sum()))
            if (case.rows, case.seqs) in ((512, 1), (1, 1)) and case.depth in (64, 512):
                runs.append((f"append {case.rows}", append, lambda: None))
            for title, run, before in runs:
                row = row_of(title, case, isa, seconds(run, budget, before), bandwidth)
                rows.append(row)
                print(line_of(row), flush=True)
    return rows


def bars_of(rows: list[dict[str, object]], isa: str) -> list[Bar]:
    ms = {(r["name"], r["codec"]): float(str(r["step_ms"])) for r in rows if r["isa"] == isa}
    values = (
        ms["decode 4096", "q4"],
        ms["decode 7000", "q4"] - ms["decode 64", "q4"],
    )
    return [Bar("kernels", name, value, limit, most=True) for (name, limit), value in zip(LIMITS.items(), values, strict=True)]


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", help="only this instruction set (default: all; the best one if --quick)")
    args = parser.parse_args()
    if reason := native.why_unavailable():
        sys.exit(f"no native kernels: {reason}")
    isas = [args.isa] if args.isa else native.isas()[: 1 if args.quick else None]
    rows = measure(args.quick, isas, args.threads)
    return finish("attention", rows, bars_of(rows, isas[0]), args)


if __name__ == "__main__":
    sys.exit(main())
