"""Foundations: options, events of a split, forks, interrupts, logs, text."""

__all__ = [
    "collection",
    "forks",
    "interrupts",
    "logs",
    "openmp",
    "options",
    "plain_json",
    "progress",
    "rounding",
    "terminal",
    "transformers_version",
    "validation",
]
