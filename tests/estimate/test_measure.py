"""What is multiplied with and read to find rates: the model's shapes and forms, and nothing of it is left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.span_reader import BLOCK, READ_BYTES, THROUGH_THE_CACHE, ReadMode
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.estimate import measure
from rabbitllm.estimate.measure import FileSample, bitsandbytes_module, something_to_read, upload_rate, working_set
from rabbitllm.quant import vectors
from rabbitllm.quant.products import Matrix, kernel_for
from tests.support.fake_gpu import FakeGpu, watched

# Products


ALL = 1 << 40
SHAPES = {(512, 256): 3_000_000, (64, 512): 1_000_000}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SET_BYTES", 4 << 20)
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(measure, "SAMPLE_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "WRITTEN_BYTES", READ_BYTES)
    monkeypatch.setattr(measure, "UPLOADED_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "READ_SECONDS", 0.02)


@pytest.mark.parametrize("form", ["bfloat16", "float32", "4bit", "8bit"])
def test_shapes_and_proportions(form: str) -> None:
    made = working_set(form, SHAPES, torch.bfloat16, CpuDevice(), ALL)
    rows = [weight.shape[0] for weight in made.weights]
    assert set(rows) == {512, 64}
    large = sum(weight.numel() for weight in made.weights if weight.shape[0] == 512)
    assert large / sum(weight.numel() for weight in made.weights) == pytest.approx(0.75, abs=0.05)
    assert made.nbytes == pytest.approx(4 << 20, rel=0.2)
    assert all(isinstance(weight, QuantizedWeight) == (form in ("4bit", "8bit")) for weight in made.weights)


@pytest.mark.skipif(not vectors.lanes(), reason="no vectors of a kind that is used here")
@pytest.mark.parametrize("form", ["4bit", "8bit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_measured_is_the_kernel(form: str, dtype: torch.dtype) -> None:
    """Made-up codes with a meaning that no kernel knows would be dequantized."""
    for weight in working_set(form, SHAPES, dtype, CpuDevice(), ALL).weights:
        assert isinstance(weight, QuantizedWeight)
        assert isinstance(weight.matrix, Matrix)
        assert weight.matrix.table_for(kernel_for(form, dtype))


def test_of_a_large_matrix_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MATRIX_BYTES", 1 << 16)
    made = working_set("bfloat16", {(100_000, 256): 1}, torch.bfloat16, CpuDevice(), ALL)
    assert {tuple(weight.shape) for weight in made.weights} == {(128, 256)}


def test_of_a_small_model_no_more_than_it_has() -> None:
    made = working_set("bfloat16", SHAPES, torch.bfloat16, CpuDevice(), 1 << 20)
    assert made.nbytes == pytest.approx(1 << 20, rel=0.3)


@pytest.mark.parametrize("form", ["float32", "4bit", "8bit"])
@pytest.mark.parametrize("inputs", [1, 16])
def test_rate_is_of_all_bytes(form: str, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = working_set(form, SHAPES, torch.float32, CpuDevice(), ALL)
    monkeypatch.setattr(measure, "_rounds", lambda work, device: [sum(one() is None for one in work) + 2.0, 1.0, 9.0])
    assert made.rate(inputs) == made.nbytes / 2
    assert made.rate(inputs, disturbed=True) == made.nbytes / 4
    monkeypatch.undo()
    assert made.rate(inputs) > 0


def test_on_a_device_nothing_is_elsewhere() -> None:
    gpu = FakeGpu(0)
    with watched():
        made = working_set("bfloat16", SHAPES, torch.bfloat16, gpu, ALL)
        assert {weight.device for weight in made.weights} == {gpu.torch_device}
        assert made.rate(1) > 0


def test_weights_that_stay_are_in_small_pages() -> None:
    made = working_set("4bit", SHAPES, torch.bfloat16, CpuDevice(), ALL, mapped=True)
    other = working_set("4bit", SHAPES, torch.bfloat16, CpuDevice(), ALL)
    x = torch.randn(1, 256)
    for one, two in zip(made.weights, other.weights, strict=True):
        if one.shape[1] == 256:
            assert torch.equal(torch.nn.functional.linear(x, one), torch.nn.functional.linear(x, two))


@pytest.mark.parametrize("form", ["bitsandbytes 8bit", "bitsandbytes 4bit in float32", "bitsandbytes 4bit in bfloat16"])
def test_products_of_bitsandbytes_own_modules(form: str) -> None:
    """The very modules that such a checkpoint computes with, around made-up codes."""
    made = bitsandbytes_module(form, 64, 128, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    found = made(torch.ones(1, 3, 128, dtype=torch.bfloat16))
    assert found.shape == (1, 3, 64)
    # at 8bit a code is a 127th of the scale; at 4bit 3 and 12 are the codes, in turns
    table = torch.tensor([-0.3949, 0.4407])
    wanted = 128 * (0x3C / 127 if "8bit" in form else float(table.mean()))
    assert torch.allclose(found.float(), torch.full((1, 3, 64), wanted), rtol=0.05)
    stored = 64 * 128 + 4 * 64 if "8bit" in form else 64 * 128 // 2 + 128 * 4
    chosen = working_set(form, {(64, 128): 1}, torch.bfloat16, CpuDevice(), 5 * stored)
    assert chosen.nbytes == 5 * stored
    assert chosen.rate(1) > 0


# Reading


def file(folder: Path, nbytes: int, name: str = "f") -> Path:
    path = folder / name
    path.write_bytes(os.urandom(nbytes))
    return path


def test_pieces_are_spread_over_the_files(tmp_path: Path) -> None:
    files = [file(tmp_path, 3_000_000, name) for name in "abc"]
    spans = FileSample(files, 100_000).spans
    assert {span.file for span in spans} == {"0", "1", "2"}
    assert all(span.offset % BLOCK == 0 and span.offset + span.nbytes <= 3_000_000 for span in spans)
    assert 1 << 19 <= sum(span.nbytes for span in spans) <= 1 << 20


def test_of_a_small_file_all_is_read(tmp_path: Path) -> None:
    assert [(span.offset, span.nbytes) for span in FileSample([file(tmp_path, 1000)], 1 << 30).spans] == [(0, 1000)]


def test_runs_of_an_expert_are_as_long_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of DeepSeek-V3's is 44 MB, and was not found in runs of what one call reads."""
    monkeypatch.setattr(measure, "READ_BYTES", 1 << 16)
    files = [file(tmp_path, 900_000)]
    assert {span.nbytes for span in FileSample(files, 1 << 18).spans} <= {1 << 16, 900_000 % (1 << 16)}
    whole = FileSample(files, 1 << 18, whole=True)
    assert [span.nbytes for span in whole.spans].count(1 << 18) == 3
    assert (whole.rate(THROUGH_THE_CACHE) or 0) > 0


