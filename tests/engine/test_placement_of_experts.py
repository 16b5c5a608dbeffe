"""Where experts go, as arithmetic: after what every token needs, within the limits, in slots of one size."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.engine.placement import EXPERT_STAGING, Budget, ExpertCost, Placement, Tier, UnitCost
from rabbitllm.engine.placing import place
from tests.engine.test_placement import footprint, layer, tiers

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


def test_with_room_for_all_of_them_they_are_used_where_they_lie() -> None:
    found = placed(3, Budget("cpu", 3 * 100 + 3 * SLOT * EXPERTS, True))
    assert found.is_resident
    assert {one.tier for one in found.experts} == {Tier.RESIDENT}
    assert found.pools == ()


def test_what_has_no_room_when_made_is_made_for_each_use() -> None:
    found = placed(3, Budget("cpu", 300 + 3 * SLOT * EXPERTS, True), ready=9_000)
    assert {one.tier for one in found.experts} == {Tier.PACKED}
    assert set(tiers(found).values()) == {Tier.RESIDENT}


def test_what_every_token_needs_comes_first() -> None:
    found = placed(3, Budget("cpu", 3 * 100 + 4 * SLOT + 7 * SLOT, True))
    assert set(tiers(found).values()) == {Tier.RESIDENT}
    (pool,) = found.pools
    assert (pool.slots, pool.transit, pool.host_slots) == (7, 4, 0)
    assert not found.is_resident
    assert "experts, by routing" in str(found)


@settings(max_examples=200)
@given(st.integers(1, 6), st.integers(0, 20_000), st.booleans())
def test_limits_are_kept_by_units_and_experts_together(layers: int, room: int, is_host: bool) -> None:
    costs, experts = mixture(layers)
    found = place(costs, [Budget("d", room, is_host)], experts=experts)
    at_once = footprint(costs, found, "d") + sum(pool.nbytes for pool in found.pools)
    at_once += sum(one.stored for one in found.experts if one.tier is not Tier.ROUTED)
    least = 4 * SLOT + 2 * 100  # slots for transit and for streamed units are taken in any case
    assert at_once <= max(room, least)
    assert all(pool.slots <= layers * EXPERTS for pool in found.pools)


@settings(max_examples=200)
@given(st.integers(1, 6), st.integers(0, 14_000), st.integers(0, 4_000))
def test_more_room_never_keeps_fewer(layers: int, room: int, more: int) -> None:
    def kept(nbytes: int) -> int:
        found = placed(layers, Budget("d", nbytes, True))
        return sum(pool.slots for pool in found.pools) if found.pools else layers * EXPERTS

    assert kept(room + more) >= kept(room)


@settings(max_examples=200)
@given(st.integers(1, 6), st.lists(st.integers(0, 8_000), min_size=1, max_size=3), st.integers(0, 20_000))
def test_host_memory_holds_what_devices_do_not(layers: int, rooms: list[int], host: int) -> None:
    found = placed(layers, *(Budget(f"cuda:{i}", room, False) for i, room in enumerate(rooms)), host=host)
    assert all(pool.slots + pool.host_slots <= pool.experts for pool in found.pools)
    taken = sum(pool.host_slots * pool.slot for pool in found.pools)
    pinned = sum(one.stored for one in found.units if one.tier is Tier.PINNED)
    staging = sum(EXPERT_STAGING * pool.slot for pool in found.pools)
    assert taken + pinned + (staging if taken else 0) <= host
    assert {pool.device for pool in found.pools} == {one.device for one in found.experts}


def test_devices_share_layers_by_their_experts_too() -> None:
    """The first layer has ten times the bytes of the others, nearly all of them in experts."""
    costs, experts = mixture(1)
    costs += [layer(f"dense.{i}", 200) for i in range(10)]
    found = place(costs, [Budget("cuda:0", 2_000, False), Budget("cuda:1", 2_000, False)], experts=experts)
    assert [one.unit for one in found.units if one.device == "cuda:0"] == ["layers.0"]
