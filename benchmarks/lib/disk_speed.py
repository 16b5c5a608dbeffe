"""What a disk gives: files read past the page cache, in a few threads."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rabbitllm.storage.files import page_aligned

THREADS = 4
CHUNK_BYTES = 4 << 20


def read_speed(files: Sequence[Path], most: int) -> float:
    """Bytes a second of `O_DIRECT` reads of 4 MiB in 4 threads, over the whole chunks of the first `most` bytes.

    0 where no file has a whole chunk.
    """
    chunks = [(path, at) for path in files for at in range(0, path.stat().st_size - CHUNK_BYTES + 1, CHUNK_BYTES)]
    chunks = chunks[: max(most // CHUNK_BYTES, 1)]
    descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in chunks}

    def read(part: int) -> int:
        buffer = page_aligned(CHUNK_BYTES)
        return sum(os.preadv(descriptors[path], [buffer], at) for path, at in chunks[part::THREADS])

    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            done = sum(pool.map(read, range(THREADS)))
        return done / (time.perf_counter() - start)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