@pytest.mark.parametrize("way", [THROUGH_THE_CACHE, ReadMode(drop=True)])
def test_rates(tmp_path: Path, way: ReadMode) -> None:
    sample = FileSample([file(tmp_path, 2_000_000)], 300_000)
    assert (sample.rate(way) or 0) > 0
    assert (sample.cached_rate() or 0) > 0
    assert (sample.mapped_rate() or 0) > 0
    with sample.reading(way) as background:
        pass
    (rate,) = background
    assert (rate or 0) > 0


def test_nothing_to_read_has_no_rate(tmp_path: Path) -> None:
    for sample in (FileSample([], 1), FileSample([file(tmp_path, 0)], 1)):
        assert sample.spans == ()
        assert sample.rate(THROUGH_THE_CACHE) is sample.cached_rate() is sample.mapped_rate() is None
    gone = file(tmp_path, 5000)
    sample = FileSample([gone], 1 << 20)
    gone.unlink()
    assert sample.rate(THROUGH_THE_CACHE) is None


def test_files_that_are_there_are_taken(tmp_path: Path) -> None:
    here, before = file(tmp_path, 5000), sorted(tmp_path.iterdir())
    with something_to_read(tmp_path / "not" / "there", [here, tmp_path / "gone"], 0) as found:
        assert list(found) == [here]
    assert sorted(tmp_path.iterdir()) == before


def test_where_there_are_none_one_without_a_name_is_written(tmp_path: Path) -> None:
    status = tmp_path.stat()
    with something_to_read(tmp_path / "not" / "there", [], 0) as found:
        assert list(tmp_path.iterdir()) == []
        (path,) = found
        assert 0 < path.stat().st_size <= READ_BYTES
        assert path.stat().st_dev == status.st_dev
        assert (FileSample(found, 1 << 18).rate(THROUGH_THE_CACHE) or 0) > 0
    assert not path.exists() or path.stat().st_size == 0
    assert list(tmp_path.iterdir()) == []


def test_without_room_nothing_is_written(tmp_path: Path) -> None:
    with something_to_read(tmp_path, [], shutil.disk_usage(tmp_path).free) as found:
        assert list(found) == []


def test_uploads_go_the_engines_way() -> None:
    gpu = FakeGpu(0)
    assert upload_rate(gpu) > 0
    assert gpu.locked == {}  # else the driver would go on believing in memory that is gone
    assert upload_rate(FakeGpu(0, lockable=0)) > 0
    assert gpu.uploads >= 2
    assert gpu.uploaded_bytes == gpu.uploads * (1 << 16)
