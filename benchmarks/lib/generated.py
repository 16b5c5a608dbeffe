"""Weights made on demand: any range of a checkpoint of any size, by repeating one block; and the shards' digests.

The block has a prime number of elements, so that equal places of two tensors, or of two chunks of one, hold different
bytes: a misplaced run shows.

The SHA-256 of a shard is computed once and kept in a file, under a key of all that it depends on. Scales share shards.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.lib.checkpoint import write_tokenizer
from benchmarks.lib.published import ELEMENT_BYTES, Checkpoint, Placed, Shard

BLOCK_ELEMENTS = (1 << 23) - 15
"""The largest prime below 2**23; 16 MiB, which the processor's caches hold."""
SEED = 0
SCALE = np.float32(0.02)
"""Standard deviation of the weights, the usual `initializer_range`."""
PIECE_BYTES = 1 << 20
DIGESTS_FORMAT = 1
_DRAWN_AT_ONCE = 1 << 20
_SAID_BYTES = 1000**3
"""Hashing more than this is announced."""


class Weights(Protocol):
    """The bytes of a checkpoint's shards."""

    def key(self, shard: Shard) -> str:
        """A digest of all that a shard's bytes depend on."""

    def of_file(self, shard: Shard, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of a shard from `start` to `stop`."""


class Content:
    """A block of normally distributed weights, repeated."""

    def __init__(self, scale: np.float32 = SCALE) -> None:
        self.block = _normal_bfloat16(BLOCK_ELEMENTS, scale).data.cast("B").toreadonly()

    @cached_property
    def mark(self) -> str:
        """Identifies this block."""
        return hashlib.sha256(self.block).hexdigest()

    def pieces(self, position: int, nbytes: int, most: int = PIECE_BYTES) -> Iterator[memoryview]:
        """`nbytes` from `position` among the bytes of all tensors, as views of at most `most` bytes."""
        while nbytes > 0:
            offset = position % len(self.block)
            piece = self.block[offset : offset + min(nbytes, most)]
            yield piece
            position, nbytes = position + len(piece), nbytes - len(piece)

    def of_file(self, shard: Shard, start: int, stop: int, most: int = PIECE_BYTES) -> Iterator[memoryview]:
        """The bytes of a shard from `start` to `stop`."""
        if start < len(shard.header):
            yield memoryview(shard.header)[start:stop]
            start = len(shard.header)
        yield from self.pieces(shard.position + start - len(shard.header), stop - start, most)

    def key(self, shard: Shard) -> str:
        """A digest of all that a shard's bytes depend on."""
        place = f"{self.mark} {shard.position % len(self.block)} {shard.size}\n"
        return hashlib.sha256(place.encode() + shard.header).hexdigest()

    def of_tensor(self, shard: Shard, placed: Placed, first: int, elements: int) -> bytes:
        """`elements` elements of a tensor from its `first` one on."""
        start = placed.offset + first * ELEMENT_BYTES
        return b"".join(self.of_file(shard, start, start + elements * ELEMENT_BYTES))


def _normal_bfloat16(elements: int, scale: np.float32) -> npt.NDArray[np.uint16]:
    """Bits of normally distributed weights."""
    random = np.random.default_rng(SEED)
    bits = np.empty(elements, np.uint16)
    for start in range(0, elements, _DRAWN_AT_ONCE):
        count = min(_DRAWN_AT_ONCE, elements - start)
        bits[start : start + count] = bfloat16_bits(random.standard_normal(count, np.float32) * scale)
    return bits


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Finite values rounded to the nearest bfloat16, to even at a tie, as bits."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Digests:
    """SHA-256 of every shard, by name; and the bytes hashed for it, with the seconds and threads."""

    of: dict[str, str]
    hashed: int
    seconds: float
    threads: int


def digests(checkpoint: Checkpoint, content: Weights, known: Path, threads: int | None = None) -> Digests:
    """The digests of all shards; those missing from the file `known` are computed and added to it."""
    held: dict[str, str] = {}
    if known.exists() and (read := json.loads(known.read_text())).get("format") == DIGESTS_FORMAT:
        held = read["digests"]
    keys = {shard.name: content.key(shard) for shard in checkpoint.shards}
    missing = [shard for shard in checkpoint.shards if keys[shard.name] not in held]
    nbytes = sum(shard.size for shard in missing)
    if nbytes > _SAID_BYTES:
        print(f"Hashing {nbytes / 1e9:.1f} GB in {len(missing)} shards, once …", file=sys.stderr, flush=True)
    lock, workers = threading.Lock(), threads or len(os.sched_getaffinity(0))

    def work_out(shard: Shard) -> None:
        digest = hashlib.sha256()
        for piece in content.of_file(shard, 0, shard.size):
            digest.update(piece)  # without the interpreter's lock
        with lock:
            held[keys[shard.name]] = digest.hexdigest()
            fresh = known.with_name(known.name + ".new")
            fresh.write_text(json.dumps({"format": DIGESTS_FORMAT, "digests": held}, indent=1) + "\n")
            fresh.replace(known)

    start = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work_out, missing))
    seconds = time.perf_counter() - start
    return Digests({name: held[key] for name, key in keys.items()}, nbytes, seconds, workers)


def write_around(folder: Path, checkpoint: Checkpoint, vocab_size: int) -> None:
    """Write the files of a checkpoint that are not shards: configs, index and tokenizer."""
    files = {
        "config.json": checkpoint.config,
        "generation_config.json": checkpoint.model.generation_config,
        "model.safetensors.index.json": checkpoint.index(),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    write_tokenizer(folder, vocab_size)
