"""Foundations: options, events of a split, forks, interrupts, logs, text."""

__all__ = [
    "building",
    "collection",
    "compiling",
    "contexts",
    "forks",
    "grouping",
    "interrupts",
    "logs",
    "openmp",
    "options",
    "parts",
    "plain_json",
    "programs",
    "progress",
    "random_tensors",
    "rounding",
    "terminal",
    "transformers_version",
    "validation",
]
