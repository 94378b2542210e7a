"""Numbers for a monitor, in Prometheus' text format. Knows that format; what is counted, the memory knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from rewake.api.verbs import on_engine
from rewake.engine import Engine
from rewake.memory.stats import Stats, stats_of

__all__ = ["router"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    """One of them; `samples` are labels and values, and values that are None are not known yet."""

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, float | None], ...]

    def lines(self) -> Iterable[str]:
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples:
            if value is not None:
                yield f"{self.name}{labels} {value}"


def gauge(name: str, help: str, value: float | None) -> Metric:
    return Metric(f"rewake_{name}", "gauge", help, (("", value),))


def counter(name: str, help: str, value: float) -> Metric:
    return Metric(f"rewake_{name}_total", "counter", help, (("", value),))


def metrics(stats: Stats, running: int, waiting: int) -> list[Metric]:
    pages = (("free", stats.pages_free), ("held", stats.pages_held), ("cached", stats.pages_cached), ("loading", stats.pages_loading))
    return [
        counter("bytes_written", "Bytes of pages and segments written to disk since the start.", stats.bytes_written),
        counter("bytes_read", "Bytes of pages and segments read from disk since the start.", stats.bytes_read),
        gauge("disk_bytes", "Bytes that memories take on disk.", stats.disk_bytes),
        gauge("disk_budget_bytes", "Bytes that memories may take on disk.", stats.disk_budget_bytes),
        Metric("rewake_pages", "gauge", "Slots for pages in the arena, by state.", tuple((f'{{state="{s}"}}', n) for s, n in pages)),
        gauge("arena_bytes", "Bytes of the arena that pages in memory lie in.", stats.arena_bytes),
        gauge("agents", "Agents that are remembered.", stats.agents),
        gauge("requests_running", "Requests that are being computed, or whose last turn is being saved.", running),
        gauge("requests_waiting", "Requests that wait for room, for their pages, or for their agent.", waiting),
        gauge("writer_waiting_bytes", "Bytes that wait to be written to disk.", stats.writer_waiting_bytes),
        gauge("load_gate_read_seconds_per_byte", "What reading pages back has taken lately.", stats.read_cost),
        gauge("load_gate_compute_seconds_per_token", "What computing prompts has taken lately.", stats.compute_cost),
    ]


def router(engine: Engine) -> APIRouter:
    routes = APIRouter()

    def measure() -> list[Metric]:
        running, waiting = len(engine.running) + len(engine.closing), len(engine.waiting) + len(engine.opening)
        return metrics(stats_of(engine.memory.ledger), running, waiting)

    @routes.get("/metrics")
    async def all_metrics() -> PlainTextResponse:
        lines = [line for metric in await on_engine(engine, measure) for line in metric.lines()]
        return PlainTextResponse("\n".join(lines) + "\n", media_type=CONTENT_TYPE)

    return routes
