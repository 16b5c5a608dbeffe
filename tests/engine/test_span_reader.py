"""Layer files read past the page cache and through it: the same bytes, and a choice between the two."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rabbitllm.engine import span_reader
from rabbitllm.engine.free_memory import untouched_bytes
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.span_reader import (
    BLOCK,
    CHECKED_BYTES,
    READ_BYTES,
    THROUGH_THE_CACHE,
    FileSpan,
    ReadMode,
    SpanReader,
    choose_read_mode,
    drop_cached,
)
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.safetensors_file import MappedFile
from rabbitllm.formats.tensor_spec import Header
from rabbitllm.storage.files import PositionalFile, page_aligned
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import build_checkpoint
from tests.support.draws import draws
from tests.support.quantized import build_mxfp4
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself
from tests.support.tiny_models import INPUT, assert_same, load, run, split, tiers

WAYS = [THROUGH_THE_CACHE, ReadMode(drop=True), ReadMode(direct=True)]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="O_DIRECT")


class Folder:
    """The interface of a split directory that `SpanReader` uses."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name

    def mapped(self, name: str) -> MappedFile:
        return MappedFile(self.path(name), Header((), {}, 0))


def folder(root: Path, nbytes: int) -> LayerStore:
    (root / "x").write_bytes(os.urandom(nbytes))
    return Folder(root)  # type: ignore[return-value]


def span(offset: int, nbytes: int, after: int = 0) -> FileSpan:
    return FileSpan("x", offset, nbytes, after + offset % BLOCK)


@pytest.mark.parametrize("way", WAYS, ids=["through", "dropped behind", "past"])
@settings(max_examples=draws(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 39_999), st.integers(1, 20_000)), min_size=1, max_size=4))
def test_spans_anywhere_in_a_file(tmp_path: Path, way: ReadMode, places: list[tuple[int, int]]) -> None:
    store = folder(tmp_path, 40_001)  # its last block is a part of one
    content = (tmp_path / "x").read_bytes()
    spans: list[FileSpan] = []
    for offset, nbytes in places:
        spans.append(span(offset, min(nbytes, len(content) - offset), spans[-1].end if spans else 0))
    buffer = page_aligned(spans[-1].end)
    reader = SpanReader(store, way)
    reader.read(spans, buffer)
    for s in spans:
        assert bytes(buffer[s.at : s.at + s.nbytes]) == content[s.offset : s.offset + s.nbytes]
    assert reader.mode == way


@on_linux
@pytest.mark.parametrize("nbytes", [1, BLOCK, 3 * BLOCK + 64, CHECKED_BYTES + 70_000])
@pytest.mark.parametrize("offset", [0, 64, BLOCK, CHECKED_BYTES - 5000])
def test_nothing_else_is_written(tmp_path: Path, offset: int, nbytes: int) -> None:
    """Wherever a span lies in its blocks and in memory, it is read past the page cache, and alone."""
    store = folder(tmp_path, 2 * CHECKED_BYTES + 100_001)
    content, reader = (tmp_path / "x").read_bytes(), SpanReader(store, ReadMode(direct=True), is_exact=True)
    for at in (0, 64, offset % BLOCK, BLOCK):
        s = FileSpan("x", offset, nbytes, at)
        buffer = page_aligned(s.end + BLOCK)
        buffer[:] = b"\x55" * len(buffer)
        reader.read([s], buffer)
        assert bytes(buffer[at : at + nbytes]) == content[offset : offset + nbytes]
        assert {*buffer[:at], *buffer[at + nbytes :]} == {0x55}
    assert reader.mode == ReadMode(direct=True)


