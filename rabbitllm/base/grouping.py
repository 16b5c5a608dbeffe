"""Values by a key that several of them have."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Keys -> the values of each, both in the order in which they came."""
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def summed(pairs: Iterable[tuple[_Key, int]]) -> dict[_Key, int]:
    """Keys -> the sum of the numbers of each, in the order in which they came."""
    return {key: sum(numbers) for key, numbers in grouped(pairs).items()}
