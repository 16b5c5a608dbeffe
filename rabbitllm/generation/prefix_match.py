"""Finds the KV cache whose prefix a new request can reuse, and whether it should wait for a longer one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rabbitllm.generation.prefixes import WORTH_TOKENS, beginning, usable

WORTH_WAITING = 64
"""A request waits for a shared prefix of at least so many tokens that another request is computing."""


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A sequence that shares a prefix with another one.

    Attributes:
        ids: of the tokens in its cache.
        cache: its KV cache.
        tokens: the first so many of them can be reused.
    """

    ids: Sequence[int]
    cache: Any
    tokens: int


def best_source(wanted: Sequence[int], texts: Iterable[tuple[Sequence[int], Any]]) -> PrefixSource | None:
    """The source with the longest usable prefix; None if there is none.

    Args:
        wanted: ids of the new request.
        texts: ids and KV cache of each candidate.
    """
    found = (PrefixSource(ids, cache, usable(wanted, ids, cache)) for ids, cache in texts)
    best = max(found, key=lambda source: source.tokens, default=None)
    return best if best is not None and best.tokens else None


def should_wait(wanted: Sequence[int], tokens: int, computed: Iterable[Sequence[int]]) -> bool:
    """Whether a request should wait until another one has computed their shared prefix.

    Args:
        wanted: ids of the new request.
        tokens: length of the prefix that is cached already.
        computed: prompts in prefill.
    """
    worth = max(tokens + WORTH_TOKENS, WORTH_WAITING)
    return any(beginning(wanted, prompt) >= worth for prompt in computed)
