"""Who hears of a split, and in which order things are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from rabbitllm import progress
from rabbitllm.progress import (
    BytesDone,
    Event,
    LayerDone,
    ShardDone,
    ShardStarted,
    SplitDone,
    SplitStarted,
    has_listeners,
    listening,
    tell,
)
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.splitting import split

EVENT = ShardStarted("a", 1, 1)


def test_everyone_hears_and_nobody_hears_afterwards() -> None:
    first: list[Event] = []
    second: list[Event] = []
    assert not has_listeners()
    with listening(first.append):
        assert has_listeners()
        with listening(second.append):
            tell(EVENT)
        tell(EVENT)
    tell(EVENT)
    assert not has_listeners()
    assert (len(first), len(second)) == (2, 1)


def test_listener_that_raises_is_gone_afterwards() -> None:
    def fail(event: Event) -> None:
        raise KeyError

    with pytest.raises(KeyError), listening(fail):
        tell(EVENT)
    assert not has_listeners()


def test_one_listener_twice_hears_twice() -> None:
    heard: list[Event] = []
    with listening(heard.append), listening(heard.append):
        tell(EVENT)
    assert heard == [EVENT, EVENT]
    assert not progress.has_listeners()


def test_what_a_split_tells(tmp_path: Path) -> None:
    tensors = llama_tensors()
    source = write_shards(tmp_path / "model", cut(tensors, 3))
    sizes = {path.name: path.stat().st_size for path in sorted(source.glob("*.safetensors"))}
    told: list[Event] = []
    with listening(told.append):
        folder = split(source)
    started, *middle, finished = told
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
