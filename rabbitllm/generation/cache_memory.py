"""The memory that keys and values may take beside a model's weights, and what tokens cost of it."""

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
"""One part in so many of the limit is for what is brought from a file before its attention comes."""
UNUSED_SHARE = 4
"""In bulk, where passes are as large as memory allows, one part in so many of what is left to them is for the rest:
lines that wait, answers that are written, what is on its way into a file."""
LEAST_TOKENS = 64
"""A server whose keys and values have room for less would refuse nearly everything."""


class CacheMemory:
    """What keys and values may take, and what they do.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        cache_bytes: they may take; None for half of what is free beside the weights, on the devices that compute.
        in_bulk: see `Limits`.
        running: texts in one pass, at most.

    Attributes:
        limit: bytes that they may take.
        max_tokens: of prompts that one pass can compute beside them.
        part: of these, those that can go through a layer at a time; None for all.
        rows: of several texts that gain by going through a layer together; None for all.
        max_texts: in one pass, as many as are asked for if there is memory for their logits.
        is_tight: whether what passes let go of has to go back to the system at once.

    Raises:
        OptionError: there is no memory left, or none to compute in.
    """

    def __init__(self, model: Any, cache_bytes: int | None, *, in_bulk: bool = False, running: int = 1) -> None:
        config = model.config.get_text_config(decoder=True)
        self._cost: CacheCost = cost_by_config(config, model.dtype)
        self._is_measured = False
        free = free_memory(model)
        self.limit = cache_bytes if cache_bytes is not None else free // 2
        if cache_bytes is None and self.limit < self.bytes_for(LEAST_TOKENS):
            raise OptionError(
                f"Beside the weights {size(free)} are free, which is too little to answer anybody.",
                "Give the weights less (--max-memory), or the machine fewer other things to do.",
            )
        left = max(free - self.limit, 0)  # both are there at once
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
                f"Keys and values may take {size(cache_bytes)}, and a pass computes in {size(cost.least())} more; "
                f"beside the weights {size(free)} are free.",
                "Give keys and values less (--cache-memory), or the weights (--max-memory).",
            )
        left -= left // UNUSED_SHARE
        self.max_texts = min(running, cost.texts_in(left))
        self.max_tokens, self.part = cost.parts_in(left, self.max_texts)
        self.rows = min(self.part, cost.max_tokens)
        self.is_tight = cost.is_tight(self.rows, left // 2)

    def bytes_for(self, tokens: int) -> int:
        """That the keys and values of so many tokens of one text take."""
        return self._cost.bytes_for(tokens)

    def beside_file(self) -> int:
        """That a text takes whose keys and values are in a file."""
        return self._cost.beside_file(TAIL_TOKENS)

    def ahead(self) -> int:
        """That may be read of a file ahead of its use."""
        return self.limit // AHEAD_SHARE

    def now(self, texts: Iterable[SequenceMemory]) -> int:
        """Bytes for these texts in the next pass."""
        return sum(self.bytes_for(text.tokens + 1) for text in texts)

    def soon(self, texts: Iterable[SequenceMemory]) -> int:
        """Bytes for these texts before long."""
        return sum(self.bytes_for(text.soon) for text in texts)

    def measure(self, caches: Iterable[Any]) -> None:
        """Once there is a cache that shows it, what tokens cost is known.

        Args:
            caches: of each text, with some tokens in it, or None.
        """
        if self._is_measured:
            return
        for cache in caches:
            if cache is not None and (found := cost_by_cache(cache)) is not None:
                self._cost, self._is_measured = found, True
                return


def free_memory(model: Any) -> int:
    """Bytes on all devices together, beside the weights."""
    free: list[int] = [lane.device.free_bytes() for lane in model.streamer.lanes.values()]
    return len(free) * min(free)
