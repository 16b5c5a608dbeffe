"""The whole of it: nothing that is broken hides the rest, and what is said adds up."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from rich.console import Console

from rabbitllm.engine import devices
from rabbitllm.estimate import machine, outline
from rabbitllm.estimate.doctor import examine as examining
from rabbitllm.estimate.doctor.examine import Probes, examine
from rabbitllm.estimate.doctor.records import Memory, Report, as_record
from rabbitllm.estimate.doctor.report import show
from rabbitllm.estimate.outline import published
from rabbitllm.storage.folders import Folder
from tests.support.fake_gpu import FakeGpu
from tests.support.quick_measuring import quick_measuring  # noqa: F401  applies by itself
from tests.support.tiny_models import one_thread  # noqa: F401  one more

GB = 10**9
PROBES = {
    "memory": (examining, "probe_memory"),
    "the processor": (examining, "probe_processor"),
    "GPUs": (examining, "probe_gpus"),
    "the host": (examining, "host_of"),
    "disks": (examining, "probe_folders"),
    "the hub": (examining, "probe_hub"),
    "packages": (examining, "probe_packages"),
    "the list of models": (outline, "published"),
}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing outside is asked or written."""
    monkeypatch.setenv("RABBITLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def text_of(report: Report, width: int = 80, *, terminal: bool = False, every: bool = False) -> str:
    file = io.StringIO()
    show(report, Console(file=file, width=width, force_terminal=terminal, color_system=None), every=every)
    return file.getvalue()


@pytest.mark.parametrize("broken", PROBES)
def test_a_failed_probe_costs_a_line(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **kwargs: object) -> None:
        raise OSError(28, "broken on purpose")

    before = examine(quick=True)
    monkeypatch.setattr(*PROBES[broken], fail)
    report = examine(quick=True)
    assert not before.failures
    assert [failure.what for failure in report.failures] == [broken]
    text = text_of(report)
    assert f"not checked: {broken} (OSError: [Errno 28] broken on purpose)" in text
    assert len(text.splitlines()) > 8
    json.dumps(as_record(report))


def test_a_hanging_probe_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    probes, forever = Probes(lambda name: None), threading.Event()
    assert probes.begin("the hub", forever.wait, 0.01)() is None
    assert "no answer" in probes.failures[0].problem
    forever.set()


def test_measured_values_are_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models of the list, measured on next to nothing: places, times and advice come together."""
    few = tuple(model for model in published() if model.parameters < 1e9 or "gpt-oss-20b" in model.repository)
    monkeypatch.setattr(outline, "published", lambda: few)
    report = examine(every=True)
    assert not report.failures
    assert len(report.devices) == max(len(report.machine.gpus.found), 1)  # type: ignore[union-attr]
    assert {rate.what.split(" ")[0] for rate in report.machine.rates} >= {"reading", "multiplying"}
    for model in report.models:
        for choice in model.at:
            assert choice.problem is None
            assert choice.generation is not None
            assert (choice.generation.token_seconds or 0) > 0
            nbytes = sum(content.stored_bytes for content in choice.generation.placed)
            nbytes += sum(experts.stored_bytes for experts in choice.generation.experts)
            assert nbytes == pytest.approx(choice.output_bytes, rel=0.3)  # tied embeddings are counted twice
    text = text_of(report, every=True)
    assert "openai/gpt-oss-20b: 20.91 billion parameters" in text
    assert report.seconds > 0


@pytest.mark.parametrize("broken", ["this_machine", "product", "reading", "overhead"])
def test_a_failed_measurement_costs_a_line(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **kwargs: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(outline, "published", lambda: published()[:1])
    target: dict[str, tuple[Any, str]] = {
        "this_machine": (machine, "this_machine"),
        "product": (machine, "product_rate"),
        "reading": (machine, "read_rate"),
        "overhead": (machine, "overhead"),
    }
    monkeypatch.setattr(*target[broken], fail)
    report = examine()
    text = text_of(report, every=True)
    assert "broken on purpose" in text
    assert "Traceback" not in text
    assert report.machine.memory is not None
    assert report.models[0].at[0].output_bytes > 0


@pytest.mark.long
def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outline, "published", lambda: published()[:1])
    monkeypatch.setattr(machine, "resolve_devices", lambda *arguments: [FakeGpu(0)])
    report = examine()
    assert not report.failures
    assert report.devices == ("fake:0",)
    assert {"multiplying with bfloat16 on fake:0", "copying from host memory to fake:0"} <= {
        rate.what for rate in report.machine.rates
    }
    assert all((choice.token_seconds or 0) > 0 for choice in report.models[0].at)
    assert "seconds per token on fake:0" in text_of(report)


def test_measuring_stops_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rabbitllm.estimate.doctor.examine.MEASURING_SECONDS", -1.0)
    report = examine()
    assert [failure.what for failure in report.failures] == ["speed of Qwen2.5-0.5B-Instruct and later models"]
    assert report.machine.rates
    assert all(choice.generation is None for model in report.models for choice in model.at)


def test_no_measuring_with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "probe_memory", lambda: Memory(4 * GB, 2 * GB, 2 * GB))
    report = examine()
    assert report.machine.rates == ()
    assert [failure.what for failure in report.failures] == ["times"]
    assert "2.00 GB of RAM is available" in text_of(report)
    assert report.models[0].at[0].route == "standard"


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("width", [80, 120])
def test_lines_fit_the_terminal(width: int, every: bool) -> None:
    report = examine(quick=True)
    lines = text_of(report, width, terminal=True, every=every).splitlines()
    assert all(len(line) <= width for line in lines)
    names = [model.name.replace("-Instruct", "") for model in report.models]
    cut = width == 80 and not every
    assert all(any((name[:17] if cut else name) in line for line in lines) for name in names)
    if not every:  # the sizes are below one another, those of long names too
        table = [line for line in lines if any(line.startswith(name[:17]) for name in names)]
        assert len(table) == len(names)
        assert len({line.index(" B ") for line in table}) == 1


def test_weights_published_quantized_are_not_called_uncompressed() -> None:
    report = examine(quick=True)
    assert "uncompressed" not in text_of(report)
    rows = text_of(report, every=True).partition("openai/gpt-oss-20b")[2].splitlines()
    assert rows[2].split()[:2] == ["as", "published"], rows


def test_measuring_once_for_all_does_not_count_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine small operations alone take longer than the models."""
    now = 0.0

    def overhead(device: object) -> machine.Overhead:
        nonlocal now
        now += 1000.0
        return machine.Overhead(0.0, 0.0)

    monkeypatch.setattr(examining, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(machine, "overhead", overhead)
    few = tuple(model for model in published() if "Qwen2.5-0.5B" in model.repository or "-70B" in model.repository)
    monkeypatch.setattr(outline, "published", lambda: few)
    report = examine(every=False)
    assert not report.failures
    assert all(choice.token_seconds for model in report.models for choice in model.at if choice.route)


def test_a_machine_without_a_gpu_is_not_told_that_models_run_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU")
    devices._warn_of_no_cuda.cache_clear()
    with machine.this_machine(Path.cwd(), examining.MIN_FREE_BYTES):
        assert not caplog.records


def room(free: int, *, apart: int | None = None) -> list[Folder]:
    def folder(use: str, disk: int, free: int) -> Folder:
        return Folder((use,), Path("/x", use), True, "ext4", disk, 9 * free, free)

    return [folder(examining.SPLITS, 1, free), folder(examining.CACHE, 2 if apart else 1, apart or free)]


def test_routes_that_fit() -> None:
    """By the rule of the README: checkpoint and layer files, or layer files and one shard, or layer files alone."""
    model = next(model for model in published() if model.repository.endswith("Qwen2.5-72B-Instruct"))
    output, least = model.outline.output_bytes("4bit"), examining.MIN_FREE_BYTES
    both, shard = output + model.outline.checkpoint_bytes, model.largest_shard_bytes

    def route(*arguments: Any, **kwargs: Any) -> str | None:
        return examining.on_disk(model, room(*arguments, **kwargs)).at[2].route

    assert route(both + least) == "standard"
    assert route(both + least - 1) == "sequential_ahead"
    assert route(output + 2 * shard + least - 1) == "sequential_file"
    assert route(output + shard + least - 1) == "sequential_stream"
    assert route(output + least - 1) is None
    assert route(output + least, apart=model.outline.checkpoint_bytes + least) == "standard"
    assert route(output + least, apart=model.outline.checkpoint_bytes + least - 1) == "sequential_stream"
