"""The peak disk use of a split, whether it fits, and the transfer of its shards."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitllm.base.options import ShardPolicy, SplitOptions, parse_size
from rabbitllm.base.terminal import size, size_rounded_up
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import NotEnoughSpaceException, OptionError, SplitError
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.splitter.disk_budget import (
    DiskBudget,
    DiskUse,
    ShardTransfer,
    choose_shard_transfer,
    on_disk,
    own_records_bytes,
)
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.splitter.request import SplitRequest, plan_split
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.draws import draws
from tests.support.plans import MIB, all_freed, even, peak_of, plan_of, shard_of
from tests.support.splitting import Call, interrupted, names_in, split


def test_disk_of_a_local_source_whose_shards_are_deleted() -> None:
    plan = plan_of(even(4, MIB))
    shard, layer = MIB + 100, MIB + 4096 + 4096
    assert peak_of(plan, freed=all_freed(plan)) == DiskUse(created=4 * layer, added=layer + 3 * (layer - shard))
    assert peak_of(plan) == DiskUse(created=4 * layer, added=4 * layer)


def test_disk_of_fetched_shards() -> None:
    plan = plan_of(even(4, MIB, staged=True))
    shard, layer = MIB + 100, MIB + 4096 + 4096
    shard = on_disk(shard)
    for deletes in (True, False):
        assert peak_of(plan, freed=all_freed(plan, deletes)) == DiskUse(4 * layer + shard, 4 * layer + shard)
    # the last shard has none after it, so two are there while the last but one is used
    peak = max(3 * layer + 2 * shard, 4 * layer + shard)
    assert peak_of(plan, shard_transfer=ShardTransfer.FILE_AHEAD, freed=all_freed(plan)) == DiskUse(peak, peak)
    smaller = plan_of(even(4, MIB, staged=True), "4bit")
    assert peak_of(smaller, shard_transfer=ShardTransfer.FILE_AHEAD, freed=all_freed(smaller)).added > 2 * shard
    assert peak_of(plan, shard_transfer=ShardTransfer.STREAM, freed=all_freed(plan)) == DiskUse(4 * layer, 4 * layer)


def test_disk_of_a_resumed_split() -> None:
    plan = plan_of(even(4, MIB, staged=True))
    shard, layer = on_disk(MIB + 100), MIB + 4096 + 4096
    there = layer + 5000  # and a piece of the second shard
    use = peak_of(plan, freed=all_freed(plan), used=frozenset(["shard-0"]), in_use=there, small_files=7)
    assert use == DiskUse(4 * layer + shard + 7, 4 * layer + shard + 7 - there)


def test_records_are_bounded(tmp_path: Path) -> None:
    """Journal and manifest of a real split stay slightly below the planned size."""
    source = write_shards(tmp_path / "model", cut(llama_tensors(layers=6), 4))
    plan = plan_split(SplitRequest(LocalCheckpoint(source), tmp_path / "out", {}, SplitOptions()))
    sizes: list[int] = []

    def look(step: Step) -> None:
        if step.kind == "unlink" and step.path.name == "split.journal":
            sizes.append(step.path.stat().st_size + (step.path.parent / "split.json").stat().st_size)

    with observe_steps(look):
        split(source)
    assert len(sizes) == 1
    assert sizes[0] <= own_records_bytes(plan) <= 4 * sizes[0] + 4096


@pytest.mark.parametrize(("compression", "factor"), [("4bit", 0.2813), ("8bit", 0.501)])
def test_disk_under_compression(compression: str, factor: float) -> None:
    use = peak_of(plan_of(even(8, 4 * MIB, staged=True), compression))
    assert use.created == pytest.approx(8 * 4 * MIB * factor + 4 * MIB, rel=0.01)
    assert use.added == use.created


def test_late_large_shard_determines_the_peak() -> None:
    small = even(3, MIB, staged=True)
    large = shard_of("z", {"model.layers.9.w": ("BF16", (16 * MIB // 128, 64))}, staged=True)
    first = peak_of(plan_of((large, *small), "4bit"))
    last = peak_of(plan_of((*small, large), "4bit"))
    assert first.created < last.created
    assert last.created - first.created == pytest.approx(3 * 0.2813 * MIB, rel=0.05)


def test_used_shards_add_no_disk() -> None:
    plan = plan_of(even(4, MIB))
    layer = MIB + 4096 + 4096
    used = frozenset(["shard-0", "shard-1"])
    there = 2 * layer
    assert peak_of(plan, used=used, in_use=there) == DiskUse(created=4 * layer, added=2 * layer)
    everything = frozenset(shard.name for shard in plan.shards)
    assert peak_of(plan, used=everything) == DiskUse(created=4 * layer, added=0)


def test_header_counts_once_for_a_layer_in_many_shards() -> None:
    shards = tuple(shard_of(f"s{n}", {f"model.layers.0.w{n}": ("F32", (16, 64))}) for n in range(5))
    plan = plan_of(shards)
    assert peak_of(plan).added == 4096 + 4096 + 5 * 4096
    assert plan.output_bytes == 4096 + 5 * 4096


@settings(max_examples=draws(60), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    compression=st.sampled_from([None, "4bit", "8bit", "4bit-double"]),
    staged=st.booleans(),
)
def test_disk_use_is_bounded(sizes: list[int], compression: str | None, staged: bool) -> None:
    shards = tuple(
        shard_of(f"s{n}", {f"model.layers.{n}.w": ("BF16", (size * 64, 64))}, staged) for n, size in enumerate(sizes)
    )
    plan = plan_of(shards, compression)
    use = peak_of(plan, freed=all_freed(plan))
    slack = 64 * 1024 * len(plan.layouts)
    largest = max(shard.size for shard in shards)
    assert use.created <= plan.output_bytes + (largest if staged else 0) + slack
    if staged:
        assert use.added == use.created
    else:
        assert use.added <= largest + slack
        assert use.added >= plan.output_bytes - plan.source_bytes


# Whether a split fits, the way for shards to arrive that does, and refusals that say what would.


Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The free disk, bytes; a test may change it."""
    amount = [10**15]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2 * 10**15, 0, amount[0]))
    return amount


