"""Numbers for a monitor, in Prometheus' text format. Knows that format; what is counted, the memory knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import get_args

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from rewake.api.verbs import on_loaded
from rewake.counts import Histogram
from rewake.engine import Engine
from rewake.memory.stats import Stats, stats_of
from rewake.request import MatchKind
from rewake.services import Services

__all__ = ["router"]


class Exposition(PlainTextResponse):
    media_type = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    """One of them; `samples` are what follows the name, and values; values that are None are not known yet."""

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, float | None], ...]

    def of_model(self, name: str) -> Metric:
        """As one of several models' samples."""
        escaped = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        samples = []
        for sample, value in self.samples:
            suffix, _, labels = sample.partition("{")
            samples.append((f'{suffix}{{model="{escaped}"' + (f",{labels}" if labels else "}"), value))
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


def histogram(name: str, help: str, seen: Histogram) -> Metric:
    bounds = [*(f"{bound:g}" for bound in seen.bounds), "+Inf"]
    buckets = tuple((f'_bucket{{le="{b}"}}', number) for b, number in zip(bounds, seen.cumulative(), strict=True))
    return Metric(f"rewake_{name}", "histogram", help, (*buckets, ("_sum", seen.sum), ("_count", seen.count)))


def labelled(kind: str, name: str, help: str, label: str, samples: Mapping[str, float]) -> Metric:
    return Metric(f"rewake_{name}", kind, help, tuple((f'{{{label}="{value}"}}', number) for value, number in samples.items()))


def of_memory(stats: Stats) -> list[Metric]:
    pages = {"free": stats.pages_free, "held": stats.pages_held, "cached": stats.pages_cached, "loading": stats.pages_loading}
    return [
        counter("bytes_written", "Bytes of pages and segments written to disk since the start.", stats.bytes_written),
        counter("bytes_read", "Bytes of pages and segments read from disk since the start.", stats.bytes_read),
        gauge("disk_bytes", "Bytes that memories take on disk.", stats.disk_bytes),
        gauge("disk_budget_bytes", "Bytes that memories may take on disk.", stats.disk_budget_bytes),
        gauge("disk_pages", "Pages, whole or begun, that are on disk, whether they are in memory or not.", stats.pages_on_disk),
        labelled("gauge", "pages", "Slots for pages in the arena, by state.", "state", pages),
        gauge("arena_bytes", "Bytes of the arena that pages in memory lie in.", stats.arena_bytes),
        gauge("agents", "Agents that are remembered.", stats.agents),
        gauge("writer_waiting_bytes", "Bytes that wait to be written to disk.", stats.writer_waiting_bytes),
        gauge("load_gate_read_seconds_per_byte", "What reading pages back has taken lately.", stats.read_cost),
        gauge("load_gate_compute_seconds_per_token", "What computing prompts has taken lately.", stats.compute_cost),
    ]


def of_work(engine: Engine) -> list[Metric]:
    running, waiting = len(engine.running) + len(engine.closing), len(engine.waiting) + len(engine.opening)
    counts = engine.counts
    matches = {kind: counts.matches[kind] for kind in get_args(MatchKind)}
    return [
        gauge("requests_running", "Requests that are being computed, or whose last turn is being saved.", running),
        gauge("requests_waiting", "Requests that wait for room, for their pages, or for their agent.", waiting),
        gauge("requests_running_limit", "Requests that are computed together at most.", engine.max_running),
        gauge("requests_waiting_limit", "Requests that may wait before more are refused.", engine.max_waiting),
        histogram("ttft_seconds", "From a request's arrival to its first token.", counts.ttft),
        histogram("step_seconds", "How long the model took for a step.", counts.steps),
        counter("step_tokens", "Tokens that steps have computed, of prompts and answers.", counts.step_tokens),
        counter("prompt_tokens", "Tokens of prompts, computed or not.", counts.prompt_tokens),
        counter("reused_tokens", "Tokens of prompts that were remembered, in memory or on disk.", counts.reused_tokens),
        counter("loaded_tokens", "Tokens of prompts that were read from disk.", counts.loaded_tokens),
        counter("generated_tokens", "Tokens of answers.", counts.generated_tokens),
        labelled("counter", "matches_total", "Requests, by what was remembered of their prompts.", "kind", matches),
    ]


def measure(engine: Engine) -> list[Metric]:
    return [*of_work(engine), *of_memory(stats_of(engine.memory.ledger))]


def router(services: Services, answers: Mapping[int, int]) -> APIRouter:
    """`answers` is how many there were, by HTTP status."""
    routes = APIRouter()

    async def of_models() -> list[list[Metric]]:
        """Of each model that is loaded; labelled with its name where several are served."""
        found = []
        for name in services.names:
            if (measured := await on_loaded(services, name, measure)) is not None:
                found.append([m.of_model(name) for m in measured] if len(services.names) > 1 else measured)
        return found

    @routes.get("/metrics", response_class=Exposition)
    async def all_metrics() -> Exposition:
        """Numbers in Prometheus' text format."""
        by_status = {str(status): number for status, number in sorted(answers.items())}
        lines = [line for same in zip(*await of_models(), strict=True) for i, m in enumerate(same) for line in m.lines(with_help=not i)]
        lines += labelled("counter", "http_answers_total", "Answers, by status.", "status", by_status).lines()
        return Exposition("\n".join(lines) + "\n")

    return routes
