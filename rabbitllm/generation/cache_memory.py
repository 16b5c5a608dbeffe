"""The memory limit of KV caches, and how many bytes of it sequences take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rabbitllm.base.terminal import size
from rabbitllm.errors import OptionError
from rabbitllm.generation.cache_cost import CacheCost, cost_by_cache, cost_by_config
from rabbitllm.generation.cache_file import TAIL_TOKENS
from rabbitllm.generation.pass_cost import cost_of_a_pass
from rabbitllm.generation.picking import SequenceMemory

AHEAD_SHARE = 8
"""1 / `AHEAD_SHARE` of the limit is for KV caches that are read from a file ahead of their attention."""
UNUSED_SHARE = 4
"""In bulk, where passes are as large as memory allows, 1 / `UNUSED_SHARE` of their memory is kept free for input lines
in the queue, answers, and caches that are being written to a file."""
LEAST_TOKENS = 64
"""With room for fewer tokens in KV caches a server would reject nearly every request."""


class CacheMemory:
    """How much memory KV caches may take, and how much they take.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        cache_bytes: limit of all KV caches; None for half of the memory that is free once the weights are loaded, on
            the devices that compute.
        in_bulk: see `Limits`.
        running: maximum number of sequences in one pass.

    Attributes:
        limit: bytes that KV caches may take.
        max_tokens: prompt tokens that one pass can compute in the remaining memory.
        part: how many of these can go through a layer at a time; None for all.
        rows: most rows of several sequences that are worth packing into one forward; None for no limit.
        max_texts: most sequences in one pass: `running`, or fewer if memory for their logits is short.
        is_tight: whether memory freed after a pass must be returned to the system at once.

    Raises:
        OptionError: no memory is left for KV caches, or none for activations.
    """

    def __init__(self, model: Any, cache_bytes: int | None, *, in_bulk: bool = False, running: int = 1) -> None:
        config = model.config.get_text_config(decoder=True)
        self._cost: CacheCost = cost_by_config(config, model.dtype)
        self._is_measured = False
        free = free_memory(model)
        self.limit = cache_bytes if cache_bytes is not None else free // 2
        if cache_bytes is None and self.limit < self.bytes_for(LEAST_TOKENS):
            raise OptionError(
                f"The weights leave {size(free)} free, which is too little to answer any request.",
                "Give the weights less (--max-memory), or the machine fewer other things to do.",
            )
        left = max(free - self.limit, 0)  # KV caches and activations are in memory at once
        cost = cost_of_a_pass(config, model.dtype.itemsize)
        self.max_texts = running
        self.part: int | None = None
        self.rows: int | None = None
        self.is_tight = False
        if not in_bulk:
            self.max_tokens = cost.tokens_in(left - cost.of(0, 0, running))
            return
        if cache_bytes is not None and left < cost.least():
            raise OptionError(
                f"The KV cache may take {size(cache_bytes)}, and a pass needs {size(cost.least())} more; "
                f"the weights leave {size(free)} free.",
                "Give the KV cache less (--cache-memory), or the weights (--max-memory).",
            )
        left -= left // UNUSED_SHARE
        self.max_texts = min(running, cost.texts_in(left))
        self.max_tokens, self.part = cost.parts_in(left, self.max_texts)
        self.rows = min(self.part, cost.max_tokens)
        self.is_tight = cost.is_tight(self.rows, left // 2)

    def bytes_for(self, tokens: int) -> int:
        """The size in bytes of the KV cache of one sequence with so many tokens."""
        return self._cost.bytes_for(tokens)

    def beside_file(self) -> int:
        """Bytes of memory of a sequence whose KV cache is in a file."""
        return self._cost.beside_file(TAIL_TOKENS)

    def ahead(self) -> int:
        """Bytes that may be read from a file ahead of their use."""
        return self.limit // AHEAD_SHARE

    def now(self, texts: Iterable[SequenceMemory]) -> int:
        """Bytes of the KV caches of these sequences after the next pass."""
        return sum(self.bytes_for(text.tokens + 1) for text in texts)

    def soon(self, texts: Iterable[SequenceMemory]) -> int:
        """Bytes of the KV caches of these sequences after the next tokens; see `SequenceMemory.soon`."""
        return sum(self.bytes_for(text.soon) for text in texts)

    def measure(self, caches: Iterable[Any]) -> None:
        """Measure the bytes of a token on the first cache that allows it; does nothing after that.

        Args:
            caches: of each sequence, a cache with some tokens in it or None.
        """
        if self._is_measured:
            return
        for cache in caches:
            if cache is not None and (found := cost_by_cache(cache)) is not None:
                self._cost, self._is_measured = found, True
                return


def free_memory(model: Any) -> int:
    """Free bytes on all devices together, with the weights loaded."""
    free: list[int] = [lane.device.free_bytes() for lane in model.streamer.lanes.values()]
    return len(free) * min(free)
