"""The limits of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rabbitllm.checkpoints.local import is_writable
from rabbitllm.errors import OptionError


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a batch.

    Attributes:
        running: maximum number of requests in one pass.
        waiting: maximum number of requests in the queue; those that begin at the next pass do not count.
        cache_bytes: limit of the KV caches of all requests, including the prefix cache; None for half of the memory
            that is free when the batch begins, on the devices that compute.
        chunk: tokens of one prompt in a pass, so that a long prompt does not block other requests; several prompts
            together may have more, see `picking.TokenBudget`.
        exact: compute each request's rows separately: in any dtype it gets the same tokens as alone, but slower.
        aside_bytes: limit of KV caches of preempted requests, swapped out to RAM or a file until there is room again;
            None for four times `cache_bytes`, 0 to recompute them each time. See `swap_space.py`.
        aside_folder: folder of such files; None for a folder of temporary files that is not in memory.
        file_bytes: limit of KV caches of running requests in a file in `aside_folder`, used if a pass reads more bytes
            of weights than memory has for KV caches; None for a quarter of the free space there, 0 for none. See
            `cache_file.py`.
        in_bulk: optimize throughput, not the latency of single answers: a pass takes as many prompt tokens as memory
            allows, and its sequences go through each layer in parts.
    """

    running: int = 64
    waiting: int = 256
    cache_bytes: int | None = None
    chunk: int = 512
    exact: bool = False
    aside_bytes: int | None = None
    aside_folder: Path | None = None
    in_bulk: bool = False
    file_bytes: int | None = 0

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: a number below its minimum, or a folder in which no file can be made.
        """
        for name in ("running", "waiting", "cache_bytes", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value}, which is none at all.", "Give at least 1.")
        for name in ("aside_bytes", "file_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise OptionError(f"{name}={value}, which is less than nothing.", "Give 0 for none.")
        if self.aside_folder is not None and not (self.aside_folder.is_dir() and is_writable(self.aside_folder)):
            raise OptionError(
                f"No file can be made in {self.aside_folder}, where keys and values were to be set aside.",
                "Name a folder that is there and can be written to.",
            )
