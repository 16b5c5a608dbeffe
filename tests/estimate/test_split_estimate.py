"""Estimates of a split: the composition of a checkpoint, routes and times, and measured rates."""

from __future__ import annotations

import ast
import dataclasses
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rabbitllm.checkpoints.hub import HubAccess, HubRepository, open_repository
from rabbitllm.errors import MissingPackageError
from rabbitllm.estimate import machine, split_estimate
from rabbitllm.estimate.split_estimate import (
    CompressionEstimate,
    Disk,
    Load,
    Rate,
    Rates,
    Recommendation,
    Route,
    SplitEstimate,
    TensorGroup,
    anatomy_of,
)
from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, byte_size
from rabbitllm.quant.schemes import COMPRESSIONS, is_compressible
from rabbitllm.splitter.disk_budget import DiskBudget, ShardTransfer, Shortage
from rabbitllm.splitter.plan import CHUNK_BYTES, PlannedShard
from tests.splitter.test_memory import MOST
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import GeneratedFile, LocalHub
from tests.support.plans import MIB, all_freed, even, peak_of, plan_of, shard_of


def spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, dtype, shape, "s", 0, byte_size(dtype, shape))


def special() -> tuple[PlannedShard, ...]:
    """Two shards with one of everything that is not an ordinary weight."""
    first = shard_of(
        "model-1.safetensors",
        {
            "model.embed_tokens.weight": ("BF16", (128, 64)),
            "model.layers.0.self_attn.q_proj.weight": ("BF16", (64, 64)),
            "model.layers.0.mlp.gate.weight": ("BF16", (8, 1024)),
            "model.layers.0.conv1d.weight": ("F32", (128, 1, 64)),
            "model.layers.0.A_log": ("F32", (128, 64)),
            "model.layers.0.mlp.experts.down_proj_bias": ("BF16", (64, 65)),
            "model.layers.0.patch.weight": ("BF16", (8, 8, 16, 16)),
        },
    )
    second = shard_of(
        "model-2.safetensors",
        {
            "model.layers.0.fp8.weight": ("F8_E4M3", (64, 64)),
            "model.layers.0.small.weight": ("BF16", (4, 4)),
            "model.layers.0.tiny.weight": ("BF16", (2, 4)),
            "model.layers.0.steps": ("I64", (3,)),
            "model.layers.0.mask": ("BOOL", (5, 5)),
            "model.layers.0.scale": ("F32", ()),
            "model.layers.0.nothing": ("F32", (0, 64)),
            "model.norm.weight": ("BF16", (64,)),
        },
    )
    return first, second


def test_anatomy_of_a_checkpoint_with_everything() -> None:
    shards = special()
    plan = plan_of(shards)
    anatomy = split_estimate.anatomy_of(plan, {"tie_word_embeddings": True})
    assert anatomy.total_bytes == sum(shard.size for shard in shards)
    assert (anatomy.shards, anatomy.largest_shard_bytes) == (2, max(shard.size for shard in shards))
    assert (anatomy.layers, anatomy.largest_layer) == (3, "layers.0")
    assert anatomy.largest_layer_bytes == plan.layouts["layers.0"].size
    assert anatomy.tensors == 15
    floating = 128 * 64 + 64 * 64 + 8 * 1024 + 128 * 64 + 128 * 64 + 8 * 8 * 16 * 16 + 64 * 65 + 64 * 64 + 89
    assert anatomy.parameters == floating
    assert anatomy.tied_embeddings is True
    assert anatomy.never_compressed == (
        TensorGroup("convolution", 1, 128 * 64 * 4),
        TensorGroup("more than 3 dimensions", 1, 8 * 8 * 16 * 16 * 2),
        TensorGroup("state-space decay", 1, 128 * 64 * 4),
        TensorGroup("expert router", 1, 8 * 1024 * 2),
        TensorGroup("biases of experts", 1, 64 * 65 * 2),
        TensorGroup("F8_E4M3 already", 1, 64 * 64),
        TensorGroup("under 4,096 elements", 2, 32 + 16),
    )
    assert anatomy.not_floating == (TensorGroup("BOOL", 1, 25), TensorGroup("I64", 1, 24))
    assert (anatomy.empty, anatomy.scalars) == (1, 1)
    assert (anatomy.layers_over_shards, anatomy.most_shards_of_a_layer) == (1, 2)


