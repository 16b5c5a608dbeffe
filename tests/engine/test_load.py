"""A load builds one skeleton; the trial of a device's 4bit kernel."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rabbitllm import AutoModel
from rabbitllm.engine import load_plan, skeleton
from rabbitllm.engine.free_memory import trimming
from rabbitllm.engine.load_plan import DISTINCT_ROWS, MAX_ROWS, fused_chooser, is_near
from rabbitllm.quant import products
from rabbitllm.quant.schemes import Quantized
from tests.engine.test_fake_gpu import load_on
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import ALL, load, split

FORM = Quantized("4bit", (96, 128), "bfloat16")


def test_load_builds_the_skeleton_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, built = build_checkpoint(tmp_path / "model", "llama"), []
    build_skeleton = skeleton.build_skeleton

    def count(*args: Any) -> Any:
        built.append(args)
        return build_skeleton(*args)

    AutoModel.from_pretrained(str(folder), device="cpu")
    monkeypatch.setattr(skeleton, "build_skeleton", count)
    AutoModel.from_pretrained(str(folder), device="cpu")
    assert len(built) == 1


@pytest.mark.skipif(trimming() is None, reason="no glibc here")
def test_memory_that_a_tokenizer_freed_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one takes small blocks by the million, some of which stay, so that the others are holes of the heap."""
    directory = split(build_checkpoint(tmp_path / "model", "llama"))
    filled, stays = list[int](), list[torch.Tensor]()

    def read(*args: Any) -> None:
        blocks = [torch.ones(60_000, dtype=torch.uint8) for _ in range(1600)]
        stays.extend(blocks[::40])
        filled.append(psutil.Process().memory_info().rss)

    monkeypatch.setattr(skeleton, "_tokenizer", read)
    load(directory)
    assert psutil.Process().memory_info().rss < filled[0] - 1500 * 30_000
    assert all(bool(block.all()) for block in stays)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_is_near_allows_rounding_errors(dtype: torch.dtype) -> None:
    expected = torch.randn(200, dtype=torch.float64)
    assert is_near(expected.to(dtype), expected.to(dtype))
    assert is_near((expected * (1 + torch.finfo(dtype).eps)).to(dtype), expected.to(dtype))
    assert not is_near((expected * 1.2).to(dtype), expected.to(dtype))
    assert not is_near(expected.flip(0).to(dtype), expected.to(dtype))
    assert not is_near((expected * float("nan")).to(dtype), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_right_kernel_is_used(dtype: torch.dtype) -> None:
    assert fused_chooser(FakeGpu(0))(FORM, dtype) is products.FusedMatrix


@pytest.mark.parametrize("scheme", ["4bit", "4bit-double"])
@pytest.mark.parametrize("rows", [96, DISTINCT_ROWS, 2 * DISTINCT_ROWS + 7])
def test_trial_covers_every_product_of_a_pass(scheme: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all rows of the matrix, in the parts that a pass multiplies; one wrong product refuses the kernel."""
    ordinary, calls = products.multiply_4bit, []
    monkeypatch.setattr(products, "FUSED_ELEMENTS", 1500 * 64)
    form = Quantized(scheme, (rows, 64), "bfloat16", None if scheme == "4bit" else 0.25)

    def multiply(part: Quantized, payload: Any, absmax: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append((len(x), part.shape[0], rest[-1] is not None))
        result = ordinary(part, payload, absmax, x, *rest)
        return result.flip(-1) if len(x) in wrong else result

    monkeypatch.setattr(products, "multiply_4bit", multiply)
    wrong: list[int] = []
    assert fused_chooser(FakeGpu(0))(form, torch.bfloat16) is products.FusedMatrix
    assert {count for count, _, _ in calls} == {1, 4, 6, 16, 48, 128, 600}
    for count in (1, 128):
        assert sum(part for inputs, part, _ in calls if inputs == count) == rows
    assert max(part for count, part, _ in calls if count > products.FEW_INPUTS) <= 1500
    assert {is_nested for *_, is_nested in calls} == {scheme != "4bit"}
    for count in (4, 128, 600):
        wrong[:] = [count]
        assert fused_chooser(FakeGpu(0))(form, torch.bfloat16) is None


def test_matrices_of_a_shape_share_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def note(device: Any, form: Quantized, dtype: torch.dtype) -> bool:
        tried.append((device.name, form.shape, dtype))
        return True

    monkeypatch.setattr(load_plan, "_is_right", note)
    choose_matrix = fused_chooser(FakeGpu(0))
    for _ in range(3):
        for shape in ((96, 128), (128, 128), (50_000, 64), (150_000, 64)):
            assert choose_matrix(Quantized("4bit", shape, "bfloat16"), torch.bfloat16) is products.FusedMatrix
    assert tried == [("fake:0", shape, torch.bfloat16) for shape in ((96, 128), (128, 128), (MAX_ROWS, 64))]


def test_resident_model_needs_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16), "4bit")
    tried: list[Any] = []
    monkeypatch.setattr(load_plan, "_is_right", lambda *args: bool(tried.append(args)))
    assert load_on([FakeGpu(0)], directory, ALL, exact=False).placement.is_resident
    assert not tried
    load_on([FakeGpu(0)], directory, 0, exact=False)
    assert tried


def test_forms_without_a_kernel_need_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "_is_right", lambda *args: pytest.fail("tried"))
    choose_matrix = fused_chooser(FakeGpu(0))
    assert choose_matrix(Quantized("8bit", (96, 128), None), torch.bfloat16) is None
    assert choose_matrix(Quantized("4bit", (96, 100), "bfloat16"), torch.bfloat16) is None
    assert choose_matrix(FORM, torch.float64) is None


def test_wrong_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right = products.multiply_4bit
    monkeypatch.setattr(products, "multiply_4bit", lambda *args: right(*args).flip(-1))
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        assert fused_chooser(FakeGpu(0))(FORM, torch.bfloat16) is None
    assert "multiplies 4bit codes incorrectly on fake:0" in caplog.records[0].getMessage()


@pytest.mark.parametrize("error", [NotImplementedError, RuntimeError, torch.OutOfMemoryError, AttributeError])
def test_missing_kernel_is_not_used(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> torch.Tensor:
        raise error("no such kernel")

    monkeypatch.setattr(products, "multiply_4bit", fail)
    assert fused_chooser(FakeGpu(0))(FORM, torch.bfloat16) is None
