"""The profile of passes names the cause of the caller's waits."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.engine.placement import Tier
from rabbitllm.engine.span_reader import SpanReader
from rabbitllm.telemetry.passes import COMPUTE, DEQUANTIZE, READ, READ_WAIT, UPLOAD, copies_of
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import ALL, INPUT, NEW_TOKENS, load, run, split, tiers

UNITS = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "llama", shards=2)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    read = SpanReader.read

    def slow(self: SpanReader, *args: Any) -> None:
        time.sleep(0.03)
        read(self, *args)

    monkeypatch.setattr(SpanReader, "read", slow)


def passes(model: Any, count: int = 3) -> None:
    with torch.inference_mode():
        for _ in range(count):
            model(INPUT)


def measured(model: Any, bottleneck: str) -> bool:
    """Whether some passes have this bottleneck; others may be held up by what else the machine does."""
    for _ in range(20):
        model.profiler.clear()
        passes(model)
        if model.profiler.bottleneck == bottleneck:
            return True
    return False


def test_profiler_is_off_by_default(checkpoint: Path) -> None:
    model = load(split(checkpoint), 0)
    passes(model)
    assert not model.profiler.stages
    assert "pass profiling_mode=True" in model.profiler.report()


def test_streamed_units_by_stage(checkpoint: Path) -> None:
    model = load(split(checkpoint), 0, profiling=True)
    passes(model, 3)
    layers = model.profiler.layers
    streamed = [unit for unit, tier in tiers(model).items() if tier is Tier.STREAMED]
    for unit in streamed:
        assert layers[unit].keys() == {READ, READ_WAIT, COMPUTE}
        assert layers[unit][COMPUTE].count == 3
        stored = model.placement.of(unit).stored
        assert layers[unit][READ].nbytes == layers[unit][READ].count * stored
    assert layers["model.norm"].keys() == {COMPUTE}


def test_resident_units_only_compute(checkpoint: Path) -> None:
    model = load(split(checkpoint), ALL, profiling=True)
    passes(model, 2)
    layers = model.profiler.layers
    assert list(layers) == UNITS
    assert all(stages.keys() == {COMPUTE} and stages[COMPUTE].count == 2 for stages in layers.values())
    assert model.profiler.bottleneck == COMPUTE


def test_slow_disk_is_the_bottleneck(checkpoint: Path, slow_disk: None) -> None:
    model = load(split(checkpoint), 0, profiling=True)
    assert measured(model, READ_WAIT)
    assert f"Bottleneck: {READ_WAIT} (" in model.profiler.report()
    marked = [line for line in model.profiler.report().splitlines() if "<-- BOTTLENECK" in line]
    assert marked[-1].split("  ")[0] == READ_WAIT  # the load, which comes first, has a bottleneck of its own


def test_slow_computation_is_the_bottleneck_and_hides_the_disk(checkpoint: Path, slow_disk: None) -> None:
    model = load(split(checkpoint), 0, profiling=True)
    for layer in [*model.model.layers, model.lm_head]:
        layer.register_forward_hook(lambda module, args, output: time.sleep(0.15))
        layer._forward_hooks.move_to_end(next(reversed(layer._forward_hooks)), last=False)
    passes(model, 1)  # nothing can be read ahead for the first pass
    assert measured(model, COMPUTE)
    stages = model.profiler.stages
    assert stages[READ].seconds > 3 * 4 * 0.03
    assert stages[READ_WAIT].seconds < stages[READ].seconds / 3


def test_slow_dequantizing_is_distinguished(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rabbitllm.engine import units

    dequantize, slept = units.dequantize, []

    def slow(*args: Any) -> torch.Tensor:
        time.sleep(0.01)
        slept.append(0.01)
        return dequantize(*args)

    model = load(split(checkpoint, "4bit"), 0, profiling=True)
    monkeypatch.setattr(units, "dequantize", slow)
    passes(model)
    assert slept
    assert model.profiler.stages[DEQUANTIZE].seconds >= sum(slept)
    assert set(model.profiler.layers["model.layers.0"]) == {READ, READ_WAIT, DEQUANTIZE, COMPUTE}


def test_copies_to_a_gpu_are_recorded(checkpoint: Path) -> None:
    from rabbitllm.base.options import RunOptions
    from rabbitllm.engine.load import load_model

    gpu = FakeGpu(0)
    options = RunOptions(max_memory={gpu.name: 0, "cpu": 0}, show_progress=False, profiling=True)
    model = load_model(split(checkpoint), options, None, [gpu])
    run(model)
    uploaded = model.profiler.stages[UPLOAD]
    assert uploaded.count >= NEW_TOKENS * 4
    assert uploaded.nbytes > NEW_TOKENS * model.placement.streamed_bytes


def test_exception_leaves_no_open_record(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(split(checkpoint), 0, profiling=True)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[1].mlp, "forward", fail)
        with pytest.raises(RuntimeError):
            model(INPUT)
    passes(model, 1)
    assert model.profiler.layers["model.layers.1"][COMPUTE].count == 2
    assert model.profiler.layers["model.layers.2"][COMPUTE].count == 1


def test_passes_have_tokens_and_bytes(checkpoint: Path) -> None:
    model = load(split(checkpoint), 0, profiling=True)
    ids = INPUT.repeat(2, 1)
    model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    first, *further = model.profiler.passes
    assert (first.kind, first.tokens, first.made) == ("prompt", ids.numel(), 2)
    assert [(p.kind, p.tokens) for p in further] == [("further", 2)] * 4
    assert [p.made for p in further] == [2, 2, 2, None]
    sums = model.profiler.sums
    read = sums["prompt"].disk_bytes + sums["further"].disk_bytes
    assert read >= 5 * model.placement.streamed_bytes
    assert 0 < sums["further"].overlap <= 1
    assert model.profiler.in_place == {"cpu resident": model.placement.of("model.norm").stored}


def test_passes_of_a_packed_model_move_no_bytes(checkpoint: Path) -> None:
    model = load(split(checkpoint, "4bit"), ALL, profiling=True, exact=False)
    passes(model, 2)
    assert len(model.profiler.passes) == 2
    assert model.profiler.sums["prompt"].disk_bytes == 0
    kept = sum(placed.stored for placed in model.placement.units if placed.unit != "model.embed_tokens")
    assert model.profiler.in_place == {"cpu resident": kept}


@pytest.mark.parametrize("host", [0, 1 << 30], ids=["from the disk", "from page-locked memory"])
def test_passes_count_copies_to_a_gpu(checkpoint: Path, host: int) -> None:
    from rabbitllm.base.options import RunOptions
    from rabbitllm.engine.load import load_model

    gpu = FakeGpu(0)
    options = RunOptions(max_memory={gpu.name: 0, "cpu": host}, show_progress=False, profiling=True)
    model = load_model(split(checkpoint), options, None, [gpu])
    run(model)
    assert len(model.profiler.passes) == 1 + NEW_TOKENS
    assert model.placement.uploaded_bytes > 0
    copied = sum(copies_of(p.stages).nbytes for p in model.profiler.passes)
    assert copied == (1 + NEW_TOKENS) * model.placement.uploaded_bytes


def test_threads_that_share_a_resident_model_lose_no_time(checkpoint: Path) -> None:
    """Their passes overlap: one is recorded, and what the other does meanwhile is part of it."""
    model = load(split(checkpoint), ALL, profiling=True)
    barrier = threading.Barrier(2)

    def meet(module: Any, args: Any, output: Any) -> None:
        barrier.wait(600)

    model.model.embed_tokens.register_forward_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(passes, model, 1) for _ in range(2)]:
            done.result(600)
    assert len(model.profiler.passes) == 1
    alone = load(split(checkpoint), ALL, profiling=True)
    passes(alone, 1)
    assert model.profiler.layers.keys() == alone.profiler.layers.keys()
