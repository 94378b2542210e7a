"""What there is to measure of a memory: a few numbers, taken at once on the engine thread."""

from __future__ import annotations

from dataclasses import dataclass

from rewake.memory.ledger import Ledger

__all__ = ["Stats", "stats_of"]


@dataclass(frozen=True)
class Stats:
    """Bytes written and read count since the start; without a directory all that is about disks is 0. Costs are None until measured."""

    agents: int
    arena_bytes: int
    pages_free: int
    pages_held: int
    pages_cached: int
    pages_loading: int
    pages_on_disk: int
    disk_bytes: int
    disk_budget_bytes: int
    bytes_written: int
    bytes_read: int
    writer_waiting_bytes: int
    read_cost: float | None
    compute_cost: float | None


def stats_of(ledger: Ledger) -> Stats:
    """Only agents that have a name are counted, as only they are listed."""
    residency, store, writer = ledger.residency, ledger.store, ledger.writer
    free, cached, loading = residency.pool.num_free, len(residency.cached), len(residency.loading)
    return Stats(
        agents=sum(name is not None for _, name in ledger.tree.agents),
        arena_bytes=len(residency.arena),
        pages_free=free,
        pages_held=residency.pool.num_slots - free - cached - loading,
        pages_cached=cached,
        pages_loading=loading,
        pages_on_disk=sum(1 for resident in ledger.tree.residents() if resident.files),
        disk_bytes=store.used if store else 0,
        disk_budget_bytes=store.budget if store else 0,
        bytes_written=store.bytes_written if store else 0,
        bytes_read=store.bytes_read if store else 0,
        writer_waiting_bytes=writer.waiting_bytes if writer else 0,
        read_cost=residency.gate.read_cost,
        compute_cost=residency.gate.compute_cost,
    )
