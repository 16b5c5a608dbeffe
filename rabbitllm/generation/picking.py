"""Which sequences take part in the next pass, may begin, or are preempted. Numbers in, decisions out.

order      first come, first served; preempted ones come first
a pass     every sequence in decode, and as many prompt tokens as keep the pass short
memory     a sequence may begin if the running ones leave room for its KV cache and some more tokens;
           if the caches exceed the limit later, the last sequence to begin is preempted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

AHEAD_TOKENS = 64
"""Room for so many future tokens is left to every sequence, so that it is not preempted at once."""


MANY_TOKENS = 64
"""A pass with fewer is one whose time is that of the weights."""
FIRST_TOKENS = 1024
"""Of prompts in a pass, before it is known what they cost."""
MAX_TOKENS = 8192
"""Of prompts in a pass: their activations need memory too."""


@dataclass(frozen=True, slots=True)
class SequenceMemory:
    """A text as far as its memory is concerned.

    Attributes:
        tokens: of it, generated ones included.
        room: tokens that may follow.
    """

    tokens: int
    room: int

    @property
    def soon(self) -> int:
        """Tokens that it will have before long."""
        return self.tokens + min(self.room, AHEAD_TOKENS)


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """How long passes take, and so how many tokens of prompts one may have: as many as make it twice as long.

    A pass over streamed weights takes its time whatever goes through it; up to there tokens cost little.

    Attributes:
        least: seconds of the shortest of the latest passes; None before the first.
        each: seconds that a token adds; None as long as no pass with many has shown it.
    """

    least: float | None = None
    each: float | None = None

    def after(self, tokens: int, seconds: float) -> TokenBudget:
        """What is known after one more pass."""
        if tokens >= MANY_TOKENS and self.least is not None:
            each = max(seconds - self.least, 0.0) / tokens
            return TokenBudget(self.least, each if self.each is None else 0.5 * (self.each + each))
        # a short pass long ago says little about now: it is forgotten slowly
        return TokenBudget(seconds if self.least is None else min(seconds, 1.05 * self.least), self.each)

    def recompute_seconds(self, tokens: int, chunk: int) -> float | None:
        """Seconds until a text has gone through the model again, in passes that are made anyway; None if not known.

        What its tokens add to passes, and the time of every pass but the last, from which its next token comes.

        Args:
            tokens: of it.
            chunk: of these in one pass.
        """
        if self.least is None or self.each is None:
            return None
        return tokens * self.each + (-(-tokens // chunk) - 1) * self.least

    def prompt_tokens(self, chunk: int) -> int:
        """Of prompts, in the next pass; never less than a chunk.

        Args:
            chunk: tokens of one prompt.
        """
        if self.least is None or self.each is None:
            return max(chunk, FIRST_TOKENS)
        return min(max(chunk, int(self.least / max(self.each, 1e-9))), MAX_TOKENS)


def take_part(tokens: Sequence[int], chunk: int) -> list[int]:
    """Places, in the order given, of those that take part in the next pass.

    Args:
        tokens: that each would bring; one for a text that is being continued.
        chunk: tokens of prompts in a pass, at most; the first prompt takes part in any case.
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
    """Whether a text may begin; one alone always may.

    Args:
        text: that waits.
        running: those that run.
        cost: tokens -> bytes.
        limit: bytes.
    """
    return not running or cost(text.soon) + sum(cost(one.soon) for one in running) <= limit


def too_many(running: Sequence[SequenceMemory], cost: Callable[[int], int], limit: int) -> int:
    """How many running sequences, from the last one on, are preempted before the next pass.

    Args:
        running: in the order in which they came.
        cost, limit: see `fits`.
    """
    needed = [cost(one.tokens + 1) for one in running]
    count = 0
    while count < len(running) - 1 and sum(needed[: len(needed) - count]) > limit:
        count += 1
    return count


def grouped(sizes: Sequence[int], most: int | None) -> list[slice]:
    """Neighbours that go together: as many as there is room for, and one at least.

    Args:
        sizes: of each.
        most: of a group; None for no limit.

    Returns:
        The places of each group.
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
    """Seconds until one of those that wait will probably have been taken on.

    Args:
        waiting: how many.
        places: requests that run at a time.
        seconds: that one took lately.
    """
    return min(max(1.0, seconds * max(waiting, 1) / max(places, 1)), 600.0)
