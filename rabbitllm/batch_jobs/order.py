"""The order in which lines are best answered. Records in, numbers out.

Lines of one kind come together, since they share passes; among these, lines with the same beginning, since it is
computed once; otherwise the longest come first, so that the slowest do not come last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rabbitllm.batch_jobs.items import Asked, BatchCall, Choose, Embed, Generate, Item, Key, Refused, ScoreItem

BEGINNING = 256
"""Lines whose first characters, this many, are equal count as having the same beginning."""
CHARACTERS_OF_A_TOKEN = 3
"""Less than the average of most languages, so that the estimate of tokens tends to be high."""
ERRORS, GENERATIONS, LIKELIHOODS, EMBEDDINGS = range(4)
"""Kinds of lines."""


def ordered(items: Sequence[Item]) -> list[Item]:
    """Items in an efficient order."""
    said = [sized(item.asked) for item in items]
    places = in_order(
        np.array([kind_of(item.asked) for item in items], dtype=np.int64),
        np.array([tokens for _, tokens in said], dtype=np.int64),
        np.array([hashed(text[:BEGINNING]) for text, _ in said], dtype=np.int64),
    )
    return [items[place] for place in places]


def in_order(kinds: Any, lengths: Any, beginnings: Any) -> Any:
    """Indices of lines in an efficient order.

    Args:
        kinds, lengths, beginnings: of each line: see `kind_of` and `sized`, the last one hashed; arrays of (lines,).
    """
    if not len(kinds):
        return np.zeros(0, dtype=np.int64)
    _, groups, counts = np.unique(beginnings, return_inverse=True, return_counts=True)
    groups = np.where(counts[groups] > 1, groups, -1)  # a beginning that occurs once forms no group
    return np.lexsort((-lengths, groups, kinds))


def kind_of(asked: Asked) -> int:
    """The kind of a line; lines of one kind share passes."""
    if isinstance(asked, Refused):
        return ERRORS
    if isinstance(asked, Generate) or (isinstance(asked, BatchCall) and not asked.url.endswith("embeddings")):
        return GENERATIONS
    return LIKELIHOODS if isinstance(asked, ScoreItem | Choose) else EMBEDDINGS


def sized(asked: Asked) -> tuple[str, int]:
    """The beginning of a line, and its estimated number of tokens."""
    if isinstance(asked, Generate):
        if isinstance(asked.given, str):
            return asked.given, len(asked.given) // CHARACTERS_OF_A_TOKEN + asked.max_new_tokens
        if asked.given and isinstance(asked.given[0], int):
            return str(asked.given[:BEGINNING]), len(asked.given) + asked.max_new_tokens
        said = "".join(str(message.get("content")) for message in asked.given if not isinstance(message, int))
        return said, len(said) // CHARACTERS_OF_A_TOKEN + asked.max_new_tokens
    if isinstance(asked, ScoreItem | Choose):
        texts = asked.continuations if isinstance(asked, ScoreItem) else asked.choices
        return asked.context, (len(asked.context) + max(map(len, texts))) // CHARACTERS_OF_A_TOKEN
    if isinstance(asked, Embed):
        longest = max(asked.texts, key=len)
        return "", len(longest) // (CHARACTERS_OF_A_TOKEN if isinstance(longest, str) else 1)
    if isinstance(asked, BatchCall):
        said = str(asked.body.get("messages") or asked.body.get("prompt") or asked.body.get("input") or "")
        most = asked.body.get("max_completion_tokens") or asked.body.get("max_tokens") or asked.defaults.max_new_tokens
        return said, len(said) // CHARACTERS_OF_A_TOKEN + (most if isinstance(most, int) else 0)
    return "", 0


def hashed(value: Key) -> int:
    """A 64-bit hash of a text or number, the same in every process."""
    said = f"{type(value).__name__} {value}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little", signed=True)
