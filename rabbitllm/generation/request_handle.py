"""A request that was submitted to a batch, and its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rabbitllm.generation.generation import Generation
from rabbitllm.generation.members import Member
from rabbitllm.generation.picking import SequenceMemory
from rabbitllm.generation.swap_space import SwappedOutCache


@dataclass(eq=False, slots=True)
class RequestHandle:
    """A submitted request. Its caller uses only `cancel`, the batch the rest.

    Attributes:
        wake: wakes the batch after a change.
        generation: its generation.
        member: its member of the joint passes, while it runs.
        is_cancelled: whether it was cancelled.
        deadline: deadline in `time.monotonic()`; None for no limit.
        held: its KV cache, if it was preempted and the cache is swapped out.
    """

    wake: Callable[[], None]
    generation: Generation
    member: Member | None = None
    is_cancelled: bool = False
    deadline: float | None = None
    held: SwappedOutCache | None = None

    def cancel(self) -> None:
        """End it after the current pass; may be called from any thread, any number of times."""
        self.is_cancelled = True
        self.wake()

    @property
    def text(self) -> SequenceMemory:
        """Its current and maximum length."""
        generation = self.generation
        return SequenceMemory(len(generation.request.prompt) + len(generation.tokens), generation.room)

    @property
    def cached_tokens(self) -> int:
        """How many tokens its cache has; 0 without one."""
        cache = self.generation.cache
        return cache.get_seq_length() if cache is not None else 0

    def whole_cache(self, continues: bool) -> Any | None:
        """The KV cache from which `generate` can continue: of all tokens except those of the next pass.

        None if the request has just begun, or if its cache does not report its number of tokens.

        Args:
            continues: whether the model can continue the cache with several tokens at once; otherwise the next pass
                must have one token.
        """
        if self.member is None or not self.member.is_outside:
            return None
        entry, cache = self.member.brings
        if not entry.past or entry.past >= self.text.tokens or not (continues or entry.length == 1):
            return None
        return cache
