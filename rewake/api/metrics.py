"""Numbers for a monitor, in Prometheus' text format. Knows that format; what is counted, the memory knows."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from rewake.api.verbs import on_engine
from rewake.engine import Engine
from rewake.errors import ShuttingDown
from rewake.memory.stats import Stats, stats_of
from rewake.services import Services

__all__ = ["router"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    """One of them; `samples` are labels and values, and values that are None are not known yet."""

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, float | None], ...]

    def of_model(self, name: str) -> Metric:
        """As one of several models' samples."""
        escaped = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        samples = ((f'{{model="{escaped}"' + (f",{labels[1:]}" if labels else "}"), value) for labels, value in self.samples)
        return replace(self, samples=tuple(samples))

    def lines(self, with_help: bool = True) -> Iterable[str]:
        if with_help:
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
        Metric("rewake_pages", "gauge", "Pages of the arena, by state.", tuple((f'{{state="{s}"}}', n) for s, n in pages)),
        gauge("arena_bytes", "Bytes of the arena that pages in memory lie in.", stats.arena_bytes),
        gauge("agents", "Agents that are remembered.", stats.agents),
        gauge("requests_running", "Requests that are being computed, or whose last turn is being saved.", running),
        gauge("requests_waiting", "Requests that wait for room, for their pages, or for their agent.", waiting),
        gauge("writer_waiting_bytes", "Bytes that wait to be written to disk.", stats.writer_waiting_bytes),
        gauge("load_gate_read_seconds_per_byte", "What reading pages back has taken lately.", stats.read_cost),
        gauge("load_gate_compute_seconds_per_token", "What computing prompts has taken lately.", stats.compute_cost),
    ]


def measure(engine: Engine) -> list[Metric]:
    running, waiting = len(engine.running) + len(engine.closing), len(engine.waiting) + len(engine.opening)
    return metrics(stats_of(engine.memory.ledger), running, waiting)


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    async def of_models() -> list[list[Metric]]:
        """Of each model that is loaded; labelled with its name where several are served."""
        found = []
        for name, service in services.loaded.items():
            with suppress(ShuttingDown) if len(services.names) > 1 else nullcontext():  # it is unloaded just now
                measured = await on_engine(service.engine, partial(measure, service.engine))
                found.append([m.of_model(name) for m in measured] if len(services.names) > 1 else measured)
        return found

    @routes.get("/metrics")
    async def all_metrics() -> PlainTextResponse:
        lines = [line for same in zip(*await of_models(), strict=True) for i, m in enumerate(same) for line in m.lines(with_help=not i)]
        return PlainTextResponse("\n".join(lines) + "\n", media_type=CONTENT_TYPE)

    return routes
