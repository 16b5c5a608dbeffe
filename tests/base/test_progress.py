"""Who hears of a split, and in which order things are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from rabbitllm.base import progress
from rabbitllm.base.progress import (
    BytesDone,
    DiskSampled,
    Event,
    LayerDone,
    ShardDone,
    ShardStarted,
    SplitDone,
    SplitStarted,
    is_shown,
    listening,
    tell,
)
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.splitting import split

EVENT = ShardStarted("a", 1, 1)


def test_each_listener_hears_and_none_hears_afterwards() -> None:
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


def test_listener_that_raises_is_gone_afterwards() -> None:
    def fail(event: Event) -> None:
        raise KeyError

    with pytest.raises(KeyError), listening(fail):
        tell(EVENT)
    assert not is_shown()


def test_one_listener_twice_hears_twice() -> None:
    heard: list[Event] = []
    with listening(heard.append), listening(heard.append):
        tell(EVENT)
    assert heard == [EVENT, EVENT]
    assert not progress.is_shown()


def test_what_a_split_tells(tmp_path: Path) -> None:
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
        (kind, shard, number, 3) for number, shard in enumerate(sizes, 1) for kind in (ShardStarted, ShardDone)
    ]
    layers = [event for event in middle if isinstance(event, LayerDone)]
    assert {event.file for event in layers} == {path.name for path in folder.glob("*.safetensors")}
    assert len(layers) == 6
    moved = sum(event.nbytes for event in middle if isinstance(event, BytesDone))
    assert moved == sum(tensor.nbytes for tensor in tensors.values())
    left = [event.source_left_bytes for event in middle if isinstance(event, ShardDone)]
    assert left == [sum(list(sizes.values())[number:]) for number in (1, 2, 3)]
    assert (started.shard_bytes, started.layers) == (tuple(sizes.values()), 6)
    assert (started.source_left_bytes, started.fetches, started.quantizes) == (sum(sizes.values()), False, False)
    chunks = [event for event in middle if isinstance(event, BytesDone)]
    assert all((event.written, event.quantized) == (event.nbytes, 0) for event in chunks)
    assert {event.layer for event in chunks} <= {event.layer for event in layers}
    assert told[0] == looks[0]  # before the first byte
    assert max(event.disk_bytes for event in looks) == finished.peak_disk_bytes


def test_what_quantizing_makes_of_the_bytes(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    told: list[Event] = []
    with listening(told.append):
        folder = split(source, compression="4bit", max_disk=10_000_000)
    chunks = [event for event in told if isinstance(event, BytesDone)]
    assert 0 < sum(event.quantized for event in chunks) < sum(event.nbytes for event in chunks)
    written = sum(event.written for event in chunks)
    assert 0.9 < written / sum(tensor_bytes(path) for path in folder.glob("*.safetensors")) <= 1
    assert all(event.limit_bytes == 10_000_000 for event in told if isinstance(event, DiskSampled))


def tensor_bytes(path: Path) -> int:
    header = int.from_bytes(path.read_bytes()[:8], "little")
    return path.stat().st_size - 8 - header


def test_a_listener_that_only_keeps_is_no_show() -> None:
    heard: list[Event] = []
    with listening(heard.append, shows=False):
        assert not is_shown()
        tell(EVENT)
    assert heard == [EVENT]