@pytest.mark.parametrize(
    ("head", "config", "tied"),
    [
        (None, {"tie_word_embeddings": True}, True),
        (None, {"text_config": {"tie_word_embeddings": True}}, True),
        (None, {"tie_word_embeddings": False}, None),
        (None, {}, None),
        (None, {"tie_word_embeddings": "yes", "text_config": 7}, None),
        ("lm_head.weight", {"tie_word_embeddings": True}, False),
        ("model.lm_head.weight", {}, False),
        ("embed_out.weight", {}, False),
        ("output.weight", {}, False),
    ],
)
def test_tied_embeddings(head: str | None, config: Mapping[str, object], tied: bool | None) -> None:
    tensors = {"model.embed_tokens.weight": ("BF16", (64, 64)), "model.layers.0.output.dense": ("BF16", (8,))}
    tensors |= {head: ("BF16", (64, 64))} if head else {}
    assert split_estimate.anatomy_of(plan_of((shard_of("a", tensors),)), config).tied_embeddings is tied


ORDINARY = ("w.weight", "mlp.gate_proj.weight")
NAMES = (*ORDINARY, "mlp.gate.weight", "router.weight", "conv1d.weight", "A_log", "a.Conv.b", "a.bias")
SHAPES = ((), (0, 64), (4096,), (63, 65), (64, 64), (1024, 64), (1025, 64), (4, 32, 32), (2, 2, 32, 32), (1, 2, 3, 4))


def test_a_reason_is_named_for_uncompressed_tensors_only() -> None:
    reasons = set()
    for name in NAMES:
        for shape in SHAPES:
            for dtype in DTYPES:
                if DTYPES[dtype].bits < 8:
                    continue
                tensor = spec(name, dtype, shape)
                why = split_estimate.why_never_compressed(tensor)
                reasons.add(why)
                ordinary = split_estimate.is_floating(tensor) and len(shape) >= 2 and tensor.elements
                assert (why is None) == (not ordinary or is_compressible(tensor)), tensor
    assert {"expert router", "convolution", "state-space decay", "biases of experts"} < reasons
    assert {"more than 3 dimensions", "F64 already"} < reasons


def test_which_dtypes_are_floating() -> None:
    integers = {name for name in DTYPES if not split_estimate.is_floating(spec("w", name, (2, 2)))}
    assert integers == {"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL", "C64"}


def test_dtype_of_the_quantizer_measurement() -> None:
    tensors = {"model.layers.0.a": ("F32", (64, 64)), "model.layers.0.b": ("BF16", (64, 256))}
    assert split_estimate.commonest_dtype(plan_of((shard_of("a", tensors),))) == "BF16"
    assert split_estimate.commonest_dtype(plan_of((shard_of("a", {"model.norm.weight": ("F32", (4096,))}),))) is None


def test_layers_above_10_gb() -> None:
    plan = plan_of((shard_of("a", {"model.layers.0.w": ("BF16", (80_000, 65_536)), "lm_head.w": ("BF16", (64, 64))}),))
    assert split_estimate.big_layers(plan) == ("layers.0",)
    assert split_estimate.big_layers(plan_of(plan.shards, "8bit")) == ()


# What a forecast says, from plans that exist as headers only: records against arithmetic done by hand.


FOLDER = Path("somewhere")
RATES = Rates(Rate(10), Rate(100), {"8bit": Rate(50), "4bit": Rate(5)}, 2, "cpu")


def test_load_counts_the_remaining_shards() -> None:
    staged, here = even(2, MIB, staged=True), even(3, MIB)[2:]
    plan = plan_of((*staged, *here), "4bit")
    assert split_estimate.load_of(plan, frozenset()) == Load(2 * staged[0].size, here[0].size, 3 * MIB)
    assert split_estimate.load_of(plan, frozenset({"shard-0"})) == Load(staged[0].size, here[0].size, 2 * MIB)
    assert split_estimate.load_of(plan_of((*staged, *here)), frozenset()).quantized == 0
    small = shard_of("small", {"model.layers.9.norm": ("BF16", (64,))})
    assert split_estimate.load_of(plan_of((small,), "4bit"), frozenset()).quantized == 0


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        ("standard", 1000 / 10 + 300 / 100 + 700 / 50),
        ("sequential_file", 1000 / 10 + 300 / 100 + 700 / 50),
        ("sequential_ahead", 1000 / 10),
        ("sequential_stream", 1000 / 10),
    ],
)
def test_seconds(route: str, expected: float) -> None:
    assert split_estimate.seconds_of(Load(1000, 300, 700), route, "8bit", RATES) == pytest.approx(expected)


def test_the_slower_of_parallel_steps_decides() -> None:
    load = Load(1000, 0, 700)
    assert split_estimate.seconds_of(load, "sequential_stream", "4bit", RATES) == pytest.approx(700 / 5)
    assert split_estimate.seconds_of(load, "sequential_file", "4bit", RATES) == pytest.approx(1000 / 10 + 700 / 5)
    assert split_estimate.seconds_of(dataclasses.replace(load, quantized=0), "sequential_stream", None, RATES) == 100


def test_double_uses_its_measured_rate() -> None:
    assert RATES.quantizing("4bit-double") == RATES.quantizing("4bit") == Rate(5)
    rates = dataclasses.replace(RATES, quantize={**RATES.quantize, "4bit-double": Rate(3)})
    assert rates.quantizing("4bit-double") == rates.quantizing("auto") == Rate(3)
    assert rates.quantizing("4bit") == Rate(5)
    assert split_estimate.seconds_of(Load(0, 0, 700), "standard", "4bit-double", rates) == pytest.approx(700 / 3)


@pytest.mark.parametrize("lacking", ["fetch", "read", "quantize"])
def test_no_estimate_without_a_needed_rate(lacking: str) -> None:
    rates = dataclasses.replace(RATES, **{lacking: {} if lacking == "quantize" else None})
    load = {"fetch": Load(0, 300, 700), "read": Load(1000, 0, 700), "quantize": Load(1000, 300, 0)}[lacking]
    for route in split_estimate.ROUTES:
        assert split_estimate.seconds_of(Load(1000, 300, 700), route, "8bit", rates) is None
        assert split_estimate.seconds_of(load, route, "8bit", rates) is not None


def test_a_route_needs_the_planned_space() -> None:
    plan = plan_of(even(4, MIB, staged=True), "8bit")
    disk_budget = DiskBudget(FOLDER, all_freed(plan), small_files=5000, used=frozenset({"shard-0"}), in_use=4096)
    for name, way in split_estimate.ROUTES.items():
        use = peak_of(
            plan, shard_transfer=way, freed=all_freed(plan), small_files=5000, used=frozenset({"shard-0"}), in_use=4096
        )
        route = split_estimate.route_of(name, plan, disk_budget, None, 1.0)
        assert route == Route(name, use.added, use.created, 0, None, 1.0)
        assert route.fits
    lacking = Shortage(5, 3, "there")
    fetching = dataclasses.replace(disk_budget, downloads=((FOLDER, 7 * MIB),))
    route = split_estimate.route_of("standard", plan, fetching, lacking, None)
    assert route.disk_bytes == split_estimate.route_of("standard", plan, disk_budget, None, None).disk_bytes + 7 * MIB
    assert route.cache_bytes == 7 * MIB
    assert not route.fits
    assert split_estimate.missing_bytes(route) == 2


def route(name: str, lacks: int = 0) -> Route:
    return Route(name, 10, 10, 0, Shortage(10, 10 - lacks, "there") if lacks else None, None)


def outlook(
    compression: str | None, *routes: Route, state: str = "new", obstacle: str | None = None
) -> CompressionEstimate:
    return CompressionEstimate(compression, FOLDER, state, 10, routes=routes, obstacle=obstacle)


def chosen(*outlooks: CompressionEstimate, asked: str | None = None) -> tuple[str | None, str | None] | None:
    best = split_estimate.best(outlooks, asked)
    return None if best is None else (best[0].compression, best[1].name if best[1] else None)


def test_best_is_the_requested_or_the_least_compressed() -> None:
    every = [outlook(c, route("standard"), route("sequential_file")) for c in COMPRESSIONS]
    assert chosen(*every) == (None, "standard")
    assert chosen(*every, asked="4bit") == ("4bit", "standard")
    full = outlook(None, route("standard", 3), route("sequential_file", 2), route("sequential_stream", 1))
    half = outlook("8bit", route("standard", 1), route("sequential_file", 1), route("sequential_stream"))
    assert chosen(full, half, every[2]) == ("8bit", "sequential_stream")
    assert chosen(full, every[1], every[2]) == ("8bit", "standard")
    assert chosen(full, half, every[2], asked="4bit") == ("4bit", "standard")
    assert chosen(full, half, outlook("auto", route("standard", 1))) == ("8bit", "sequential_stream")
    assert chosen(full, half, outlook("auto", route("standard"))) == ("auto", "standard")
    assert chosen(full, outlook("4bit", state="finished"), outlook("auto", route("standard"))) == ("4bit", None)
    assert chosen(full) is None
    assert chosen() is None


def test_a_finished_split_of_the_source_is_best() -> None:
    here = outlook(None, route("standard"))
    assert chosen(here, outlook("4bit", state="finished"), asked="4bit") == ("4bit", None)
    assert chosen(here, outlook("4bit", state="finished"), asked=None) == (None, "standard")
    assert chosen(here, outlook("4bit", state="finished", obstacle="another's"), asked="4bit") == (None, "standard")


def test_smallest_uses_the_least_disk_also_where_a_larger_one_is_nearer_to_its_limit() -> None:
    def needs(name: str, disk_bytes: int, lacks: int) -> Route:
        return dataclasses.replace(route(name, lacks), disk_bytes=disk_bytes)

    half = outlook("8bit", needs("standard", 20, 9), needs("stream", 12, 1))
    quarter = outlook("4bit", needs("standard", 11, 5), needs("stream", 7, 4), needs("file", 7, 3))
    least = split_estimate.smallest([half, quarter])
    assert least is not None
    assert (least[0].compression, least[1].name) == ("4bit", "file")
    assert split_estimate.smallest([outlook(None)]) is None


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("org/name", {}),
        ("org/name", {"compression": "4bit", "sequential_shard_processing": True, "max_disk": "57GiB"}),
        ("~/a 'b' \"c\"", {"layer_shards_saving_path": "C:\\new\\dir", "max_disk": 1234, "token": False}),
    ],
)
def test_the_call_has_the_given_arguments(source: str, arguments: dict[str, object]) -> None:
    text = split_estimate.call_of(source, {**arguments, "revision": None})
    call = ast.parse(text).body[-1].value  # type: ignore[attr-defined]
    assert [ast.literal_eval(argument) for argument in call.args] == [source]
    assert {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords} == arguments
    assert "\\'" not in split_estimate.call_of("plain", {})
    assert max(map(len, text.splitlines())) <= split_estimate.WIDTH


def test_json_has_plain_values_and_fits() -> None:
    small = shard_of("s", {"model.layers.0.w": ("BF16", (4, 4)), "model.layers.0.v": ("BF16", (2, 4))})
    estimate = SplitEstimate(
        source="m",
        kind="local",
        label="m",
        commit=None,
        compression=None,
        max_disk=None,
        min_free_disk=0,
        anatomy=anatomy_of(plan_of((small,)), {}),
        disks=(Disk(FOLDER, 5),),
        outlooks=(outlook(None, route("standard", 1)), outlook("4bit", state="finished")),
        memory_bytes=split_estimate.MEMORY_BYTES,
        rates=RATES,
        choice=Recommendation("4bit", None, "call"),
    )
    record = split_estimate.as_json(estimate)
    assert json.loads(json.dumps(record)) == record
    assert record["disks"] == [{"folder": "somewhere", "free_bytes": 5}]
    assert [entry["fits"] for entry in record["outlooks"]] == [False, True]
    lacking = {"need_bytes": 10, "have_bytes": 9, "where": "there"}
    assert record["outlooks"][0]["routes"][0]["lacking"] == lacking
    assert not record["outlooks"][0]["routes"][0]["fits"]
    assert record["anatomy"]["never_compressed"][-1] == {"what": "under 4,096 elements", "count": 2, "total_bytes": 48}
    assert record["rates"]["quantise"]["8bit"] == {"bytes_per_second": 50, "measured_bytes": 0}


def test_every_arrival_policy_is_a_route() -> None:
    assert set(split_estimate.ROUTES.values()) == set(ShardTransfer)


def test_the_stated_memory_is_the_tested_one() -> None:
    assert split_estimate.memory_bytes(0) == split_estimate.MEMORY_BYTES == MOST


# Measurements on small samples: how much they read, how long they may take, and that their rates are real.


REPO = "org/model"
SHARD = "model.safetensors"


def repository(hub: LocalHub, size: int) -> HubRepository:
    """A repository with one large file, of which no digest need be computed."""
    hub.add_generated(REPO, {SHARD: GeneratedFile(size, lambda offset, length: bytes(length), "0" * 64)})
    opened = open_repository(REPO, HubAccess(), Path())
    hub.forget_requests()
    return opened


def test_fetch_requests_only_the_sample(hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    rate = split_estimate.fetch_rate(repository(local_hub, 1 << 40), SHARD)
    assert rate is not None
    assert rate.measured_bytes == split_estimate.FETCHED_BYTES
    assert [request.range for request in local_hub.requests] == [f"bytes=0-{split_estimate.FETCHED_BYTES - 1}"]
    assert local_hub.body_bytes() == split_estimate.FETCHED_BYTES


def test_fetch_of_a_small_shard(hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    rate = split_estimate.fetch_rate(repository(local_hub, 1000), SHARD)
    assert rate is not None
    assert rate.measured_bytes == 1000


def test_fetch_is_as_fast_as_the_hub(hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    """A hub that needs a tenth of a second for each MiB sends at most 10 MiB a second."""
    opened = repository(local_hub, 1 << 30)
    local_hub.faults.delay_per_mib = 0.1
    rate = split_estimate.fetch_rate(opened, SHARD)
    assert rate is not None
    assert 0 < rate.bytes_per_second < 12 * MIB


def test_fetch_stops_in_time(
    hub_environment: HubEnvironment,
    local_hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_estimate, "MAX_SECONDS", 0.5)
    opened = repository(local_hub, 1 << 30)
    local_hub.faults.delay_per_mib = 0.2
    rate = split_estimate.fetch_rate(opened, SHARD)
    assert rate is not None
    assert 0 < rate.measured_bytes < split_estimate.FETCHED_BYTES


def test_fetch_from_a_hub_that_fails(
    hub_environment: HubEnvironment,
    local_hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(split_estimate, "MAX_SECONDS", 0.3)
    opened = repository(local_hub, 1 << 30)
    local_hub.faults.status, local_hub.faults.status_times = 404, -1
    assert split_estimate.fetch_rate(opened, SHARD) is None
    local_hub.faults.status = 503
    assert split_estimate.fetch_rate(opened, SHARD) is None


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        ([(2.0, 100), (3.0, 400), (4.0, 600)], (1000 / 2, 1100)),  # the wait for the first is no part of the rate
        ([(2.0, 900), (2.1, 100)], (1000 / 2.1, 1000)),  # too little is left without the first
        ([(2.0, 100)], (100 / 2, 100)),
        ([], None),
    ],
)
def test_rate_of_chunks(arrived: list[tuple[float, int]], expected: tuple[float, int] | None) -> None:
    rate = split_estimate._steady_rate(arrived)
    assert (rate and (pytest.approx(rate.bytes_per_second), rate.measured_bytes)) == expected


def files(folder: Path, sizes: list[int]) -> list[Path]:
    paths = [folder / f"{index}.bin" for index in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(bytes(size))
    return paths


def test_small_files_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SAMPLE_BYTES", 128 << 20)
    monkeypatch.setattr(machine, "READ_SECONDS", 60.0)
    rate, nbytes = machine.read_rate(files(tmp_path, [CHUNK_BYTES + 5, 100, 0, 3 * MIB]), machine.DROPPED)
    assert rate is not None
    assert rate > 0
    assert nbytes == CHUNK_BYTES + 5 + 100 + 3 * MIB


def test_a_sample_of_large_files_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PIECE_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(machine, "SAMPLE_BYTES", 4 * CHUNK_BYTES)
    monkeypatch.setattr(machine, "READ_SECONDS", 60.0)
    paths = [tmp_path / f"large-{index}" for index in range(4)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(10 * CHUNK_BYTES)
    rate, nbytes = machine.read_rate(paths, machine.DROPPED)
    assert rate is not None
    assert nbytes == 4 * CHUNK_BYTES


def test_no_rate_without_files(tmp_path: Path) -> None:
    assert machine.read_rate([], machine.DROPPED)[0] is None
    folder = tmp_path / "a folder"
    folder.mkdir()
    assert machine.read_rate([folder], machine.DROPPED)[0] is None


def test_the_quantizer_is_called_as_in_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: set[tuple[str, int, str, str, bool]] = set()
    threads, together = set[int](), threading.Barrier(3)

    def quantize(
        scheme: str, data: memoryview, dtype: str, device: str, *, fitted: bool
    ) -> tuple[memoryview, memoryview]:
        calls.add((scheme, len(data), dtype, device, fitted))
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            together.wait(600)
        time.sleep(0.01)
        return data, data

    monkeypatch.setattr("rabbitllm.quant.quantize.quantize_blocks", quantize)
    monkeypatch.setattr(split_estimate, "QUANTIZE_SECONDS", 0.1)
    rate = split_estimate.quantize_rate("4bit", "F32", 3, fitted=True)
    assert calls == {("4bit", CHUNK_BYTES, "F32", "cpu", True)}
    assert len(threads) == 3
    assert rate is not None
    assert rate.bytes_per_second <= 3 * CHUNK_BYTES / 0.01
    assert rate.measured_bytes >= 3 * CHUNK_BYTES


@pytest.mark.parametrize(("scheme", "fitted"), [("4bit", False), ("8bit", False), ("4bit-double", True)])
@pytest.mark.long
def test_rate_of_the_quantizer(scheme: str, fitted: bool) -> None:
    rate = split_estimate.quantize_rate(scheme, "BF16", 2, fitted=fitted)
    assert rate is not None
    assert rate.measured_bytes % CHUNK_BYTES == 0
    assert 1e6 < rate.bytes_per_second < 1e12


def test_the_rate_is_measured_with_another_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_estimate, "QUANTIZE_SECONDS", 0.01)
    with torch.device("meta"):
        assert split_estimate.quantize_rate("Q8_0", "BF16", 1) is not None


def test_the_random_state_of_the_caller_is_kept() -> None:
    state = torch.get_rng_state()
    assert split_estimate.quantize_rate("8bit", "BF16", 1) is not None
    assert torch.equal(torch.get_rng_state(), state)


def test_no_rate_without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **named: object) -> None:
        raise MissingPackageError("not installed")

    monkeypatch.setattr("rabbitllm.quant.quantize.quantize_blocks", missing)
    assert split_estimate.quantize_rate("8bit", "BF16", 2) is None
