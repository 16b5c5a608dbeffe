"""What a forecast says, from plans that exist as headers only: records against arithmetic done by hand."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest

from rabbitllm.quant.compression import COMPRESSIONS
from rabbitllm.splitter import split_estimate
from rabbitllm.splitter.disk_budget import DiskBudget, ShardTransfer, Shortage, disk_use
from rabbitllm.splitter.split_estimate import (
    CompressionEstimate,
    Disk,
    Load,
    Rate,
    Rates,
    Recommendation,
    Route,
    SplitEstimate,
    anatomy_of,
)
from tests.splitter.test_memory import MOST
from tests.support.plans import MIB, all_freed, even, plan_of, shard_of

FOLDER = Path("somewhere")
RATES = Rates(Rate(10), Rate(100), {"8bit": Rate(50), "4bit": Rate(5)}, 2, "cpu")


def test_load_is_of_what_is_left() -> None:
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


def test_the_slower_side_decides_where_both_go_on_at_once() -> None:
    load = Load(1000, 0, 700)
    assert split_estimate.seconds_of(load, "sequential_stream", "4bit", RATES) == pytest.approx(700 / 5)
    assert split_estimate.seconds_of(load, "sequential_file", "4bit", RATES) == pytest.approx(1000 / 10 + 700 / 5)
    assert split_estimate.seconds_of(dataclasses.replace(load, quantized=0), "sequential_stream", None, RATES) == 100


def test_double_goes_by_its_own_rate_where_there_is_one() -> None:
    assert RATES.quantizing("4bit-double") == RATES.quantizing("4bit") == Rate(5)
    own = dataclasses.replace(RATES, quantize={**RATES.quantize, "4bit-double": Rate(3)})
    assert own.quantizing("4bit-double") == own.quantizing("auto") == Rate(3)
    assert own.quantizing("4bit") == Rate(5)
    assert split_estimate.seconds_of(Load(0, 0, 700), "standard", "4bit-double", own) == pytest.approx(700 / 3)


@pytest.mark.parametrize("lacking", ["fetch", "read", "quantize"])
def test_no_estimate_without_a_rate_that_it_needs(lacking: str) -> None:
    rates = dataclasses.replace(RATES, **{lacking: {} if lacking == "quantize" else None})
    nothing = {"fetch": Load(0, 300, 700), "read": Load(1000, 0, 700), "quantize": Load(1000, 300, 0)}[lacking]
    for route in split_estimate.ROUTES:
        assert split_estimate.seconds_of(Load(1000, 300, 700), route, "8bit", rates) is None
        assert split_estimate.seconds_of(nothing, route, "8bit", rates) is not None


def test_route_takes_what_the_plan_says() -> None:
    plan = plan_of(even(4, MIB, staged=True), "8bit")
    disk_budget = DiskBudget(FOLDER, all_freed(plan), small_files=5000, used=frozenset({"shard-0"}), in_use=4096)
    for name, way in split_estimate.ROUTES.items():
        use = disk_use(
            plan, shard_transfer=way, freed=all_freed(plan), small_files=5000, used=frozenset({"shard-0"}), in_use=4096
        )
        found = split_estimate.route_of(name, plan, disk_budget, None, 1.0)
        assert found == Route(name, use.added, use.created, 0, None, 1.0)
        assert found.fits
    lacking = Shortage(5, 3, "there")
    fetching = dataclasses.replace(disk_budget, downloads=((FOLDER, 7 * MIB),))
    found = split_estimate.route_of("standard", plan, fetching, lacking, None)
    assert found.disk_bytes == split_estimate.route_of("standard", plan, disk_budget, None, None).disk_bytes + 7 * MIB
    assert found.cache_bytes == 7 * MIB
    assert not found.fits
    assert split_estimate.missing_bytes(found) == 2


def route(name: str, lacks: int = 0) -> Route:
    return Route(name, 10, 10, 0, Shortage(10, 10 - lacks, "there") if lacks else None, None)


def outlook(
    compression: str | None, *routes: Route, state: str = "new", obstacle: str | None = None
) -> CompressionEstimate:
    return CompressionEstimate(compression, FOLDER, state, 10, routes=routes, obstacle=obstacle)


def chosen(*outlooks: CompressionEstimate, asked: str | None = None) -> tuple[str | None, str | None] | None:
    found = split_estimate.best(outlooks, asked)
    return None if found is None else (found[0].compression, found[1].name if found[1] else None)


def test_best_is_the_asked_compression_then_the_least_compressed_and_its_first_route() -> None:
    every = [outlook(c, route("standard"), route("sequential_file")) for c in COMPRESSIONS]
    assert chosen(*every) == (None, "standard")
    assert chosen(*every, asked="4bit") == ("4bit", "standard")
    full = outlook(None, route("standard", 3), route("sequential_file", 2), route("sequential_stream", 1))
    half = outlook("8bit", route("standard", 1), route("sequential_file", 1), route("sequential_stream"))
    assert chosen(full, half, every[2]) == ("8bit", "sequential_stream")
    assert chosen(full, every[1], every[2]) == ("8bit", "standard")
    assert chosen(full, half, every[2], asked="4bit") == ("4bit", "standard")
    assert chosen(full) is None
    assert chosen() is None


def test_a_finished_split_is_the_best_there_is_if_it_is_this_source_s() -> None:
    here = outlook(None, route("standard"))
    assert chosen(here, outlook("4bit", state="finished"), asked="4bit") == ("4bit", None)
    assert chosen(here, outlook("4bit", state="finished"), asked=None) == (None, "standard")
    assert chosen(here, outlook("4bit", state="finished", obstacle="another's"), asked="4bit") == (None, "standard")


def test_least_is_what_lacks_least() -> None:
    full, quarter = outlook(None, route("standard", 9)), outlook("4bit", route("standard", 4), route("x", 2))
    found = split_estimate.least([full, quarter])
    assert found is not None
    assert (found[0].compression, found[1].name) == ("4bit", "x")
    larger = dataclasses.replace(route("y", 2), disk_bytes=11)
    found = split_estimate.least([outlook("8bit", larger), quarter])
    assert found is not None
    assert found[1].name == "x"
    assert split_estimate.least([outlook(None)]) is None


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("org/name", {}),
        ("org/name", {"compression": "4bit", "sequential_shard_processing": True, "max_disk": "57GiB"}),
        ("~/a 'b' \"c\"", {"layer_shards_saving_path": "C:\\new\\dir", "max_disk": 1234, "token": False}),
    ],
)
def test_call_says_what_was_given(source: str, arguments: dict[str, object]) -> None:
    text = split_estimate.call_of(source, {**arguments, "revision": None})
    call = ast.parse(text).body[-1].value  # type: ignore[attr-defined]
    assert [ast.literal_eval(argument) for argument in call.args] == [source]
    assert {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords} == arguments
    assert "\\'" not in split_estimate.call_of("plain", {})
    assert max(map(len, text.splitlines())) <= split_estimate.WIDTH


def test_json_has_plain_values_and_says_what_fits() -> None:
    small = shard_of("s", {"model.layers.0.w": ("BF16", (4, 4)), "model.layers.0.v": ("BF16", (2, 4))})
    made = SplitEstimate(
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
    found = split_estimate.as_json(made)
    assert json.loads(json.dumps(found)) == found
    assert found["disks"] == [{"folder": "somewhere", "free_bytes": 5}]
    assert [entry["fits"] for entry in found["outlooks"]] == [False, True]
    lacking = {"need_bytes": 10, "have_bytes": 9, "where": "there"}
    assert found["outlooks"][0]["routes"][0]["lacking"] == lacking
    assert not found["outlooks"][0]["routes"][0]["fits"]
    assert found["anatomy"]["never_compressed"][-1] == {"what": "under 4,096 elements", "count": 2, "total_bytes": 48}
    assert found["rates"]["quantise"]["8bit"] == {"bytes_per_second": 50, "measured_bytes": 0}


def test_every_way_to_arrive_is_a_route() -> None:
    assert set(split_estimate.ROUTES.values()) == set(ShardTransfer)


def test_the_memory_that_is_told_is_the_one_that_is_tested() -> None:
    assert split_estimate.memory_bytes(0) == split_estimate.MEMORY_BYTES == MOST
