"""The parts of the benchmark on GPUs, on the device of the tests: models, passes, and the message without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import devices, gpu, passes, sized_model
from benchmarks.gpu.child import Place
from benchmarks.gpu.models import _placed
from benchmarks.lib import worker
from benchmarks.lib.measure import drop_cached
from rabbitllm.base.options import RunOptions
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import SLOTS, STAGING
from tests.benchmarks.test_benchmarks import resident_pages
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself
from tests.support.tiny_models import load, split

PROMPT = [1, 40, 81, 7]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("cuda", "driver", "found", "remedy"),
    [
        (None, False, "built without CUDA, and NVIDIA's driver is not loaded", "a machine with an NVIDIA GPU"),
        ("13.0", False, "built for CUDA 13.0, and NVIDIA's driver is not loaded", "a machine with an NVIDIA GPU"),
        (None, True, "built without CUDA, and NVIDIA's driver is loaded", "install a torch that is built with CUDA"),
        ("13.0", True, "built for CUDA 13.0, and NVIDIA's driver is loaded", "`nvidia-smi` lists the GPU"),
    ],
)
def test_the_remedy_suits_what_is_missing(
    no_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cuda: str | None,
    driver: bool,
    found: str,
    remedy: str,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if driver:
        (tmp_path / "version").touch()
    said = gpu.what_is_missing(tmp_path / "version")
    assert said is not None
    assert found in said
    assert remedy in said


def test_with_a_gpu_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.what_is_missing() is None


@pytest.mark.parametrize("gigabytes", [0.5, 6, 25])
def test_the_model_is_as_large_as_it_may_be(gigabytes: float) -> None:
    part = sized_model.model_of(gigabytes)
    tensors = [placed.tensor for shard in part.shards for placed in shard.tensors]
    one_layer = sum(tensor.nbytes for tensor in tensors if tensor.name.startswith("model.layers.0."))
    weights = sum(tensor.nbytes for tensor in tensors)
    assert weights <= gigabytes * 1e9 < weights + one_layer or part.layers == 1
    assert max(shard.size - len(shard.header) for shard in part.shards) <= sized_model.SHARD_BYTES


def test_the_model_is_one_that_transformers_loads(tmp_path: Path) -> None:
    part, folder = sized_model.model_of(0.004, tiny=True), tmp_path / "model"
    sized_model.write(part, folder)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) == part.nbytes
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert len(model.model.layers) == part.layers == AutoConfig.from_pretrained(folder).num_hidden_layers > 1
    assert all((value == 1).all() for name, value in model.named_parameters() if name.endswith("norm.weight"))
    assert 0.019 < float(model.model.layers[1].mlp.up_proj.weight.detach().float().std()) < 0.021
    logits = model(torch.tensor([PROMPT])).logits
    assert logits.isfinite().all()
    assert len(set(logits[0, -1].tolist())) > 100
    (shard,) = part.shards
    with safe_open(folder / shard.name, "np") as file:  # type: ignore[no-untyped-call]
        assert set(file.keys()) == {placed.tensor.name for placed in shard.tensors}


def test_a_model_that_was_finished_stays_and_another_replaces_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    sized_model.write(sized_model.model_of(0.001, tiny=True), folder)
    (shard,) = folder.glob("*.safetensors")
    shard.write_bytes(b"kept")
    sized_model.write(sized_model.model_of(0.001, tiny=True), folder)
    assert shard.read_bytes() == b"kept"
    other = sized_model.model_of(0.004, tiny=True)
    sized_model.write(other, folder)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) == other.nbytes


def test_the_link_is_what_nvidia_smi_says() -> None:
    said = devices.link_of("550.54.15, 3, 16, 3, 16")
    assert said == {"driver": "550.54.15", "link": "PCIe 3 x16 (at most 3 x16)"}
    assert devices.link_of("") == {"driver": "unknown", "link": "unknown"}
    assert devices._first_line(["no-such-command"]) == ""


def test_the_link_is_measured() -> None:
    device = FakeGpu(0)
    assert devices.copy_rate(device, 1 << 20, device.host_buffer(1 << 20)) > 0


def loaded(folder: Path, device: FakeGpu, device_bytes: int = 0, host_bytes: int = 0) -> Any:
    limits = {device.name: device_bytes, "cpu": host_bytes}
    return load_model(split(folder), RunOptions(max_memory=limits, show_progress=False, exact=True), None, [device])


@pytest.mark.parametrize(("device_bytes", "host_bytes"), [(0, 0), (0, 1 << 30), (1 << 30, 0)])
def test_this_project_is_measured_on_the_device(tmp_path: Path, device_bytes: int, host_bytes: int) -> None:
    folder, device = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6), FakeGpu(0)
    plain = load(split(folder))
    with watched(), torch.inference_mode():
        model = loaded(folder, device, device_bytes, host_bytes)
        found = passes.generate(model, 4)
        bring, compute = passes.seconds_to_bring(model, device), passes.seconds_to_compute(model, 4)
    prompt = torch.tensor([[(i * 37 + 11) % plain.config.vocab_size for i in range(16)]])
    assert found["tokens"] == plain.generate(prompt, max_new_tokens=4, do_sample=False)[0, 16:].tolist()
    assert len(found["step_seconds"]) == len(found["step_bytes"]) == 3
    assert min(*found["step_seconds"], bring, compute) > 0
    layers, copied = sum(p.stored for p in plain.placement.units if "layers" in p.unit), passes.copied_bytes(model)
    assert copied >= layers if not device_bytes else copied == 0


def test_bringing_computes_nothing_and_computing_brings_nothing(tmp_path: Path) -> None:
    device = FakeGpu(0)
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6)
    with watched(), torch.inference_mode():
        model = loaded(folder, device)
        before = passes.generate(model, 4)
        (executor,) = model.streamer.executors.values()
        brought = executor.loader.loads
        passes.seconds_to_bring(model, device)
        expected = passes.BRINGING_TURNS * len(executor.follower)
        assert abs(executor.loader.loads - brought - expected) <= SLOTS + STAGING  # that many are brought ahead
        loader, brought = executor.loader, executor.loader.loads
        assert passes.seconds_to_compute(model, 4) > 0
        assert executor.loader is loader
        assert loader.loads - brought <= SLOTS + STAGING
        assert passes.generate(model, 4)["tokens"] == before["tokens"]


def test_a_model_that_accelerate_placed_tells_what_it_brings(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "vram", "llama", num_hidden_layers=6, dtype=torch.bfloat16)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    layer = sum(parameter.nbytes for parameter in plain.model.layers[0].parameters())
    model = _placed(Place(tmp_path, is_rehearsal=True), FakeGpu(0), whole - 2 * layer)
    assert passes.generate(model, 4)["tokens"] == passes.generate(plain, 4)["tokens"]
    assert 2 * layer <= passes.copied_bytes(model) < whole
    assert passes.copied_bytes(_placed(Place(tmp_path, is_rehearsal=True), FakeGpu(0), 2 * whole)) == 0


def test_after_each_token_files_are_out_of_the_page_cache_and_the_clock_stands_still(tmp_path: Path) -> None:
    path = tmp_path / "below" / "file"
    path.parent.mkdir()
    path.write_bytes(np.zeros(1 << 20, np.uint8).tobytes())
    before = resident_pages(path)
    clock = worker.Clock(lambda: drop_cached(tmp_path))
    clock.put(None)
    if before == resident_pages(path):
        pytest.skip("this file system keeps its files in memory")
    assert resident_pages(path) == 0
    assert clock.resumed[0] >= clock.times[0]
