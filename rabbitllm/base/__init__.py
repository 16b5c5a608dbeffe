"""Foundations: options, events of a split, forks, logs, text."""

__all__ = [
    "collection",
    "forks",
    "logs",
    "options",
    "plain_json",
    "progress",
    "rounding",
    "terminal",
    "transformers_version",
]
