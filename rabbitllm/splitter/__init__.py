"""Splits shards into layer files: map, plan, journal, split. Never imports the engine."""

__all__ = [
    "bit_allocation",
    "disk_budget",
    "disk_sampler",
    "filler",
    "interrupted",
    "journal",
    "lock",
    "mover",
    "plan",
    "request",
    "source_check",
    "split",
    "sums",
]