def choose(
    plan: SplitPlan,
    folder: Path,
    max_disk: int | None,
    *,
    deletes: bool,
    min_free: int = 0,
    transfer: str = "auto",
    downloads: tuple[tuple[Path, int], ...] = (),
) -> ShardTransfer:
    options = SplitOptions(max_disk=max_disk, min_free=min_free, shard_transfer=transfer)
    return choose_shard_transfer(plan, DiskBudget(folder, all_freed(plan, deletes), downloads=downloads), options)[0]


def test_fitting_splits_are_accepted(tmp_path: Path, free: list[int]) -> None:
    plan = plan_of(even(4, MIB))
    use = peak_of(plan)
    free[0] = use.added
    choose(plan, tmp_path, None, deletes=False)
    choose(plan, tmp_path / "not" / "there" / "yet", use.created, deletes=False)


def test_too_little_free_disk_is_refused(tmp_path: Path, free: list[int]) -> None:
    plan = plan_of(even(512, 4 * MIB))
    need = peak_of(plan).added
    folder = tmp_path / "not" / "yet"
    free[0] = 1 << 30
    with pytest.raises(NotEnoughSpaceException) as refused:
        choose(plan, folder, None, deletes=False)
    assert refused.value.problem == (
        f"Splitting m into {folder} needs 2.16 GB ({need:,} bytes) of free disk at its peak; 1.07 GB is free on the "
        f"disk of {tmp_path}."
    )
    assert refused.value.remedy == "compression='4bit' would fit."
    assert isinstance(refused.value, SplitError)
    free[0] = 3 << 29
    with pytest.raises(NotEnoughSpaceException, match="compression='8bit' would fit"):
        choose(plan, folder, None, deletes=False)
    free[0] = 1 << 20
    with pytest.raises(NotEnoughSpaceException) as refused:
        choose(plan, folder, None, deletes=False)
    assert f"Free {size_rounded_up(need - MIB)} there, or use a folder on another disk" in str(refused.value)
    assert "No compression would fit now." in str(refused.value)


