"""What a GPU measures, on the test device: the model of a size, the rate of the link, and generating with its memory
capped; and what is said without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu import gpu, sized_model
from benchmarks.gpu import work as work_of
from benchmarks.gpu.models import TEST_DEVICE
from benchmarks.gpu.work import GpuWork
from benchmarks.lib import worker
from rabbitllm.engine import devices, load_plan
from rabbitllm.engine.placement import SLOTS, STAGING
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE
from tests.benchmarks.test_benchmarks import resident_pages
from tests.support.builders import build_checkpoint
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
    said = work_of.link_of("550.54.15, 3, 16, 3, 16")
    assert said == {"driver": "550.54.15", "link": "PCIe 3 x16 (at most 3 x16)"}
    assert work_of.link_of("") == {"driver": "unknown", "link": "unknown"}
    assert work_of._said(["no-such-command"]) == ""


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> GpuWork:
    monkeypatch.setattr(devices, "_gpu", devices._gpu)  # the stand-in puts itself there
    monkeypatch.setattr(load_plan, "available_ram", load_plan.available_ram)
    return GpuWork(TEST_DEVICE, 1 << 20)


def job_for(folder: Path, **changed: Any) -> dict[str, Any]:
    return {
        "package": "rabbitllm",
        "loader": "layered",
        "is_ours": True,
        "checkpoint": str(folder),
        "options": {"layer_shards_saving_path": str(folder.parent / "layers"), "exact": True},
        "weights_bytes": 0,
        "host_bytes": 0,
        "dtype": "float32",
        "cold": [],
        "told_ram": None,
        "prompt": PROMPT,
        "tokens": 4,
        **changed,
    }


def test_the_link_is_measured_and_the_hardware_named(work: GpuWork) -> None:
    found = work.probe()
    assert found["copy_speed"] > 0
    assert (found["dtype"], found["facts"]["gpu"]) == ("bfloat16", "the test device")


@pytest.mark.parametrize(("device_bytes", "host_bytes"), [(0, 0), (0, 1 << 30), (1 << 30, 0)])
def test_this_project_is_measured_on_the_device(
    work: GpuWork, tmp_path: Path, device_bytes: int, host_bytes: int
) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6)
    plain = load(split(folder))
    expected = plain.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False)[0, len(PROMPT) :].tolist()
    found = work.decode(job_for(folder, weights_bytes=device_bytes, host_bytes=host_bytes))
    assert found["tokens"] == expected
    assert len(found["step_seconds"]) == len(found["step_bytes"]) == 3
    assert min(*found["step_seconds"], found["bring_seconds"], found["compute_seconds"]) > 0
    layers = sum(placed.stored for placed in plain.placement.units if "layers" in placed.unit)
    assert found["copied_bytes"] >= layers if not device_bytes else found["copied_bytes"] == 0
    assert found["planned_read_bytes"] == (0 if host_bytes else found["copied_bytes"])
    assert found["vram_reserved"] > 0


@pytest.mark.parametrize("told", [None, 0])
def test_what_is_told_of_no_free_memory_reads_past_the_page_cache(
    work: GpuWork, tmp_path: Path, told: int | None
) -> None:
    job = job_for(build_checkpoint(tmp_path / "model", "llama"), told_ram=told)
    model = work_of.LOADERS["layered"](job, work.gpu)
    assert (model.streamer.executors[model.placement.home].read_mode == THROUGH_THE_CACHE) == (told is None)


def test_what_brings_nothing_uploads_nothing_and_leaves_the_model_as_it_was(work: GpuWork, tmp_path: Path) -> None:
    job = job_for(build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6))
    model = work_of.LOADERS["layered"](job, work.gpu)
    before = work._generate(model, job)
    (executor,) = model.streamer.executors.values()
    brought = executor.loader.loads
    work._bring_alone(model, job)
    passes = work_of.BRINGING_TURNS * len(executor.follower)
    assert abs(executor.loader.loads - brought - passes) <= SLOTS + STAGING  # that many are brought ahead
    loader, brought = executor.loader, executor.loader.loads
    assert work._compute_alone(model, job) > 0
    assert executor.loader is loader
    assert loader.loads - brought <= SLOTS + STAGING
    assert work._generate(model, job)["tokens"] == before["tokens"]


def test_a_model_that_accelerate_placed_tells_what_it_brings(work: GpuWork, tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    whole = sum(parameter.nbytes for parameter in plain.parameters())
    layer = sum(parameter.nbytes for parameter in plain.model.layers[0].parameters())
    places = {"loader": "placed", "is_ours": False, "offload_folder": str(tmp_path / "offload")}
    found = work.decode(job_for(folder, **places, weights_bytes=whole - 2 * layer))
    expected = plain.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False)
    assert found["tokens"] == expected[0, len(PROMPT) :].tolist()
    assert 2 * layer <= found["copied_bytes"] < whole
    assert "bring_seconds" not in found
    everything = work.decode(job_for(folder, **places, weights_bytes=2 * whole))
    assert everything["copied_bytes"] == 0


def test_after_each_token_files_are_out_of_the_page_cache_and_the_clock_stands_still(tmp_path: Path) -> None:
    path = tmp_path / "below" / "file"
    path.parent.mkdir()
    path.write_bytes(np.zeros(1 << 20, np.uint8).tobytes())
    clock = worker.Clock()
    clock.put(None)
    before = resident_pages(path)
    with path.open("rb") as file:  # what is not on the disk yet cannot be dropped
        work_of.os.fsync(file.fileno())
    clock = worker.Clock(lambda: work_of.forget_files([str(tmp_path)]))
    clock.put(None)
    if before == resident_pages(path):
        pytest.skip("this file system keeps its files in memory")
    assert resident_pages(path) == 0
    assert clock.resumed[0] >= clock.times[0]
