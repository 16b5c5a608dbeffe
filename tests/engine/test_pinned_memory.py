"""Host memory for a device: what is locked, what is done where nothing can be, and that it is given back."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch

from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.pinned_memory import HostBuffers, keep_units
from rabbitllm.engine.placement import Budget, PlacedUnit, Placement, Tier
from tests.engine.test_loader import LAYERS, Opened
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import split


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return Opened(split(build_checkpoint(tmp_path / "model", "llama", shards=2, num_hidden_layers=6)))


def placed(opened: Opened, pinned: list[str], devices: list[str]) -> Placement:
    """Six layers, split evenly over devices, some of them pinned and the rest streamed."""
    units = []
    for at, name in enumerate(LAYERS):
        tier = Tier.PINNED if name in pinned else Tier.STREAMED
        units.append(PlacedUnit(name, devices[at * len(devices) // 6], tier, opened.sources[name].stored_bytes))
    return Placement(tuple(units), tuple(Budget(name, 0, False) for name in devices))


def test_buffers_are_given_back_together() -> None:
    gpu = FakeGpu(0)
    memory = HostBuffers(gpu)
    buffers = [memory.take(5000), memory.take_anyhow(100)]
    assert [len(buffer) for buffer in buffers] == [5000, 100]
    assert set(gpu.locked) == {buffer.data_ptr() for buffer in buffers}
    del memory
    gc.collect()
    assert gpu.locked == {}


def test_copies_under_way_are_over_before_memory_is_unlocked() -> None:
    gpu = FakeGpu(0)
    memory = HostBuffers(gpu)
    host, buffer = memory.take(4).fill_(7), gpu.device_buffer(4)
    gpu.upload(host, buffer, gpu.leave())
    del memory
    gc.collect()
    assert gpu.locked == {}
    assert buffer.tolist() == [7] * 4


def test_what_must_be_had_comes_unlocked_where_nothing_can_be_locked(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu(0, lockable=4096)
    memory = HostBuffers(gpu)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        buffer = memory.take_anyhow(8192)
    assert (buffer.shape, buffer.dtype) == ((8192,), torch.uint8)
    assert gpu.locked == {}
    assert "8,192 bytes of host memory could not be page-locked" in caplog.records[0].getMessage()
    with pytest.raises(RuntimeError, match="no more memory"):
        memory.take(8192)


def test_each_device_gets_its_units(opened: Opened) -> None:
    gpus = {gpu.name: gpu for gpu in (FakeGpu(0), FakeGpu(1))}
    before = placed(opened, LAYERS[1:5], list(gpus))
    after, kept = keep_units(before, opened.sources, {**gpus, "cpu": CpuDevice()}, opened.store)
    assert after == before
    assert {name: list(found.units) for name, found in kept.items()} == {"fake:0": LAYERS[1:3], "fake:1": LAYERS[3:5]}
    for name, gpu in gpus.items():
        assert set(gpu.locked) == {buffer.data_ptr() for buffer in kept[name].units.values()}
        for unit, buffer in kept[name].units.items():
            source = opened.sources[unit]
            part = source.part_of(buffer)
            from safetensors.torch import load_file

            wanted = load_file(opened.file(unit))
            assert all(torch.equal(part(tensor.parts[0]), wanted[key]) for key, tensor in source.stored.items())


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, MemoryError, OSError])
def test_what_is_refused_is_streamed_and_said(
    opened: Opened, error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = FakeGpu(0)
    take, asked = gpu.host_buffer, []

    def some(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        if len(asked) > 2:
            raise error("enough")
        return take(nbytes)

    monkeypatch.setattr(gpu, "host_buffer", some)
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        after, kept = keep_units(placed(opened, LAYERS[:5], [gpu.name]), opened.sources, {gpu.name: gpu}, opened.store)
    assert len(asked) == 3  # no more requests after the first refusal
    assert list(kept[gpu.name].units) == LAYERS[:2]
    assert after == placed(opened, LAYERS[:2], [gpu.name])
    (record,) = caplog.records
    assert "can be page-locked (enough); 3 layers of" in record.getMessage()


def test_a_file_that_cannot_be_read_is_an_error_and_leaves_nothing_locked(opened: Opened) -> None:
    gpu = FakeGpu(0)
    opened.file(LAYERS[1]).unlink()
    with pytest.raises(OSError):  # noqa: PT011
        keep_units(placed(opened, LAYERS[:3], [gpu.name]), opened.sources, {gpu.name: gpu}, opened.store)
    gc.collect()
    assert gpu.locked == {}
