"""Pictures of a pass and of a split's disk, in every format; and the errors where none can be drawn."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.base import progress
from rabbitllm.base.progress import DiskSampled, ShardDone, SplitStarted
from rabbitllm.display import pictures
from rabbitllm.display.pictures import (
    DiskRecord,
    DiskSample,
    check_picture,
    draw_pass,
    pictured,
    spent_by_layer,
    thinned,
)
from rabbitllm.errors import MissingPackageError, OptionError
from rabbitllm.telemetry.passes import COMPUTE, DEQUANTIZE, READ, READ_WAIT, Pass, PassInput
from rabbitllm.telemetry.profiler import Event, Trace
from tests.support.builders import build_checkpoint, cut, llama_tensors, write_shards
from tests.support.commands import invoke
from tests.support.splitting import Call, names_in
from tests.support.tiny_models import INPUT, load, split

# A pass


MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF-"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    model: Any = load(split(build_checkpoint(tmp_path_factory.mktemp("model"), "llama")), 0, profiling=True)
    with torch.inference_mode(), model.profiler.trace() as recorded:
        model.generate(INPUT, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    result: Trace = recorded
    return result


@pytest.mark.parametrize("ending", list(MAGIC))
def test_formats(trace: Trace, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"time.{ending}"
    draw_pass(trace, path, "a model", "its figures")
    assert path.read_bytes().startswith(MAGIC[ending])


def test_picture_names_lanes_layers_and_stages(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text
    path = tmp_path / "time.svg"
    draw_pass(trace, path, "a model", "its figures")
    words = {"".join(element.itertext()).strip() for element in ElementTree.parse(path).iter() if element.text}
    assert {"disk", "computing", "wait for weights", COMPUTE} <= words
    assert {"embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "lm_head"} <= words
    assert {"a model", "its figures"} <= words


def test_layer_has_the_read_of_its_weights() -> None:
    """The first layer was read at the end of the previous pass; reads for the next pass do not count."""
    second_pass = Pass(2, 10.0, 2.0, PassInput(1, 1, 5, 1), None, {})
    events = [
        Event(8.0, 0.5, "reader", "a", READ, 1),
        Event(9.5, 0.75, "reader", "a", READ, 1),
        Event(10.0, 0.25, "main", "a", READ_WAIT, 0),
        Event(10.25, 0.25, "main", "a", COMPUTE, 0),
        Event(10.5, 0.5, "reader", "b", READ, 1),
        Event(10.75, 0.25, "main", "b", DEQUANTIZE, 0),
        Event(11.0, 0.5, "main", "b", COMPUTE, 0),
        Event(11.25, 0.5, "reader", "a", READ, 1),
        Event(12.5, 0.5, "main", "a", COMPUTE, 0),
    ]
    assert spent_by_layer(second_pass, events) == {
        "a": {READ_WAIT: 0.25, COMPUTE: 0.25, READ: 0.75},
        "b": {DEQUANTIZE: 0.25, COMPUTE: 0.5, READ: 0.5},
    }


def test_only_whole_passes_are_drawn(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no complete pass"):
        draw_pass(Trace(), tmp_path / "time.png")
    short = Trace(most_events=1)
    for start in (1.0, 2.0):
        short.add(Event(start, 0.5, "main", "a", COMPUTE, 0))
    short.add_pass(Pass(1, 0.9, 2.0, PassInput(1, 1, 5, 1), None, {}), "main")
    with pytest.raises(OptionError, match="no complete pass"):
        draw_pass(short, tmp_path / "time.png")


# The disk of a split


PNG = b"\x89PNG\r\n\x1a\n"


class Clock:
    """One second later at each call."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_record_equals_the_events() -> None:
    record = DiskRecord(Clock())
    record(DiskSampled(0, 500))
    record(SplitStarted("m", ("a", "b"), 200, 60, 0, 0, (100, 100), 3, 200))
    record(DiskSampled(30, 470))
    record(ShardDone("a", 1, 2, "deleted", 35, 100))
    record(DiskSampled(60, 540))
    record(ShardDone("b", 2, 2, "deleted", 60, 0))
    assert record.points == [
        DiskSample(0, 0, 200, 500),  # the source was there before the split's first word
        DiskSample(1, 30, 200, 470),
        DiskSample(2, 35, 200, 470),
        DiskSample(3, 35, 100, 470),
        DiskSample(4, 60, 100, 540),
        DiskSample(5, 60, 100, 540),
        DiskSample(6, 60, 0, 540),
    ]
    assert record.shards == [(3, 1), (6, 2)]
    assert record.peak == DiskSample(2, 35, 200, 470)
    assert (record.label, record.source_bytes, record.num_shards) == ("m", 200, 2)


