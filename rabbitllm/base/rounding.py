"""Rounds sizes and offsets up."""

from __future__ import annotations


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
