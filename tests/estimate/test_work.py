"""The work of a pass for each unit, compared with the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rabbitllm.base.options import StreamOptions
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.load_plan import LoadPlan, make_load_plan
from rabbitllm.estimate.work import Product, UnitWork, shapes, work_of
from tests.splitter.test_plan import planned
from tests.support.builders import build_checkpoint


def drawn(
    folder: Path, family: str, compression: str | None = None, room: int = 1 << 34, **settings: object
) -> LoadPlan:
    build_checkpoint(folder, family, dtype=torch.bfloat16, tied=family == "t5", **settings)  # type: ignore[arg-type]
    options = StreamOptions(device="cpu", max_memory={"cpu": room}, show_progress=False)
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
    packed = [
        source.stored[job.recipe.sources[0][1]]
        for source in found.sources.values()
        for job in source.jobs
        if job.packed
    ]
    assert len(packed) > 10
    assert touched(work, scheme) == sum(tensor.nbytes for tensor in packed)


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
