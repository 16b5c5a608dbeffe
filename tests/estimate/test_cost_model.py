"""The work of a pass, compared with the model itself; experts; and the time of a pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.expert_pool import ExpertCache
from rabbitllm.engine.load_plan import LoadPlan, make_load_plan
from rabbitllm.engine.placement import Tier
from rabbitllm.estimate.cost_model import (
    Product,
    Strain,
    UnitTime,
    UnitWork,
    experts_of,
    pass_seconds,
    routed_work,
    shapes,
    work_of,
)
from tests.splitter.test_plan import planned
from tests.support.builders import build_checkpoint


def drawn(
    folder: Path, family: str, compression: str | None = None, room: int = 1 << 34, **settings: object
) -> LoadPlan:
    build_checkpoint(folder, family, dtype=torch.bfloat16, tied=family == "t5", **settings)  # type: ignore[arg-type]
    options = RunOptions(device="cpu", max_memory={"cpu": room}, show_progress=False)
    return make_load_plan(planned(folder, compression), options, folder, [CpuDevice()])


def touched(work: tuple[UnitWork, ...], form: str, tokens: int = 1) -> float:
    return sum(product.touched(tokens) for unit in work for product in unit.products if product.form == form)


def test_every_matrix_of_a_dense_model_is_multiplied_with_once(tmp_path: Path) -> None:
    found = drawn(tmp_path / "m", "llama")
    linears = [module for module in found.model.modules() if isinstance(module, nn.Linear)]
    work = work_of(found)
    assert touched(work, "bfloat16") == sum(2 * linear.weight.numel() for linear in linears)
    assert touched(work, "bfloat16", 16) == touched(work, "bfloat16")
    assert sum(shapes(work, "bfloat16").values()) == touched(work, "bfloat16")
    assert not any(unit.hooked or unit.streamed for unit in work)
    assert [unit.modules > 5 for unit in work] == [".layers." in unit.unit for unit in work]


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
def test_compressed_matrices_are_multiplied_from_their_codes(tmp_path: Path, scheme: str) -> None:
    found = drawn(tmp_path / "m", "llama", scheme, hidden_size=128, intermediate_size=256)
    work = work_of(found)
    quantized = [
        source.stored[job.recipe.sources[0][1]]
        for source in found.sources.values()
        for job in source.jobs
        if job.quantized
    ]
    assert len(quantized) > 10
    assert touched(work, scheme) == sum(tensor.nbytes for tensor in quantized)


def test_what_does_not_fit_is_streamed_and_bound_for_each_pass(tmp_path: Path) -> None:
    found = drawn(tmp_path / "m", "llama", room=0)
    work = work_of(found)
    assert sum(unit.streamed for unit in work) == found.placement.streamed_bytes > 0
    assert {unit.hooked for unit in work if unit.streamed} == {True}
    layers = [unit for unit in work if unit.modules]
    assert len({unit.kind for unit in layers}) == 1


def test_experts_are_no_products_of_their_layer(tmp_path: Path) -> None:
    found = drawn(tmp_path / "m", "qwen3_moe")
    products = [product for unit in work_of(found) for product in unit.products]
    assert {product.share for product in products} == {1.0}
    linears = [module.weight for module in found.model.modules() if isinstance(module, nn.Linear)]
    routers = [module.weight for name, module in found.model.named_modules() if name.endswith("mlp.gate")]
    assert sum(product.nbytes for product in products) == sum(2 * weight.numel() for weight in linears + routers)


def test_of_experts_that_come_with_their_layer_a_token_needs_those_that_are_picked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a family whose experts are not brought in by themselves."""
    monkeypatch.setattr("rabbitllm.engine.load_plan.expert_sources", lambda *given: [])
    work = work_of(drawn(tmp_path / "m", "qwen3_moe"))
    shares = {product.share for unit in work for product in unit.products}
    assert shares == {0.5, 1.0}  # 2 of 4
    experts = [product for unit in work for product in unit.products if product.share < 1]
    assert [product.touched(1) / product.nbytes for product in experts] == [0.5] * len(experts)
    assert 0.99 < experts[0].touched(16) / experts[0].nbytes < 1
    assert Product("bfloat16", (2, 3), 100).touched(5) == 100


def test_an_encoder_is_passed_once(tmp_path: Path) -> None:
    work = work_of(drawn(tmp_path / "m", "t5"))
    assert {unit.unit.split(".")[0] for unit in work if unit.once} == {"encoder"}
    assert not any(unit.unit.startswith("encoder") for unit in work if not unit.once)


# Experts


MANY = {"num_experts": 12, "num_experts_per_tok": 3}


def test_experts_that_stay_are_read_by_no_token(tmp_path: Path) -> None:
    found = drawn(tmp_path / "m", "qwen3_moe", **MANY)
    work = routed_work(found)
    assert [routed.name for routed in work] == [source.name for source in found.experts]
    assert {(routed.tier, routed.on_device, routed.missed, routed.read_bytes) for routed in work} == {
        (Tier.RESIDENT, 1.0, 0.0, 0.0)
    }
    (own,) = experts_of(work)
    assert own.kept_bytes == own.stored_bytes == sum(source.stored_bytes for source in found.experts)
    assert own.used_bytes == own.stored_bytes * 3 / 12
    assert (own.count, own.used) == (3 * 12, 3 * 3)


def test_of_experts_that_come_and_go_what_is_kept_is_not_read(tmp_path: Path) -> None:
    found = drawn(tmp_path / "m", "qwen3_moe", room=700_000, **MANY)
    (pool,) = found.placement.pools
    assert 0 < pool.slots < 36
    work = routed_work(found)
    for routed in work:
        assert routed.on_device == pool.slots / 36
        assert routed.read_bytes == pytest.approx((1 - pool.slots / 36) * 3 * routed.expert_bytes)
        assert routed.copied_bytes == 0
    (own,) = experts_of(work)
    assert own.kept_bytes == pytest.approx(own.stored_bytes * pool.slots / 36, abs=1)


def test_a_prompt_touches_more_experts_than_a_token_and_never_more_than_there_are(tmp_path: Path) -> None:
    (routed, *_) = routed_work(drawn(tmp_path / "m", "qwen3_moe", room=0, **MANY))
    assert routed.touched_bytes(1) == pytest.approx(routed.used_bytes)
    assert routed.touched_bytes(2) == pytest.approx((3 + 3 * 9 / 12) * routed.expert_bytes)
    assert routed.touched_bytes(1000) == pytest.approx(12 * routed.expert_bytes)


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_used_alike_a_cache_finds_the_share_that_it_keeps(share: float) -> None:
    """What plans assume, of the engine's own cache."""
    experts, used, tokens = 64, 4, 2000
    cache, random = ExpertCache([experts], int(share * experts)), np.random.default_rng(0)
    found = 0
    for _ in range(tokens):
        chosen = np.sort(random.choice(experts, used, replace=False))
        cache.use(0, chosen, np.ones(used, np.int64), 1)
        slots = cache.slots_of(0, chosen)
        found += int(np.count_nonzero(slots >= 0))
        cache.admit(0, chosen[slots < 0], slots[slots >= 0])
    assert found / (used * tokens) == pytest.approx(share, abs=0.03)


# The time of a pass


SECONDS = st.floats(0, 10).map(lambda value: round(value, 3))
ALONE = st.lists(st.builds(UnitTime, st.just("cpu"), SECONDS, SECONDS), min_size=1, max_size=12)
STEPS = st.lists(st.builds(UnitTime, st.sampled_from(["cpu", "cuda:0"]), SECONDS, SECONDS), min_size=1, max_size=12)


def streamed(count: int, compute: float, read: float) -> list[UnitTime]:
    return [UnitTime("cpu", compute, read)] * count


def test_what_stays_costs_its_computing() -> None:
    assert pass_seconds([UnitTime("cpu", 1), UnitTime("cpu", 2.5)]) == pytest.approx(3.5)
    assert pass_seconds([]) == 0


