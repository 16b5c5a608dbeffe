"""The benchmark of a GPU whose memory is capped: what it says without one, its model, its arithmetic, and the very jobs
of its processes on the test device.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.decode import vram, vram_model, vram_report
from benchmarks.decode.vram_report import Case, VramRun
from benchmarks.lib import peers, worker, worker_gpu
from benchmarks.lib.control_group import can_limit_memory
from benchmarks.lib.generation import Runner
from rabbitllm.engine import devices, load_plan
from rabbitllm.engine.placement import SLOTS, STAGING
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE
from tests.benchmarks.test_benchmarks import resident_pages
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import load, split

STAND_IN = "tests.support.rehearsed_gpu:RehearsedGpu"
PROMPT = [1, 40, 81, 7]
OURS = Case("rabbitllm-2", 2, "disk")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# Without a GPU


def test_without_a_gpu_it_says_what_to_do_and_exits_with_2(
    no_gpu: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert vram.main(["--work-dir", str(tmp_path / "w")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["Found no GPU", "Needed", "What to do"]
    assert f"torch {torch.__version__}" in said[0]
    assert not (tmp_path / "w").exists()


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
    said = vram.what_is_missing(tmp_path / "version")
    assert said is not None
    assert found in said
    assert remedy in said


def test_with_a_gpu_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert vram.what_is_missing() is None


def test_a_gpu_that_does_not_suit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--scale", "tiny", "--work-dir", str(tmp_path), "--gpu", STAND_IN]
    assert vram.main([*given, "--size", "30"]) == 2
    assert "--size is 30; expected more than 0 and at most 25 (GB)." in capsys.readouterr().err
    facts = {"gpu": "a small one", "vram_bytes": 2 << 30}
    monkeypatch.setattr(vram, "probe", lambda gpu, work: {"facts": facts, "dtype": "float16"})
    assert vram.main([*given, "--vram", "2", "8"]) == 2
    assert "Found a small one of 2.0 GiB; --vram needs a cap below that." in capsys.readouterr().err

    def fail(gpu: str, work: Path) -> Any:
        raise peers.PeerError("RuntimeError: no kernel image is available")

    monkeypatch.setattr(vram, "probe", fail)
    assert vram.main(given) == 2
    assert "does not work: RuntimeError: no kernel image is available" in capsys.readouterr().err


# The model


@pytest.mark.parametrize("gigabytes", [0.5, 6, 25])
def test_the_model_is_as_large_as_it_may_be(gigabytes: float) -> None:
    part = vram_model.model_of(gigabytes)
    one_layer = vram_model.layer_bytes(part) // part.layers
    headers = sum(len(shard.header) for shard in part.shards)
    weights = part.nbytes - headers
    assert weights <= gigabytes * 1e9 < weights + one_layer or part.layers == 1
    assert max(shard.size - len(shard.header) for shard in part.shards) <= vram_model.SHARD_BYTES


def test_the_model_is_one_that_transformers_loads(tmp_path: Path) -> None:
    part, folder = vram_model.model_of(0.004, tiny=True), tmp_path / "model"
    vram_model.write(part, folder)
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
    vram_model.write(vram_model.model_of(0.001, tiny=True), folder)
    (shard,) = folder.glob("*.safetensors")
    shard.write_bytes(b"kept")
    vram_model.write(vram_model.model_of(0.001, tiny=True), folder)
    assert shard.read_bytes() == b"kept"
    other = vram_model.model_of(0.004, tiny=True)
    vram_model.write(other, folder)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) == other.nbytes


# What is made of the figures


def measured(case: Case, **figures: Any) -> VramRun:
    return VramRun(case.name, 0, **{"token_seconds": 1.0, "copy_speed": 10e9, "disk_speed": 2e9, **figures})


def test_the_ceiling_is_the_slowest_of_disk_link_and_computing() -> None:
    peer = Case("airllm-4.0.0", 2, "disk")
    runs = [
        measured(OURS, step_bytes=[10**9, 10**9], copied_bytes=3 * 10**9, bring_seconds=0.8, compute_seconds=0.4),
        measured(peer, step_bytes=[0], copied_bytes=5 * 10**9, token_seconds=2.0),
    ]
    assert vram_report.of_the_ceiling(runs, OURS) == pytest.approx([0.5])  # 1 GB at 2 GB/s
    assert vram_report.of_the_ceiling(runs, peer) == pytest.approx([0.25])  # 5 GB at 10 GB/s in two seconds
    runs[0].copied_bytes, runs[1].copied_bytes = 8 * 10**9, None
    assert vram_report.of_the_ceiling(runs, OURS) == pytest.approx([0.8])
    assert vram_report.of_the_ceiling(runs, peer) == pytest.approx([0.2])  # computing, as ours measured it
    assert vram_report.of_the_ceiling([measured(peer, token_seconds=4.0, disk_speed=0.0)], peer) == [0.0]


def test_its_limit_is_what_the_same_process_took() -> None:
    runs = [measured(OURS, bring_seconds=0.8, compute_seconds=0.4), measured(OURS, bring_seconds=0.1)]
    assert vram_report.of_its_limit(runs, OURS) == pytest.approx([1.25])


def test_computing_takes_the_same_under_every_cap_and_differs_by_compression() -> None:
    small, packed = Case("rabbitllm-2", 8, "RAM"), Case("rabbitllm-2-4bit", 2, "disk")
    runs = [measured(OURS, compute_seconds=0.5), measured(small, compute_seconds=0.3)]
    runs.append(measured(packed, compute_seconds=0.1))
    assert vram_report.computing(runs, Case("accelerate", 4, "disk")) == 0.3
    assert vram_report.computing(runs, Case("airllm-4.0.0-4bit", 4, "disk")) == 0.1
    assert vram_report.computing([], OURS) == 0.0


def test_tokens_are_compared_under_the_same_cap() -> None:
    reference = Case(vram_report.REFERENCE, 2, "disk")
    runs = [measured(reference, tokens=[1, 2]), measured(OURS, tokens=[1, 2])]
    assert vram_report.tokens_equal(runs, OURS) == [True]
    assert vram_report.tokens_equal(runs, Case("rabbitllm-2", 4, "disk")) == []


def test_what_is_reported(tmp_path: Path) -> None:
    failed = Case("airllm-4.0.0", 2, "disk")
    cases = [OURS, failed]
    runs = [
        measured(OURS, bring_seconds=0.95, compute_seconds=0.4, vram_reserved=3 << 29, dtype="float16"),
        VramRun(failed.name, 0, error="OutOfMemoryError"),
    ]
    table = vram_report.tabulate(runs, cases, 1)
    cells = dict(zip(table.headings, table.rows[0], strict=True))
    assert (cells["ok"], cells["VRAM GiB"], cells["of its limit"]) == (
        "1/1",
        "1.50 (1.50-1.50)",
        "1.05 (1.05-1.05)",
    )
    assert table.rows[1][1] == "0/1"
    notes = vram_report.notes_on(runs, cases, ["disk: by hand"])
    assert "airllm-4.0.0, 2 GiB, disk failed: OutOfMemoryError" in notes
    assert "rabbitllm-2, 2 GiB, disk, of its limit: 1.053 (at most 1.1): reached" in notes
    assert any("10.00 (10.00-10.00) GB/s; disk past the page cache: 2.00" in note for note in notes)
    assert "Computed in float16; weights are stored in bfloat16." in notes
    ((heading, found),) = vram_report.picture("title", runs, cases)["groups"].items()
    assert heading == "2 GiB of VRAM, the rest from the disk"
    assert [(bar["name"], bar["figures"] is None, bar["ours"]) for bar in found] == [
        ("rabbitllm-2", False, True),
        ("airllm-4.0.0", True, False),
    ]


def test_the_link_is_what_nvidia_smi_says() -> None:
    said = worker_gpu.link_of("550.54.15, 3, 16, 3, 16")
    assert said == {"driver": "550.54.15", "link": "PCIe 3 x16 (at most 3 x16)"}
    assert worker_gpu.link_of("") == {"driver": "unknown", "link": "unknown"}
    assert worker_gpu._said(["no-such-command"]) == ""


def test_what_of_a_cap_is_given_to_weights() -> None:
    assert vram.weights_bytes(1 << 30) == (1 << 30) - (128 << 20)
    assert vram.weights_bytes(8 << 30) == (8 << 30) - (256 << 20)


def test_peers_stand_on_this_torch_and_keep_their_own_transformers() -> None:
    for row in vram.BY_DEFAULT:
        environment = vram.RUNNERS[row].environment
        if environment != peers.THIS:
            assert environment.over_this
            assert not any(name.startswith(("torch==", "accelerate==")) for name in environment.requirements)
            assert any(name.startswith("transformers==") for name in environment.requirements)


# The jobs of its processes


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> worker_gpu.GpuWork:
    monkeypatch.setattr(devices, "_gpu", devices._gpu)  # the stand-in puts itself there
    monkeypatch.setattr(load_plan, "available_ram", load_plan.available_ram)
    return worker_gpu.GpuWork({"gpu": STAND_IN, "vram": 1 << 20}, worker)


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


def test_the_link_is_measured_and_the_hardware_named(work: worker_gpu.GpuWork) -> None:
    found = work.probe({})
    assert found["copy_speed"] > 0
    assert (found["dtype"], found["facts"]["gpu"]) == ("bfloat16", "the test device")


@pytest.mark.parametrize(("device_bytes", "host_bytes"), [(0, 0), (0, 1 << 30), (1 << 30, 0)])
def test_this_project_is_measured_on_the_device(
    work: worker_gpu.GpuWork, tmp_path: Path, device_bytes: int, host_bytes: int
) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6)
    plain = load(split(folder))
    expected = plain.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False)[0, len(PROMPT) :].tolist()
    found = work.tasks["gpu decode"](job_for(folder, weights_bytes=device_bytes, host_bytes=host_bytes))
    assert found["tokens"] == expected
    assert len(found["step_seconds"]) == len(found["step_bytes"]) == 3
    assert min(*found["step_seconds"], found["bring_seconds"], found["compute_seconds"]) > 0
    layers = sum(placed.stored for placed in plain.placement.units if "layers" in placed.unit)
    assert found["copied_bytes"] >= layers if not device_bytes else found["copied_bytes"] == 0
    assert found["planned_read_bytes"] == (0 if host_bytes else found["copied_bytes"])
    assert found["vram_reserved"] > 0


@pytest.mark.parametrize("told", [None, 0])
def test_what_is_told_of_no_free_memory_reads_past_the_page_cache(
    work: worker_gpu.GpuWork, tmp_path: Path, told: int | None
) -> None:
    job = job_for(build_checkpoint(tmp_path / "model", "llama"), told_ram=told)
    model = worker_gpu.LOADERS["layered"](job, work.gpu)
    assert (model.streamer.executors[model.placement.home].read_mode == THROUGH_THE_CACHE) == (told is None)


@pytest.mark.parametrize(("is_limited", "half"), [(True, 500), (False, 0)])
def test_host_memory_for_weights_by_where_they_are_to_come_from(
    monkeypatch: pytest.MonkeyPatch, is_limited: bool, half: int
) -> None:
    part = vram_model.model_of(0.001, tiny=True)
    workload = vram.Workload(Path(), part, Path(), PROMPT, 4, "", "float16", 1000, is_limited)
    assert workload.host_bytes("disk") == half
    monkeypatch.setattr(vram.psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    assert workload.host_bytes("RAM") == 4000
    (said,) = [line for line in vram.about_the_host(workload) if line.startswith("disk: ")]
    assert ("a control group of" in said) == is_limited


def test_what_brings_nothing_uploads_nothing_and_leaves_the_model_as_it_was(
    work: worker_gpu.GpuWork, tmp_path: Path
) -> None:
    job = job_for(build_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6))
    model = worker_gpu.LOADERS["layered"](job, work.gpu)
    before = work._generate(model, job)
    (executor,) = model.streamer.executors.values()
    brought = executor.loader.loads
    work._bring_alone(model, job)
    passes = worker_gpu.BRINGING_TURNS * len(executor.follower)
    assert abs(executor.loader.loads - brought - passes) <= SLOTS + STAGING  # that many are brought ahead
    loader, brought = executor.loader, executor.loader.loads
    assert work._compute_alone(model, job) > 0
    assert executor.loader is loader
    assert loader.loads - brought <= SLOTS + STAGING
    assert work._generate(model, job)["tokens"] == before["tokens"]


def test_a_model_that_accelerate_placed_tells_what_it_brings(work: worker_gpu.GpuWork, tmp_path: Path) -> None:
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
        worker_gpu.os.fsync(file.fileno())
    clock = worker.Clock(lambda: worker_gpu.forget_files([str(tmp_path)]))
    clock.put(None)
    if before == resident_pages(path):
        pytest.skip("this file system keeps its files in memory")
    assert resident_pages(path) == 0
    assert clock.resumed[0] >= clock.times[0]


@pytest.mark.long
def test_an_environment_over_this_one_sees_its_packages_behind_its_own(tmp_path: Path) -> None:
    python = peers.interpreter(peers.over_this(peers.Environment("bare", peers._COMMON)), tmp_path)
    code = "import sys, torch; print(sys.prefix, torch.__file__, torch.__version__)"
    said = peers.subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(tmp_path / "environments" / "bare-over-this"), torch.__file__, str(torch.__version__)]


@pytest.mark.long
def test_all_of_it_on_the_test_device_at_tiny_scale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    placed = Runner(peers.THIS, "transformers", "placed")
    monkeypatch.setattr(vram, "RUNNERS", {**vram.RUNNERS, vram_report.REFERENCE: placed})
    rows = [vram_report.REFERENCE, *vram_report.OURS]
    given = ["--scale", "tiny", "--gpu", STAND_IN, "--vram", "0.002", "64", "--ram", "0.25", "--only", *rows]
    folders = ["--work-dir", str(tmp_path / "w"), "--results", str(tmp_path / "r" / "vram")]
    assert vram.main([*given, *folders]) == 0
    base = tmp_path / "r" / "vram-the-test-device"
    written = json.loads(base.with_name(base.name + ".json").read_text())
    found = {run["row"]: run for run in written["runs"]}
    assert set(found) == {Case(row, 0.002, host).name for row in rows for host in vram.HOSTS}
    assert written["machine"]["gpu"] == "the test device"
    for name, run in found.items():
        assert run["error"] is None, run["error"]
        assert run["copy_speed"] > 0
        assert run["copied_bytes"] > 0, name
        if not name.startswith(vram_report.REFERENCE):
            assert min(run["bring_seconds"], run["compute_seconds"]) > 0
    if can_limit_memory():
        assert any("a control group of 0.25 GiB over the idle process" in note for note in written["notes"])
    else:
        assert found["rabbitllm-2, 0.002 GiB, disk"]["planned_read_bytes"] > 0
    assert found["rabbitllm-2, 0.002 GiB, RAM"]["planned_read_bytes"] == 0
    text = base.with_name(base.name + ".md").read_text()
    assert "| rabbitllm-2, 0.002 GiB, RAM | 1/1 |" in text
    assert base.with_name(base.name + ".svg").read_text().startswith("<?xml")
    assert not (tmp_path / "w" / "vram-run").exists()
    assert str(tmp_path) not in json.dumps(written)
