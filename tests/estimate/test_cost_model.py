"""The work of a pass, compared with the model itself, and experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rabbitllm.base.options import RunOptions
from rabbitllm.engine._expert_pool import ExpertCache
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.load_plan import LoadPlan, make_load_plan
from rabbitllm.engine.placement import Tier
from rabbitllm.estimate.cost_model import ONE_CALL, Product, UnitWork, experts_of, routed_work, work_of
from tests.splitter.test_plan import planned
from tests.support.builders import build_checkpoint


def drawn(
    folder: Path, family: str, compression: str | None = None, room: int = 1 << 34, bits: int = 16, **settings: object
) -> LoadPlan:
    dtype = "bfloat16" if bits == 16 else "float32"
    build_checkpoint(folder, family, dtype=torch.bfloat16, tied=family == "t5", **settings)  # type: ignore[arg-type]
    options = RunOptions(device="cpu", max_memory={"cpu": room}, show_progress=False, dtype=dtype)
    return make_load_plan(planned(folder, compression), options, folder, [CpuDevice()])


def touched(work: tuple[UnitWork, ...], form: str, tokens: int = 1) -> float:
    return sum(product.touched(tokens) for unit in work for product in unit.products if product.form == form)


def test_each_matrix_of_a_dense_model_is_multiplied_once(tmp_path: Path) -> None:
    plan = drawn(tmp_path / "m", "llama")
    linears = [module for module in plan.model.modules() if isinstance(module, nn.Linear)]
    work = work_of(plan)
    assert touched(work, "bfloat16") == sum(2 * linear.weight.numel() for linear in linears)
    assert touched(work, "bfloat16", 16) == touched(work, "bfloat16")
    assert not any(unit.bound or unit.made or unit.streamed for unit in work)
    assert [unit.modules > 0 for unit in work] == [".layers." in unit.unit for unit in work]


@pytest.mark.parametrize(("room", "bits", "is_one"), [(1 << 34, 16, True), (1 << 34, 32, False), (0, 16, False)])
def test_layers_that_are_one_call_count_as_little(tmp_path: Path, room: int, bits: int, is_one: bool) -> None:
    """As of a model that is loaded."""
    sizes: dict[str, int] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    plan = drawn(tmp_path / "m", "llama", "4bit", room, bits, intermediate_size=256, **sizes)
    layers = [unit.modules for unit in work_of(plan) if unit.modules]
    assert [count == ONE_CALL for count in layers] == [is_one] * 3


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
def test_compressed_matrices_are_multiplied_from_their_codes(tmp_path: Path, scheme: str) -> None:
    plan = drawn(tmp_path / "m", "llama", scheme, hidden_size=128, intermediate_size=256)
    work = work_of(plan)
    quantized = [
        source.stored[job.recipe.sources[0][1]]
        for source in plan.sources.values()
        for job in source.jobs
        if job.quantized
    ]
    assert len(quantized) > 10
    assert touched(work, scheme) == sum(tensor.nbytes for tensor in quantized)


def test_units_that_do_not_fit_are_streamed_and_bound(tmp_path: Path) -> None:
    plan = drawn(tmp_path / "m", "llama", room=0)
    work = work_of(plan)
    assert sum(unit.streamed for unit in work) == plan.placement.streamed_bytes > 0
    entries = {name: len(list(source.entries)) for name, source in plan.sources.items()}
    assert all(unit.bound == entries[unit.unit] for unit in work if unit.streamed)
    assert not any(unit.made for unit in work)  # views of what is read


def test_experts_are_no_products_of_their_layer(tmp_path: Path) -> None:
    plan = drawn(tmp_path / "m", "qwen3_moe")
    products = [product for unit in work_of(plan) for product in unit.products]
    assert {product.share for product in products} == {1.0}
    linears = [module.weight for module in plan.model.modules() if isinstance(module, nn.Linear)]
    routers = [module.weight for name, module in plan.model.named_modules() if name.endswith("mlp.gate")]
    assert sum(product.nbytes for product in products) == sum(2 * weight.numel() for weight in linears + routers)


def test_a_token_uses_the_picked_experts_of_a_streamed_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a family whose experts are not brought in by themselves."""
    monkeypatch.setattr("rabbitllm.engine.load_plan.expert_sources", lambda *args: [])
    work = work_of(drawn(tmp_path / "m", "qwen3_moe"))
    shares = {product.share for unit in work for product in unit.products}
    assert shares == {0.5, 1.0}  # 2 of 4
    experts = [product for unit in work for product in unit.products if product.share < 1]
    assert [product.touched(1) / product.nbytes for product in experts] == [0.5] * len(experts)
    assert 0.99 < experts[0].touched(16) / experts[0].nbytes < 1
    assert Product("bfloat16", (2, 3), 100).touched(5) == 100


