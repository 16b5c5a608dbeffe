"""`rabbitllm plan` as a user meets it: on folders and on a local hub, compared with the splits that it predicts."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rabbitllm
from rabbitllm.base.terminal import size, size_rounded_up
from rabbitllm.checkpoints import local
from rabbitllm.checkpoints.hub import FIRST_READ_BYTES
from rabbitllm.errors import CheckpointNotFoundError, MissingShardError, NotEnoughSpaceException, OptionError
from rabbitllm.estimate.report import show
from rabbitllm.estimate.split_estimate import FETCHED_BYTES, ROUTES, CompressionEstimate, Route, SplitEstimate
from rabbitllm.splitter.disk_budget import on_disk
from tests.splitter.test_split import LARGE
from tests.support import quantized
from tests.support.builders import SINGLE_NAME, build_checkpoint, cut, llama_tensors, write_shards
from tests.support.commands import invoke
from tests.support.gguf_files import write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.peak import Peak
from tests.support.quick_measuring import quick_measuring  # noqa: F401  a fixture that applies by itself
from tests.support.splitting import Call, interrupted, names_in
from tests.support.tiny_models import one_thread  # noqa: F401  a fixture that applies by itself

REPO = "org/model"
SHARDS = 6
PER_FILE = 64 * 1024
"""What the prediction may exceed the truth by, for every file that a split makes."""
COMPRESSIONS = [None, "8bit", "4bit", "4bit-double"]
PLANNED = [*COMPRESSIONS, "auto"]
LOCAL_ROUTES = ["standard", "sequential_file"]
KEYS = {
    *("source", "kind", "label", "commit", "compression", "max_disk", "min_free_disk", "anatomy", "disks", "outlooks"),
    *("memory_bytes", "rates", "choice", "warnings", "devices", "prompt_tokens", "generations"),
}
GENERATION_KEYS = {
    *("compression", "obstacle", "placed", "stays_bytes", "read_bytes", "from_the_disk", "token_seconds"),
    *("first_token_seconds", "speeds", "copied_bytes", "experts", "found_token_seconds", "placement", "refused"),
    *("too_little_memory", "draft"),
}
OUTLOOK_KEYS = {
    *("compression", "folder", "state", "output_bytes", "layers_above_10_gb", "finished_at", "shards_used", "shards"),
    *("obstacle", "routes", "finished", "fits", "mixture"),
}
ROUTE_KEYS = {"name", "disk_bytes", "created_bytes", "cache_bytes", "lacking", "seconds", "fits"}
ANATOMY_KEYS = {
    *("total_bytes", "shards", "largest_shard_bytes", "layers", "largest_layer", "largest_layer_bytes", "tensors"),
    *("parameters", "tied_embeddings", "never_compressed", "not_floating", "empty", "scalars"),
    *("layers_over_shards", "most_shards_of_a_layer", "quantised"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "model", cut(llama_tensors(**LARGE), SHARDS))


@pytest.fixture
def repository(tmp_path: Path, hub_environment: HubEnvironment) -> Path:
    return write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(**LARGE), SHARDS))


def run(*arguments: object) -> str:
    """What the command prints on stdout."""
    return invoke("plan", *arguments).stdout


def plan(source: Path | str, **options: Any) -> SplitEstimate:
    return rabbitllm.plan(source, **{"bandwidth": "100MB", **options})  # type: ignore[no-any-return]


def estimate_at(forecast: SplitEstimate, compression: str | None) -> CompressionEstimate:
    estimate = forecast.at(compression)
    assert estimate is not None
    return estimate


def routes(forecast: SplitEstimate, compression: str | None) -> dict[str, Route]:
    return {route.name: route for route in estimate_at(forecast, compression).routes}


def files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of all that is below a folder."""
    paths = sorted(folder.rglob("*"))
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def call_on(route: str, source: str, compression: str | None, **options: Any) -> Call:
    """The call that takes exactly this route."""
    transfer = {"sequential_file": "file", "sequential_stream": "stream"}.get(route, "auto")
    return Call(source, compression=compression, sequential=route != "standard", shard_transfer=transfer, **options)


