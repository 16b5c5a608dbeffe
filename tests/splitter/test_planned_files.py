"""What is planned is what is found: tensors, and where a model's weights will be, before and after a split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm import prepare
from rabbitllm.base.options import SplitOptions, StreamOptions
from rabbitllm.engine.devices import CpuDevice, Device
from rabbitllm.engine.load import load_model
from rabbitllm.engine.load_plan import make_load_plan
from rabbitllm.estimate.source_scan import SourceScan
from rabbitllm.splitter.plan import PlannedFiles
from rabbitllm.store.layer_store import LayerStore
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.tiny_models import split

COMPRESSIONS = [None, "8bit", "4bit"]
ROOMS = [0, 20_000, 150_000, 600_000, 1 << 34]
"""Bytes of weights: nothing, a little, about half, most of it, all."""
EXPERTS = ["qwen3_moe", "gpt_oss", "qwen3_next", "mixtral", "deepseek_v3", "jamba"]
FAMILIES = ["llama", "gemma3", "gpt_oss", "qwen3_moe", "opt", "mamba2", "t5"]


def planned(folder: Path, compression: str | None) -> PlannedFiles:
    spec = prepare.ModelSpec(str(folder), compression)
    survey = SourceScan(prepare.find(spec, only_look=True), spec, SplitOptions(compression))
    assert not survey.folders[compression].exists()
    return PlannedFiles(survey.plans[compression], survey.folders[compression])


def every_way() -> Iterator[Any]:
    """Families and compressions; at once uncompressed ones, and one compression of each family by turns."""
    for number, family in enumerate(FAMILIES):
        for compression in COMPRESSIONS:
            later = compression not in (None, ("4bit", "8bit")[number % 2])
            yield pytest.param(family, compression, marks=pytest.mark.long if later else ())
    for family in EXPERTS:
        if family not in FAMILIES:
            yield from (pytest.param(family, compression, marks=pytest.mark.long) for compression in COMPRESSIONS)


@pytest.mark.parametrize(("family", "compression"), [*every_way()])
def test_tensors_and_placement_are_those_of_the_split(tmp_path: Path, family: str, compression: str | None) -> None:
    folder = build_checkpoint(tmp_path / "m", family, tied=family == "t5", dtype=torch.bfloat16, shards=3)
    files = planned(folder, compression)
    options = [
        StreamOptions(device="cpu", max_memory={"cpu": room}, show_progress=False, exact=exact, dtype=dtype)
        for room in ROOMS
        for exact, dtype in ((False, None), (True, "float32"))
    ]
    predicted = [make_load_plan(files, given, folder, [CpuDevice()]).placement for given in options]
    made = split(folder, compression)
    assert files.tensors == LayerStore(made).tensors
    assert predicted == [load_model(made, given).placement for given in options]
    assert len(set(predicted)) > 2
    assert {bool(placement.experts) for placement in predicted} == {family in EXPERTS}
    if family in EXPERTS and compression is None:
        assert {bool(placement.pools) for placement in predicted} == {True, False}
        assert any(pool.slots for placement in predicted for pool in placement.pools)


@pytest.mark.parametrize("host", [0, 100_000, 1 << 30])
@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("qwen3_next", marks=pytest.mark.long)])
def test_placement_on_gpus_is_that_of_the_split(
    tmp_path: Path, family: str, compression: str | None, host: int
) -> None:
    folder = build_checkpoint(tmp_path / "m", family, dtype=torch.bfloat16, shards=2, num_experts=12)
    gpus: list[Device] = [FakeGpu(0), FakeGpu(1)]
    room = 120_000 if compression else 400_000
    options = StreamOptions(max_memory={**{gpu.name: room for gpu in gpus}, "cpu": host}, show_progress=False)
    files = planned(folder, compression)
    predicted = make_load_plan(files, options, folder, gpus).placement
    assert {placed.device for placed in predicted.units} == {gpu.name for gpu in gpus}
    assert {pool.device for pool in predicted.pools} == {gpu.name for gpu in gpus}
    assert any(pool.host_slots for pool in predicted.pools) == bool(host > 100_000)
    assert predicted == load_model(split(folder, compression), options, None, gpus).placement


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_tensors_that_ranks_cut(tmp_path: Path, compression: str | None) -> None:
    folder = write_meta(tmp_path / "m", tiny_llama(), ranks=2)
    files = planned(folder, compression)
    assert files.tensors == LayerStore(split(folder, compression)).tensors


def test_there_are_no_bytes(tmp_path: Path) -> None:
    files = planned(build_checkpoint(tmp_path / "m", "llama"), None)
    part = next(iter(files.tensors.values())).parts[0]
    assert not files.path(part.file).exists()
    with pytest.raises(FileNotFoundError, match="only planned"):
        files.mapped(part.file)