def test_weights_that_are_cast_for_each_use_count_as_made(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "m", "llama", dtype=torch.float32)
    options = RunOptions(device="cpu", dtype="bfloat16", max_memory={"cpu": 0}, show_progress=False)
    plan = make_load_plan(planned(tmp_path / "m", None), options, tmp_path / "m", [CpuDevice()])
    streamed = [unit for unit in work_of(plan) if unit.streamed]
    assert streamed
    assert all(2 * unit.made == unit.streamed for unit in streamed)


def test_an_encoder_counts_once(tmp_path: Path) -> None:
    work = work_of(drawn(tmp_path / "m", "t5"))
    assert {unit.unit.split(".")[0] for unit in work if unit.once} == {"encoder"}
    assert not any(unit.unit.startswith("encoder") for unit in work if not unit.once)


# Experts


MANY = {"num_experts": 12, "num_experts_per_tok": 3}


def test_resident_experts_are_not_read(tmp_path: Path) -> None:
    plan = drawn(tmp_path / "m", "qwen3_moe", **MANY)
    work = routed_work(plan)
    assert [routed.source.name for routed in work] == [source.name for source in plan.experts]
    assert {(routed.tier, routed.on_device, routed.missed, routed.read_bytes) for routed in work} == {
        (Tier.RESIDENT, 1.0, 0.0, 0.0)
    }
    (summary,) = experts_of(work)
    assert summary.kept_bytes == summary.stored_bytes == sum(source.stored_bytes for source in plan.experts)
    assert summary.used_bytes == summary.stored_bytes * 3 / 12
    assert (summary.count, summary.used) == (3 * 12, 3 * 3)


def test_kept_routed_experts_are_not_read(tmp_path: Path) -> None:
    plan = drawn(tmp_path / "m", "qwen3_moe", room=700_000, **MANY)
    (pool,) = plan.placement.pools
    assert 0 < pool.slots < 36
    work = routed_work(plan)
    for routed in work:
        assert routed.on_device == pool.slots / 36
        assert routed.read_bytes == pytest.approx((1 - pool.slots / 36) * 3 * routed.source.expert_bytes)
        assert routed.copied_bytes == 0
    (summary,) = experts_of(work)
    assert summary.kept_bytes == pytest.approx(summary.stored_bytes * pool.slots / 36, abs=1)


def test_a_prompt_uses_more_experts_than_a_token(tmp_path: Path) -> None:
    (routed, *_) = routed_work(drawn(tmp_path / "m", "qwen3_moe", room=0, **MANY))
    assert routed.touched_bytes(1) == pytest.approx(routed.used_bytes)
    assert routed.touched_bytes(2) == pytest.approx((3 + 3 * 9 / 12) * routed.source.expert_bytes)
    assert routed.touched_bytes(1000) == pytest.approx(12 * routed.source.expert_bytes)


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_uniform_use_hits_the_kept_share(share: float) -> None:
    """What plans assume, of the engine's own cache."""
    experts, used, tokens = 64, 4, 2000
    cache, random = ExpertCache([experts], int(share * experts)), np.random.default_rng(0)
    hits = 0
    for _ in range(tokens):
        chosen = np.sort(random.choice(experts, used, replace=False))
        cache.use(0, chosen, np.ones(used, np.int64), 1)
        slots = cache.slots_of(0, chosen)
        hits += int(np.count_nonzero(slots >= 0))
        cache.admit(0, chosen[slots < 0], slots[slots >= 0])
    assert hits / (used * tokens) == pytest.approx(share, abs=0.03)
