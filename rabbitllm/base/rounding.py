"""Rounds sizes and offsets up."""

from __future__ import annotations


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple
