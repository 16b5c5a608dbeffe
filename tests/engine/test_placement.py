"""Placement as arithmetic: limits are kept, every unit and expert has one tier, kept units are spread evenly.

The costs of units, where a shared tensor counts once; the room of the page cache; and the memory of a GPU that many
allocations of one size take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.engine import load_plan
from rabbitllm.engine.placement import (
    EXPERT_STAGING,
    LARGE_TABLE,
    READY,
    SLOTS,
    STAGING,
    Budget,
    Copies,
    ExpertCost,
    PlacedUnit,
    Placement,
    SharedTensor,
    Tier,
    UnitCost,
    allocated_bytes,
    place,
)
from tests.engine.test_every_architecture import build
from tests.engine.test_fake_gpu import load_on
from tests.support.builders import build_checkpoint
from tests.support.draws import draws
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import ALL, bytes_when_made, load, split
from tests.support.tiny_models import tiers as tiers_of

KEPT = (Tier.RESIDENT, Tier.PACKED)


def layer(name: str, stored: int, ready: int | None = None, **changed: bool) -> UnitCost:
    """A decoder layer; a view unless it has another size when made."""
    settings = {"is_view": ready is None, "is_layer": True, "must_stay": False, "by_rows": False, **changed}
    return UnitCost(name, stored, ready if ready is not None else stored, ready or 0, **settings)


def model(layers: int, stored: int = 100, ready: int | None = None) -> list[UnitCost]:
    """Embedding, `layers` layers, norm, head."""
    return [
        layer("embed", 150, is_layer=False),
        *(layer(f"layers.{i}", stored, ready) for i in range(layers)),
        layer("norm", 1, is_layer=False, must_stay=True),
        layer("head", 150, is_layer=False),
    ]


def tiers(placement: Placement) -> dict[str, Tier]:
    return {placed.unit: placed.tier for placed in placement.units}


def test_unknown_unit_is_a_key_error() -> None:
    unit = PlacedUnit("layers.0", "cpu", Tier.RESIDENT, 8)
    placement = Placement((unit,), ())
    assert placement.of("layers.0") is unit
    with pytest.raises(KeyError, match=r"layers\.1"):
        placement.of("layers.1")


def footprint(costs: Sequence[UnitCost], placement: Placement, device: str) -> int:
    """The maximum memory of weights on a device, by the meaning of the tiers."""
    is_host = device in {budget.device for budget in placement.budgets if budget.is_host}
    on_device = [cost for cost in costs if placement.of(cost.name).device == device]
    tier_of = {cost.name: placement.of(cost.name).tier for cost in on_device}
    # tied units have one tensor: made once; and in a mapped file it is there once
    resident = sum({tensor(cost): cost.ready for cost in on_device if tier_of[cost.name] is Tier.RESIDENT}.values())
    kept = [cost for cost in on_device if tier_of[cost.name] is Tier.PACKED]
    quantized = sum({tensor(cost) if is_host else cost.name: cost.stored for cost in kept}.values())
    slots = SLOTS * max((cost.stored for cost in on_device if tier_of[cost.name] is Tier.STREAMED), default=0)
    moving = [cost for cost in on_device if tier_of[cost.name] in (Tier.PACKED, Tier.STREAMED)]
    being_made = max((cost.scratch for cost in moving), default=0)
    return resident + quantized + slots + being_made


def tensor(cost: UnitCost) -> str:
    """What a unit is made from."""
    return cost.shared[0].key if cost.shared else cost.name


def tied(*costs: UnitCost) -> list[UnitCost]:
    """Units that are made from one tensor, that of the first."""
    first = costs[0]
    shared = (SharedTensor(first.name, first.stored, first.ready),)
    sizes = {
        "stored": first.stored,
        "ready": first.ready,
        "scratch": first.scratch,
        "is_view": first.is_view,
        "shared": shared,
    }
    return [replace(cost, **sizes) for cost in costs]  # type: ignore[arg-type]


@st.composite
def units(draw: st.DrawFn) -> list[UnitCost]:
    """Any model: sizes, kinds and order are arbitrary."""
    costs = []
    for index in range(draw(st.integers(1, 25))):
        stored = draw(st.integers(0, 1000))
        is_view = draw(st.booleans())
        ready = stored if is_view else draw(st.integers(0, 4000))
        scratch = 0 if is_view else draw(st.integers(0, 4000))
        must_stay = draw(st.integers(0, 4)) == 0
        by_rows = not must_stay and draw(st.integers(0, 8)) == 0
        costs.append(UnitCost(f"u{index}", stored, ready, scratch, is_view, draw(st.booleans()), must_stay, by_rows))
    free = [index for index, cost in enumerate(costs) if not cost.must_stay]
    if len(free) > 1 and draw(st.booleans()):
        group = sorted(draw(st.sets(st.sampled_from(free), min_size=2, max_size=4)))
        for index, cost in zip(group, tied(*(costs[index] for index in group)), strict=True):
            costs[index] = cost
    return costs


budget_lists = st.lists(st.tuples(st.integers(0, 20_000), st.booleans()), min_size=1, max_size=4).map(
    lambda given: [Budget(f"d{number}", nbytes, is_host) for number, (nbytes, is_host) in enumerate(given)]
)


@settings(max_examples=draws(300))
@given(units(), budget_lists, st.booleans())
def test_every_unit_is_placed_once_and_limits_are_kept(
    costs: list[UnitCost], budgets: list[Budget], small_first: bool
) -> None:
    placement = place(costs, budgets, small_first=small_first)
    assert [placed.unit for placed in placement.units] == [cost.name for cost in costs]
    for budget in budgets:
        on_device = [cost for cost in costs if placement.of(cost.name).device == budget.device]
        fixed = sum(cost.ready for cost in on_device if cost.must_stay)
        free = [cost for cost in on_device if not cost.must_stay and not cost.by_rows]
        least = fixed + SLOTS * max((c.stored for c in free), default=0)
        least += max((c.scratch for c in free), default=0)
        # what cannot be avoided is taken even beyond the limit, and then nothing else is
        assert footprint(costs, placement, budget.device) <= max(budget.nbytes, least)


@settings(max_examples=draws(200))
@given(units(), budget_lists)
def test_units_have_only_possible_tiers(costs: list[UnitCost], budgets: list[Budget]) -> None:
    placement = place(costs, budgets)
    host = {budget.device: budget.is_host for budget in budgets}
    for cost in costs:
        placed = placement.of(cost.name)
        if cost.must_stay:
            assert placed.tier is Tier.RESIDENT
        if cost.by_rows:
            assert placed.tier in (Tier.RESIDENT, Tier.ROWS, Tier.MAPPED)
            assert (placed.tier is Tier.MAPPED) == (cost.is_view and host[placed.device])
        else:
            assert placed.tier not in (Tier.ROWS, Tier.MAPPED)
        if cost.is_view:
            assert placed.tier is not Tier.PACKED
    assert placement.streamed_bytes == sum(
        cost.stored for cost in costs if placement.of(cost.name).tier is Tier.STREAMED
    )
    assert placement.is_resident == all(placed.tier in READY for placed in placement.units)


@settings(max_examples=draws(300))
@given(units(), st.integers(0, 20_000), st.integers(0, 1000), st.booleans())
def test_copies_of_what_is_streamed_are_within_the_limit(
    costs: list[UnitCost], nbytes: int, thousandths: int, small_first: bool
) -> None:
    costs = [replace(cost, copy=cost.stored * thousandths // 1000) for cost in costs]
    placement = place(costs, [Budget("cpu", nbytes, True)], small_first=small_first, kind="Q2_K")
    streamed = [cost for cost in costs if placement.of(cost.name).tier is Tier.STREAMED]
    copies = placement.copies
    assert copies is not None
    assert copies.nbytes == sum(cost.copy for cost in streamed)
    free = [cost for cost in costs if not cost.must_stay and not cost.by_rows]
    least = sum(cost.ready for cost in costs if cost.must_stay) + max((cost.scratch for cost in free), default=0)
    least += SLOTS * max((cost.stored for cost in free), default=0) + sum(cost.copy for cost in free)
    assert copies.lacking <= max(least - nbytes, 0)
    if streamed and not copies.lacking:
        assert footprint(costs, placement, "cpu") + copies.nbytes <= nbytes
    plain = place([replace(cost, copy=0) for cost in costs], [Budget("cpu", nbytes, True)], small_first=small_first)
    assert bool(streamed) == (Tier.STREAMED in {placed.tier for placed in plain.units})


def test_copies_of_experts_come_before_slots() -> None:
    costs, budget = [layer("a", 100), layer("b", 100)], Budget("cpu", 1500, True)
    plain = [experts_of("a"), experts_of("b")]
    copied = [replace(cost, copy=300) for cost in plain]
    placements = [place(costs, [budget], experts=some, kind="Q2_K") for some in (plain, copied)]
    assert placements[1].copies == Copies("Q2_K", 600)
    assert [placement.pools[0].slots for placement in placements] == [9, 3]
    short = place(costs, [replace(budget, nbytes=500)], experts=copied, kind="Q2_K")
    assert short.copies is not None
    assert short.copies.lacking > 0


def test_fitting_units_are_resident_to_the_byte() -> None:
    costs = model(4, stored=100, ready=300)
    need = 4 * 300 + 301
    assert place(costs, [Budget("cpu", need, True)]).is_resident
    below = tiers(place(costs, [Budget("cpu", need - 1, True)]))
    assert below["layers.0"] is Tier.PACKED
    assert below["head"] is Tier.RESIDENT


def test_packed_tier_needs_memory_to_dequantize_one_unit() -> None:
    costs = model(4, stored=100, ready=300)
    need = 4 * 100 + 301 + 300
    quantized = tiers(place(costs, [Budget("cpu", need, True)]))
    assert [quantized[f"layers.{i}"] for i in range(4)] == [Tier.PACKED] * 4
    assert Tier.STREAMED in tiers(place(costs, [Budget("cpu", need - 1, True)])).values()


def test_units_of_equal_ready_size_are_resident_on_a_device_and_packed_on_the_host() -> None:
    """bfloat16 weights on a GPU that computes in float16, of which a part is streamed."""
    costs = model(8, stored=100, ready=100)
    costs = [replace(cost, is_view=False) for cost in costs]
    for is_host, tier in ((False, Tier.RESIDENT), (True, Tier.PACKED)):
        placement = place(costs, [Budget("here", 850, is_host)])
        by_unit = tiers(placement)
        assert Tier.STREAMED in by_unit.values()
        assert by_unit["head"] is tier
        assert {by_unit[f"layers.{i}"] for i in range(8)} == {tier, Tier.STREAMED}
        assert footprint(costs, placement, "here") <= 850


def test_zero_budget() -> None:
    by_unit = tiers(place(model(3), [Budget("cpu", 0, True)]))
    assert by_unit == {
        "embed": Tier.STREAMED,
        "layers.0": Tier.STREAMED,
        "layers.1": Tier.STREAMED,
        "layers.2": Tier.STREAMED,
        "norm": Tier.RESIDENT,
        "head": Tier.STREAMED,
    }


def test_small_units_are_kept_first_by_default() -> None:
    room = SLOTS * 150 + 1 + 350
    first = tiers(place(model(8), [Budget("cpu", room, True)]))
    assert first["embed"] is first["head"] is Tier.RESIDENT
    assert (
        sum(tier is Tier.RESIDENT for tier in first.values()) == 4
    )  # and a layer, since the buffers need only hold layers
    evenly = tiers(place(model(8), [Budget("cpu", room, True)], small_first=False))
    assert Tier.STREAMED in (evenly["embed"], evenly["head"])
    assert sum(evenly[f"layers.{i}"] is Tier.RESIDENT for i in range(8)) >= 2


@settings(max_examples=draws(200))
@given(st.integers(1, 60), st.integers(0, 60))
def test_kept_layers_are_spread_evenly(layers: int, kept: int) -> None:
    """So that the transfer of each streamed layer hides behind the computation of as many others as possible."""
    kept = min(kept, layers - 1)
    costs = [layer(f"layers.{i}", 100) for i in range(layers)]
    by_unit = tiers(place(costs, [Budget("cpu", SLOTS * 100 + kept * 100, True)]))
    flags = [by_unit[f"layers.{i}"] is Tier.RESIDENT for i in range(layers)]
    if kept + SLOTS >= layers:
        assert all(flags)
        return
    assert sum(flags) == kept
    for length in range(layers + 1):
        assert abs(sum(flags[:length]) - length * kept / layers) <= 1


@settings(max_examples=draws(100))
@given(st.integers(2, 40), st.integers(0, 3000), st.integers(0, 3000))
def test_larger_budget_keeps_at_least_as_much(layers: int, room: int, more: int) -> None:
    costs = model(layers, stored=100, ready=250)

    def streamed(nbytes: int) -> int:
        return place(costs, [Budget("cpu", nbytes, True)]).streamed_bytes

    assert streamed(room + more) <= streamed(room)


def test_mapped_embedding_takes_no_memory() -> None:
    costs = [layer("embed", 10_000, is_layer=False, by_rows=True), *(layer(f"layers.{i}", 100) for i in range(3))]
    assert place(costs, [Budget("cpu", 300, True)]).is_resident
    on_gpu = tiers(place(costs, [Budget("cuda:0", 300, False)]))
    assert on_gpu["embed"] is Tier.ROWS
    assert on_gpu["layers.2"] is Tier.RESIDENT


def test_tied_embeddings_are_dequantized_once() -> None:
    """Where they have to be made, as at 4bit, and where the device is none that maps files."""
    embed, head = tied(layer("embed", 100, 400, is_layer=False, by_rows=True), layer("head", 0, is_layer=False))
    costs = [embed, *(layer(f"layers.{i}", 100, 400) for i in range(3)), head]
    for budget in (Budget("cpu", 1600, True), Budget("cuda:0", 1600, False)):
        assert place(costs, [budget]).is_resident
        assert tiers(place(costs, [replace(budget, nbytes=1599)]))["embed"] is Tier.ROWS
    two = place(costs, [Budget("cuda:0", 1000, False), Budget("cuda:1", 1600, False)])
    assert [(p.device, p.counted) for p in two.units if p.unit in ("embed", "head")] == [
        ("cuda:0", 100),
        ("cuda:1", 100),
    ]


@pytest.mark.parametrize("is_host", [True, False])
def test_packed_tied_units(is_host: bool) -> None:
    """An encoder's embedding, a decoder's and a head: in a mapped file they are there once, on a device each is."""
    embeds = tied(*(layer(name, 300, 900, is_layer=False) for name in ("first", "second", "head")))
    costs = [*embeds, *(layer(f"layers.{i}", 10, 400) for i in range(20))]
    scratch, layers = 900, 20 * 10
    whole = scratch + layers + (300 if is_host else 900)
    for room, kept in ((whole, True), (whole - 1, False)):
        placement = place(costs, [Budget("here", room, is_host)])
        assert (Tier.STREAMED not in tiers(placement).values()) == kept
    placement = place(costs, [Budget("here", whole, is_host)])
    assert sum(p.counted for p in placement.units) == layers + (300 if is_host else 900)
    smallest = place(costs, [Budget("here", scratch + 300 + SLOTS * 300, is_host)])
    kept = Tier.PACKED if is_host else Tier.STREAMED
    assert [tiers(smallest)[cost.name] for cost in embeds] == [Tier.PACKED, kept, kept]


@pytest.mark.parametrize(
    ("view", "is_host", "room", "counted"),
    [
        (True, True, 10_000, {"embed": (Tier.MAPPED, 0), "head": (Tier.RESIDENT, 100)}),
        (True, True, 0, {"embed": (Tier.MAPPED, 0), "head": (Tier.STREAMED, 100)}),
        (False, True, 10_000, {"embed": (Tier.RESIDENT, 100), "head": (Tier.RESIDENT, 0)}),
        (False, True, 0, {"embed": (Tier.ROWS, 0), "head": (Tier.STREAMED, 100)}),
        (True, False, 10_000, {"embed": (Tier.RESIDENT, 100), "head": (Tier.RESIDENT, 0)}),
        (False, False, 0, {"embed": (Tier.ROWS, 0), "head": (Tier.STREAMED, 100)}),
    ],
)
def test_shared_tensors_are_counted_at_one_unit(
    view: bool, is_host: bool, room: int, counted: dict[str, tuple[Tier, int]]
) -> None:
    ready = None if view else 400
    embed, head = tied(layer("embed", 100, ready, is_layer=False, by_rows=True), layer("head", 0, is_layer=False))
    costs = [embed, *(layer(f"layers.{i}", 500, None if view else 2000) for i in range(3)), head]
    placement = place(costs, [Budget("here", room, is_host)])
    by_unit = {placed.unit: (placed.tier, placed.counted) for placed in placement.units}
    assert {name: by_unit[name] for name in counted} == counted
    assert sum(placed.counted for placed in placement.units) == 1600
    table = [line.split() for line in str(placement).splitlines()[1:] if not line.startswith("each pass")]
    assert sum(int(row[-3]) for row in table) == 5


def test_each_unit_has_its_own_page_locked_memory() -> None:
    first, second = tied(layer("first", 300, is_layer=False), layer("second", 0, is_layer=False))
    placement = place([first, second], [Budget("cuda:0", 0, False)], host_bytes=10_000)
    assert [(placed.tier, placed.counted) for placed in placement.units] == [(Tier.PINNED, 300)] * 2


def test_quantized_embedding_is_read_by_rows() -> None:
    embed = layer("embed", 100, 400, is_layer=False, by_rows=True)
    costs = [embed, *(layer(f"layers.{i}", 100, 400) for i in range(3))]
    assert tiers(place(costs, [Budget("cpu", 1600, True)]))["embed"] is Tier.RESIDENT
    assert tiers(place(costs, [Budget("cpu", 1599, True)]))["embed"] is Tier.ROWS


@pytest.mark.parametrize(
    ("ready", "is_host", "is_view", "expected"),
    [
        (LARGE_TABLE, True, False, Tier.ROWS),
        (LARGE_TABLE - 1, True, False, Tier.RESIDENT),
        (LARGE_TABLE, False, False, Tier.RESIDENT),
        (LARGE_TABLE, True, True, Tier.MAPPED),
    ],
)
def test_no_large_matrix_is_made_for_the_rows_of_a_token(
    ready: int, is_host: bool, is_view: bool, expected: Tier
) -> None:
    """Also where everything fits; then the model is no less resident, and what is not made needs no memory."""
    embed = replace(layer("embed", 100, ready, is_layer=False, by_rows=True), is_view=is_view)
    costs = [embed, *(layer(f"layers.{i}", 100, 400) for i in range(3))]
    placement = place(costs, [Budget("cpu" if is_host else "cuda:0", ready + 1200, is_host)])
    assert tiers(placement) == {"embed": expected} | {f"layers.{i}": Tier.RESIDENT for i in range(3)}
    assert placement.is_resident
    shared = tied(replace(embed, ready=ready + 1), layer("head", 100, ready + 1, is_layer=False))
    both = tiers(place(shared, [Budget("cpu" if is_host else "cuda:0", 4 * ready, is_host)]))
    assert both["embed"] is (Tier.MAPPED if expected is Tier.MAPPED else Tier.RESIDENT)
    least = place(costs, [Budget("cpu" if is_host else "cuda:0", 1200, is_host)])
    assert (tiers(least)["layers.0"] is Tier.RESIDENT) == (expected is not Tier.RESIDENT)


@pytest.mark.parametrize(("rooms", "counts"), [((1000, 1000), (4, 4)), ((3000, 1000), (6, 2)), ((0, 1000), (0, 8))])
def test_devices_get_runs_in_proportion_to_budgets(rooms: tuple[int, int], counts: tuple[int, int]) -> None:
    costs = [layer(f"layers.{i}", 100) for i in range(8)]
    placement = place(costs, [Budget(f"cuda:{i}", room, False) for i, room in enumerate(rooms)])
    devices = [placed.device for placed in placement.units]
    assert devices == ["cuda:0"] * counts[0] + ["cuda:1"] * counts[1]
    assert placement.home == devices[0]


@settings(max_examples=draws(100))
@given(st.integers(1, 20), st.lists(st.integers(0, 1000), min_size=2, max_size=4))
def test_devices_alternate_and_links_copy_equally_if_not_all_units_fit(rounds: int, rooms: list[int]) -> None:
    budgets = [Budget(f"cuda:{i}", room, False) for i, room in enumerate(rooms)]
    costs = [layer(f"layers.{i}", 100) for i in range(rounds * len(rooms) + sum(rooms) // 100)]
    placement = place(costs, budgets, host_bytes=1 << 40)
    if placement.uploaded_bytes == 0:
        return
    links = [sum(p.stored for p in placement.units if p.device == b.device and p.tier is Tier.PINNED) for b in budgets]
    assert max(links) - min(links) <= 2 * SLOTS * 100  # the buffers of a device without streamed units are free
    if len(set(rooms)) == 1:
        devices = [placed.device for placed in placement.units]
        assert all(len(set(devices[i : i + len(rooms)])) == len(rooms) for i in range(len(devices) - len(rooms) + 1))


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.integers(2, 9),
    st.lists(st.integers(0, 2000), min_size=2, max_size=3),
)
def test_units_between_layers_are_on_one_device(
    before: list[int], after: list[int], layers: int, rooms: list[int]
) -> None:
    """Models add the results of token, position and per-layer embeddings, which GPUs do only on one of them."""
    first = [layer(f"before.{i}", stored, is_layer=False) for i, stored in enumerate(before)]
    last = [layer(f"after.{i}", stored, is_layer=False) for i, stored in enumerate(after)]
    costs = [*first, *(layer(f"layers.{i}", 100) for i in range(layers)), *last]
    placement = place(costs, [Budget(f"cuda:{i}", room, False) for i, room in enumerate(rooms)])
    for group in (first, last):
        assert len({placement.of(cost.name).device for cost in group}) == 1


def test_each_device_fills_its_budget() -> None:
    costs = [layer(f"layers.{i}", 100) for i in range(9)]
    placement = place(costs, [Budget("cuda:0", 450, False), Budget("cuda:1", 450, False)])
    streamed = [placed.unit for placed in placement.units if placed.tier is Tier.STREAMED]
    assert {placement.of(unit).device for unit in streamed} == {"cuda:0"}
    assert placement.streamed_bytes == 300


def test_cached_layers_are_kept_at_any_budget() -> None:
    by_unit = tiers(place(model(5), [Budget("cpu", 0, True)], cached_layers=2))
    assert [by_unit[f"layers.{i}"] for i in range(5)] == [Tier.RESIDENT] * 2 + [Tier.STREAMED] * 3
    quantized = tiers(place(model(5, ready=300), [Budget("cpu", 0, True)], cached_layers=2))
    assert quantized["layers.1"] is Tier.PACKED
    assert quantized["embed"] is Tier.STREAMED
    gpu = tiers(place(model(5), [Budget("cuda:0", 0, False)], cached_layers=2))
    assert [gpu[f"layers.{i}"] for i in range(5)] == [Tier.PINNED] * 2 + [Tier.STREAMED] * 3
    assert gpu["embed"] is Tier.STREAMED


gpu_lists = st.lists(st.integers(0, 20_000), min_size=1, max_size=4).map(
    lambda rooms: [Budget(f"cuda:{number}", room, False) for number, room in enumerate(rooms)]
)


@settings(max_examples=draws(300))
@given(units(), budget_lists, st.integers(0, 20_000), st.integers(0, 3))
def test_host_memory_is_not_exceeded_and_serves_other_devices(
    costs: list[UnitCost], budgets: list[Budget], room: int, cached: int
) -> None:
    without = place(costs, budgets, cached_layers=cached)
    placement = place(costs, budgets, cached_layers=cached, host_bytes=room)
    host = {budget.device for budget in budgets if budget.is_host}
    pairs = zip(without.units, placement.units, strict=True)
    changed = [(old, new) for old, new in pairs if replace(old, tied=0) != replace(new, tied=0)]
    assert all({old.tier, new.tier} == {Tier.STREAMED, Tier.PINNED} for old, new in changed)
    pinned = [placed for placed in placement.units if placed.tier is Tier.PINNED]
    assert not any(placed.device in host for placed in pinned)
    streamed = [placed for placed in placement.units if placed.tier is Tier.STREAMED and placed.device not in host]
    buffers = sum(
        STAGING * max((placed.stored for placed in streamed if placed.device == budget.device), default=0)
        for budget in budgets
    )
    asked_for = sum(sorted((c.stored for c in costs if c.is_layer), reverse=True)[:cached])
    if any(placed.stored for placed in pinned):
        assert sum(placed.stored for placed in pinned) <= max(room - buffers, 0) + asked_for
    moved = sum(placed.stored for placed in (*pinned, *streamed))
    assert placement.uploaded_bytes == moved
    assert placement.uploaded_bytes - placement.streamed_bytes <= sum(placed.stored for placed in pinned)


@settings(max_examples=draws(100))
@given(units(), gpu_lists)
def test_without_host_memory_no_unit_is_page_locked(costs: list[UnitCost], budgets: list[Budget]) -> None:
    assert not [p for p in place(costs, budgets, host_bytes=0).units if p.tier is Tier.PINNED and p.stored]
    everything = place(costs, budgets, host_bytes=1 << 40)
    assert not [p for p in everything.units if p.tier is Tier.STREAMED and p.stored]


@settings(max_examples=draws(200))
@given(st.integers(3, 60), st.lists(st.integers(0, 3000), min_size=1, max_size=3), st.integers(0, 60))
def test_disk_reads_are_spread_evenly_over_the_pass(layers: int, rooms: list[int], kept: int) -> None:
    """Over the units of each device that are not on it: so it reads from the disk at even distances."""
    budgets = [Budget(f"cuda:{index}", room, False) for index, room in enumerate(rooms)]
    costs = [layer(f"layers.{i}", 100) for i in range(layers)]
    streamed = [p for p in place(costs, budgets).units if p.tier is Tier.STREAMED]
    away = sorted(streamed, key=lambda placed: placed.device)
    if len(away) <= kept or not away:
        return
    used = len({placed.device for placed in away})
    placement = place(costs, budgets, host_bytes=100 * (kept + STAGING * used))
    flags = [placement.of(placed.unit).tier is Tier.PINNED for placed in away]
    if kept + STAGING * used >= len(away):
        assert all(flags)
        return
    assert sum(flags) == kept
    for length in range(len(away) + 1):
        assert abs(sum(flags[:length]) - length * kept / len(away)) <= 1
    for budget in budgets:
        of_device = [flag for flag, placed in zip(flags, away, strict=True) if placed.device == budget.device]
        assert abs(sum(of_device) - len(of_device) * kept / len(away)) <= 2


@settings(max_examples=draws(200))
@given(st.integers(1, 60), st.integers(0, 60))
def test_pinned_units_are_spread_evenly_among_kept_ones(layers: int, kept: int) -> None:
    costs = [layer(f"layers.{i}", 100) for i in range(layers)]
    placement = place(costs, [Budget("cuda:0", SLOTS * 100 + kept * 100, False)], host_bytes=1 << 40)
    flags = [placed.tier is Tier.PINNED for placed in placement.units]
    for length in range(layers + 1):
        assert abs(sum(flags[:length]) - length * sum(flags) / layers) <= 1


@settings(max_examples=draws(100))
@given(st.integers(2, 40), st.integers(0, 6000), st.integers(0, 3000))
def test_more_host_memory_reads_no_more(layers: int, room: int, more: int) -> None:
    costs, gpu = [layer(f"layers.{i}", 100, 250) for i in range(layers)], [Budget("cuda:0", 0, False)]
    read = [place(costs, gpu, host_bytes=nbytes).streamed_bytes for nbytes in (room, room + more)]
    assert read[1] <= read[0]


GB = 10**9


def test_placement_prints_as_a_table() -> None:
    costs = [layer(f"layers.{i}", GB) for i in range(6)]
    placement = place(costs, [Budget("cuda:0", 3 * GB, False), Budget("cuda:1", 4 * GB, False)])
    assert str(placement).splitlines() == [
        "device  tier      units     size",
        "cuda:0  resident      3  3.00 GB",
        "cuda:1  resident      3  3.00 GB",
    ]


def test_placement_prints_the_traffic_of_a_pass() -> None:
    costs = [layer(f"layers.{i}", GB) for i in range(12)]
    budgets = [Budget("cuda:0", 4 * GB, False), Budget("cuda:1", 4 * GB, False)]
    assert str(place(costs, budgets, host_bytes=6 * GB)).splitlines() == [
        "device  tier             units     size",
        "cuda:0  resident             2  2.00 GB",
        "cuda:0  page-locked RAM      1  1.00 GB",
        "cuda:0  streamed             3  3.00 GB",
        "cuda:1  resident             2  2.00 GB",
        "cuda:1  page-locked RAM      1  1.00 GB",
        "cuda:1  streamed             3  3.00 GB",
        "each pass: 4.00 GB are copied to cuda:0, 4.00 GB are copied to cuda:1, 6.00 GB are read from the disk",
    ]
    on_host = str(place(costs, [Budget("cpu", 4 * GB, True)]))
    assert on_host.splitlines()[-1] == "each pass: 10.00 GB are read from the disk"


SLOT, EXPERTS = 100, 20


def experts_of(unit: str, ready: int | None = None) -> ExpertCost:
    """Twenty experts of 100 bytes each; used as they are stored unless they have another size when made."""
    stored = SLOT * EXPERTS
    return ExpertCost(f"{unit}.experts", unit, stored, ready or stored, ready is None, EXPERTS, SLOT, 4)


def mixture(layers: int, ready: int | None = None) -> tuple[list[UnitCost], list[ExpertCost]]:
    """Layers of 100 bytes each, and their experts."""
    costs = [dataclasses.replace(layer(f"layers.{i}", 100), routed=SLOT * EXPERTS) for i in range(layers)]
    return costs, [experts_of(cost.name, ready) for cost in costs]


def placed(layers: int, *budgets: Budget, host: int = 0, ready: int | None = None) -> Placement:
    costs, experts = mixture(layers, ready)
    return place(costs, budgets, host_bytes=host, experts=experts)


def test_experts_that_all_fit_are_resident() -> None:
    placement = placed(3, Budget("cpu", 3 * 100 + 3 * SLOT * EXPERTS, True))
    assert placement.is_resident
    assert {expert.tier for expert in placement.experts} == {Tier.RESIDENT}
    assert placement.pools == ()


def test_experts_that_fit_only_as_stored_are_packed() -> None:
    placement = placed(3, Budget("cpu", 300 + 3 * SLOT * EXPERTS, True), ready=9_000)
    assert {expert.tier for expert in placement.experts} == {Tier.PACKED}
    assert set(tiers(placement).values()) == {Tier.RESIDENT}


def test_units_of_every_token_are_kept_before_experts() -> None:
    placement = placed(3, Budget("cpu", 3 * 100 + 4 * SLOT + 7 * SLOT, True))
    assert set(tiers(placement).values()) == {Tier.RESIDENT}
    (pool,) = placement.pools
    assert (pool.slots, pool.transit, pool.host_slots) == (7, 4, 0)
    assert not placement.is_resident
    assert "experts, by routing" in str(placement)


@settings(max_examples=draws(200))
@given(st.integers(1, 6), st.integers(0, 20_000), st.booleans())
def test_units_and_experts_stay_within_the_limit(layers: int, room: int, is_host: bool) -> None:
    costs, experts = mixture(layers)
    placement = place(costs, [Budget("d", room, is_host)], experts=experts)
    at_once = footprint(costs, placement, "d") + sum(pool.nbytes for pool in placement.pools)
    at_once += sum(expert.stored for expert in placement.experts if expert.tier is not Tier.ROUTED)
    least = 4 * SLOT + 2 * 100  # slots for transit and for streamed units are taken in any case
    assert at_once <= max(room, least)
    assert all(pool.slots <= layers * EXPERTS for pool in placement.pools)


@settings(max_examples=draws(200))
@given(st.integers(1, 6), st.integers(0, 14_000), st.integers(0, 4_000))
def test_larger_budget_keeps_at_least_as_many_experts(layers: int, room: int, more: int) -> None:
    def kept(nbytes: int) -> int:
        placement = placed(layers, Budget("d", nbytes, True))
        return sum(pool.slots for pool in placement.pools) if placement.pools else layers * EXPERTS

    assert kept(room + more) >= kept(room)


@settings(max_examples=draws(200))
@given(st.integers(1, 6), st.lists(st.integers(0, 8_000), min_size=1, max_size=3), st.integers(0, 20_000))
def test_host_memory_holds_experts_beyond_the_devices(layers: int, rooms: list[int], host: int) -> None:
    placement = placed(layers, *(Budget(f"cuda:{i}", room, False) for i, room in enumerate(rooms)), host=host)
    assert all(pool.slots + pool.host_slots <= pool.experts for pool in placement.pools)
    kept = sum(pool.host_slots * pool.slot for pool in placement.pools)
    pinned = sum(unit.stored for unit in placement.units if unit.tier is Tier.PINNED)
    staging = sum(EXPERT_STAGING * pool.slot for pool in placement.pools)
    assert kept + pinned + (staging if kept else 0) <= host
    assert {pool.device for pool in placement.pools} == {unit.device for unit in placement.experts}


def test_shares_of_devices_count_experts() -> None:
    """The first layer has ten times the bytes of the others, nearly all of them in experts."""
    costs, experts = mixture(1)
    costs += [layer(f"dense.{i}", 200) for i in range(10)]
    placement = place(costs, [Budget("cuda:0", 2_000, False), Budget("cuda:1", 2_000, False)], experts=experts)
    assert [unit.unit for unit in placement.units if unit.device == "cuda:0"] == ["layers.0"]


def test_page_locked_memory_of_all_devices_counts_as_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "available_ram", lambda: 1000)
    gpu = FakeGpu(0)
    units = (
        PlacedUnit("a", gpu.name, Tier.RESIDENT, 500),
        PlacedUnit("b", gpu.name, Tier.PINNED, 300),
        PlacedUnit("c", gpu.name, Tier.STREAMED, 700),
        PlacedUnit("d", "cpu", Tier.RESIDENT, 20),
        PlacedUnit("e", "cpu", Tier.PACKED, 3),
        PlacedUnit("f", "cpu", Tier.STREAMED, 70),
    )
    placement = Placement(units, (Budget(gpu.name, 0, False), Budget("cpu", 0, True)))
    assert load_plan.cache_room(placement) == 1000 - 300 - 20 - 3


def test_embeddings_read_by_rows_take_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "available_ram", lambda: 1000)
    units = (
        PlacedUnit("a", "cpu", Tier.MAPPED, 500),
        PlacedUnit("b", "cpu", Tier.ROWS, 400),
        PlacedUnit("c", "cpu", Tier.PACKED, 30),
        PlacedUnit("d", "cpu", Tier.PACKED, 30, tied=30),
    )
    assert load_plan.cache_room(Placement(units, (Budget("cpu", 0, True),))) == 1000 - 30


@pytest.fixture(params=[None, "4bit"], ids=str)
def tied_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return split(build_checkpoint(tmp_path / "m", "qwen2", tied=True, dtype=torch.bfloat16), request.param)


def stored(model: Any) -> int:
    """Bytes of all tensors in the layer files."""
    return sum(tensor.nbytes for tensor in model._internals.origin.store.tensors.values())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("budget", [0, 200_000, ALL])
def test_tied_embeddings_are_counted_once(tied_folder: Path, budget: int, exact: bool) -> None:
    model = load(tied_folder, budget, exact=exact)
    units = model.placement.units
    assert sum(placed.stored for placed in units) > stored(model)
    assert sum(placed.counted for placed in units) == stored(model)
    assert sum(sum(words.values()) for words in model.placement.bytes_by_device.values()) == stored(model)


def test_dequantized_tied_embeddings_need_memory_for_one(tmp_path: Path) -> None:
    folder = split(build_checkpoint(tmp_path / "m", "qwen2", tied=True), "4bit")
    model = load(folder)
    once = bytes_when_made(model)
    assert model.get_memory_footprint(return_buffers=False) == once
    assert load(folder, once).placement.is_resident
    assert not load(folder, once - 1).placement.is_resident
    gpus = [load_on([FakeGpu(0)], folder, budget) for budget in (once, once - 1)]
    assert [gpu.placement.is_resident for gpu in gpus] == [True, False]


def test_tied_layers_are_counted_once(tmp_path: Path) -> None:
    """Zamba2's shared blocks: each layer that has them is made from the same tensors."""
    build(tmp_path / "m", "zamba2")
    model = load(split(tmp_path / "m"))
    assert sum(placed.counted for placed in model.placement.units) == stored(model)
    assert model.placement.is_resident


