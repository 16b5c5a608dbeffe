"""What units take, where a tensor that two of them are made from counts once; and what the page cache may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.engine import costs
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.placement import Budget, PlacedUnit, Placement, Tier
from rabbitllm.engine.tier_picture import places
from tests.engine.test_every_architecture import build
from tests.engine.test_fake_gpu import load_on
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny_models import ALL, bytes_when_made, load, split, tiers


def test_page_locked_memory_is_host_memory_whatever_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "available_ram", lambda: 1000)
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
    assert costs.cache_room(placement, [gpu, CpuDevice()]) == 1000 - 300 - 20 - 3


def test_embeddings_of_which_rows_are_touched_take_no_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "available_ram", lambda: 1000)
    units = (
        PlacedUnit("a", "cpu", Tier.MAPPED, 500),
        PlacedUnit("b", "cpu", Tier.ROWS, 400),
        PlacedUnit("c", "cpu", Tier.PACKED, 30),
        PlacedUnit("d", "cpu", Tier.PACKED, 30, tied=30),
    )
    assert costs.cache_room(Placement(units, (Budget("cpu", 0, True),)), [CpuDevice()]) == 1000 - 30


@pytest.fixture(params=[None, "4bit"], ids=str)
def tied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return split(build_checkpoint(tmp_path / "m", "qwen2", tied=True, dtype=torch.bfloat16), request.param)


def stored(model: Any) -> int:
    """Bytes of all tensors in the layer files."""
    return sum(tensor.nbytes for tensor in model._origin.store.tensors.values())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("budget", [0, 200_000, ALL])
def test_tied_embeddings_are_counted_once(tied: Path, budget: int, exact: bool) -> None:
    model = load(tied, budget, exact=exact)
    units = model.placement.units
    assert sum(placed.stored for placed in units) > stored(model)
    assert sum(placed.counted for placed in units) == stored(model)
    assert sum(sum(words.values()) for words in places(model.placement).values()) == stored(model)


def test_tied_embeddings_that_are_made_fit_where_one_of_them_does(tmp_path: Path) -> None:
    folder = split(build_checkpoint(tmp_path / "m", "qwen2", tied=True), "4bit")
    model = load(folder)
    once = bytes_when_made(model)
    assert model.get_memory_footprint(return_buffers=False) == once
    assert load(folder, once).placement.is_resident
    assert not load(folder, once - 1).placement.is_resident
    gpus = [load_on([FakeGpu(0)], folder, budget) for budget in (once, once - 1)]
    assert [gpu.placement.is_resident for gpu in gpus] == [True, False]


def test_a_layer_of_a_model_with_tied_layers_is_counted_once(tmp_path: Path) -> None:
    """Zamba2's shared blocks: each layer that has them is made from the same tensors."""
    build(tmp_path / "m", "zamba2")
    model = load(split(tmp_path / "m"))
    assert sum(placed.counted for placed in model.placement.units) == stored(model)
    assert model.placement.is_resident


def test_where_nothing_may_stay_the_embedding_is_mapped(tmp_path: Path) -> None:
    model = load(split(build_checkpoint(tmp_path / "m", "llama")), 0)
    found = tiers(model)
    assert found["model.embed_tokens"] is Tier.MAPPED
    assert found["model.norm"] is Tier.RESIDENT
    assert {tier for unit, tier in found.items() if "embed" not in unit and unit != "model.norm"} == {Tier.STREAMED}
    rows = [line.split() for line in str(model.placement).splitlines()[1:-1]]
    assert [row[:-3] for row in rows] == [["cpu", "resident"], ["cpu", "mapped", "rows"], ["cpu", "streamed"]]