def test_long_split_keeps_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_POINTS", 50)
    record = DiskRecord(Clock())
    sizes = [index * 37 % 1000 for index in range(2000)]
    sizes[777] = 5000
    for size in sizes:
        record(DiskSampled(size, 9000))
    points = record.points
    assert len(points) <= 50
    assert [point.seconds for point in points] == sorted(point.seconds for point in points)
    assert (points[0].seconds, points[-1].seconds) == (0, 1999)
    assert record.peak == DiskSample(777, 5000, 0, 9000)


def test_thinning_keeps_the_higher_of_two() -> None:
    points = [DiskSample(n, size, 0, 0) for n, size in enumerate([5, 1, 2, 8, 3, 0])]
    assert [point.disk_bytes for point in thinned(points)] == [5, 2, 8, 0]


def test_record_of_a_real_split(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 4))
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    events: list[progress.Event] = []
    picture = tmp_path / "disk.png"
    with progress.listening(events.append), pictured(picture) as record:
        Call(str(source)).make()
    assert record is not None
    seen = [event.disk_bytes for event in events if isinstance(event, DiskSampled | ShardDone)]
    assert {point.disk_bytes for point in record.points} == set(seen)
    (done,) = [event for event in events if isinstance(event, progress.SplitDone)]
    assert max(point.disk_bytes for point in record.points) >= done.peak_disk_bytes
    assert size <= record.peak.total <= size + done.output_bytes + 64 * 1024
    assert record.points[0].source_left_bytes == size
    assert record.points[-1].source_left_bytes == 0
    assert [shard for _, shard in record.shards] == [1, 2, 3, 4]
    assert picture.read_bytes().startswith(PNG)


def test_failed_split_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "disk.svg"

    def fail() -> None:
        with pictured(picture):
            progress.tell(SplitStarted("a <label> of a file & more", ("a",), 2 * 10**9, 10**9, 0, 0, (2 * 10**9,), 3))
            progress.tell(DiskSampled(10**9, 10**13))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert "<svg" in picture.read_text()


def test_invalid_path_is_refused_before_the_split(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not the name of a picture"), pictured(tmp_path / "disk.txt"):
        pytest.fail("it was let in")
    with pictured(None) as record:
        assert record is None


def test_convert_draws_the_disk(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    picture, output = tmp_path / "disk.png", tmp_path / "made"
    arguments = ["convert", str(source), "-o", str(output), "--plot", str(picture)]
    result = invoke(*arguments)
    assert f"picture       {picture}" in result.stdout.replace("\n", "")
    assert picture.read_bytes().startswith(PNG)
    assert not [name for name in names_in(output) if name.endswith(".png")]
    picture.unlink()
    again = invoke(*arguments)
    assert "nothing to do" in again.stdout
    assert not picture.exists()


# Where no picture can be drawn


def test_unknown_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"\.png, \.svg, \.pdf"):
        check_picture(tmp_path / "time.txt")


def test_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match=r'pip install "\.\[plot\]"'):
        check_picture("time.png")


@pytest.mark.parametrize("name", ["time.png", "time.png.part"])
def test_a_file_that_is_no_picture_is_kept(trace: Trace, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(OptionError, match=f"{name} exists and is not a picture; it was not changed"):
        draw_pass(trace, tmp_path / "time.png", "", [])
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"weights")]
