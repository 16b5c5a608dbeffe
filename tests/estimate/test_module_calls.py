"""Calls that are measured: of routed modules, on as many bytes as they would read, and of binding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import CpuDevice, Device
from rabbitllm.engine.experts import ExpertStack
from rabbitllm.engine.load import load_model
from rabbitllm.engine.load_plan import LoadPlan
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE, ReadMode, SpanReader
from rabbitllm.estimate import module_calls
from rabbitllm.estimate.cost_model import RoutedWork
from rabbitllm.estimate.measure import FileSample
from rabbitllm.estimate.module_calls import ExpertCalls, _laid_over_each_other
from rabbitllm.estimate.predict import CallTimes
from tests.estimate.test_cost_model import drawn
from tests.support.fake_gpu import FakeGpu
from tests.support.quick_measuring import quick_measuring  # noqa: F401  applies by itself
from tests.support.tiny_models import one_thread, split  # noqa: F401  one applies by itself

FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]


def calls_of(found: LoadPlan, folder: Path, device: Device | None = None) -> ExpertCalls:
    source = found.experts[0]
    return ExpertCalls(
        found.model, source, device or CpuDevice(), FileSample(list(folder.glob("*.safetensors")), 1 << 20)
    )


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_call_is_made_and_leaves_nothing(tmp_path: Path, family: str, compression: str | None) -> None:
    found = drawn(tmp_path / "m", family, compression, room=0)
    source = found.experts[0]
    calls = calls_of(found, tmp_path / "m")
    for tokens in (1, 16):
        assert calls.found(tokens) > 0
        assert (calls.first(tokens, THROUGH_THE_CACHE, 2) or 0) > 0
        assert calls.mapped(tokens, for_good=True) > 0
        assert calls.mapped(tokens, for_good=False) > 0
    assert (calls.read(THROUGH_THE_CACHE, 0) or 0) > 0
    for leaf in source.leaves.values():
        left = leaf.entry.table[leaf.entry.leaf]
        assert left.shape == leaf.entry.shape
        assert left.is_meta
    assert not source.module._forward_pre_hooks
    assert not source.module._forward_hooks


def test_a_call_reads_the_experts_that_it_uses_and_what_is_found_reads_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drawn(tmp_path / "m", "qwen3_moe", room=0, num_experts=12, num_experts_per_tok=3)
    source, calls = found.experts[0], calls_of(found, tmp_path / "m")
    read: list[int] = []
    whole = SpanReader.read

    def note(reader: SpanReader, spans: Any, buffer: memoryview) -> None:
        chosen = list(spans)
        read.extend(span.nbytes for span in chosen)
        whole(reader, chosen, buffer)

    monkeypatch.setattr(SpanReader, "read", note)
    calls.found(1)
    assert read == []
    for slots in (0, 5, 12):
        read.clear()
        calls.read(THROUGH_THE_CACHE, slots)  # a call that is not counted, and one that is
        assert read == [source.expert_bytes] * 2 * 3


@pytest.mark.parametrize("way", [THROUGH_THE_CACHE, ReadMode(direct=True)])
def test_experts_are_read_in_as_many_pieces_as_they_lie_in(tmp_path: Path, way: ReadMode) -> None:
    for family in ("qwen3_moe", "gpt_oss"):
        found = drawn(tmp_path / family, family, room=0)
        source = found.experts[0]
        places = FileSample(list((tmp_path / family).glob("*.safetensors")), 1 << 20).spans
        moved = module_calls._moved(source, places, torch.device("cpu"))
        for expert in range(source.experts):
            assert [span.nbytes for span in moved.spans(expert)] == [span.nbytes for span in source.spans(expert)]
            assert [span.at for span in moved.spans(expert)] == [span.at for span in source.spans(expert)]


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stacks_are_ordinary_tensors_where_those_of_the_model_are(
    tmp_path: Path, family: str, compression: str | None
) -> None:
    found = drawn(tmp_path / "m", family, compression)
    (placed, *_) = found.placement.experts
    options = RunOptions(device="cpu", max_memory={"cpu": 1 << 34}, show_progress=False)
    model = load_model(split(tmp_path / "m", compression), options)
    source = found.experts[0]
    made = _laid_over_each_other(found.model, source, placed.tier is Tier.RESIDENT)
    assert made.keys() == source.leaves.keys()
    for key, tensor in made.items():
        real = model.get_parameter(f"{source.name}.{key}")
        assert isinstance(tensor, ExpertStack) == isinstance(real, ExpertStack)
        assert (tensor.shape, tensor.dtype) == (real.shape, real.dtype)


def test_on_a_gpu_that_is_none_experts_are_copied(tmp_path: Path) -> None:
    found = drawn(tmp_path / "m", "qwen3_moe", room=0)
    gpu = FakeGpu(0)
    calls = calls_of(found, tmp_path / "m", gpu)
    uploads = []
    for call in (lambda: calls.found(1), lambda: calls.near(1), lambda: calls.read(THROUGH_THE_CACHE, 0)):
        before = gpu.uploads
        assert (call() or 0) > 0
        uploads.append(gpu.uploads - before)
    assert uploads[0] == 4  # each expert once, to begin with
    assert min(uploads[1:]) >= 2 * 2  # those of a token in every call


def test_nothing_to_read_has_no_time(tmp_path: Path) -> None:
    found = drawn(tmp_path / "m", "qwen3_moe", room=0)
    calls = ExpertCalls(found.model, found.experts[0], CpuDevice(), FileSample([], 1 << 20))
    assert calls.read(THROUGH_THE_CACHE, 0) is None
    assert calls.found(1) > 0


def work(on_device: float, in_host: float) -> RoutedWork:
    return RoutedWork("m", "u", "fake:0", Tier.ROUTED, False, 8, 2, 100, on_device, in_host, ())


def test_a_token_finds_some_and_misses_some() -> None:
    times = CallTimes(found=1.0, near=3.0, read=11.0, prompt=None)
    assert times.token(work(1.0, 0.0)) == 1
    assert times.token(work(0.5, 0.5)) == 2
    assert times.token(work(0.5, 0.25)) == pytest.approx(1 + 0.25 * 2 + 0.25 * 10)
    assert CallTimes(1.0, None, None, None).token(work(1.0, 0.0)) == 1
    assert CallTimes(1.0, None, None, None).token(work(0.5, 0.0)) is None
