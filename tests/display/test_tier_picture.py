"""The picture of a placement: every stored byte is in it once, at its tier, and its labels are readable."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rabbitllm
from rabbitllm.base.options import RunOptions
from rabbitllm.display.tier_picture import (
    COLOURS,
    DISK,
    EXPERTS,
    EXPERTS_AWAY,
    EXPERTS_PINNED,
    MAPPED,
    PINNED,
    ROWS,
    STORED,
)
from rabbitllm.engine.devices import Device
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import Budget, PlacedUnit, Placement, Pool, Tier, UnitCost, place
from rabbitllm.errors import OptionError
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.quick_measuring import quick_measuring  # noqa: F401  applies by itself
from tests.support.tiny_models import split

MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "svg": b"<?xml", "pdf": b"%PDF-"}
LAYERS = 80


def large(layers: int = LAYERS) -> Placement:
    """Many layers, compressed, on two GPUs that hold less than half of them, with pinned memory for some."""

    def cost(name: str, nbytes: int, *, is_layer: bool = False, by_rows: bool = False) -> UnitCost:
        return UnitCost(name, nbytes, 4 * nbytes, 4 * nbytes, False, is_layer, False, by_rows)

    costs = [cost("model.embed_tokens", 700_000_000, by_rows=True)]
    costs += [cost(f"model.layers.{index}", 490_000_000, is_layer=True) for index in range(layers)]
    costs += [cost("model.norm", 16_384), cost("lm_head", 700_000_000)]
    budgets = [Budget("cuda:0", 12_000_000_000, False), Budget("cuda:1", 12_000_000_000, False)]
    return place(costs, budgets, host_bytes=8_000_000_000)


@pytest.fixture
def words_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Draws a placement and returns all texts of the picture."""
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text as text

    def draw(placement: Placement, title: str = "a model") -> list[str]:
        path = tmp_path / "tiers.svg"
        placement.plot(path, title)
        return ["".join(e.itertext()).strip() for e in ElementTree.parse(path).iter() if e.tag.endswith("}text")]

    return draw


@pytest.mark.parametrize("ending", list(MAGIC))
def test_formats(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"tiers.{ending}"
    large(8).plot(path, "a model")
    assert path.read_bytes().startswith(MAGIC[ending])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_unknown_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not the name of a picture"):
        large(8).plot(tmp_path / "tiers.txt")


def test_many_layers_on_two_gpus(words_of: Any) -> None:
    placement = large()
    shown = placement.bars
    assert [bar.unit for bar in shown] == [placed.unit for placed in placement.units]
    assert {text for bar in shown for text in bar.parts} == {STORED, PINNED, DISK, ROWS}
    words = words_of(placement, "many layers")
    assert {"embed_tokens", "lm_head", "10", "70", "cuda:0", "cuda:1", "page-locked", "disk"} <= set(words)
    assert {STORED, PINNED, DISK, ROWS} <= set(words)
    assert any(text.startswith("many layers") for text in words)
    assert sum(text.isdigit() for text in words) < 30  # not every layer's number, which would be unreadable
    total = sum(placed.stored for placed in placement.units if placed.tier is Tier.STREAMED)
    assert f"{(total + 700_000_000) / 1e9:,.2f} GB" in words


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("room", [0, 120_000, 1 << 34])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_every_byte_is_drawn_at_its_tier(tmp_path: Path, family: str, room: int, compression: str | None) -> None:
    folder = split(build_checkpoint(tmp_path / "m", family, dtype=torch.bfloat16), compression)
    options = RunOptions(device="cpu", max_memory={"cpu": room}, show_progress=False)
    check(load_model(folder, options).placement)


@pytest.mark.parametrize("host", [0, 300_000, 1 << 30])
def test_experts_on_gpus_and_in_host_memory(tmp_path: Path, host: int, words_of: Any) -> None:
    small = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    folder = split(build_checkpoint(tmp_path / "m", "qwen3_moe", dtype=torch.bfloat16, **small), None)
    gpus: Sequence[Device] = [FakeGpu(0), FakeGpu(1)]
    limits = {**{gpu.name: 260_000 for gpu in gpus}, "cpu": host}
    placement = load_model(folder, RunOptions(max_memory=limits, show_progress=False), devices=gpus).placement
    check(placement)
    nbytes = placement.bytes_by_device
    assert EXPERTS in nbytes["fake:0"]
    assert (EXPERTS_PINNED in nbytes.get("page-locked", {})) == bool(host and placement.pools[0].host_slots)
    assert (EXPERTS_AWAY in nbytes.get("disk", {})) == (host < 1 << 30)
    assert "fake:1" in words_of(placement)


def check(placement: Placement) -> None:
    """Compare sums by tier, device and unit with those that the placement itself gives."""
    shown = placement.bars
    stored = sum(placed.stored for placed in (*placement.units, *placement.experts))
    assert sum(bar.nbytes for bar in shown) == stored
    assert sum(sum(parts.values()) for parts in placement.bytes_by_device.values()) == stored
    assert sum(bar.parts.get(DISK, 0) for bar in shown) == placement.streamed_bytes
    kept = sum(pool.slots * (pool.stored / pool.experts) for pool in placement.pools)
    stays = sum(placed.stored for placed in placement.experts if placed.tier is not Tier.ROUTED)
    assert sum(bar.parts.get(EXPERTS, 0) for bar in shown) == pytest.approx(kept + stays, abs=len(shown))
    assert {tier for bar in shown for tier in bar.parts} <= set(COLOURS)


def test_plan_is_drawn_like_its_model(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "llama", shards=2)
    limits: Any = {"device": "cpu", "max_memory": {"cpu": 150_000}}
    plan = rabbitllm.plan(folder, compression="4bit", bandwidth="1GB", **limits)
    planned = next(generation.placement for generation in plan.generations if generation.compression == "4bit")
    model = rabbitllm.AutoModel.from_pretrained(folder, compression="4bit", show_layer_progress=False, **limits)
    assert planned is not None
    assert planned.bars == model.placement.bars


def test_shares_of_kept_experts() -> None:
    units = (PlacedUnit("model.layers.0", "cuda:0", Tier.RESIDENT, 10),)
    experts = (PlacedUnit("model.layers.0.mlp.experts", "cuda:0", Tier.ROUTED, 1000),)
    pools = (Pool("cuda:0", 2, 3, 1, 100, 10, 1000),)
    (bar,) = Placement(units, (Budget("cuda:0", 999, False),), experts, pools).bars
    assert (bar.parts[EXPERTS], bar.parts[EXPERTS_PINNED], bar.parts[EXPERTS_AWAY]) == (200, 300, 500)
    (bar,) = Placement((PlacedUnit("model.layers.0", "cpu", Tier.RESIDENT, 10),), (Budget("cpu", 9, True),)).bars
    assert bar.parts == {MAPPED: 10}
