"""Events of a split, and the statistics that accumulate from them."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from rabbitllm.base import progress
from rabbitllm.base.progress import (
    RATE_SECONDS,
    BytesDone,
    BytesFetched,
    DiskSampled,
    DownloadStarted,
    Event,
    LayerDone,
    ShardDone,
    ShardStarted,
    SplitDone,
    SplitProgress,
    SplitStarted,
    is_shown,
    listening,
    tell,
)
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.gguf_files import write_gguf
from tests.support.splitting import Call, interrupted, split

EVENT = ShardStarted("a", 1, 1)


def test_listeners_receive_events_until_they_close() -> None:
    first: list[Event] = []
    second: list[Event] = []
    assert not is_shown()
    with listening(first.append):
        assert is_shown()
        with listening(second.append):
            tell(EVENT)
        tell(EVENT)
    tell(EVENT)
    assert not is_shown()
    assert (len(first), len(second)) == (2, 1)


def test_listener_is_removed_after_an_error() -> None:
    def fail(event: Event) -> None:
        raise KeyError

    with pytest.raises(KeyError), listening(fail):
        tell(EVENT)
    assert not is_shown()


def test_listener_added_twice_receives_twice() -> None:
    heard: list[Event] = []
    with listening(heard.append), listening(heard.append):
        tell(EVENT)
    assert heard == [EVENT, EVENT]
    assert not progress.is_shown()


def test_events_of_a_split(tmp_path: Path) -> None:
    tensors = llama_tensors()
    source = write_shards(tmp_path / "model", cut(tensors, 3))
    sizes = {path.name: path.stat().st_size for path in sorted(source.glob("*.safetensors"))}
    told: list[Event] = []
    with listening(told.append):
        folder = split(source)
    looks = [event for event in told if isinstance(event, DiskSampled)]
    started, *middle, finished = [event for event in told if not isinstance(event, DiskSampled)]
    assert isinstance(started, SplitStarted)
    assert (started.label, started.shards, started.resumed) == (str(source), tuple(sizes), 0)
    assert started.source_bytes == sum(sizes.values())
    output = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert isinstance(finished, SplitDone)
    assert (finished.folder, finished.layers, finished.output_bytes) == (str(folder), 6, output)
    assert started.output_bytes == output
    ends = [event for event in middle if isinstance(event, ShardStarted | ShardDone)]
    assert [(type(event), event.shard, event.number, event.of) for event in ends] == [
        (cls, shard, index, 3) for index, shard in enumerate(sizes, 1) for cls in (ShardStarted, ShardDone)
    ]
    layers = [event for event in middle if isinstance(event, LayerDone)]
    assert {event.file for event in layers} == {path.name for path in folder.glob("*.safetensors")}
    assert len(layers) == 6
    moved = sum(event.nbytes for event in middle if isinstance(event, BytesDone))
    assert moved == sum(tensor.nbytes for tensor in tensors.values())
    source_bytes = [event.source_left_bytes for event in middle if isinstance(event, ShardDone)]
    assert source_bytes == [sum(list(sizes.values())[index:]) for index in (1, 2, 3)]
    assert (started.shard_bytes, started.layers) == (tuple(sizes.values()), 6)
    assert (started.source_left_bytes, started.fetches, started.quantizes) == (sum(sizes.values()), False, False)
    chunks = [event for event in middle if isinstance(event, BytesDone)]
    assert all((event.written, event.quantized) == (event.nbytes, 0) for event in chunks)
    assert {event.layer for event in chunks} <= {event.layer for event in layers}
    assert told[0] == looks[0]  # before the first byte
    assert max(event.disk_bytes for event in looks) == finished.peak_disk_bytes


def test_events_of_a_quantized_split(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    told: list[Event] = []
    with listening(told.append):
        folder = split(source, compression="4bit", max_disk=10_000_000)
    chunks = [event for event in told if isinstance(event, BytesDone)]
    assert 0 < sum(event.quantized for event in chunks) < sum(event.nbytes for event in chunks)
    written = sum(event.written for event in chunks)
    assert 0.9 < written / sum(tensor_bytes(path) for path in folder.glob("*.safetensors")) <= 1
    assert all(event.limit_bytes == 10_000_000 for event in told if isinstance(event, DiskSampled))


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_bytes_of_a_file_with_blocks_are_the_files_own(tmp_path: Path, compression: str | None) -> None:
    """Not those of the dequantized elements: four times as many were 100 % after a quarter of the split."""
    source = write_gguf(tmp_path / "model.gguf", types="Q4_K")
    stored = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(source).tensors)
    told: list[Event] = []
    with listening(told.append):
        split(source, compression=compression)
    chunks = [event for event in told if isinstance(event, BytesDone)]
    assert sum(event.nbytes for event in chunks) == stored
    assert all(event.quantized <= event.nbytes for event in chunks)


def tensor_bytes(path: Path) -> int:
    header = int.from_bytes(path.read_bytes()[:8], "little")
    return path.stat().st_size - 8 - header


def test_recording_listener_is_no_display() -> None:
    heard: list[Event] = []
    with listening(heard.append, shows=False):
        assert not is_shown()
        tell(EVENT)
    assert heard == [EVENT]


# What is said of a split, from its events and a clock that the test turns.


MB = 1_000_000


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def started(resumed: int = 0, **details: object) -> SplitStarted:
    """A split of four shards of 100 MB."""
    shards = tuple("abcd"[resumed:])
    settings: dict[str, object] = {"shard_bytes": (100 * MB,) * len(shards), "layers": 8} | details
    return SplitStarted("model", shards, 400 * MB, 120 * MB, 0, resumed, **settings)  # type: ignore[arg-type]


def test_bytes_rates_and_time_left() -> None:
    clock = Clock()
    ledger = SplitProgress(clock)
    ledger.hear(started(quantizes=True))
    ledger.hear(ShardStarted("a", 1, 4))
    for _ in range(80):  # 20 s, in which 80 MB come
        clock.now += 0.25
        ledger.hear(BytesDone("a", MB, "layers.0", MB, MB // 4))
    stats = ledger.stats()
    assert (stats.doing, stats.done_bytes, stats.total_bytes, stats.share) == ("splitting", 80 * MB, 400 * MB, 0.2)
    assert stats.rates.done == pytest.approx(4 * MB, rel=0.05)
    assert stats.rates.quantize == stats.rates.done
    assert stats.rates.write == pytest.approx(MB, rel=0.05)
    assert stats.rates.fetch is None
    assert stats.seconds_left == pytest.approx(80, rel=0.05)
    assert (stats.shard, stats.shards, stats.layer, stats.layers) == (1, 4, "layers.0", 8)
    assert stats.seconds == 20


def test_rates_are_of_the_last_seconds() -> None:
    clock = Clock()
    ledger = SplitProgress(clock)
    ledger.hear(started())
    for rate in (9, 1):
        for _ in range(40):
            clock.now += 0.5
            ledger.hear(BytesDone("a", rate * MB // 2))
    assert ledger.stats().rates.done == pytest.approx(MB, rel=0.06)
    clock.now += 2 * RATE_SECONDS
    stats = ledger.stats()
    assert stats.rates.done == 0
    assert stats.seconds_left is None


def test_no_rate_of_a_short_period() -> None:
    clock = Clock()
    ledger = SplitProgress(clock)
    ledger.hear(started())
    clock.now += 0.01
    ledger.hear(BytesDone("a", 50 * MB))
    assert ledger.stats().rates.done is None
    assert ledger.stats().seconds_left is None


def test_bytes_of_an_earlier_run_are_in_no_rate() -> None:
    clock = Clock()
    ledger = SplitProgress(clock)
    ledger.hear(started(resumed=2, fetches=True))
    ledger.hear(ShardStarted("c", 3, 4))
    ledger.hear(BytesFetched("c", 60 * MB, earlier=True))
    stats = ledger.stats()
    assert stats.done_bytes == 200 * MB
    assert stats.shard_here == 0.6
    for _ in range(10):
        clock.now += 1
        ledger.hear(BytesFetched("c", 2 * MB))
        ledger.hear(BytesDone("c", MB))
    stats = ledger.stats()
    assert stats.rates.fetch == pytest.approx(2 * MB, rel=0.01)
    assert stats.rates.done == pytest.approx(MB, rel=0.01)
    assert stats.done_bytes == 210 * MB
    assert stats.seconds_left == pytest.approx(190)


def test_time_left_is_that_of_the_slower_stage() -> None:
    clock = Clock()
    ledger = SplitProgress(clock)
    ledger.hear(started(fetches=True))
    ledger.hear(ShardStarted("a", 1, 4))
    ledger.hear(BytesFetched("a", 0, earlier=True))
    for _ in range(10):  # a shard that is only used when all of it is here
        clock.now += 1
        ledger.hear(BytesFetched("a", 10 * MB))
    stats = ledger.stats()
    assert stats.rates.done == 0
    assert stats.seconds_left == pytest.approx(30)
    clock.now += 1
    ledger.hear(BytesDone("a", 100 * MB))  # at once: what is left must still be fetched
    assert ledger.stats().seconds_left == pytest.approx(300 / 9, rel=0.15)


def test_waiting_for_disk_space_does_not_lower_the_fetch_rate() -> None:
    clock = Clock()
    ledger = SplitProgress(clock)
    ledger.hear(started(fetches=True))
    for shard in "ab":
        ledger.hear(BytesFetched(shard, 0, earlier=True))
        for _ in range(10):
            clock.now += 1
            ledger.hear(BytesFetched(shard, 10 * MB))
    clock.now += 8  # no third one fits; the first is split meanwhile
    ledger.hear(BytesDone("a", 90 * MB))
    stats = ledger.stats()
    assert stats.rates.fetch == pytest.approx(2 * MB, rel=0.01)
    assert stats.rates.done == pytest.approx(9 * MB, rel=0.01)
    assert stats.seconds_left == pytest.approx(310 / 9, rel=0.01)
    clock.now += 8
    ledger.hear(ShardDone("a", 1, 4, "deleted", 0, 0))
    ledger.hear(BytesFetched("c", 0, earlier=True))
    for _ in range(2):
        clock.now += 1
        ledger.hear(BytesFetched("c", 10 * MB))
    assert ledger.stats().seconds_left == pytest.approx(18, rel=0.01)  # 180 MB at 10 MB/s, as before the wait


def test_used_up_shard_counts_once_and_in_full() -> None:
    ledger = SplitProgress(Clock())
    ledger.hear(started())
    ledger.hear(BytesDone("a", 90 * MB))
    ledger.hear(BytesDone("a", 90 * MB))  # it was damaged, and all of it came again
    assert ledger.stats().done_bytes == 100 * MB
    ledger.hear(BytesDone("b", 40 * MB))
    ledger.hear(ShardDone("b", 2, 4, "deleted", 7 * MB, 200 * MB))  # its other bytes are a header and unused data
    stats = ledger.stats()
    assert stats.done_bytes == 200 * MB
    assert (stats.disk_bytes, stats.source_left_bytes) == (7 * MB, 200 * MB)


def test_disk_use_and_limit() -> None:
    ledger = SplitProgress(Clock())
    assert ledger.stats().disk_bytes is None
    ledger.hear(DiskSampled(5, 100))  # before the split has said a word
    ledger.hear(started(source_left_bytes=400 * MB))
    stats = ledger.stats()
    assert (stats.disk_bytes, stats.limit_bytes, stats.source_left_bytes) == (5, 100, 400 * MB)
    ledger.hear(LayerDone("layers.0", "x", 1))
    ledger.hear(LayerDone("layers.0", "x", 1))
    assert ledger.stats().layers_done == 1


def test_download_then_split() -> None:
    clock = Clock()
    ledger = SplitProgress(clock)
    ledger.hear(DownloadStarted("model", 2, 100 * MB))
    ledger.hear(BytesFetched("x", 20 * MB, earlier=True))
    for _ in range(10):
        clock.now += 1
        ledger.hear(BytesFetched("x", 2 * MB))
    ledger.hear(BytesFetched("x", -10 * MB))
    stats = ledger.stats()
    assert (stats.doing, stats.done_bytes, stats.total_bytes) == ("downloading", 30 * MB, 100 * MB)
    assert stats.rates.done == stats.rates.fetch == pytest.approx(2 * MB)
    assert stats.seconds_left == pytest.approx(35)
    ledger.hear(started())
    stats = ledger.stats()
    assert (stats.doing, stats.done_bytes, stats.total_bytes) == ("splitting", 0, 400 * MB)


def test_stats_of_an_interrupted_split(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 4))
    sizes = {path.name: path.stat().st_size for path in sorted(source.glob("*.safetensors"))}
    first, *rest = sizes.values()
    call = Call(str(source), max_disk=10 * MB)
    interrupted(call)
    ledger = SplitProgress()
    samples = []

    def hear(event: progress.Event) -> None:
        ledger.hear(event)
        samples.append(ledger.stats())
        if isinstance(event, SplitStarted):
            assert ledger.stats().done_bytes == first
            assert ledger.stats().source_left_bytes == sum(rest)
            assert ledger.stats().layers_done > 0

    with progress.listening(hear):
        folder = call.make()
    done_bytes = [stats.done_bytes for stats in samples if stats.total_bytes]
    assert done_bytes == sorted(done_bytes)
    last = samples[-1]
    assert last.done_bytes == last.total_bytes == sum(sizes.values())
    assert last.share == 1
    assert last.limit_bytes == 10 * MB
    assert last.source_left_bytes == 0
    assert last.shard == last.shards == 4
    assert last.layers_done == last.layers == len(list(folder.glob("*.safetensors")))
    occupied = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    assert last.disk_bytes is not None
    assert abs(last.disk_bytes - occupied) < 64 * 1024  # the journal went, the manifest came
