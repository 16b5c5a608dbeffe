"""Which running sequences have their KV cache in a file, so that more of them share a pass.

It pays if a pass reads more bytes of weights, W, than memory has for KV caches, M. A sequence in memory costs its
part of the weights, W / n, where n = M / k caches fit, each of k bytes. One more sequence in the file costs k bytes
read per pass. So it is cheaper than the others as long as W > M, and more of them lower the cost further:

    bytes read for a token    W k / M                  of n sequences, all of them in memory
                              W / N + (1 - n / N) k    of N sequences, the others in the file; k in the limit

Where W < M the file is not used. Only sequences that are packed into one forward (`packed.py`) can be in the file.
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
"""By default the file may take 1 / `SHARE` of the free space on the disk."""
WORTH = 2
"""A sequence goes to the file only if its memory is more than so many times the memory of a sequence in the file."""


def file_for(model: Any, memory: CacheMemory, folder: Path | None, limit: int | None) -> CacheFile | None:
    """A file for KV caches of running sequences; None if it would not pay or the model does not allow it.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        memory: the memory limit of KV caches.
        folder: folder of the file; None for no file.
        limit: maximum size of the file in bytes; None for a part of the free space, 0 for no file.
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
    """Bytes of weights that a pass of many sequences reads from the disk; it uses nearly all experts."""
    return placement.streamed_bytes + sum(max(pool.stored - pool.kept, 0) for pool in placement.pools)


def usual_bytes(folder: Path | None) -> int:
    """The default size limit of the file, in bytes.

    Args:
        folder: folder of the file; None for no file.
    """
    return shutil.disk_usage(folder).free // SHARE if folder is not None else 0


@dataclass(frozen=True, slots=True)
class Running:
    """The running sequences.

    Attributes:
        near: sequences with their KV cache in memory.
        filed: sequences with their KV cache in the file.
        most: maximum size of the file in bytes.
    """

    near: Sequence[SequenceMemory]
    filed: Sequence[SequenceMemory]
    most: int

    def soon(self, memory: CacheMemory) -> int:
        """Bytes of memory that they take after the next tokens; see `SequenceMemory.soon`."""
        in_file = len(self.filed) * memory.beside_file() + memory.ahead() if self.filed else 0
        return memory.soon(self.near) + in_file

    def has_place(self, text: SequenceMemory, memory: CacheMemory) -> bool:
        """Whether the file has room for one more sequence, and saves enough memory by it; see `WORTH`."""
        in_file = sum(memory.bytes_for(one.tokens + one.room + TAIL_TOKENS) for one in (*self.filed, text))
        return in_file <= self.most and memory.soon([text]) > WORTH * memory.beside_file()

    def fits(self, text: SequenceMemory, memory: CacheMemory) -> bool:
        """Whether memory has room for the KV cache of one more sequence; see `picking.fits`."""
        if not self.filed:
            return fits(text, self.near, memory.bytes_for, memory.limit)
        return replace(self, near=[*self.near, text]).soon(memory) <= memory.limit


class Begins(Enum):
    """The place of the KV cache of a sequence that begins: memory, the file, or neither because it has to wait."""

    NEAR = "in memory"
    FILED = "in a file"
    LATER = "nowhere yet"


def begins(text: SequenceMemory, running: Running, others: int, memory: CacheMemory) -> Begins:
    """Whether a sequence may begin, and where its KV cache is.

    Args:
        text: the waiting sequence.
        running: the running sequences.
        others: number of sequences that wait behind it and should run with it.
        memory: the memory limit of KV caches.
    """
    near = [*running.near, text]
    if not running.has_place(text, memory):
        return Begins.NEAR if running.fits(text, memory) else Begins.LATER
    if not running.filed and memory.soon([*near, *[text] * others]) <= memory.limit:
        return Begins.NEAR
    # the sequences behind it need some memory too
    reserved = (len(running.filed) + others) * memory.beside_file() + memory.ahead()
    if memory.soon(near) + reserved <= memory.limit:
        return Begins.NEAR
    if replace(running, filed=[*running.filed, text]).soon(memory) <= memory.limit:
        return Begins.FILED
    return Begins.NEAR if not running.near and not running.filed else Begins.LATER
