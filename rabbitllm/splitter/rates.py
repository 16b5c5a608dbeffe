"""Measures how fast this machine fetches, reads and quantizes, on small samples; nothing is written.

Each measurement takes a bounded time and returns None if it fails: an estimate must not raise an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rabbitllm.checkpoints.hub import HubFile, HubRepository
from rabbitllm.errors import MissingPackageError, RabbitLLMError
from rabbitllm.formats.tensor_spec import DTYPES, torch_dtype
from rabbitllm.quant.compression import quantize_blocks
from rabbitllm.splitter.moves import CHUNK_BYTES
from rabbitllm.splitter.split_estimate import Rate
from rabbitllm.storage.files import PositionalFile, page_aligned

FETCHED_BYTES = 8 << 20
"""The most that is fetched of a shard, from its start."""
READ_BYTES = 64 << 20
"""The most that is read of the shards on this disk, in pieces spread evenly over them."""
MAX_SECONDS = 3.0
"""A fetch or a read stops after this time; what arrived until then counts."""
QUANTIZE_SECONDS = 0.3


def fetch_rate(repository: HubRepository, shard: str) -> Rate | None:
    """Measure how fast a shard comes from the hub: one request for its first bytes, which are not kept."""
    size = min(repository.files[shard].size, FETCHED_BYTES)
    # a listing in which the shard has only this size and no digest
    sample = dataclasses.replace(repository, files={shard: HubFile(shard, size, None, None)})
    start = time.perf_counter()
    arrived: list[tuple[float, int]] = []
    enough = threading.Event()

    def take() -> None:
        with contextlib.suppress(RabbitLLMError):
            for chunk in sample.stream(shard):
                arrived.append((time.perf_counter() - start, len(chunk)))
                if enough.is_set():
                    return

    taker = threading.Thread(target=take, name="fetch-rate", daemon=True)  # a hub may stop answering, and retries pause
    taker.start()
    taker.join(MAX_SECONDS)
    enough.set()
    return _steady_rate(tuple(arrived))


def _steady_rate(arrived: Sequence[tuple[float, int]]) -> Rate | None:
    """Return the rate of chunks that arrived at these seconds, without the wait for the first if enough follow it.

    A request's latency is paid once per shard, and a sample is a thousandth of a shard.
    """
    if not arrived:
        return None
    total = sum(nbytes for _, nbytes in arrived)
    (first, head), (last, _) = arrived[0], arrived[-1]
    if last > first and 2 * head < total:
        return Rate((total - head) / (last - first), total)
    return Rate(total / last, total)


def read_rate(paths: Sequence[Path]) -> Rate | None:
    """Measure how fast these files are read; pages that were read for this are dropped from the page cache again."""
    buffer = page_aligned(CHUNK_BYTES)
    done, start = 0, time.perf_counter()
    try:
        for path, offset in _pieces(paths):
            with PositionalFile(path) as file:
                got = file.read_into(buffer, offset)
                file.drop_cache(offset, got)
            done += got
            if time.perf_counter() - start > MAX_SECONDS:
                break
    except OSError:
        return None
    seconds = time.perf_counter() - start
    return Rate(done / seconds, done) if done else None


def _pieces(paths: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    """Yield where to read: evenly spread, since parts of the files may be in the page cache; all of small files."""
    sizes = [path.stat().st_size for path in paths]
    if sum(sizes) <= READ_BYTES:
        for path, size in zip(paths, sizes, strict=True):
            yield from ((path, offset) for offset in range(0, size, CHUNK_BYTES))
        return
    step, at = -(-sum(sizes) // (READ_BYTES // CHUNK_BYTES)), 0
    for path, size in zip(paths, sizes, strict=True):
        while at < size:
            yield path, at
            at += step
        at -= size


def quantize_rate(scheme: str, dtype: str, threads: int, device: str, *, fitted: bool = False) -> Rate | None:
    """Measure how many source bytes per second the quantizer processes, called as in a split.

    Args:
        scheme: "4bit", "4bit-double" or "8bit".
        dtype: of the source, F32, F16 or BF16.
        threads: number of threads that call it at the same time.
        device: "cpu" or "cuda:N".
        fitted: whether scales of 4bit are fitted to their blocks.
    """
    import torch

    own = torch.Generator().manual_seed(0)  # the caller's generator must not be advanced
    values = torch.randn(CHUNK_BYTES * 8 // DTYPES[dtype].bits, generator=own).to(torch_dtype(dtype))
    chunk = values.view(torch.uint8).numpy().data

    def work(_: int) -> tuple[int, float]:
        quantize_blocks(
            scheme, chunk, dtype, device, fitted=fitted
        )  # a thread's first call loads kernels and starts threads
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < QUANTIZE_SECONDS:
            quantize_blocks(scheme, chunk, dtype, device, fitted=fitted)
            done += len(chunk)
        return done, time.perf_counter() - start

    with ThreadPoolExecutor(threads, thread_name_prefix="quantize-rate") as pool:
        try:
            found = list(pool.map(work, range(threads)))
        except MissingPackageError:
            return None
    return Rate(sum(done / seconds for done, seconds in found), sum(done for done, _ in found))
