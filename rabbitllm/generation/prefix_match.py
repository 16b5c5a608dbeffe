"""Whose keys and values a request that begins is given a part of, and whether it should wait for more of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rabbitllm.generation.prefixes import WORTH_TOKENS, beginning, usable

WORTH_WAITING = 64
"""A beginning of so many tokens that another request computes just now is waited for, rather than computed twice."""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A text that begins as another one does.

    Attributes:
        ids: that are in its cache.
        cache: its keys and values.
        tokens: of these, the first so many can be used.
    """

    ids: Sequence[int]
    cache: Any
    tokens: int


def best_source(wanted: Sequence[int], texts: Iterable[tuple[Sequence[int], Any]]) -> PrefixSource | None:
    """The one of which the most can be used; None if nothing can.

    Args:
        wanted: the text that begins.
        texts: ids and caches that hold their keys and values.
    """
    found = (PrefixSource(ids, cache, usable(wanted, ids, cache)) for ids, cache in texts)
    best = max(found, key=lambda source: source.tokens, default=None)
    return best if best is not None and best.tokens else None


def should_wait(wanted: Sequence[int], tokens: int, computed: Iterable[Sequence[int]]) -> bool:
    """Whether a text should wait until another one has computed what both begin with.

    Args:
        wanted: the text that would begin.
        tokens: of it, those that are there already.
        computed: prompts that are being computed.
    """
    worth = max(tokens + WORTH_TOKENS, WORTH_WAITING)
    return any(beginning(wanted, prompt) >= worth for prompt in computed)
