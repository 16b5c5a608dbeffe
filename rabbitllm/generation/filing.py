"""Which of the texts that run have their keys and values in a file, so that more of them share a pass. Numbers, mostly.

It pays where a pass reads more of the weights, W bytes, than memory has for keys and values, M bytes. A text in memory
costs its part of the weights, W / n, where n = M / k of them fit, each of k bytes. One more text in the file costs what
is read of it in a pass, k. So it is cheaper than the others as long as W > M, and the more there are the better:

    bytes read for a token    W k / M                  of n texts, all of them in memory
                              W / N + (1 - n / N) k    of N texts, the others of them in the file; k in the end

Where W < M nothing is put there. Only what a pass packs together (`packed.py`) can be in the file.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from transformers.cache_utils import DynamicCache

from rabbitllm.engine.placement import Placement
from rabbitllm.generation.cache_file import TAIL_TOKENS, CacheFile, goes_to_a_file
from rabbitllm.generation.cache_memory import CacheMemory
from rabbitllm.generation.packed_families import can_be_packed, shares_keys
from rabbitllm.generation.picking import SequenceMemory, fits

SHARE = 4
"""One part in so many of what is free on the disk may be taken where nobody says."""
WORTH = 2
"""A text goes to the file if it takes so many times less memory then."""


def file_for(model: Any, memory: CacheMemory, folder: Path | None, limit: int | None) -> CacheFile | None:
    """A file for keys and values of texts that run; None where it would be of no use.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        memory: for keys and values.
        folder: where it may be; None for nowhere.
        limit: bytes that it may have; None for a part of what is free there, 0 for none.
    """
    if limit == 0 or folder is None or read_in_a_pass(model.placement) <= memory.limit:
        return None
    if not can_be_packed(model) or shares_keys(model):
        return None
    if not goes_to_a_file(DynamicCache(config=model.config.get_text_config(decoder=True)).layers):
        return None
    most = usual_bytes(folder) if limit is None else limit
    return CacheFile(folder, most, memory.ahead(), read_in_a_pass(model.placement))


def read_in_a_pass(placement: Placement) -> int:
    """Bytes of weights that a pass of many texts reads from the disk: of experts nearly all are asked for."""
    return placement.streamed_bytes + sum(max(pool.stored - pool.kept, 0) for pool in placement.pools)


def usual_bytes(folder: Path | None) -> int:
    """That a file may have where nobody says.

    Args:
        folder: where it may be; None for nowhere.
    """
    return shutil.disk_usage(folder).free // SHARE if folder is not None else 0


@dataclass(frozen=True, slots=True)
class Running:
    """The texts that run.

    Attributes:
        near: those that have keys and values in memory.
        filed: those that have them in a file.
        most: bytes that the file may have.
    """

    near: Sequence[SequenceMemory]
    filed: Sequence[SequenceMemory]
    most: int

    def soon(self, memory: CacheMemory) -> int:
        """Bytes of memory that they take before long."""
        beside = len(self.filed) * memory.beside_file() + memory.ahead() if self.filed else 0
        return memory.soon(self.near) + beside

    def has_place(self, text: SequenceMemory, memory: CacheMemory) -> bool:
        """Whether the file has room for one more, which takes so much less memory then that it is worth it."""
        in_file = sum(memory.bytes_for(one.tokens + one.room + TAIL_TOKENS) for one in (*self.filed, text))
        return in_file <= self.most and memory.soon([text]) > WORTH * memory.beside_file()

    def fits(self, text: SequenceMemory, memory: CacheMemory) -> bool:
        """Whether one more may have its keys and values in memory; one alone always may."""
        if not self.filed:
            return fits(text, self.near, memory.bytes_for, memory.limit)
        return replace(self, near=[*self.near, text]).soon(memory) <= memory.limit


class Begins(Enum):
    """Where a text has its keys and values that begins."""

    NEAR = "in memory"
    FILED = "in a file"
    LATER = "nowhere yet"


def begins(text: SequenceMemory, running: Running, others: int, memory: CacheMemory) -> Begins:
    """Whether a text may begin, and where.

    Args:
        text: that waits.
        running: those that run.
        others: how many wait behind it and are to run with it.
        memory: for keys and values.
    """
    near = [*running.near, text]
    if not running.has_place(text, memory):
        return Begins.NEAR if running.fits(text, memory) else Begins.LATER
    if not running.filed and memory.soon([*near, *[text] * others]) <= memory.limit:
        return Begins.NEAR
    # those behind it need some memory too
    reserved = (len(running.filed) + others) * memory.beside_file() + memory.ahead()
    if memory.soon(near) + reserved <= memory.limit:
        return Begins.NEAR
    if replace(running, filed=[*running.filed, text]).soon(memory) <= memory.limit:
        return Begins.FILED
    return Begins.NEAR if not running.near and not running.filed else Begins.LATER