# What it says


def test_a_plan_prints_as_the_command_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_shards(tmp_path / "<b>model</b>", cut(llama_tensors(), SHARDS))
    forecast = plan(folder)
    monkeypatch.setattr("rabbitllm.estimate.plan.plan", lambda *arguments, **options: forecast)
    printed = run(folder)
    assert str(forecast) == printed.rstrip("\n")
    assert "sequential" in printed
    in_a_notebook = forecast._repr_html_()
    assert "&lt;b&gt;model&lt;/b&gt;" in in_a_notebook
    assert html.unescape(in_a_notebook.removeprefix("<pre>").removesuffix("</pre>")) == str(forecast)


def test_folder_as_text(folder: Path) -> None:
    before = files_in(folder)
    text = run(folder, "--bandwidth", "100MB")
    assert files_in(folder) == before
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert re.search(rf"checkpoint +{re.escape(size(total))} in {SHARDS} shards", text)
    assert re.search(r"layer files +8, the largest layers\.\d with", text)
    assert "100 MB/s (as given) from this disk" in text
    assert "Estimated times" in text
    assert text.count("fits") == len(PLANNED) * 2 + 1
    assert f'model = AutoModel.from_pretrained("{folder}")' in text.replace("\n    ", "").replace(",\n)", ")")
    assert "\x1b" not in text


@pytest.mark.parametrize(("fitted", "measured"), [(False, {"8bit", "4bit"}), (True, {"8bit", "4bit", "4bit-double"})])
def test_fitted_scales_are_timed_separately(folder: Path, fitted: bool, measured: set[str]) -> None:
    """It tries fewer scales; scales that are not fitted are 4bit's."""
    forecast = plan(folder, compression="4bit-double", fit_scales=fitted, device="cpu")
    assert set(forecast.rates.quantize) == measured
    assert all(route.seconds is not None for route in estimate_at(forecast, "4bit-double").routes)


def test_published_codes_are_not_called_uncompressed(tmp_path: Path) -> None:
    text = run(str(quantized.build_fp8(tmp_path / "model", "llama")), "--bandwidth", "100MB", "--device", "cpu")
    assert re.search(r"^quantized +fp8, as published", text, re.MULTILINE)
    assert re.search(r"^as published, [\d.]+ MB of layer files$", text, re.MULTILINE)
    assert re.search(r"^  as published +[\d.]+ MB", text, re.MULTILINE)
    assert re.search(r"^As published fits:$", text, re.MULTILINE)
    assert "ncompressed" not in text


def test_folder_as_json(folder: Path) -> None:
    record = json.loads(run(folder, "--json", "--compression", "4bit", "--max-disk", "1GiB"))
    assert set(record) == KEYS
    assert set(record["anatomy"]) == ANATOMY_KEYS
    assert [entry["compression"] for entry in record["outlooks"]] == PLANNED
    for entry in record["outlooks"]:
        assert set(entry) == OUTLOOK_KEYS
        assert [route["name"] for route in entry["routes"]] == LOCAL_ROUTES
        assert all(set(route) == ROUTE_KEYS for route in entry["routes"])
        assert entry["routes"][0]["seconds"] > 0
    assert (record["kind"], record["label"], record["commit"]) == ("local", str(folder), None)
    assert (record["max_disk"], record["min_free_disk"]) == (1 << 30, 10**9)
    assert record["memory_bytes"] == 200_000_000 + 2400 * record["anatomy"]["tensors"]
    assert record["choice"]["compression"] == "4bit"
    assert 0 < record["rates"]["read"]["measured_bytes"] <= record["anatomy"]["total_bytes"]
    assert record["rates"]["fetch"] is None
    assert set(record["rates"]["quantise"]) == {"4bit", "8bit"}


