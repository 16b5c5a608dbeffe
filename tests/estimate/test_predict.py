"""Estimates of seconds a token before there is a split.

Facts are compared with the model that is then loaded; times follow from given rates.

How close the times come is for `benchmarks/decode/predict.py` to say.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rabbitllm
from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import CpuDevice, Device
from rabbitllm.engine.load import load_model
from rabbitllm.engine.load_plan import make_load_plan
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.span_reader import THROUGH_THE_CACHE
from rabbitllm.errors import CheckpointError, DeviceError, OptionError
from rabbitllm.estimate import machine
from rabbitllm.estimate import predict as predictions
from rabbitllm.estimate.cost_model import DraftEstimate, GenerationEstimate, Product, work_of
from rabbitllm.estimate.machine import Machine, Overhead
from rabbitllm.estimate.plan import Plan
from rabbitllm.store.layer_store import WeightFiles
from tests.chat.talkers import characters
from tests.splitter.test_plan import planned
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.hybrid_families import HYBRIDS
from tests.support.mtp_heads import build_with_head
from tests.support.quick_measuring import quick_measuring  # noqa: F401  another one
from tests.support.tiny_models import one_thread, split  # noqa: F401  one more

COMPRESSIONS = [None, "8bit", "4bit", "4bit-double"]
PLANNED = [*COMPRESSIONS, "auto"]


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte per second of everything; Python takes no time."""
    monkeypatch.setattr(Machine, "product", lambda self, *arguments: 1e6)
    monkeypatch.setattr(Machine, "reading", lambda self, mode: 1e6)
    monkeypatch.setattr(Machine, "link", lambda self, device: 1e6)
    monkeypatch.setattr(Machine, "overhead", lambda self, device: Overhead(0.0, 0.0))


