"""Whose keys and values are where: of texts that run, of those that are over and may be begun with, of those aside.

All of them together, but for those aside, are kept within a limit. Called in the batch's thread, but for `nbytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers.cache_utils import DynamicCache

from rabbitllm.batching.aside import Aside, usual_folder
from rabbitllm.batching.beginnings import best_source, should_wait
from rabbitllm.batching.cache_memory import CacheMemory
from rabbitllm.batching.limits import Limits
from rabbitllm.batching.picking import Pace
from rabbitllm.batching.prefixes import Kept, copied
from rabbitllm.batching.ticket import Ticket
from rabbitllm.chat.kept_cache import keeps

ASIDE_SHARE = 4
"""So many times what may be in memory may be aside, where nobody says. Texts that grow alike, and make way until one of
them is left, add up to no more if they are at most 80."""


class TextCaches:
    """The caches of a batch's texts.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        limits: of the batch.

    Attributes:
        memory: what they may take, and what tokens cost.
        chunk: tokens of a prompt in one pass.
        resumed: times that a text got back what was set aside.

    Raises:
        OptionError: there is no memory left.
    """

    def __init__(self, model: Any, limits: Limits) -> None:
        self.memory = CacheMemory(model, limits.cache_bytes, in_bulk=limits.in_bulk)
        self.chunk = min(limits.chunk, self.memory.part or self.memory.most_tokens)
        self.resumed = 0
        self._config = model.config.get_text_config(decoder=True)
        self._exact = limits.exact
        self._keeps = keeps(model)
        self._shares = self._keeps and not limits.exact
        self._kept = Kept()
        aside_bytes = limits.aside_bytes if limits.aside_bytes is not None else ASIDE_SHARE * self.memory.limit
        folder = limits.aside_folder or usual_folder()
        if folder is None and all(lane.device.shares_host_memory for lane in model.streamer.lanes.values()):
            aside_bytes = 0  # there is no other memory, and no disk
        self.aside = Aside(aside_bytes, folder)

    @property
    def prompt_chunk(self) -> int | None:
        """Tokens after which a prompt is cut; None where it goes through the model as a whole."""
        return self.chunk if self._shares else None

    def nbytes(self, running: Iterable[Ticket]) -> int:
        """That are held in memory; may be called from any thread."""
        return self._kept.nbytes + self._held_by(running)

    def shrink(self, running: Iterable[Ticket]) -> None:
        """Drop texts that are over, where those that run need their room in the next pass."""
        self._kept.shrink(self.memory.limit - self.memory.now(ticket.text for ticket in running))

    def measure(self, running: Iterable[Ticket]) -> None:
        """See what tokens cost, after a pass; of caches of unusual kinds it is foretold by the config only."""
        if self._keeps:
            self.memory.measure(ticket.whole_cache(continues=True) for ticket in running)

    def give(self, ticket: Ticket, running: Sequence[Ticket]) -> bool:
        """Give one that begins its cache; False if another one just computes what it begins with too."""
        left = self.memory.limit - self.memory.soon(one.text for one in (*running, ticket))
        if ticket.held is not None:
            self._kept.shrink(left)
            ticket.generation.cache = self.aside.take(ticket.held)
            ticket.held = None
            if ticket.generation.cache is not None:
                self.resumed += 1
                return True
        if not self._shares:
            return True
        generation = ticket.generation
        source = best_source(generation.ids, self._sources(running))
        tokens = source.tokens if source is not None else 0
        if should_wait(generation.ids, tokens, _computed_prompts(running)):
            return False
        if source is not None:
            generation.cache = copied(source.cache, tokens)
            self._kept.used(source.ids)
        else:
            generation.cache = DynamicCache(config=self._config)
        generation.kept_tokens = max(generation.kept_tokens, min(tokens, len(generation.request.prompt)))
        self._kept.shrink(left)
        return True

    def set_aside(self, ticket: Ticket, cache: Any, pace: Pace) -> None:
        """Take the cache of one that has made way.

        Args:
            ticket: whose it is.
            cache: all that it has computed; None if there is none that could come back.
            pace: of the passes.
        """
        ticket.generation.cache = None
        if cache is None:
            return
        tokens = cache.get_seq_length()
        # computed anew it would not have the bits that it has
        anew = None if self._exact else pace.anew(tokens, self.prompt_chunk or tokens)
        ticket.held = self.aside.put(cache, anew)

    def whole_cache(self, ticket: Ticket) -> Any:
        """What one that waits for a pass could go on from; see `Ticket.whole_cache`."""
        return ticket.whole_cache(continues=self._shares)

    def keep(self, ticket: Ticket, running: Iterable[Ticket]) -> None:
        """Have the cache of one that has ended for those that begin as it did."""
        cache, ticket.generation.cache = ticket.generation.cache, None
        if self._shares and cache is not None and (tokens := cache.get_seq_length()):
            self._kept.put(ticket.generation.ids[:tokens], cache)
            self._kept.shrink(self.memory.limit - self._held_by(running))

    def drop(self, ticket: Ticket) -> None:
        """Forget what is aside of one that has ended."""
        if ticket.held is not None:
            self.aside.drop(ticket.held)
            ticket.held = None

    def _sources(self, running: Iterable[Ticket]) -> Iterable[tuple[Sequence[int], Any]]:
        """Ids and caches that hold their keys and values."""
        yield from self._kept.texts()
        for ticket in running:
            if tokens := ticket.cached_tokens:
                yield ticket.generation.ids[:tokens], ticket.generation.cache

    def _held_by(self, running: Iterable[Ticket]) -> int:
        # not of their tensors: another thread changes them meanwhile
        counts = [
            ticket.cached_tokens if ticket.generation.cache is not None else ticket.text.tokens for ticket in running
        ]
        return sum(map(self.memory.bytes_for, counts))


def _computed_prompts(running: Iterable[Ticket]) -> Iterable[Sequence[int]]:
    """Those that are not in their caches yet."""
    for ticket in running:
        prompt = ticket.generation.request.prompt
        if ticket.generation.cache is not None and ticket.cached_tokens < len(prompt):
            yield prompt