def test_zero_budget_maps_the_embedding(tmp_path: Path) -> None:
    model = load(split(build_checkpoint(tmp_path / "m", "llama")), 0)
    by_unit = tiers_of(model)
    assert by_unit["model.embed_tokens"] is Tier.MAPPED
    assert by_unit["model.norm"] is Tier.RESIDENT
    assert {tier for unit, tier in by_unit.items() if "embed" not in unit and unit != "model.norm"} == {Tier.STREAMED}
    rows = [line.split() for line in str(model.placement).splitlines()[1:-1]]
    assert [row[:-3] for row in rows] == [["cpu", "resident"], ["cpu", "mapped", "rows"], ["cpu", "streamed"]]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, 512),
        (1, 512),
        (513, 1024),
        (MIB, MIB),
        (MIB + 1, 20 * MIB // 19),
        (7 * MIB, 10 * MIB),
        (9 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (354 * MIB, 354 * MIB),
    ],
)
def test_bytes_taken_by_size(nbytes: int, expected: int) -> None:
    assert allocated_bytes(nbytes) == expected


@given(st.integers(1, 1 << 34), st.integers(1, 200))
def test_slots_fit_their_predicted_segments(nbytes: int, count: int) -> None:
    """Segment by segment, as the allocator fills them."""
    rounded = -(-nbytes // 512) * 512
    if rounded >= 10 * MIB:
        held = count * (-(-rounded // (2 * MIB)) * 2 * MIB)
    else:
        segment = 2 * MIB if rounded <= MIB else 20 * MIB
        held = -(-count // (segment // rounded)) * segment
    assert nbytes <= allocated_bytes(nbytes)
    last = 20 * MIB if rounded < 10 * MIB else 0  # the last segment may not be full
    rounding = count  # of shares to whole bytes
    assert count * allocated_bytes(nbytes) <= held + rounding
    assert held <= count * allocated_bytes(nbytes) + rounding + last


def test_expert_slots_on_a_gpu_count_allocator_segments() -> None:
    costs, experts = mixture(3)
    room = 4 * 100 + 300 + 5 * 512
    for is_host, slots in ((True, 5 * 512 // 100), (False, 5)):
        (pool,) = place(costs, [Budget("d", room, is_host)], experts=experts).pools
        assert pool.slots == slots
