"""KV caches in a file: the bits of those in memory, and no more of memory and page cache than there is room for."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache, DynamicLayer

from rabbitllm.generation import _cache_file
from rabbitllm.generation._cache_file import BufferFile, CacheFile, KVBuffer
from rabbitllm.generation._slot_file import FileSlots
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.storage.files import DIRECT_ALIGNMENT
from tests.engine.test_span_reader import _cached_pages
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself

LAYERS, HEADS, WIDTH, VALUE_WIDTH = 3, 2, 8, 4
PROMPTS = (11, 5, 8)
STEPS = 9
"""More than a text's tail has, so that layers are written again."""


@pytest.fixture(autouse=True)
def short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache_file, "TAIL_TOKENS", 4)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., CacheFile]]:
    opened_files: list[CacheFile] = []

    def open_one(limit: int = 1 << 20, ahead: int = 1 << 12, weight_bytes: int = 0) -> CacheFile:
        opened_files.append(CacheFile(tmp_path, limit, ahead, weight_bytes))
        return opened_files[-1]

    yield open_one
    for file in opened_files:
        file.close()


def new(rows: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn((1, HEADS, rows, WIDTH), generator=generator)
    return keys.to(dtype), torch.randn((1, HEADS, rows, VALUE_WIDTH), generator=generator).to(dtype)


def attend(file: CacheFile, caches: list[Any], plain: list[Any], rows: list[int], seed: int) -> None:
    """One pass: each layer of each sequence gets rows, and returns the KV cache of one that was always in memory."""
    file.begin(caches)
    for layer in range(LAYERS):
        for text, (cache, plain_cache) in enumerate(zip(caches, plain, strict=True)):
            keys, values = new(rows[text], 1000 * seed + 10 * layer + text)
            expected = plain_cache.update(keys, values, layer)
            if not file.covers(cache, layer):
                pair = cache.update(keys, values, layer)
            else:
                pair = file.load(cache, layer, keys, values)
            assert all(torch.equal(a, b) for a, b in zip(pair, expected, strict=True))
            if file.covers(cache, layer):
                file.store(cache, layer, keys, values)
            assert cache.get_seq_length(layer) == plain_cache.get_seq_length(layer)


def caches() -> tuple[list[Any], list[Any]]:
    """Of texts, and of the same ones in memory."""
    new = [DynamicCache() for _ in (*PROMPTS, *PROMPTS)]
    for cache in new:
        cache.layers = [DynamicLayer() for _ in range(LAYERS)]
    return new[: len(PROMPTS)], new[len(PROMPTS) :]


@pytest.mark.parametrize("ahead", [0, 1 << 9, 1 << 20])
def test_attention_gets_the_same_keys_as_in_memory(opened: Callable[..., CacheFile], ahead: int) -> None:
    file, (texts, plain) = opened(ahead=ahead), caches()
    for cache in texts[:2]:
        file.add(cache)
    attend(file, texts, plain, [*PROMPTS], 0)
    for step in range(STEPS):
        attend(file, texts, plain, [1, 1, 1], step + 1)
    assert all(torch.isnan(layer.keys).all() for layer in texts[0].layers)
    assert file.buffers.nbytes > 0
    assert file.buffers.read > STEPS * LAYERS * HEADS * (PROMPTS[0] + PROMPTS[1]) * (WIDTH + VALUE_WIDTH) * 2
    attend(file, texts, plain, [6, 1, 1], 99)  # several at once, as of a prompt that is cut
    for cache in texts:
        file.drop(cache)
    assert file.buffers.nbytes == 0


def test_attention_gets_the_same_keys_past_the_page_cache(
    opened: Callable[..., CacheFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cache_file, "MIN_BLOCKS", 0)  # these are small, and go past it all the same
    file, (texts, plain) = opened(ahead=1 << 14, weight_bytes=1 << 60), caches()
    for cache in texts:
        file.add(cache)
    attend(file, texts, plain, [*PROMPTS], 0)
    for step in range(STEPS):
        attend(file, texts, plain, [1, 1, 1], step + 1)
    assert file.buffers.nbytes == len(texts) * LAYERS * DIRECT_ALIGNMENT
    assert file.buffers.read == STEPS * file.buffers.nbytes
    for cache in texts:
        file.return_to_memory(cache)
    attend(file, texts, plain, [1, 1, 1], STEPS + 1)
    assert file.buffers.nbytes == 0


def test_sequences_move_to_the_file_and_back(opened: Callable[..., CacheFile]) -> None:
    file, (texts, plain) = opened(), caches()
    attend(file, texts, plain, [*PROMPTS], 0)
    file.add(texts[0])
    file.put(texts[1])
    assert torch.isnan(texts[1].layers[0].keys).all()
    for step in range(3):
        attend(file, texts, plain, [1, 1, 1], step + 1)
    copied = file.in_memory(texts[0])
    assert all(torch.equal(a.keys, b.keys) for a, b in zip(copied.layers, plain[0].layers, strict=True))
    file.return_to_memory(texts[0])
    assert texts[0] in file
    assert not file.stays_in_file(texts[0])
    attend(file, texts, plain, [1, 1, 1], 7)
    assert texts[0] not in file
    for cache in (texts[1], None):
        file.take_back(cache)
    file.begin([texts[0]])
    for text in range(2):
        for a, b in zip(texts[text].layers, plain[text].layers, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
    assert file.buffers.nbytes == 0


def test_prefetched_bytes_are_limited(opened: Callable[..., CacheFile], monkeypatch: pytest.MonkeyPatch) -> None:
    file, (texts, plain) = opened(ahead=1 << 11), caches()
    for cache in texts:
        file.add(cache)
    attend(file, texts, plain, [*PROMPTS], 0)
    sizes: list[int] = []
    take = BufferFile.take

    def taken(self: BufferFile, *args: Any) -> Any:
        sizes.append(sum(len(buffer.whole) for buffer, _ in self._prefetched.values()))
        assert sizes[-1] == self.prefetched_bytes
        return take(self, *args)

    monkeypatch.setattr(BufferFile, "take", taken)
    attend(file, texts, plain, [1, 1, 1], 1)
    assert len(sizes) == LAYERS * len(PROMPTS)
    assert min(sizes[:-1]) > 0
    assert max(sizes) <= 1 << 11


def test_an_aborted_pass_leaves_no_prefetched_buffers(opened: Callable[..., CacheFile]) -> None:
    file, (texts, plain) = opened(), caches()
    for cache in texts:
        file.add(cache)
    attend(file, texts, plain, [*PROMPTS], 0)
    file.begin(texts)
    file.drop(texts[0])
    file.begin(texts[1:])
    attend(file, texts[1:], plain[1:], [1, 1], 1)


def test_without_memory_to_prefetch_buffers_are_read_on_use(
    opened: Callable[..., CacheFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, (texts, plain) = opened(), caches()
    for cache in texts:
        file.add(cache)
    attend(file, texts, plain, [*PROMPTS], 0)
    new, calls = KVBuffer.new, []

    def fails_first(*args: Any) -> KVBuffer:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return new(*args)

    monkeypatch.setattr(KVBuffer, "new", fails_first)
    attend(file, texts, plain, [1, 1, 1], 1)
    assert file.buffers.prefetched_bytes == 0
    assert len(calls) > 2


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: not enough memory")], ids=repr)
def test_a_sequence_is_lost_without_memory_to_write_it(
    opened: Callable[..., CacheFile], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    file, (texts, plain) = opened(), caches()
    for cache in texts:
        file.add(cache)
    of, calls = KVBuffer.of, []

    def fails_once(*args: Any) -> KVBuffer:
        calls.append(args)
        if len(calls) == 2:
            raise error
        return of(*args)

    monkeypatch.setattr(KVBuffer, "of", fails_once)
    attend(file, texts, plain, [*PROMPTS], 0)
    assert [file.is_lost(cache) for cache in texts] == [False, True, False]
    file.drop(texts[1])
    attend(file, texts[::2], plain[::2], [1, 1], 1)


@pytest.mark.parametrize("full", [True, False], ids=["full disk", "limit"])
def test_a_sequence_is_lost_when_the_disk_is_full(
    opened: Callable[..., CacheFile], full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file, (texts, plain) = opened(limit=1 << 20 if full else 2500), caches()
    for cache in texts[:2]:
        file.add(cache)

    def fail(step: Step) -> None:
        if full and step.offset > 1500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with observe_steps(fail):
        attend(file, texts, plain, [*PROMPTS], 0)
    assert [file.is_lost(cache) for cache in texts] == [True, True, False]
    assert file.buffers.limit == 0 if full else 0 < file.buffers.limit < 2500
    assert caplog.text.count("No space left on device") == int(full)
    for cache in texts[:2]:
        file.drop(cache)
    assert file.buffers.nbytes == 0
    attend(file, texts[2:], plain[2:], [1], 1)


def test_the_file_has_no_name_and_is_deleted_on_close(opened: Callable[..., CacheFile], tmp_path: Path) -> None:
    file, (texts, plain) = opened(), caches()
    file.add(texts[0])
    attend(file, texts, plain, [*PROMPTS], 0)
    assert file.buffers.nbytes > 0
    assert not list(tmp_path.iterdir())


MORE_THAN_ANY_MEMORY = 1 << 60
TOKENS = (300, 301, 700)
"""Of buffers larger than what is kept small; two of them not of whole blocks."""

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT, mincore, /proc")


def buffer(tokens: int, seed: int) -> KVBuffer:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn((1, 2, tokens, width), generator=generator).bfloat16() for width in (40, 24))
    return KVBuffer.of(keys, values, 3)


def buffer_file(folder: Path, spare: int) -> BufferFile:
    return BufferFile(folder, 1 << 22, 0, spare)


def pages(folder: Path) -> int:
    """In the page cache, of the nameless files in a folder that this process has open."""
    return sum(_cached_pages(path) for path in nameless(folder))


def nameless(folder: Path) -> Iterator[Path]:
    names = set()
    for path in Path("/proc/self/fd").iterdir():
        if os.path.lexists(path) and str(path.readlink()).startswith(f"{folder}/"):
            status = path.stat()
            if status.st_ino not in names:
                names.add(status.st_ino)
                yield path


def fill_and_compare(file: BufferFile, seeds: range) -> None:
    """Buffers there and back, some of them in places of others that were given back."""
    buffers: dict[int, tuple[Any, KVBuffer]] = {}
    for seed in seeds:
        written = buffer(TOKENS[seed % len(TOKENS)], seed)
        stored = file.put(written)
        assert stored is not None
        buffers[seed] = stored, written
        if seed % 4 == 3:
            file.release(buffers.pop(seed - 2)[0])
    for stored, written in buffers.values():
        back = file.take(stored)
        assert torch.equal(back.keys, written.keys)
        assert torch.equal(back.values, written.values)
        assert back.form == written.form


@on_linux
def test_direct_io_leaves_no_pages_cached(tmp_path: Path) -> None:
    file = buffer_file(tmp_path, MORE_THAN_ANY_MEMORY)
    fill_and_compare(file, range(12))
    assert file.is_past_the_cache
    assert file.nbytes > 100 * DIRECT_ALIGNMENT
    assert pages(tmp_path) == 0
    file.close()


@on_linux
def test_a_small_file_uses_the_page_cache(tmp_path: Path) -> None:
    file = buffer_file(tmp_path, 0)
    fill_and_compare(file, range(12))
    assert not file.is_past_the_cache
    assert pages(tmp_path) >= file.nbytes // DIRECT_ALIGNMENT
    file.close()


@on_linux
def test_direct_io_begins_when_the_file_no_longer_stays_cached(tmp_path: Path) -> None:
    file = buffer_file(tmp_path, 0)
    first = buffer(300, 0)
    stored = file.put(first)
    assert stored is not None
    assert pages(tmp_path) > 0
    file._weight_bytes = MORE_THAN_ANY_MEMORY
    fill_and_compare(file, range(1, 12))
    assert file.is_past_the_cache
    assert torch.equal(file.take(stored).keys, first.keys)  # written through the cache, read past it
    assert pages(tmp_path) == 0
    file.close()


@on_linux
def test_without_direct_io_read_pages_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    file = buffer_file(tmp_path, MORE_THAN_ANY_MEMORY)
    buffers = [buffer(tokens, seed) for seed, tokens in enumerate(4 * TOKENS)]
    slots = [file.put(written) for written in buffers]
    for path in nameless(tmp_path):
        with path.open("rb+") as again:
            os.fsync(again)  # what is not on the disk yet cannot be dropped
    for written, stored in zip(buffers, slots, strict=True):
        assert stored is not None
        assert torch.equal(file.take(stored).values, written.values)
    assert pages(tmp_path) == 0
    for stored in slots[: len(TOKENS)]:
        assert stored is not None
        file.take(stored)
    assert pages(tmp_path) == 0  # nor has anything been read ahead of the next one
    file.close()


@pytest.mark.parametrize("spare", [0, MORE_THAN_ANY_MEMORY])
def test_small_buffers_are_not_padded(tmp_path: Path, spare: int) -> None:
    file = buffer_file(tmp_path, spare)
    small, large = buffer(5, 1), buffer(300, 2)
    assert len(small.whole) == 2 * (5 + 3) * (40 + 24) * 2
    assert len(large.whole) % DIRECT_ALIGNMENT == 0
    assert large.is_aligned
    first, second = file.put(small), file.put(large)  # a large one whose place is on no block
    assert first is not None
    assert second is not None
    assert second.offset % DIRECT_ALIGNMENT
    assert torch.equal(file.take(first).values, small.values)
    assert torch.equal(file.take(second).values, large.values)
    file.close()


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8)), max_size=60), st.integers(20, 300))
def test_slots_never_overlap_and_are_reused(steps: list[tuple[int, int]], limit: int) -> None:
    """Each step takes a place, and gives back one of those that are taken, if its number is one of theirs."""
    places = FileSlots(limit)
    taken: list[tuple[int, int]] = []
    for nbytes, which in steps:
        begin = places.take(nbytes)
        if begin is not None:
            assert begin + nbytes <= limit
            assert all(begin + nbytes <= start or start + size <= begin for start, size in taken)
            taken.append((begin, nbytes))
        if which < len(taken):
            places.give_back(*taken.pop(which))
        assert places.taken == sum(size for _, size in taken)
    for begin, nbytes in taken:
        places.give_back(begin, nbytes)
    assert places.taken == 0
    assert places.take(limit) == 0


def test_the_first_large_enough_hole_is_taken() -> None:
    places = FileSlots(100)
    first, second, third = (places.take(20) for _ in range(3))
    assert (first, second, third) == (0, 20, 40)
    places.give_back(20, 20)
    assert places.take(30) == 60
    assert places.take(15) == 20
    assert places.take(20) is None
    assert places.take(5) == 35
