"""Rates that are measured: of every form of weights, of reading and copying, and nothing of it is left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, ReadMode
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.estimate import machine
from rabbitllm.estimate.machine import (
    DIRECT,
    DROPPED,
    Machine,
    overhead,
    product_rate,
    read_rate,
    something_to_read,
    upload_rate,
)
from rabbitllm.quant import _vectors, bfloat_products
from rabbitllm.quant.products import Matrix
from rabbitllm.quant.schemes import INT8_BLOCK
from tests.support.call_counts import counted_calls
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.quick_measuring import quick_measuring  # noqa: F401  applies by itself
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself
from tests.support.tiny_models import one_thread  # noqa: F401  another one

ELEMENTS = 64 * 512


def machine_with(*files: Path) -> Machine:
    return Machine([CpuDevice()], RunOptions(device="cpu"), files)


# Products


@pytest.mark.parametrize(
    ("form", "nbytes"),
    [
        ("bfloat16", ELEMENTS * 2),
        ("float32", ELEMENTS * 4),
        ("8bit", ELEMENTS + ELEMENTS // INT8_BLOCK * 4),
        ("4bit", ELEMENTS // 2 + ELEMENTS // 64 * 4),
        ("Q8_0", ELEMENTS // 32 * 34),
        ("fp8 F32 128x128", ELEMENTS + 4 * 4),
        ("bitsandbytes 8bit", ELEMENTS),
        ("bitsandbytes 4bit in bfloat16", ELEMENTS * 9 // 16),
    ],
)
def test_weights_of_every_form_are_multiplied(form: str, nbytes: int) -> None:
    weight, stored = machine._weight(CpuDevice(), form, torch.float32 if form == "float32" else torch.bfloat16)
    assert stored == nbytes
    assert isinstance(weight, torch.nn.Module) == form.startswith("bitsandbytes")
    for rows in (1, 16):
        assert product_rate(CpuDevice(), form, torch.bfloat16, rows) > 0


@pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used here")
@pytest.mark.parametrize("form", ["4bit", "8bit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_are_multiplied_by_the_kernel(form: str, dtype: torch.dtype) -> None:
    """Made-up codes with a meaning that no kernel knows would be dequantized."""
    weight, _ = machine._weight(CpuDevice(), form, dtype)
    assert isinstance(weight, QuantizedWeight)
    assert isinstance(weight.matrix, Matrix)
    assert weight.matrix.method_for(1, dtype)[0] == "codes"


@pytest.mark.skipif(not bfloat_products.max_rows(), reason="torch's products are the fastest here")
def test_plain_weights_are_multiplied_as_by_the_commands() -> None:
    with counted_calls() as calls:
        assert product_rate(CpuDevice(), "bfloat16", torch.bfloat16, 1) > 0
    assert calls["rabbitllm/quant/bfloat_products.py:linear"] > 0


def test_the_rate_counts_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_seconds", lambda work: work() or 2.0)
    assert product_rate(CpuDevice(), "bfloat16", torch.float32, 1) == machine.SET_BYTES / 2


def test_weights_on_a_gpu_stay_there() -> None:
    gpu = FakeGpu(0)
    with watched():
        assert product_rate(gpu, "bfloat16", torch.bfloat16, 1) > 0
        assert product_rate(gpu, "4bit", torch.bfloat16, 1) > 0


def test_each_rate_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter(range(9))
    monkeypatch.setattr(machine, "product_rate", lambda *arguments: next(rates))
    measured = machine_with()
    assert [measured.product("cpu", "4bit", torch.bfloat16) for _ in range(3)] == [0, 0, 0]
    assert measured.product("cpu", "4bit", torch.float32) == 1
    assert measured.product("cpu", "4bit", torch.float32, 16) == 2
    # numbers of a dtype are multiplied with numbers of this dtype
    assert measured.product("cpu", "float32", torch.bfloat16) == measured.product("cpu", "float32", torch.float32) == 3


def test_measuring_the_overhead_keeps_the_random_state() -> None:
    before = torch.get_rng_state()
    seconds = overhead(CpuDevice())
    assert seconds.a_token >= 0
    assert seconds.a_module >= 0
    assert seconds.a_token + seconds.a_module > 0
    assert torch.equal(torch.get_rng_state(), before)


# Reading and copying


def file(folder: Path, nbytes: int, name: str = "f") -> Path:
    path = folder / name
    path.write_bytes(os.urandom(nbytes))
    return path


@pytest.mark.parametrize("mode", [THROUGH_THE_CACHE, DROPPED])
def test_files_are_read(tmp_path: Path, mode: ReadMode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "READ_SECONDS", 10.0)
    monkeypatch.setattr(machine, "PIECE_BYTES", 1 << 20)
    files = [file(tmp_path, 3_000_000, name) for name in "abc"]
    monkeypatch.setattr(machine, "SAMPLE_BYTES", 1 << 30)
    rate, nbytes = read_rate(files, mode)
    assert rate is not None
    assert rate > 0
    assert nbytes == 9_000_000
    monkeypatch.setattr(machine, "SAMPLE_BYTES", 3 << 20)  # the first piece of each
    assert read_rate(files, mode)[1] == 3 << 20


def test_no_rates_without_files(tmp_path: Path) -> None:
    missing = file(tmp_path, 5000)
    measured = machine_with(missing)
    missing.unlink()
    for subject in (machine_with(), machine_with(file(tmp_path, 0)), measured):
        assert subject.disk() is subject.reading(THROUGH_THE_CACHE) is None


def test_the_faster_mode_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    for rates, chosen in (({DIRECT: 2.0, DROPPED: 1.0}, DIRECT), ({DIRECT: None, DROPPED: 1.0}, DROPPED)):
        monkeypatch.setattr(machine, "read_rate", lambda files, mode, rates=rates: (rates[mode], 0))
        assert machine_with().disk() == (chosen, rates[chosen])


def test_existing_files_are_read(tmp_path: Path) -> None:
    here, before = file(tmp_path, 5000), sorted(tmp_path.iterdir())
    with something_to_read(tmp_path / "not" / "there", [here, tmp_path / "gone"], 0) as files:
        assert list(files) == [here]
    assert sorted(tmp_path.iterdir()) == [*before]


def test_a_nameless_file_is_written_without_files(tmp_path: Path) -> None:
    status = tmp_path.stat()
    with something_to_read(tmp_path / "not" / "there", [], 0) as files:
        assert list(tmp_path.iterdir()) == []
        (path,) = files
        assert 0 < path.stat().st_size <= machine.SAMPLE_BYTES
        assert path.stat().st_dev == status.st_dev
        assert read_rate(files, THROUGH_THE_CACHE)[0]
    assert not path.exists() or path.stat().st_size == 0
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_written_without_space(tmp_path: Path) -> None:
    with something_to_read(tmp_path, [], shutil.disk_usage(tmp_path).free) as files:
        assert list(files) == []


def test_uploads_are_those_of_the_engine() -> None:
    gpu = FakeGpu(0)
    assert upload_rate(gpu) > 0
    assert gpu.locked == {}  # else the driver would go on believing in memory that is gone
    assert upload_rate(FakeGpu(0, lockable=0)) > 0
    assert gpu.uploads >= 2
    assert gpu.uploaded_bytes == gpu.uploads * machine.UPLOADED_BYTES
