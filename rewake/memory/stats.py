"""What there is to measure of a memory: a few numbers, taken at once on the engine thread."""

from __future__ import annotations

from dataclasses import dataclass

from rewake.memory.ledger import Ledger

__all__ = ["Stats", "Used", "stats_of", "used_by"]


@dataclass(frozen=True)
class Stats:
    """Bytes written and read count since the start; without a directory all that is about disks is 0. Costs are None until measured.

    `pages_*` count slots of the arena: a page of some models takes several.
    """

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
    free, cached, loading = residency.pool.num_free, residency.num_cached, sum(len(slots) for slots, _ in residency.loading.values())
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


@dataclass(frozen=True)
class Used:
    """What one namespace takes, in bytes, and of what; pages that several agents share count once."""

    memory: int
    memory_budget: int
    disk: int
    disk_budget: int
    pages_in_memory: int
    pages_loading: int
    pages_on_disk: int


def used_by(ledger: Ledger, namespace: str) -> Used:
    """Pages of the arena that are reserved, but empty yet, are not counted."""
    residency, store = ledger.residency, ledger.store
    in_memory = loading = on_disk = disk_bytes = num_slots = 0
    on_the_way = {resident for resident, _ in residency.loading}
    for resident in ledger.tree.residents(namespace):
        in_memory += bool(resident.slots)
        num_slots += sum(map(len, resident.slots.values()))
        loading += resident in on_the_way
        on_disk += bool(resident.files)
        disk_bytes += sum(file.file_bytes for file in resident.files)
    return Used(
        memory=num_slots * residency.pool.slot_bytes,
        memory_budget=residency.pool.num_slots * residency.pool.slot_bytes,
        disk=disk_bytes,
        disk_budget=store.budget if store else 0,
        pages_in_memory=in_memory,
        pages_loading=loading,
        pages_on_disk=on_disk,
    )