@on_linux
@pytest.mark.parametrize("has_sectors", [False, True])
def test_sectors_are_read_to_their_place(tmp_path: Path, has_sectors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a disk whose sectors are as large as blocks, on which they are copied."""
    store, sizes = folder(tmp_path, 5 * BLOCK), list[tuple[int, int]]()
    content, ordinary = (tmp_path / "x").read_bytes(), PositionalFile.read_into

    def read_into(self: PositionalFile, buffer: memoryview, offset: int) -> int:
        if not has_sectors and (offset % BLOCK or len(buffer) % BLOCK):
            reader._sector = BLOCK  # as another thread may, which reads at the same time
            raise OSError(errno.EINVAL, "not whole blocks")
        sizes.append((offset, len(buffer)))
        return ordinary(self, buffer, offset)

    monkeypatch.setattr(PositionalFile, "read_into", read_into)
    reader = SpanReader(store, ReadMode(direct=True), is_exact=True)
    for offset, nbytes in ((512 + 64, 2 * BLOCK), (BLOCK - 512, BLOCK + 1)):
        at = offset % 512 + 512
        buffer = page_aligned(4 * BLOCK)
        reader.read([FileSpan("x", offset, nbytes, at)], buffer)
        assert bytes(buffer[at : at + nbytes]) == content[offset : offset + nbytes]
        assert {*buffer[:at], *buffer[at + nbytes :]} == {0}
    assert reader.mode == ReadMode(direct=True)
    by_sector = [(512, 2 * BLOCK + 512), (BLOCK - 512, BLOCK + 512)]
    assert ("memory" in vars(reader._copied)) is not has_sectors
    assert sizes == (by_sector if has_sectors else [(0, 3 * BLOCK), (0, 2 * BLOCK)])


@on_linux
def test_experts_of_published_codes_are_read_to_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPT-OSS's: their codes are whole sectors, but not all are whole blocks. Some scales are copied."""
    sizes = {"hidden_size": 192, "intermediate_size": 64, "num_local_experts": 5}
    directory = split(build_mxfp4(tmp_path / "model", **sizes))
    read, copied, ordinary = list[int](), list[int](), SpanReader.read

    def copyto(place: Any, source: Any) -> None:
        copied.append(len(source))
        np.copyto(place, source)

    def noted(self: SpanReader, spans: Iterable[FileSpan], buffer: memoryview) -> None:
        spans = [*spans]
        read.extend(span.nbytes for span in spans)
        ordinary(self, spans, buffer)
        assert self.mode.direct

    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *args: ReadMode(direct=True))
    model = load(directory, 600_000, exact=False)
    (pool,) = model.placement.pools
    assert pool.slots < pool.experts
    monkeypatch.setattr(SpanReader, "read", noted)
    monkeypatch.setattr(span_reader, "np", SimpleNamespace(**{**vars(np), "copyto": copyto}))
    model(INPUT)
    scales = [nbytes for nbytes in read if nbytes < BLOCK]
    assert {*read} == {192 * 64, 96 * 64, *scales}
    assert 0 < sum(copied) < sum(scales)


@pytest.mark.parametrize("way", WAYS, ids=["through", "dropped behind", "past"])
def test_span_of_several_reads(tmp_path: Path, way: ReadMode) -> None:
    store = folder(tmp_path, READ_BYTES + 70_000)
    s = span(4096 + 64, READ_BYTES + 5000)
    buffer = page_aligned(s.end)
    SpanReader(store, way).read([s], buffer)
    content = (tmp_path / "x").read_bytes()
    assert bytes(buffer[s.at : s.at + s.nbytes]) == content[s.offset : s.offset + s.nbytes]


@pytest.mark.parametrize("way", WAYS, ids=["through", "dropped behind", "past"])
def test_truncated_file(tmp_path: Path, way: ReadMode) -> None:
    store = folder(tmp_path, 10_000)
    with pytest.raises(OSError, match="ends at byte 10,000"):
        SpanReader(store, way).read([span(5000, 6000)], page_aligned(5 * BLOCK))


@on_linux
def test_unaligned_memory_is_read_through_the_cache(tmp_path: Path) -> None:
    store = folder(tmp_path, 20_000)
    reader = SpanReader(store, ReadMode(direct=True))
    buffer = page_aligned(6 * BLOCK)[8:]
    reader.read([span(4096, 8192)], buffer)
    assert bytes(buffer[:8192]) == (tmp_path / "x").read_bytes()[4096:12288]
    assert reader.mode == ReadMode(drop=True)


@on_linux
def test_direct_read_leaves_the_page_cache_empty(tmp_path: Path) -> None:
    store = folder(tmp_path, 1 << 20)
    with PositionalFile(tmp_path / "x") as file:
        os.sync()
        file.drop_cache(0, 1 << 20)
    before = _cached_pages(tmp_path / "x")
    SpanReader(store, ReadMode(direct=True)).read([span(0, 1 << 20)], page_aligned(1 << 20))
    assert _cached_pages(tmp_path / "x") == before
    SpanReader(store, THROUGH_THE_CACHE).read([span(0, 1 << 20)], page_aligned(1 << 20))
    assert _cached_pages(tmp_path / "x") == (1 << 20) // BLOCK