@pytest.fixture
def nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the page cache had no room."""
    monkeypatch.setattr(predictions, "stays_cached", lambda nbytes, room: False)


def checkpoint(folder: Path, family: str = "llama", **settings: Any) -> Path:
    return build_checkpoint(folder, family, dtype=torch.bfloat16, shards=2, **settings)


def predict(compression: str | None, store: WeightFiles, home: Path, machine: Machine) -> GenerationEstimate:
    """The estimate with layer files that need not exist yet."""
    return predictions.estimate(compression, make_load_plan(store, machine.options, home, machine.devices), machine)


def machine_of(folder: Path, options: RunOptions, *devices: Device) -> Machine:
    return Machine(devices or [CpuDevice()], options, list(folder.glob("*.safetensors")))


def foretell(folder: Path, compression: str | None = None, room: int = 1 << 34, **settings: Any) -> GenerationEstimate:
    options = RunOptions(device="cpu", max_memory={"cpu": room}, **settings)
    return predict(compression, planned(folder, compression), folder, machine_of(folder, options))


def at(plan: Plan, compression: str | None) -> GenerationEstimate:
    return next(generation for generation in plan.generations if generation.compression == compression)


@pytest.mark.parametrize("room", [0, 200_000, None])
def test_a_plan_predicts_the_load(tmp_path: Path, room: int | None) -> None:
    folder = checkpoint(tmp_path / "m", hidden_size=128)
    limits: Any = {"device": "cpu", "max_memory": None if room is None else {"cpu": room}}
    plan = rabbitllm.plan(folder, bandwidth="1GB", **limits)
    assert plan.devices == ("cpu",)
    assert [generation.compression for generation in plan.generations] == PLANNED
    for compression in PLANNED:
        estimate = at(plan, compression)
        model = rabbitllm.AutoModel.from_pretrained(
            folder, compression=compression, show_layer_progress=False, **limits
        )
        units = model.placement.units
        for tier in Tier:
            here = [placed for placed in units if placed.tier is tier]
            content = [content for content in estimate.placed if content.tier == tier.value]
            assert [content.units for content in content] == ([len(here)] if here else [])
            assert sum(content.stored_bytes for content in content) == sum(placed.counted for placed in here)
        assert estimate.read_bytes == model.placement.streamed_bytes
        assert estimate.token_seconds is not None
        assert estimate.first_token_seconds is not None
        assert estimate.speeds
    after = rabbitllm.plan(folder, bandwidth="1GB", **limits)  # the same of finished splits
    assert [g.placed for g in after.generations] == [g.placed for g in plan.generations]


@pytest.mark.parametrize("room", [0, 200_000, 1 << 34])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tied_embeddings_are_counted_once(tmp_path: Path, compression: str | None, room: int) -> None:
    folder = checkpoint(tmp_path / "m", "qwen2", tied=True)
    tensors = planned(folder, compression).tensors.values()
    estimate = foretell(folder, compression, room)
    assert sum(content.stored_bytes for content in estimate.placed) == sum(tensor.nbytes for tensor in tensors)
    if room == 1 << 34:
        assert estimate.stays_bytes == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("room", [0, 600_000, 1 << 34])
def test_a_plan_predicts_the_loaded_experts(tmp_path: Path, room: int, compression: str | None) -> None:
    folder = checkpoint(tmp_path / "m", "qwen3_moe", num_experts=12, num_experts_per_tok=3)
    estimate = foretell(folder, compression, room)
    options = RunOptions(device="cpu", max_memory={"cpu": room}, show_progress=False)
    placement = load_model(split(folder, compression), options).placement
    (experts,) = estimate.experts
    assert {placed.tier.value for placed in placement.experts} == {experts.tier}
    assert sum(placed.stored for placed in placement.experts) == experts.stored_bytes
    assert experts.used_bytes * 4 == experts.stored_bytes
    slots = sum(pool.slots for pool in placement.pools)
    share = slots / experts.count if placement.pools else 1
    assert experts.kept_bytes == pytest.approx(share * experts.stored_bytes, abs=1)
    assert estimate.read_bytes == pytest.approx(placement.streamed_bytes + (1 - share) * experts.used_bytes, abs=1)
    assert (estimate.found_token_seconds or 0) > 0
    assert estimate.token_seconds is not None


def test_kept_experts_are_not_read(tmp_path: Path, known_rates: None) -> None:
    folder = checkpoint(tmp_path / "m", "qwen3_moe", num_experts=12, num_experts_per_tok=3)
    for room in (0, 600_000):
        estimate = foretell(folder, None, room)
        (experts,) = estimate.experts
        assert estimate.token_seconds is not None
        assert estimate.found_token_seconds is not None
        missed = 1 - experts.kept_bytes / experts.stored_bytes
        spared = estimate.token_seconds - estimate.found_token_seconds
        assert spared == pytest.approx(missed * experts.used_bytes / 1e6, rel=0.01)
    assert 0 < missed < 1


def test_a_model_in_memory_takes_as_long_as_its_products(tmp_path: Path, known_rates: None) -> None:
    folder = checkpoint(tmp_path / "m", hidden_size=128, intermediate_size=512)
    estimate = foretell(folder)
    assert estimate.read_bytes == 0
    assert estimate.token_seconds == pytest.approx(estimate.stays_bytes / 1e6, rel=0.1)
    assert estimate.first_token_seconds == pytest.approx(2 * estimate.token_seconds, rel=0.1)  # all is read once
    quantized = foretell(folder, "4bit")
    assert quantized.token_seconds is not None
    assert quantized.token_seconds < 0.5 * estimate.token_seconds  # type: ignore[operator]


@pytest.mark.usefixtures("known_rates")
@pytest.mark.parametrize("is_cached", [True, False])
def test_disk_reads_overlap_computing_and_page_cache_reads_do_not(
    tmp_path: Path, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictions, "stays_cached", lambda nbytes, room: is_cached)
    folder = checkpoint(tmp_path / "m", hidden_size=128, intermediate_size=512, num_hidden_layers=8)
    estimate = foretell(folder, room=0)
    assert estimate.from_the_disk is not is_cached
    assert estimate.read_bytes > 2 * estimate.stays_bytes
    assert estimate.token_seconds == pytest.approx((1 + is_cached) * estimate.read_bytes / 1e6, rel=0.01)


def test_python_takes_time_for_every_module_and_every_bound_weight(
    tmp_path: Path, known_rates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "m", head_dim=32)
    before = [foretell(folder, room=room).token_seconds for room in (0, 1 << 34)]
    monkeypatch.setattr(Machine, "overhead", lambda self, device: Overhead(7.0, 1.0))
    after = [foretell(folder, room=room).token_seconds for room in (0, 1 << 34)]
    for room, ordinary, slow in zip((0, 1 << 34), before, after, strict=True):
        options = RunOptions(device="cpu", max_memory={"cpu": room}, show_progress=False)
        work = work_of(make_load_plan(planned(folder, None), options, folder, [CpuDevice()]))
        modules, bound = sum(unit.modules for unit in work), sum(unit.bound for unit in work)
        assert (modules > 20) is (bound > 20) is (room == 0)  # else they are one call
        expected = 7 + modules + predictions.BINDING * bound
        assert slow - ordinary == pytest.approx(expected, rel=1e-2)  # type: ignore[operator]


def test_small_forms_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a router in float32, or a table of integers, with which torch multiplies nothing."""
    forms: list[str] = []
    product = Machine.product
    monkeypatch.setattr(Machine, "product", lambda self, *args: forms.append(args[1]) or product(self, *args))
    folder = checkpoint(tmp_path / "m", hidden_size=128, intermediate_size=512)
    few = Product("int64", (2, 2), 100)
    monkeypatch.setattr(
        predictions, "work_of", lambda plan: tuple(replace(u, products=(*u.products, few)) for u in work_of(plan))
    )
    assert (foretell(folder).token_seconds or 0) > 0
    assert set(forms) == {"bfloat16"}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("room", [0, 100_000, 1 << 34])
