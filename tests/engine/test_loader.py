"""The loader alone, on real layer files: right bytes, fixed slots, and nothing lost when something fails."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rabbitllm.engine import skeleton
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.loader import Loader, largest
from rabbitllm.engine.prefetcher import FilledSlot
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, ReadMode, SpanReader
from rabbitllm.engine.unit_source import UnitSource, source_of
from rabbitllm.engine.units import find_units
from rabbitllm.engine.weights import map_weights
from rabbitllm.store.layer_store import LayerStore
from rabbitllm.telemetry.profiler import READ, READ_WAIT, Profiler
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import split

LAYERS = [f"model.layers.{i}" for i in range(6)]


class Opened:
    """A split directory and the units of its model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = LayerStore(directory)
        config = skeleton.read_config(directory)
        model = skeleton.build_skeleton(directory, config, torch.float32, None)
        weights = map_weights(model, self.store.tensors, str(directory))
        self.sources = {unit.name: source_of(unit, weights, self.store) for unit in find_units(model)}
        self.profiler = Profiler()

    def loader(self, slots: int = 2, way: ReadMode = THROUGH_THE_CACHE) -> Loader:
        streamed = {name: self.sources[name] for name in LAYERS}
        device = CpuDevice()
        buffers = [device.host_buffer(largest(streamed)) for _ in range(slots)]
        return Loader(streamed, SpanReader(self.store, way), device, self.profiler, buffers, slots)

    def file(self, unit: str) -> Path:
        (name,) = {span.file for span in self.sources[unit].spans}
        return self.directory / name

    def is_right(self, loaded: FilledSlot) -> bool:
        """Whether every tensor in the slot has the bytes that safetensors finds in the layer file."""
        source: UnitSource = self.sources[loaded.unit]
        part = source.part_of(loaded.slot.buffer)
        wanted = load_file(self.file(loaded.unit))
        found = {spec.name: part(spec) for tensor in source.stored.values() for spec in tensor.parts}
        return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return Opened(split(build_checkpoint(tmp_path / "model", "llama", shards=2, num_hidden_layers=6)))


def until(condition: Callable[[], bool]) -> bool:
    """Whether something comes true within seconds."""
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def test_takes_the_bytes_of_the_layer_file(opened: Opened) -> None:
    loader = opened.loader()
    for name in LAYERS * 2:
        loaded = loader.take(name)
        assert loaded.unit == name
        assert opened.is_right(loaded)
        loader.give_back(loaded)
    assert loader.loads == 12


def test_what_was_requested_is_loaded_once(opened: Opened) -> None:
    loader = opened.loader()
    loader.request(LAYERS[0])
    loader.request(LAYERS[0])
    assert until(lambda: loader.loads == 1)
    assert opened.is_right(loader.take(LAYERS[0]))
    assert loader.loads == 1


def test_a_request_waits_for_a_slot(opened: Opened) -> None:
    loader = opened.loader(slots=2)
    first, second = loader.take(LAYERS[0]), loader.take(LAYERS[1])
    loader.request(LAYERS[2])
    time.sleep(0.05)
    assert loader.loads == 2
    assert opened.is_right(first)
    loader.give_back(first)
    assert opened.is_right(loader.take(LAYERS[2]))
    assert opened.is_right(second)


def test_buffers_are_allocated_once(opened: Opened) -> None:
    loader = opened.loader(slots=2)
    seen = set()
    for name, following in pairwise(LAYERS * 3):
        loaded = loader.take(name)
        loader.request(following)
        seen.add(loaded.slot.buffer.data_ptr())
        loader.give_back(loaded)
    assert len(seen) == 2
    assert all(address % 4096 == 0 for address in seen)


def test_a_wrong_prediction_costs_one_load_and_no_slot(opened: Opened) -> None:
    loader = opened.loader(slots=2)
    for name in LAYERS:
        loaded = loader.take(name)
        loader.request(LAYERS[0])  # never what comes next
        assert opened.is_right(loaded)
        loader.give_back(loaded)
    held = [loader.take(name) for name in LAYERS[:2]]
    assert all(map(opened.is_right, held))


@pytest.mark.parametrize("slots", [1, 2])
def test_several_requests_in_vain(opened: Opened, slots: int) -> None:
    loader = opened.loader(slots)
    for name in LAYERS[1:]:
        loader.request(name)
    loaded = loader.take(LAYERS[0])
    assert opened.is_right(loaded)
    loader.give_back(loaded)
    assert opened.is_right(loader.take(LAYERS[5]))


def test_a_file_cut_short_is_named_and_costs_no_slot(opened: Opened) -> None:
    loader = opened.loader(slots=2)
    path = opened.file(LAYERS[1])
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    for _ in range(5):
        with pytest.raises(OSError, match=f"{path.name} ended at byte"):
            loader.take(LAYERS[1])
    path.write_bytes(whole)
    assert opened.is_right(loader.take(LAYERS[1]))
    assert opened.is_right(loader.take(LAYERS[2]))


def test_a_failed_prefetch_of_what_is_not_needed_is_forgotten(opened: Opened) -> None:
    loader = opened.loader(slots=2)
    path = opened.file(LAYERS[1])
    whole = path.read_bytes()
    path.unlink()
    loader.request(LAYERS[1])
    assert until(lambda: loader.loads == 1)
    assert opened.is_right(loader.take(LAYERS[4]))
    path.write_bytes(whole)
    assert opened.is_right(loader.take(LAYERS[1]))


def test_an_interrupted_wait_costs_no_slot(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = opened.loader(slots=2)

    class Interrupted:
        def result(self) -> None:
            raise KeyboardInterrupt

    pending = loader._ahead._pending
    for name in LAYERS[:3]:
        loader.expect([name])
        slot, under_way = pending[name]
        monkeypatch.setitem(pending, name, (slot, Interrupted()))  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            loader.take(name)
        assert name in pending
        pending[name] = slot, under_way
    held = [loader.take(LAYERS[4]), loader.take(LAYERS[5])]
    assert all(map(opened.is_right, held))


def test_records_reading_and_waiting(opened: Opened) -> None:
    loader = opened.loader()
    loader.give_back(loader.take(LAYERS[2]))
    stages = opened.profiler.layers[LAYERS[2]]
    assert stages[READ].nbytes == opened.sources[LAYERS[2]].stored_bytes
    assert stages[READ_WAIT].count == 1


def test_closing_ends_the_reading_thread(opened: Opened) -> None:
    loader = opened.loader()
    loader.take(LAYERS[0])
    loader.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        loader.take(LAYERS[1])


@pytest.mark.long
def test_an_uncompressed_model_is_loaded_and_run_without_bitsandbytes(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    code = (
        "import sys; from rabbitllm import AutoModel; import torch\n"
        "model = AutoModel.from_pretrained(sys.argv[1], device='cpu', show_layer_progress=False)\n"
        "model.generate(torch.tensor([[3, 4]]), max_new_tokens=2)\n"
        "assert 'bitsandbytes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