def test_repository_asks_for_headers_and_one_sample(
    repository: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    record = json.loads(run(REPO, "--json"))
    assert record["label"] == f"{REPO}@{local_hub.commit(REPO)[:8]}"
    assert record["commit"] == local_hub.commit(REPO)
    sizes = {path.name: path.stat().st_size for path in repository.glob("*.safetensors")}
    assert min(sizes.values()) > 8 * FIRST_READ_BYTES
    first = min(sizes)
    for name, nbytes in sizes.items():
        sample = min(nbytes, FETCHED_BYTES) if name == first else 0
        assert 0 < local_hub.body_bytes(name) <= FIRST_READ_BYTES + sample
    ranges = [request.range for request in local_hub.requests if request.file in sizes and request.method == "GET"]
    assert ranges.count(f"bytes=0-{min(sizes[first], FETCHED_BYTES) - 1}") == 1
    assert ranges.count(f"bytes=0-{FIRST_READ_BYTES - 1}") == len(ranges) - 1
    assert record["rates"]["fetch"]["measured_bytes"] == min(sizes[first], FETCHED_BYTES)
    assert [route["name"] for route in record["outlooks"][0]["routes"]] == list(ROUTES)
    # small files of the repository, where huggingface_hub keeps them, and nothing else
    below = {path.relative_to(hub_environment.home).parts[0] for path in hub_environment.home.rglob("*")}
    assert below == {"hub"}
    assert not list(hub_environment.home.rglob("*.safetensors"))


def test_given_bandwidth_is_not_measured(
    repository: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    text = run(REPO, "--bandwidth", "2MB")
    assert "2.00 MB/s (as given) from the hub" in text
    assert local_hub.body_bytes(".safetensors") == SHARDS * FIRST_READ_BYTES
    forecast = plan(REPO, bandwidth="2MB")
    assert forecast.rates.read is None
    total = forecast.anatomy.total_bytes  # type: ignore[union-attr]
    times = {name: route.seconds for name, route in routes(forecast, None).items()}
    assert times == pytest.approx(dict.fromkeys(ROUTES, total / 2e6))


def test_cached_shards_are_read_and_not_fetched(
    repository: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    Call(REPO, sequential=False).make()
    local_hub.forget_requests()
    forecast = rabbitllm.plan(REPO, compression="4bit")
    assert local_hub.body_bytes(".safetensors") == 0
    assert [route.name for route in estimate_at(forecast, "4bit").routes] == LOCAL_ROUTES
    assert forecast.rates.fetch is None
    assert forecast.rates.read is not None
    assert routes(forecast, "4bit")["standard"].cache_bytes < 16 * 1024  # a listing of files


def test_estimates_of_unusual_checkpoints(tmp_path: Path) -> None:
    import torch

    tensors = llama_tensors(layers=2)
    del tensors["lm_head.weight"]
    tensors["model.layers.1.conv1d.weight"] = torch.zeros(128, 1, 64)
    tensors["model.layers.1.steps"] = torch.zeros(3, dtype=torch.int64)
    tensors["model.layers.1.scale"] = torch.zeros(())
    tensors["model.layers.1.nothing"] = torch.zeros(0, 4)
    source = write_shards(tmp_path / "m", cut(tensors, 3))
    (source / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    text = run(source, "--bandwidth", "1GB")
    assert re.search(r"embeddings +tied", text)
    assert re.search(r"kept as is +convolution \(1 tensor, [\d,]+ bytes\), at any compression", text)
    assert re.search(r"not floating +I64 \(1 tensor", text)
    assert re.search(r"odd shapes +1 empty tensor, 1 scalar", text)
    assert re.search(r"layer files +4, .*; 2 in several shards \(at most 2\)", text)


# Whether it is true


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", LOCAL_ROUTES)
def test_peak_of_a_folder(folder: Path, name: str, compression: str | None) -> None:
    predicted = routes(plan(folder), compression)[name]
    peak = Peak(folder)
    written = peak.during(call_on(name, str(folder), compression, max_disk=predicted.created_bytes))
    assert_bound(predicted.disk_bytes, peak.most, written)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", list(ROUTES))
def test_peak_of_a_repository(
    repository: Path, hub_environment: HubEnvironment, name: str, compression: str | None
) -> None:
    predicted = routes(plan(REPO), compression)[name]
    peak = Peak(hub_environment.home)
    written = peak.during(call_on(name, REPO, compression, max_disk=predicted.created_bytes))
    if name == "sequential_ahead":  # the next shard may come late
        assert peak.most <= predicted.disk_bytes
    else:
        assert_bound(predicted.disk_bytes, peak.most, written)


def assert_bound(predicted: int, peak_bytes: int, folder: Path) -> None:
    """The estimate is an upper bound, and close."""
    files = len([path for path in folder.rglob("*") if path.stat().st_size])
    assert peak_bytes <= predicted <= peak_bytes + PER_FILE * files


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", ["standard", "sequential_file", "sequential_stream"])
@pytest.mark.parametrize("source_type", ["folder", "repository"])
def test_plan_and_split_refuse_the_same_sizes(
    tmp_path: Path, hub_environment: HubEnvironment, source_type: str, name: str, compression: str | None
) -> None:
    """One byte less than is needed: the plan says no, and so does the split, with the same numbers."""
    if source_type == "folder" and name not in LOCAL_ROUTES:
        return
    where = tmp_path / ("hub" if source_type == "repository" else "x") / REPO
    source = write_shards(where, cut(llama_tensors(), 3))
    named = REPO if source_type == "repository" else str(source)
    need = routes(plan(named), compression)[name].created_bytes
    enough, too_little = plan(named, max_disk=need), plan(named, max_disk=need - 1)
    assert routes(enough, compression)[name].fits
    lacking = routes(too_little, compression)[name].lacking
    assert lacking is not None
    assert (lacking.need, lacking.have) == (need, need - 1)
    call = call_on(name, named, compression)
    with pytest.raises(NotEnoughSpaceException, match=f"needs {re.escape(size_rounded_up(need))} ") as refused:
        dataclasses.replace(call, max_disk=need - 1).make()
    assert lacking.where in str(refused.value)
    split_folder = dataclasses.replace(call, max_disk=need).make()
    assert (split_folder / "split.json").exists()


def test_free_disk_and_min_free_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = routes(plan(folder), "8bit")["standard"].disk_bytes
    free = [need + 1000]
    monkeypatch.setattr("shutil.disk_usage", lambda path: os.terminal_size((0, 0)) and _Usage(free[0]))
    forecast = plan(folder, min_free_disk=1000)
    assert routes(forecast, "8bit")["standard"].fits
    assert [disk.free_bytes for disk in forecast.disks] == free
    lacking = routes(plan(folder, min_free_disk=1001), "8bit")["standard"].lacking
    assert lacking is not None
    assert (lacking.need, lacking.have, lacking.missing) == (need, need + 1000, 1)
    assert "min_free_disk" in lacking.where


@dataclasses.dataclass
class _Usage:
    free: int


# The call that it proposes


def arguments_of(call: str) -> dict[str, Any]:
    """What a proposed call would hand to from_pretrained, by way of running it."""
    passed: dict[str, Any] = {}

    class Model:
        @staticmethod
        def from_pretrained(source: str, **arguments: Any) -> None:
            passed.update(arguments, source=source)

    exec(call.replace("from rabbitllm import AutoModel", ""), {"AutoModel": Model})
    return passed


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("standard", {}),
        ("sequential_ahead", {"sequential_shard_processing": True}),
        ("sequential_file", {"sequential_shard_processing": True}),
        ("sequential_stream", {"sequential_shard_processing": True}),
    ],
)
def test_choice_is_the_best_route_that_fits(
    repository: Path,
    hub_environment: HubEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    budget: str,
    expected: dict[str, Any],
) -> None:
    free = routes(plan(REPO), "4bit")[budget].disk_bytes
    monkeypatch.setattr("shutil.disk_usage", lambda path: _Usage(free))
    forecast = plan(REPO, compression="4bit", min_free_disk=0)
    assert forecast.choice is not None
    assert (forecast.choice.compression, forecast.choice.route) == ("4bit", budget)
    assert arguments_of(forecast.choice.call) == {"source": REPO, "compression": "4bit", "min_free_disk": 0, **expected}


@pytest.mark.long
def test_less_compression_is_proposed_before_more(repository: Path, hub_environment: HubEnvironment) -> None:
    budget = routes(plan(REPO), "8bit")["sequential_stream"].created_bytes
    forecast = plan(REPO, max_disk=budget, revision="main")
    assert forecast.choice is not None
    # the standard route would hold all shards and the layer files at the same time
    assert (forecast.choice.compression, forecast.choice.route) == ("auto", "sequential_stream")
    expected = {"source": REPO, "compression": "auto", "revision": "main", "max_disk": budget}
    assert arguments_of(forecast.choice.call) == {**expected, "sequential_shard_processing": True}
    assert plan(REPO, max_disk=1000).choice is None
    text = run(REPO, "--max-disk", "1000", "--bandwidth", "1GB")
    assert "Nothing fits. The smallest is 4bit-double, sequential, stream: it needs" in text
    assert re.search(
        r"of max_disk at its peak; 1,000 bytes is allowed by max_disk=1,000. Set max_disk to \d+, or", text
    )


def test_call_can_be_pasted(tmp_path: Path) -> None:
    source = build_checkpoint(tmp_path / "m", "qwen2", shards=3)
    need = routes(plan(source), "4bit")["sequential_file"].created_bytes
    forecast = plan(source, max_disk=need, layer_shards_saving_path=tmp_path / "out")
    assert forecast.choice is not None
    names: dict[str, Any] = {}
    exec(forecast.choice.call, names)
    assert names["model"].tokenizer is not None
    assert names_in(tmp_path / "out") == ["splitted_model.4bit"]
    loads = plan(source, compression="4bit", layer_shards_saving_path=tmp_path / "out").choice
    assert loads is not None
    assert loads.route is None


def test_token_is_not_printed(repository: Path, hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    local_hub.token = "hf_secret"
    forecast = plan(REPO, token="hf_secret")
    assert "hf_secret" not in repr(forecast)
    assert forecast.choice is not None
    assert arguments_of(forecast.choice.call)["token"] == "hf_…"


# What is there already


@pytest.mark.parametrize("source_type", ["folder", "repository"])
@pytest.mark.parametrize("compression", [None, "8bit"])
def test_unfinished_split_is_planned_to_its_end(
    tmp_path: Path, hub_environment: HubEnvironment, source_type: str, compression: str | None
) -> None:
    where = tmp_path / ("hub" if source_type == "repository" else "x") / REPO
    source = write_shards(where, cut(llama_tensors(**LARGE), SHARDS))
    named = REPO if source_type == "repository" else str(source)
    fresh = routes(plan(named), compression)["sequential_file"]
    call = call_on("sequential_file", named, compression, max_disk=fresh.created_bytes)
    split_folder = interrupted(call, shards=2)
    before = files_in(split_folder)
    forecast = plan(named)
    assert files_in(split_folder) == before
    outlook = estimate_at(forecast, compression)
    assert (outlook.state, outlook.shards_used, outlook.shards) == ("unfinished", 2, SHARDS)
    assert outlook.routes[-1].name == "standard"  # it would fetch shards again that are used up
    remaining = routes(forecast, compression)["sequential_file"]
    assert remaining.disk_bytes < fresh.disk_bytes
    assert remaining.seconds is not None
    assert fresh.seconds is not None
    assert remaining.seconds < fresh.seconds
    assert f"unfinished, 2 of {SHARDS} shards used" in run(named, "--bandwidth", "1GB")
    other_estimates = [estimate_at(forecast, name) for name in COMPRESSIONS if name != compression]
    if source_type == "folder":
        assert all(f"2 of its {SHARDS} shards are missing" in (estimate.obstacle or "") for estimate in other_estimates)
        assert not any(estimate.routes for estimate in other_estimates)
    else:
        assert all(estimate.obstacle is None and estimate.routes for estimate in other_estimates)
    watched = source if source_type == "folder" else hub_environment.home
    peak = Peak(watched)
    assert peak.during(call) == split_folder
    assert peak.most <= remaining.disk_bytes


@pytest.mark.parametrize("sequential", [True, False])
def test_finished_split_is_reported(folder: Path, sequential: bool) -> None:
    split_folder = Call(str(folder), compression="4bit", sequential=sequential).make()
    before = files_in(folder)
    forecast = plan(folder, compression="4bit", max_disk=1)
    assert files_in(folder) == before
    outlook = estimate_at(forecast, "4bit")
    assert outlook.finished
    assert outlook.folder == split_folder
    assert outlook.output_bytes == sum(path.stat().st_size for path in split_folder.glob("*.safetensors"))
    assert forecast.choice is not None
    assert arguments_of(forecast.choice.call) == {"source": str(folder), "compression": "4bit", "max_disk": 1}
    assert (estimate_at(forecast, None).obstacle is not None) == sequential  # its shards are gone
    text = run(folder, "--compression", "4bit")
    assert re.search(r"4bit, .*: finished \d{4}-\d\d-\d\d \d\d:\d\d in ", text)
    assert "is finished. To load it:" in text


def test_split_directory_itself(folder: Path) -> None:
    split_folder = Call(str(folder), compression="8bit").make()
    forecast = plan(split_folder)
    assert (forecast.kind, forecast.anatomy) == ("split", None)
    assert [outlook.compression for outlook in forecast.outlooks] == ["8bit"]
    assert forecast.choice is not None
    assert arguments_of(forecast.choice.call) == {"source": str(split_folder), "compression": "8bit"}
    text = run(split_folder)
    assert "8bit is finished. To load it:" in text
    assert "no route" not in text


@pytest.mark.parametrize("source_format", ["folder", "gguf"])
def test_folder_with_nothing_but_a_split(tmp_path: Path, source_format: str) -> None:
    if source_format == "gguf":
        source = write_gguf(tmp_path / "model.gguf")
    else:
        source = build_checkpoint(tmp_path / "model", "llama")
    Call(str(source), str(tmp_path / "out"), compression="8bit", sequential=False).make()
    forecast = plan(tmp_path / "out", device="cpu")
    assert not forecast.warnings
    assert [g.compression for g in forecast.generations if g.obstacle is None] == ["8bit"]
    with pytest.raises(CheckpointNotFoundError, match=r"Load or resume that one: compression='8bit' in"):
        rabbitllm.AutoModel.from_pretrained(tmp_path / "out", split=False, device="cpu")


def test_shards_that_a_split_has_used_up_cannot_be_loaded(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(hidden=128), 2))
    Call(str(source), compression="8bit").make()
    with pytest.raises(MissingShardError, match=r"Load or resume that one: compression='8bit' in"):
        rabbitllm.AutoModel.from_pretrained(source, split=False, device="cpu")


def test_deleted_single_file(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "m", {SINGLE_NAME: llama_tensors()}, index=False)
    call = Call(str(source), compression="4bit")
    call.make()
    assert not (source / SINGLE_NAME).exists()
    forecast = plan(source)
    assert estimate_at(forecast, "4bit").finished
    assert estimate_at(forecast, None).obstacle == "its shards are missing"
    assert forecast.choice is not None
    assert forecast.choice.compression == "4bit"


def test_split_of_another_model_in_the_way(tmp_path: Path) -> None:
    first = write_shards(tmp_path / "a" / "model", cut(llama_tensors(seed=1), 3))
    second = write_shards(tmp_path / "b" / "model", cut(llama_tensors(seed=2), 3))
    Call(str(first), str(tmp_path / "out"), compression="8bit", sequential=False).make()
    interrupted(Call(str(first), str(tmp_path / "out"), compression="4bit", sequential=False))
    forecast = plan(second, layer_shards_saving_path=tmp_path / "out")
    assert "of another source: its shard" in (estimate_at(forecast, "8bit").obstacle or "")
    assert "of another source: its shard" in (estimate_at(forecast, "4bit").obstacle or "")
    assert not estimate_at(forecast, "8bit").finished
    assert estimate_at(forecast, None).routes
    text = run(second, "--dir", str(tmp_path / "out"), "--bandwidth", "1GB")
    assert text.count("not possible: the ") == 2


def test_other_commit_with_the_same_weights(
    repository: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    split_folder = Call(REPO, compression="4bit").make()
    (repository / "README.md").write_text("a new readme")
    forecast = plan(REPO, compression="4bit")
    assert forecast.commit == local_hub.commit(REPO)
    assert forecast.commit not in str(split_folder)
    assert estimate_at(forecast, "4bit").finished
    assert estimate_at(forecast, "4bit").folder == split_folder


def test_plan_keeps_the_commit_of_offline_calls(
    repository: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    split_folder = Call(REPO, compression="4bit").make()
    write_shards(repository, cut(llama_tensors(seed=5), SHARDS))
    assert not estimate_at(plan(REPO, compression="4bit"), "4bit").finished
    assert Call(REPO, compression="4bit", local_files_only=True).find().split_folder == split_folder


# What is wrong with the source


@pytest.mark.parametrize("config", [None, "{ no json", '{"model_type": 7}'])
def test_unusable_config(folder: Path, config: str | None) -> None:
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    forecast = plan(folder)
    assert forecast.anatomy is not None
    assert forecast.anatomy.layers == 8
    assert bool(forecast.warnings) == (config != '{"model_type": 7}')
    state = "is missing" if config is None else "cannot be read"
    assert all(f"config.json {state}" in warning for warning in forecast.warnings)


def test_repository_without_a_config(repository: Path, hub_environment: HubEnvironment) -> None:
    (repository / "config.json").unlink()
    forecast = plan(REPO)
    assert "config.json is missing" in forecast.warnings[0]
    assert forecast.choice is None  # from_pretrained would refuse it
    assert "no config.json" in str(estimate_at(forecast, None).obstacle)


def test_missing_source_is_refused(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    with pytest.raises(CheckpointNotFoundError):
        plan("org/nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        plan(tmp_path / "empty")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bandwidth": 0}, "bandwidth"),
        ({"bandwidth": "fast"}, "bandwidth"),
        ({"max_disk": "x"}, "max_disk"),
        ({"min_free_disk": "-1"}, "min_free_disk"),
        ({"compression": "2bit"}, "2bit"),
        ({"max_memory": {"cpu": "much"}}, "max_memory"),
    ],
)
def test_invalid_arguments_are_refused(folder: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        plan(folder, **options)


def test_memory_as_on_the_command_line(tmp_path: Path) -> None:
    source = build_checkpoint(tmp_path / "m", "llama", hidden_size=128, intermediate_size=512)
    options = ("--device", "cpu", "--max-memory", "cpu=500kB", "--bandwidth", "1GB")
    record = json.loads(run(source, "--json", *options))
    assert [set(entry) for entry in record["generations"]] == [GENERATION_KEYS] * len(PLANNED)
    streamed = [entry["read_bytes"] for entry in record["generations"]]
    assert streamed[0] > streamed[2] == 0
    assert 'max_memory={"cpu": "500kB"}' in record["choice"]["call"]
    text = run(source, *options)
    assert re.search(r"uncompressed +[\d.,]+ (?:MB|bytes) +[\d.]+ MB, cached", text)
    with pytest.raises(OptionError):
        run(source, "--max-memory", "500kB")


def test_errors_are_on_stderr(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rabbitllm", "plan", str(tmp_path / "nowhere"), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("error: There is no folder")


@pytest.mark.long
def test_stdout_is_one_json_object(folder: Path) -> None:
    command = [sys.executable, "-m", "rabbitllm", "plan", str(folder), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(json.loads(ran.stdout)) == KEYS


# How it looks


@pytest.fixture
def on_terminal() -> Callable[[SplitEstimate, int], str]:
    def printed(forecast: SplitEstimate, width: int) -> str:
        out = io.StringIO()
        show(forecast, Console(file=out, force_terminal=True, width=width, highlight=False, color_system="standard"))
        return out.getvalue()

    return printed


def test_terminal_of_80_columns_is_enough(
    repository: Path, hub_environment: HubEnvironment, on_terminal: Callable[[SplitEstimate, int], str]
) -> None:
    """No line is broken in the table; a terminal of another width only breaks sentences elsewhere."""
    forecast = plan(REPO, max_disk="6MB")
    coloured = on_terminal(forecast, 80)
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert "\x1b[" in coloured
    assert max(map(len, plain.splitlines())) <= 80
    wide = re.sub(r"\x1b\[[\d;]*m", "", on_terminal(forecast, 120))
    assert "".join(plain.split()) == "".join(wide.split())
    rows = [line for line in plain.splitlines() if re.match(r"  (standard|sequential)", line)]
    assert len(rows) == 4 * len(PLANNED)
    assert all(re.search(r"(fits|no, [\d.]+ [MG]B (over|short)) +(under )?\d+ (s|min)$", row) for row in rows)
    assert {line for line in rows if "fits" in line} < set(rows)


GUIDES = Path(rabbitllm.__file__).parent.parent / "docs" / "guides"
MEASURED = re.compile(r"free disk +[\d.]+|[\d.,]+ [MG]B/s|under 1 s|[\d.]+ m?s|cuda:0|\bcpu\b|\d+ CPU threads")


@pytest.mark.parametrize("guide", ["small-disk", "compression"])
def test_guide_has_the_printed_output(guide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of it, with … between them, but for what is measured; shards give back their blocks on any disk."""
    monkeypatch.setattr(local, "bytes_freed_by_deleting", lambda path, device: on_disk(path.stat().st_size))
    page = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    block = re.search(r"```text\n\$ rabbitllm plan ([^\n]*)\n(.*?)```", page, re.DOTALL)
    assert block is not None
    monkeypatch.chdir(Path(rabbitllm.__file__).parent.parent)
    printed = " ".join(MEASURED.sub("#", run(*block[1].split())).split())
    parts = [" ".join(MEASURED.sub("#", part).split()) for part in block[2].split("…") if part.strip()]
    assert len(parts) >= 2
    offsets = [printed.find(part) for part in parts]
    assert -1 not in offsets, printed
    assert offsets == sorted(offsets)


def test_markup_in_a_name_is_escaped(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "[red]m[/red]", cut(llama_tensors(), 3))
    assert f"{source}\n" in run(source, "--bandwidth", "1GB")


def test_picture_of_the_placement(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "m", cut(llama_tensors(), 3))
    with pytest.raises(OptionError):
        run(source, "--plot", tmp_path / "tiers.txt")
    (source / "config.json").unlink()
    with pytest.raises(OptionError):  # without a config nothing is known of generating
        run(source, "--plot", tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    checkpoint = build_checkpoint(tmp_path / "whole", "llama")
    picture = tmp_path / "tiers.png"
    run(checkpoint, "--bandwidth", "1GB", "--device", "cpu", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_keeping_the_blocks_of_a_gguf_file_takes_the_time_of_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    plain = json.loads(invoke("plan", path, "--json").stdout)["outlooks"][0]
    assert (plain["compression"], bool(plain["routes"])) == (None, True)
    assert all(route["seconds"] is not None for route in plain["routes"])