def test_no_token_is_slower_than_the_first(
    tmp_path: Path, compression: str | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a disturbed measurement finds the disk faster than the page cache, and many rows faster than one."""
    rates = {THROUGH_THE_CACHE: 1e5}
    monkeypatch.setattr(Machine, "reading", lambda self, mode: rates.get(mode, 1e12))
    monkeypatch.setattr(Machine, "product", lambda self, device, form, dtype, rows=1: 1e6 * rows**2)
    estimate = foretell(checkpoint(tmp_path / "m", "qwen3_moe"), compression, room)
    assert 0 < (estimate.token_seconds or 0) <= (estimate.first_token_seconds or 0)


def test_without_files_only_resident_models_have_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "m")
    monkeypatch.setattr(Machine, "reading", lambda self, mode: None)
    fits, streams = foretell(folder), foretell(folder, room=0)
    assert fits.token_seconds is not None
    assert fits.first_token_seconds is None
    assert streams.token_seconds is streams.first_token_seconds is None
    assert streams.read_bytes > 0


@pytest.mark.parametrize("host", [0, 300_000, 1 << 30])
def test_experts_on_fake_gpus(tmp_path: Path, host: int) -> None:
    folder = checkpoint(tmp_path / "m", "qwen3_moe", num_experts=12, num_experts_per_tok=3, moe_intermediate_size=32)
    options = RunOptions(max_memory={"fake:0": 260_000, "fake:1": 260_000, "cpu": host})
    estimate = predict(None, planned(folder, None), folder, machine_of(folder, options, FakeGpu(0), FakeGpu(1)))
    assert {e.device for e in estimate.experts} == {"fake:0", "fake:1"}
    for e in estimate.experts:
        assert 0 < e.kept_bytes < e.stored_bytes
        missed = 1 - (e.kept_bytes + e.host_bytes) / e.stored_bytes
        assert e.copied_bytes == pytest.approx(e.used_bytes * (1 - e.kept_bytes / e.stored_bytes), abs=2)
        assert e.read_bytes == pytest.approx(e.used_bytes * missed, abs=2)
        assert (missed < 1e-6) == (host == 1 << 30)
    assert any(e.host_bytes for e in estimate.experts) == bool(host)
    assert {speed.what.rpartition(" ")[2] for speed in estimate.speeds if "multiplying" in speed.what} >= {"fake:0"}
    assert (estimate.token_seconds or 0) > (estimate.found_token_seconds or 0) > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "gpt_oss", "t5", "mamba2"])
def test_other_families(tmp_path: Path, family: str) -> None:
    folder = checkpoint(tmp_path / "m", family, tied=family == "t5")
    for compression, room in ((None, 0), ("4bit", 1 << 34)):
        estimate = foretell(folder, compression, room)
        assert (estimate.token_seconds or 0) > 0
        assert (estimate.first_token_seconds or 0) > 0


@pytest.mark.parametrize("family", ["zamba", "hy_v4", "dots3_note", "llama4"])
def test_special_families(tmp_path: Path, family: str) -> None:
    """Matrices kept in float32; layers that differ in what a config says once; experts with a forward of their own."""
    folder = build_checkpoint(tmp_path / "m", HYBRIDS[family], dtype=torch.bfloat16)
    for room in (0, 1 << 34):
        assert (foretell(folder, None, room).token_seconds or 0) > 0


def test_estimates_on_fake_gpus(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    gpus = [FakeGpu(0), FakeGpu(1)]
    options = RunOptions(max_memory={gpu.name: 60_000 for gpu in gpus})
    machine = machine_of(folder, options, *gpus)
    for compression in (None, "4bit"):
        estimate = predict(compression, planned(folder, compression), folder, machine)
        assert {content.device for content in estimate.placed} == {"fake:0", "fake:1"}
        assert (estimate.token_seconds or 0) > 0
        assert any("on fake:1" in speed.what for speed in estimate.speeds)
    assert all(gpu.uploads for gpu in gpus)


@pytest.mark.parametrize("host", [0, 1 << 30], ids=["nothing is kept", "all is kept in page-locked memory"])
def test_bytes_copied_to_a_gpu_for_each_token(tmp_path: Path, host: int, known_rates: None) -> None:
    folder = checkpoint(tmp_path / "m")
    options = RunOptions(max_memory={"fake:0": 60_000, "cpu": host})
    estimate = predict(None, planned(folder, None), folder, machine_of(folder, options, FakeGpu(0)))
    assert estimate.copied_bytes > 0
    assert estimate.read_bytes == (0 if host else estimate.copied_bytes)
    computed = estimate.stays_bytes if host else estimate.copied_bytes
    assert estimate.token_seconds == pytest.approx(max(estimate.copied_bytes, computed) / 1e6, rel=0.5)


def test_links_of_several_gpus_work_at_the_same_time(tmp_path: Path, known_rates: None) -> None:
    folder = checkpoint(tmp_path / "m", num_hidden_layers=12)
    seconds = []
    for gpus in ([FakeGpu(0)], [FakeGpu(0), FakeGpu(1)]):
        options = RunOptions(max_memory={**{gpu.name: 60_000 for gpu in gpus}, "cpu": 1 << 30})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Machine, "product", lambda self, *arguments: 1e12)
            estimate = predict(None, planned(folder, None), folder, machine_of(folder, options, *gpus))
        seconds.append(estimate.token_seconds or 0)
        assert seconds[-1] == pytest.approx(estimate.copied_bytes / len(gpus) / 1e6, rel=0.2)
    assert seconds[1] < 0.6 * seconds[0]


@pytest.mark.parametrize("exact", [True, False])
def test_products_from_codes_are_measured_on_a_gpu(tmp_path: Path, exact: bool) -> None:
    folder = checkpoint(tmp_path / "m")
    options = RunOptions(max_memory={"fake:0": 60_000, "cpu": 1 << 30}, exact=exact)
    estimate = predict("4bit", planned(folder, "4bit"), folder, machine_of(folder, options, FakeGpu(0)))
    names = {speed.what for speed in estimate.speeds if speed.what.startswith("multiplying")}
    assert ("multiplying with 4bit codes on fake:0" in names) != exact
    assert "multiplying with bfloat16 on fake:0" in names or not exact
    assert (estimate.token_seconds or 0) > 0


def test_a_gpu_too_small_for_measuring_has_a_plan_without_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path / "m")
    machine = machine_of(folder, RunOptions(max_memory={"fake:0": 30_000}), FakeGpu(0, capacity=50_000))
    with watched():
        estimate = predict("4bit", planned(folder, "4bit"), folder, machine)
    assert estimate.copied_bytes > 0
    assert estimate.token_seconds is None
    assert "The seconds per token cannot be measured: A GPU has too little memory for measuring" in caplog.text
    assert "Weights may take max_memory={'fake:0': 30,000} bytes" in caplog.text


def test_unknown_architectures_are_an_obstacle(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "hare", "architectures": ["Hare"]}))
    plan = rabbitllm.plan(folder, bandwidth="1GB", device="cpu")
    assert plan.choice is None
    assert [generation.obstacle is None for generation in plan.generations] == [False] * len(PLANNED)
    assert all("cannot build the model" in (generation.obstacle or "") for generation in plan.generations)
    assert all("loading would fail" in str(outlook.obstacle) for outlook in plan.outlooks)


def test_missing_devices(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="this machine has no GPU"):
            rabbitllm.plan(folder, max_memory={0: "1GB"})
    with pytest.raises(OptionError, match="max_memory names the device"):
        rabbitllm.plan(folder, max_memory={"disk": "1GB"})


def test_no_files_remain(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    elsewhere = tmp_path / "elsewhere"
    rabbitllm.plan(folder, bandwidth="1GB", device="cpu", layer_shards_saving_path=elsewhere, max_memory={"cpu": 0})
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_token_slower_than_the_first_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine that is busy while the products of one token are measured at 8bit."""
    folder = checkpoint(tmp_path / "m", hidden_size=128, intermediate_size=512)
    measured: list[tuple[str, int]] = []
    busy: list[tuple[str, int]] = []

    def product_rate(device: Device, form: str, dtype: torch.dtype, rows: int) -> float:
        measured.append((form, rows))
        return 1e3 if measured[-1] in busy and measured.count(measured[-1]) == 1 else 1e6

    monkeypatch.setattr(machine, "product_rate", product_rate)
    monkeypatch.setattr(machine, "read_rate", lambda files, mode: (1e9, 1))
    monkeypatch.setattr(machine, "overhead", lambda device: Overhead(0.0, 0.0))
    idle = rabbitllm.plan(folder, bandwidth="1GB", device="cpu")
    assert not caplog.records
    assert len(measured) == len(set(measured))
    measured.clear()
    busy.append(("8bit", 1))
    plan = rabbitllm.plan(folder, bandwidth="1GB", device="cpu")
    assert [record.getMessage()[:25] for record in caplog.records] == ["This machine is busy: a t"]
    assert measured.count(("8bit", 1)) == 2
    for compression in COMPRESSIONS:
        assert at(plan, compression).token_seconds == at(idle, compression).token_seconds
        assert at(plan, compression).first_token_seconds == at(idle, compression).first_token_seconds


# with a draft


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def drafted(folder: Path, draft: Any, room: int, **options: Any) -> GenerationEstimate:
    plan = rabbitllm.plan(folder, draft=draft, device="cpu", max_memory={"cpu": room}, bandwidth="1GB", **options)
    return at(plan, None)


def draft_of(estimate: GenerationEstimate) -> DraftEstimate:
    assert estimate.draft is not None
    assert estimate.draft.obstacle is None, estimate.draft.obstacle
    return estimate.draft


@pytest.mark.usefixtures("nothing_is_cached")
def test_rows_of_a_streamed_model_are_free_until_they_take_longer_than_reading(
    tmp_path: Path, known_rates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "product", lambda self, device, form, dtype, rows=1: 3e6 / rows)
    folder = checkpoint(tmp_path / "m", hidden_size=128, intermediate_size=512, num_hidden_layers=8)
    streamed, resident = (drafted(folder, "ngram", room) for room in (0, 1 << 34))
    assert draft_of(streamed).held_bytes == draft_of(streamed).step_seconds == 0
    two, three, _, nine = draft_of(streamed).passes
    assert (two.drafted, two.tokens, nine.drafted, nine.tokens) == (1, 1.5, 8, 5.0)
    assert (two.break_even, three.break_even) == (pytest.approx(1, abs=0.05), pytest.approx(1, abs=0.05))
    assert nine.break_even == pytest.approx(3, rel=0.1)  # nine rows take three times as long as reading
    assert two.token_seconds == pytest.approx(streamed.token_seconds / 1.5, rel=0.05)  # type: ignore[operator]
    for one in draft_of(resident).passes:
        assert one.break_even == pytest.approx(one.drafted + 1, rel=0.01)


@pytest.mark.usefixtures("nothing_is_cached")
def test_a_draft_model_takes_memory_and_time(tmp_path: Path, known_rates: None) -> None:
    folder = checkpoint(tmp_path / "m", hidden_size=128, intermediate_size=512, num_hidden_layers=8)
    small = checkpoint(tmp_path / "draft")
    room = bytes_of(folder) // 2
    estimate = drafted(folder, small, room)
    draft = draft_of(estimate)
    assert draft.step_seconds == pytest.approx(foretell(small).token_seconds)  # its products' bytes at a rate of 1
    beside = foretell(folder, room=room - draft.held_bytes)
    assert beside.read_bytes > estimate.read_bytes  # that is without the draft
    one = draft.passes[0]
    assert one.token_seconds * 1.5 == pytest.approx(beside.token_seconds + draft.step_seconds)  # type: ignore[operator]
    assert one.break_even == pytest.approx(1.5 * one.token_seconds / estimate.token_seconds)  # type: ignore[operator]
    options = RunOptions(device="cpu", show_progress=False)
    assert draft.held_bytes == load_model(split(small), options)._internals.held_bytes


@pytest.mark.usefixtures("nothing_is_cached")
def test_a_head_and_copies_take_memory_and_time(tmp_path: Path, known_rates: None) -> None:
    folder = build_with_head(tmp_path / "m", "qwen3_5", dtype=torch.bfloat16)
    much, little = (bytes_of(folder) * percent // 100 for percent in (57, 50))

    def loaded(room: int, **own: bool) -> Any:
        return load_model(split(folder), RunOptions("cpu", max_memory={"cpu": room}, show_progress=False, **own))

    by_head, model = draft_of(drafted(folder, "auto", much)), loaded(much, heads=True)
    assert by_head.held_bytes == model.heads.nbytes
    output = next(unit.stored for unit in model.placement.units if unit.unit == "lm_head")
    # products with both, at a megabyte per second
    assert by_head.step_seconds == pytest.approx((model.heads.nbytes + output) / 1e6, rel=0.02)
    by_copies, placement = draft_of(drafted(folder, "self", little)), loaded(little, self_draft=True).placement
    assert (by_head.name, by_copies.name, by_copies.held_bytes) == ("mtp", "self", placement.copies.nbytes)
    kept = [unit for unit in placement.units if unit.tier in (Tier.RESIDENT, Tier.PACKED)]
    computed = placement.copies.nbytes + sum(unit.stored for unit in kept)
    assert by_copies.step_seconds == pytest.approx(computed / 1e6, rel=0.02)
    assert draft_of(drafted(checkpoint(tmp_path / "plain"), "auto", 0)).name == "ngram"


def test_why_a_draft_cannot_be_used(tmp_path: Path, known_rates: None) -> None:
    folder, room = checkpoint(tmp_path / "m"), 1 << 34
    assert drafted(folder, "none", room).draft is None
    for draft, found in (("mtp", "no usable heads"), ("self", "all weights of this model fit in memory")):
        estimate = drafted(folder, draft, room).draft
        assert estimate is not None
        assert found in (estimate.obstacle or "")
        assert not estimate.passes
    automatic = drafted(folder, "auto", room)
    assert automatic.read_bytes == automatic.copied_bytes == 0
    assert (automatic.draft and automatic.draft.obstacle) == "auto is none where all weights stay in memory."
    other = checkpoint(tmp_path / "other")
    characters().save_pretrained(other)
    estimate = drafted(folder, other, room).draft
    assert "another vocabulary" in (estimate.obstacle or "")  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="missing"):
        drafted(folder, tmp_path / "missing", room)