def test_advice_for_a_split_that_was_begun(tmp_path: Path, free: list[int]) -> None:
    """Another compression, or a folder on another disk, would need the shards that are used up."""
    call = Call(str(write_shards(tmp_path / "model", cut(llama_tensors(layers=8), 3))))
    folder = interrupted(call)
    free[0] = 1000
    with pytest.raises(NotEnoughSpaceException, match=r"Free .* there, or lower min_free.*\. The split is") as refused:
        call.make()
    assert "compression" not in refused.value.remedy
    assert "another disk" not in refused.value.remedy
    free[0] = 1 << 40
    assert call.make() == folder


def test_too_small_max_disk_is_refused(tmp_path: Path, free: list[int]) -> None:
    plan = plan_of(even(512, 4 * MIB, staged=True))
    use = peak_of(plan, freed=all_freed(plan))
    with pytest.raises(NotEnoughSpaceException, match=r"1.07 GB is allowed by max_disk=1,073,741,824"):
        choose(plan, tmp_path, 1 << 30, deletes=True)
    choose(plan, tmp_path, use.created, deletes=True)
    with pytest.raises(NotEnoughSpaceException):
        choose(plan, tmp_path, use.created - 1, deletes=True, transfer="file")


SMALLER = ("8bit", "4bit", "4bit-double")


@pytest.mark.parametrize("compression", [None, "8bit", "4bit", "4bit-double"])
@pytest.mark.parametrize("deletes", [True, False])
@pytest.mark.parametrize("staged", [True, False])
def test_suggested_options_fit(
    tmp_path: Path, free: list[int], compression: str | None, deletes: bool, staged: bool
) -> None:
    """The suggested compression is tried with the space that was too little; without a suggestion each is tried."""
    shards, seen = even(8, 4 * MIB, staged), set()
    for available in range(0, 44 * MIB, MIB):
        for max_disk in (None, 20 * MIB):
            free[0] = available
            try:
                choose(plan_of(shards, compression), tmp_path, max_disk, deletes=deletes)
            except NotEnoughSpaceException as refused:
                named = [c for c in SMALLER if f"'{c}' would fit" in refused.remedy]
                seen.add(tuple(named))
                for choice in named:
                    choose(plan_of(shards, choice), tmp_path, max_disk, deletes=deletes)
                for choice in () if named else SMALLER:
                    with pytest.raises(NotEnoughSpaceException):
                        choose(plan_of(shards, choice), tmp_path, max_disk, deletes=deletes)
    assert () in seen
    assert (("4bit",) in seen) == (compression in (None, "8bit"))


