"""The scheduler's decisions: which sequences take part in the next pass, are admitted, or are preempted.

order      first come, first served; preempted sequences come first
a pass     every sequence in decode, and as many prompt tokens as keep the pass short
memory     a sequence is admitted if the running ones leave room for its KV cache and some more tokens;
           if the caches exceed the limit later, the sequence admitted last is preempted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

AHEAD_TOKENS = 64
"""Number of future tokens of every sequence for which room is reserved, so that it is not preempted at once."""


MANY_TOKENS = 64
"""The time of a pass with fewer tokens counts as the time to stream the weights."""
FIRST_TOKENS = 1024
"""Prompt tokens in a pass before their cost is measured."""
MAX_TOKENS = 8192
"""The most prompt tokens in a pass: their activations need memory too."""


@dataclass(frozen=True, slots=True)
class SequenceMemory:
    """The length of a sequence, which determines its memory.

    Attributes:
        tokens: number of tokens, including generated ones.
        room: number of tokens that may follow.
    """

    tokens: int
    room: int

    @property
    def soon(self) -> int:
        """Number of tokens after the next `AHEAD_TOKENS`, limited by `room`."""
        return self.tokens + min(self.room, AHEAD_TOKENS)


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """The measured time of passes, and from it the budget of prompt tokens: as many as double the time of a pass.

    A pass over streamed weights has a minimum time for any number of tokens; up to the budget, tokens cost little.

    Attributes:
        least: seconds of the shortest recent pass; None before the first.
        each: seconds that a token adds; None until a pass with many tokens was measured.
    """

    least: float | None = None
    each: float | None = None

    def after(self, tokens: int, seconds: float) -> TokenBudget:
        """The budget updated by one more pass."""
        if tokens >= MANY_TOKENS and self.least is not None:
            each = max(seconds - self.least, 0.0) / tokens
            return TokenBudget(self.least, each if self.each is None else 0.5 * (self.each + each))
        # the minimum rises slowly, so that a short pass long ago does not count for ever
        return TokenBudget(seconds if self.least is None else min(seconds, 1.05 * self.least), self.each)

    def recompute_seconds(self, tokens: int, chunk: int) -> float | None:
        """Estimated seconds to recompute the KV cache of a sequence; None if not measured yet.

        Counts the time that its tokens add to passes, and the whole time of every pass but the last, which yields its
        next token.

        Args:
            tokens: number of tokens of the sequence.
            chunk: tokens of it in one pass.
        """
        if self.least is None or self.each is None:
            return None
        return tokens * self.each + (-(-tokens // chunk) - 1) * self.least

    def prompt_tokens(self, chunk: int) -> int:
        """Budget of prompt tokens in the next pass; at least a chunk.

        Args:
            chunk: tokens of one prompt in a pass.
        """
        if self.least is None or self.each is None:
            return max(chunk, FIRST_TOKENS)
        return min(max(chunk, int(self.least / max(self.each, 1e-9))), MAX_TOKENS)


def take_part(tokens: Sequence[int], chunk: int) -> list[int]:
    """Indices of the sequences that take part in the next pass, in ascending order.

    Args:
        tokens: number of tokens that each sequence brings; one for a sequence in decode.
        chunk: maximum prompt tokens in a pass; the first prompt takes part in any case.
    """
    found = []
    left = chunk
    for place, count in enumerate(tokens):
        if count <= 1:
            found.append(place)
        elif left == chunk or count <= left:
            found.append(place)
            left -= count
    return found


def fits(text: SequenceMemory, running: Sequence[SequenceMemory], cost: Callable[[int], int], limit: int) -> bool:
    """Whether memory has room for one more sequence; with no others running it always may begin.

    Args:
        text: the waiting sequence.
        running: the running sequences.
        cost: function from tokens to bytes of the KV cache.
        limit: limit in bytes.
    """
    return not running or cost(text.soon) + sum(cost(one.soon) for one in running) <= limit


def too_many(running: Sequence[SequenceMemory], cost: Callable[[int], int], limit: int) -> int:
    """How many running sequences, counted from the last, are preempted before the next pass.

    Args:
        running: sequences in the order in which they were admitted.
        cost, limit: see `fits`.
    """
    needed = [cost(one.tokens + 1) for one in running]
    count = 0
    while count < len(running) - 1 and sum(needed[: len(needed) - count]) > limit:
        count += 1
    return count


def grouped(sizes: Sequence[int], most: int | None) -> list[slice]:
    """Group neighbours greedily up to a maximum size; each group has at least one.

    Args:
        sizes: size of each item.
        most: maximum size of a group; None for no limit.

    Returns:
        The indices of each group as a slice.
    """
    groups: list[slice] = []
    begin, taken = 0, 0
    for at, size in enumerate(sizes):
        if at > begin and most is not None and taken + size > most:
            groups.append(slice(begin, at))
            begin, taken = at, 0
        taken += size
    return [*groups, slice(begin, len(sizes))] if sizes else []


def retry_after(waiting: int, places: int, seconds: float) -> float:
    """Estimated seconds until a new request can be accepted, from 1 to 600.

    Args:
        waiting: number of waiting requests.
        places: maximum number of running requests.
        seconds: recent duration of a request.
    """
    return min(max(1.0, seconds * max(waiting, 1) / max(places, 1)), 600.0)