def _cached_pages(path: Path) -> int:
    import ctypes
    import mmap

    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as m,
    ):
        states = (ctypes.c_ubyte * (size // BLOCK))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(m))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), states) == 0
        del address
        return sum(state & 1 for state in states)


def test_files_that_fit_into_free_memory_are_read_through_the_cache(tmp_path: Path) -> None:
    store = folder(tmp_path, 100_000)
    assert choose_read_mode(store, [], 0) == THROUGH_THE_CACHE
    assert choose_read_mode(store, [], -5) == THROUGH_THE_CACHE  # nothing is read, and nothing to be tried
    assert choose_read_mode(store, [span(0, 80_000)], 100_000) == THROUGH_THE_CACHE
    assert choose_read_mode(store, [span(0, 80_001)], 100_000) != THROUGH_THE_CACHE
    assert choose_read_mode(store, [span(0, 1)], -5) != THROUGH_THE_CACHE


@pytest.mark.parametrize(
    ("past", "through", "chosen"),
    [(1, 2, ReadMode(direct=True)), (2, 1, ReadMode(drop=True)), (1.2, 1, ReadMode(direct=True))],
)
def test_clearly_faster_read_mode_is_chosen(
    tmp_path: Path, past: float, through: float, chosen: ReadMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = folder(tmp_path, 100_000)
    monkeypatch.setattr(span_reader, "_seconds", lambda _store, _span, way, _buffer: past if way.direct else through)
    monkeypatch.setattr(span_reader, "drop_cached", lambda _store, spans: spans)
    assert choose_read_mode(store, [span(0, 50_000), span(0, 100)], 0) == chosen


def test_single_slow_reading_does_not_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = folder(tmp_path, 100_000)
    taken = {ReadMode(direct=True): iter([9.0, 1.0, 9.0]), ReadMode(drop=True): iter([2.0, 2.0, 2.0])}
    monkeypatch.setattr(span_reader, "_seconds", lambda _store, _span, way, _buffer: next(taken[way]))
    monkeypatch.setattr(span_reader, "drop_cached", lambda _store, spans: spans)
    assert choose_read_mode(store, [span(offset, 1000) for offset in (0, 5000, 9000)], 0) == ReadMode(direct=True)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="the system does not tell what is cached")
def test_reads_of_what_stays_cached_do_not_decide(tmp_path: Path) -> None:
    store = folder(tmp_path, 100_000)
    with (tmp_path / "x").open("rb+") as written:
        os.fsync(written.fileno())
    with PositionalFile(store.path("x")) as file:
        if not drop_cached(store, [span(0, 50_000)]):
            pytest.skip("its files are in memory")
        mapped = file.map_privately()
        assert bytes(mapped)
        assert file.is_cached(0)
        assert drop_cached(store, [span(0, 50_000)]) == []
        assert choose_read_mode(store, [span(0, 50_000)], 0) == ReadMode(direct=True)
        del mapped
        assert drop_cached(store, [span(0, 50_000)]) == [span(0, 50_000)]


@on_linux
def test_a_piece_leaves_the_page_cache_before_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = 4 << 20  # no huge page is in two
    monkeypatch.setattr(span_reader, "READ_BYTES", piece)
    store = folder(tmp_path, 3 * piece)
    with (tmp_path / "x").open("rb+") as written:
        os.fsync(written.fileno())
    with PositionalFile(store.path("x")) as file:
        file.drop_cache(0, 3 * piece)
        mapped = file.map_privately()
    if untouched_bytes(mapped) < 3 * piece:
        pytest.skip("its files are in memory")
    read, cached = PositionalFile.read_into, list[int]()

    def noted(file: PositionalFile, buffer: memoryview, offset: int) -> int:
        cached.append(offset - untouched_bytes(mapped[:offset]))
        return read(file, buffer, offset)

    monkeypatch.setattr(PositionalFile, "read_into", noted)
    SpanReader(store, ReadMode(drop=True)).read([span(0, 3 * piece)], page_aligned(3 * piece))
    assert cached == [0, 0, 0]


@pytest.mark.parametrize("way", WAYS, ids=["through", "dropped behind", "past"])
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_model_has_the_same_bits_in_both_modes(
    tmp_path: Path, way: ReadMode, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama"), compression)
    expected = run(load(directory))
    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *_: way)
    model = load(directory, 0)
    assert Tier.STREAMED in tiers(model).values()
    assert_same(run(model), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_file_that_is_replaced_while_a_model_is_loaded(tmp_path: Path, family: str) -> None:
    """Its bytes are compared again, also if all of it was: a damaged one is refused, and the old one is as good."""
    directory = split(build_checkpoint(tmp_path / "model", family), "4bit")
    model, path = load(directory, 0), directory / "model.layers.1.safetensors"
    expected, content = [run(model) for _ in range(2)][-1], path.read_bytes()
    assert model._internals.origin.store.checks.is_done(path.name)
    damaged = bytearray(content)
    for offset in range(len(content) // 2, len(content), 64):
        damaged[offset] ^= 1
    for _ in range(2):
        for written in (damaged, content):
            (tmp_path / "new").write_bytes(written)
            (tmp_path / "new").replace(path)
            if written is content:
                assert_same(run(model), expected)
            else:
                with pytest.raises(IncompleteSplitError, match=f"{path} is damaged"):
                    run(model)