def test_refusal_comes_before_the_first_change(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    before = names_in(source)
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    with pytest.raises(NotEnoughSpaceException, match="is allowed by max_disk=1,000"):
        split(source, max_disk=1000)
    assert names_in(source) == before
    assert LocalCheckpoint(source).metadata("model-00003-of-00003.safetensors") is not None
    assert largest > 1000


def test_min_free_disk_is_not_used(tmp_path: Path, free: list[int]) -> None:
    plan = plan_of(even(4, MIB))
    need = peak_of(plan).added
    free[0] = need + 50 * MIB
    choose(plan, tmp_path, None, deletes=False, min_free=50 * MIB)
    free[0] -= 1
    with pytest.raises(NotEnoughSpaceException, match=r"must stay free \(min_free_disk\)") as refusal:
        choose(plan, tmp_path, None, deletes=False, min_free=50 * MIB)
    assert f"{size(free[0])} is free on the disk of {tmp_path}, of which 52.43 MB" in str(refusal.value)


def refused(plan: SplitPlan, folder: Path, max_disk: int | None, min_free: int) -> str:
    with pytest.raises(NotEnoughSpaceException) as error:
        choose(plan, folder, max_disk, deletes=False, min_free=min_free)
    return error.value.remedy


def freed_by(remedy: str) -> int:
    size = re.search(r"[Ff]ree ([\d.]+ [GM]B)", remedy)
    assert size is not None
    return parse_size(size[1], "remedy")


def test_what_is_to_be_freed_is_the_true_figure_also_below_the_reserve(tmp_path: Path, free: list[int]) -> None:
    plan = plan_of(even(4, MIB), "4bit-double")
    free[0] = 60 * MIB
    remedy = refused(plan, tmp_path, None, 10**13)
    assert remedy.startswith("Free 9999.")  # GB: 10 TB and what the split needs, less what is free
    assert "or lower min_free_disk (rabbitllm pull --min-free-disk)," in remedy
    choose(plan, tmp_path, None, deletes=False, min_free=0)
    free[0] += freed_by(remedy)
    choose(plan, tmp_path, None, deletes=False, min_free=10**13)
    free[0] = MIB
    lower, more = refused(plan, tmp_path, None, 10**9).split(", or lower min_free_disk")
    assert freed_by(lower) > 10**9
    free[0] += freed_by(more)
    choose(plan, tmp_path, None, deletes=False, min_free=0)


def test_advice_that_is_followed_once_is_enough(tmp_path: Path, free: list[int]) -> None:
    plan = plan_of(even(4, MIB), "4bit-double")
    free[0] = 60 * MIB
    remedy = refused(plan, tmp_path, 1000, 10**9)
    limit = re.search(r"Set max_disk to (\d+) and free", remedy)
    assert limit is not None
    free[0] += freed_by(remedy)
    choose(plan, tmp_path, int(limit[1]), deletes=False, min_free=10**9)


def test_best_shard_transfer_that_fits_is_chosen(tmp_path: Path, free: list[int]) -> None:
    """Two shards are on the disk if both fit, one if one fits, else none."""
    plan = plan_of(even(4, MIB, staged=True), "4bit")
    needs = {way: peak_of(plan, shard_transfer=way, freed=all_freed(plan)).created for way in ShardTransfer}
    assert needs[ShardTransfer.FILE_AHEAD] > needs[ShardTransfer.FILE] > needs[ShardTransfer.STREAM]
    for way, need in needs.items():
        for available, max_disk in ((need, None), (10**15, need)):
            free[0] = available
            assert choose(plan, tmp_path, max_disk, deletes=True) is way
            if way is not ShardTransfer.STREAM:
                assert choose(plan, tmp_path, max_disk, deletes=True, transfer="file") is way
            assert choose(plan, tmp_path, max_disk, deletes=True, transfer="stream") is ShardTransfer.STREAM
            free[0] = min(available, needs[ShardTransfer.STREAM] - 1)
            with pytest.raises(NotEnoughSpaceException):
                choose(plan, tmp_path, max_disk, deletes=True)


def test_refusal_of_files_names_the_stream_that_fits(tmp_path: Path, free: list[int]) -> None:
    plan = plan_of(even(4, MIB, staged=True), "4bit")
    free[0] = peak_of(plan, shard_transfer=ShardTransfer.STREAM, freed=all_freed(plan)).created
    with pytest.raises(NotEnoughSpaceException, match="would fit: it writes no shard"):
        choose(plan, tmp_path, None, deletes=True, transfer="file")


def transposed(tensor: TensorSpec) -> TensorSpec:
    return tensor._replace(strides=(1, tensor.shape[0]))


def test_unstreamable_shards_are_never_streamed(tmp_path: Path, free: list[int]) -> None:
    whole = [
        dataclasses.replace(shard, header_first=False, tensors=tuple(map(transposed, shard.tensors)))
        for shard in even(4, MIB, staged=True)
    ]
    plan = plan_of((*whole[:1], *even(4, MIB, staged=True)[1:]), "4bit")  # one is enough
    assert plan.unstreamable == ("shard-0",)
    needs = {way: peak_of(plan, shard_transfer=way, freed=all_freed(plan)).created for way in ShardTransfer}
    for way in (ShardTransfer.FILE_AHEAD, ShardTransfer.FILE):
        for transfer in ("auto", "file"):
            free[0] = needs[way]
            assert choose(plan, tmp_path, None, deletes=True, transfer=transfer) is way
    free[0] -= 1
    for transfer in ("auto", "file"):
        with pytest.raises(
            NotEnoughSpaceException, match=re.escape(size_rounded_up(needs[ShardTransfer.FILE]))
        ) as short:
            choose(plan, tmp_path, None, deletes=True, transfer=transfer)
        assert "stream" not in short.value.remedy
    with pytest.raises(OptionError, match=r"shard_transfer='stream' is not possible for m: shard-0 is a torch"):
        choose(plan, tmp_path, None, deletes=True, transfer="stream")
    here = plan_of(tuple(dataclasses.replace(shard, staged=False) for shard in whole))
    free[0] = 10**15
    assert choose(here, tmp_path, None, deletes=True, transfer="stream") is ShardTransfer.FILE


def test_local_shards_have_one_transfer(tmp_path: Path, free: list[int]) -> None:
    for transfer in ("auto", "file", "stream"):
        assert choose(plan_of(even(2, MIB)), tmp_path, None, deletes=True, transfer=transfer) is ShardTransfer.FILE


def test_max_disk_counts_downloads_outside_the_split(tmp_path: Path, free: list[int]) -> None:
    plan, cache = plan_of(even(4, MIB)), ((tmp_path / "cache", 10 * MIB),)
    need = peak_of(plan).created + 10 * MIB
    choose(plan, tmp_path / "split", need, deletes=False, downloads=cache)
    with pytest.raises(NotEnoughSpaceException, match=re.escape(f"allowed by max_disk={need - 1:,}")) as refused:
        choose(plan, tmp_path / "split", need - 1, deletes=False, downloads=cache)
    assert "sequential_shard_processing=True: it downloads one shard at a time" in str(refused.value)


def test_downloads_count_on_the_disk_of_the_cache(
    tmp_path: Path, free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(even(4, MIB))
    need = peak_of(plan).added
    free[0] = need + 10 * MIB
    choose(plan, tmp_path / "split", None, deletes=False, downloads=((tmp_path / "cache", 10 * MIB),))
    with pytest.raises(NotEnoughSpaceException, match=re.escape(size_rounded_up(need + 10 * MIB + 1))):
        choose(plan, tmp_path / "split", None, deletes=False, downloads=((tmp_path / "cache", 10 * MIB + 1),))


@pytest.mark.parametrize("staged", [False, True])
def test_concurrent_shards_are_limited_by_the_disk(tmp_path: Path, staged: bool) -> None:
    plan = plan_of(even(6, 4 * MIB, staged=staged))
    disk_budget = DiskBudget(tmp_path, all_freed(plan, not staged))

    def chosen(max_disk: int, transfer: str = "file") -> tuple[ShardTransfer, int]:
        return choose_shard_transfer(
            plan, disk_budget, SplitOptions(max_disk=max_disk, min_free=0, shard_transfer=transfer), 4
        )

    def need(at_once: int, shard_transfer: ShardTransfer = ShardTransfer.FILE) -> int:
        return peak_of(plan, at_once, shard_transfer=shard_transfer, freed=all_freed(plan, not staged)).created

    assert chosen(need(4)) == (ShardTransfer.FILE, 4)
    with pytest.raises(NotEnoughSpaceException, match="at its peak"):
        chosen(need(1) - 1)
    if staged:
        assert chosen(need(4) - 1) == (ShardTransfer.FILE, 3)
        assert chosen(need(2)) == (ShardTransfer.FILE, 2)
        assert chosen(need(4) - 1, "auto") == (ShardTransfer.STREAM, 4)
    assert choose_shard_transfer(plan, disk_budget, SplitOptions(min_free=0), 100)[1] == 6


def test_free_disk_bounds_the_shards_that_are_not_yet_deleted(tmp_path: Path, free: list[int]) -> None:
    plan = plan_of(even(6, 4 * MIB))
    added = [
        peak_of(plan, count, shard_transfer=ShardTransfer.FILE, freed=all_freed(plan)).added for count in range(1, 7)
    ]
    assert added == sorted(added)
    for count in (1, 3, 6):
        free[0] = added[count - 1]
        options = SplitOptions(shards=ShardPolicy.DELETE_USED, min_free=0)
        assert choose_shard_transfer(plan, DiskBudget(tmp_path, all_freed(plan)), options, 6) == (
            ShardTransfer.FILE,
            count,
        )