@pytest.mark.parametrize(("compute", "read", "each"), [(1, 3, 3), (3, 1, 3), (2, 2, 2), (0, 1, 1)])
def test_the_slower_of_both_decides_where_all_is_streamed(compute: float, read: float, each: float) -> None:
    assert pass_seconds(streamed(6, compute, read)) == pytest.approx(6 * each)


def test_a_single_streamed_unit_is_read_ahead_of_nothing() -> None:
    assert pass_seconds([UnitTime("cpu", 1, 3), UnitTime("cpu", 5)]) == pytest.approx(9)


def test_reading_goes_on_while_what_stays_computes() -> None:
    between = [UnitTime("cpu", 1, 4), UnitTime("cpu", 1), UnitTime("cpu", 1), UnitTime("cpu", 1)]
    assert pass_seconds(between * 3) == pytest.approx(12)
    assert pass_seconds([UnitTime("cpu", 1, 5), *between[1:]] * 3) == pytest.approx(15)
    assert pass_seconds([UnitTime("cpu", 1, 3), *between[1:]] * 3) == pytest.approx(12)


def test_what_stays_in_one_place_hides_one_unit_and_no_more() -> None:
    """Two buffers: the next unit is read ahead, and not the one after it."""
    crowded = [*streamed(3, 0, 2), UnitTime("cpu", 10)]
    # units 1 and 2 are waited for; unit 0 comes while the last step of the pass before computes
    assert pass_seconds(crowded) == pytest.approx(2 + 2 + 10)


def test_each_slows_the_other_while_both_go_on() -> None:
    alone, strained = streamed(4, 1, 1), Strain(computing=2, reading=3)
    # together, a second of reading takes three and one of computing two: 2/3 is read by then, 1/3 is read alone
    assert pass_seconds(alone, strained) == pytest.approx(4 * (2 + 1 / 3))
    assert pass_seconds([UnitTime("cpu", 1)], strained) == pytest.approx(1)


def test_devices_read_at_the_same_time_and_share_the_disk() -> None:
    both = [UnitTime("cuda:0", 0, 1), UnitTime("cuda:0", 0, 1), UnitTime("cuda:1", 0, 1), UnitTime("cuda:1", 0, 1)]
    assert pass_seconds(both) == pytest.approx(4)
    hidden = [UnitTime("cuda:0", 4, 1), UnitTime("cuda:0", 4, 1), UnitTime("cuda:1", 4, 1), UnitTime("cuda:1", 4, 1)]
    assert pass_seconds(hidden) == pytest.approx(16)


def test_devices_in_turns_copy_over_all_links_at_the_same_time() -> None:
    in_turns = [UnitTime(f"cuda:{i % 2}", 0, 1, by_link=True) for i in range(20)]
    in_runs = sorted(in_turns, key=lambda step: step.device)
    assert pass_seconds(in_turns) == pytest.approx(10)
    assert pass_seconds(in_runs) == pytest.approx(18)  # of each run one unit is copied ahead
    assert pass_seconds([replace(step, by_link=False) for step in in_turns]) == pytest.approx(20)


@given(ALONE)
def test_between_the_longer_of_both_and_their_sum(steps: list[UnitTime]) -> None:
    computing, reading = sum(step.compute for step in steps), sum(step.read for step in steps)
    assert max(computing, reading) - 1e-6 <= pass_seconds(steps) <= computing + reading + 1e-6


@given(STEPS)
def test_several_devices_take_no_longer_than_one_after_the_other(steps: list[UnitTime]) -> None:
    assert pass_seconds(steps) <= sum(step.compute + step.read for step in steps) + 1e-6


@given(ALONE, st.floats(1, 5), st.floats(1, 5))
def test_strain_never_helps_and_is_bounded(steps: list[UnitTime], computing: float, reading: float) -> None:
    alone, strained = pass_seconds(steps), pass_seconds(steps, Strain(computing, reading))
    assert alone - 1e-6 <= strained
    work = sum(step.compute * computing + step.read * reading for step in steps)
    assert strained <= work + 1e-6
