"""Splits at "auto": the same bytes on every route and after every death, loaded as the dequantized weights."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rabbitllm
from rabbitllm import AutoModel, prepare
from rabbitllm.base.options import SplitOptions
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.engine.placement import Tier
from rabbitllm.errors import IncompleteSplitError, NotEnoughSpaceException, SplitMismatchError
from rabbitllm.models.library import compression_here, one_of_model
from rabbitllm.quant.schemes import BLOCKS, DOUBLE, scheme_of
from rabbitllm.splitter import journal
from rabbitllm.splitter.bit_allocation import groups
from rabbitllm.splitter.request import SplitRequest, plan_split
from rabbitllm.splitter.split import split
from rabbitllm.store.layer_store import LayerStore, verify
from rabbitllm.store.manifest import JOURNAL_NAME, MANIFEST_NAME, BitAllocation, Manifest, is_fitted, read_manifest
from rabbitllm.store.stored_form import stored_schemes
from tests.ray.test_shards import Here
from tests.support.builders import build_checkpoint, cut, llama_tensors, write_shards
from tests.support.commands import invoke
from tests.support.crashes import KILLED, CrashServer
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.quick_measuring import quick_measuring as quick_measuring
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.scenes import Scene, sample
from tests.support.splitting import Call, contents, interrupted
from tests.support.tiny_models import INPUT, assert_same, dequantized, plain_model, run, tiers
from tests.support.tiny_models import one_thread as one_thread

REPO = "acme/tiny"
WIDE: Mapping[str, int] = {"intermediate_size": 2048}
"""Matrices that are large enough for 4bit-double."""


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def chosen_in(folder: Path) -> dict[str, str]:
    chosen = manifest_of(folder).chosen
    assert chosen is not None
    return dict(chosen.schemes)


def size_at(folder: Path, where: Path, compression: str | None) -> int:
    """Bytes of all layer files."""
    split_folder = Call(str(folder), str(where), compression, sequential=False).make()
    return sum(record.size for record in manifest_of(split_folder).layers)


def between(folder: Path, where: Path, share: float = 0.6, *, for_gpu: bool = False) -> int:
    """Return memory between the needs of 4 and of 8 bits."""
    largest = max(path.stat().st_size for path in Call(str(folder), str(where), sequential=False).make().iterdir())
    names = ("4bit", "8bit") if for_gpu else ("q4_k", "q8_0")
    less, more = (size_at(folder, where, name) for name in names)
    return largest + int(less + (more - less) * share)


def split_in(
    memory: int, source: str, where: Path, executor: Any = None, *, for_gpu: bool = False, **call: Any
) -> Path:
    options_of_call = Call(source, str(where), "auto", **call)
    source_found = options_of_call.find()
    options = SplitOptions(
        "auto",
        options_of_call.shards,
        shard_transfer=options_of_call.shard_transfer,
        memory=memory,
        memory_is_given=True,
        for_gpu=for_gpu,
    )
    prepare.ensure_split(source_found, options, executor=executor)
    return source_found.split_folder


@pytest.mark.parametrize(("family", "for_gpu"), [("llama", False), ("llama", True), ("qwen3_moe", False)])
def test_every_route_makes_the_same_folder(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, family: str, for_gpu: bool
) -> None:
    folder = build_checkpoint(tmp_path / "hub" / REPO, family, dtype=torch.bfloat16, shards=4)
    memory = between(folder, tmp_path / "uniform", for_gpu=for_gpu)
    kept = split_in(memory, str(folder), tmp_path / "kept", sequential=False, for_gpu=for_gpu)
    assert kept.name == "splitted_model.auto"
    used = chosen_in(kept)
    assert len({*used.values()}) > 1
    assert {*used.values()} <= {"4bit", "8bit"} if for_gpu else BLOCKS.keys() >= {*used.values()}
    layers = {name: data for name, data in contents(kept).items() if name.endswith(".safetensors")}
    assert sum(map(len, layers.values())) <= memory
    folders = [
        split_in(memory, str(folder), tmp_path / "by hands", Here(3), sequential=False, for_gpu=for_gpu),
        split_in(memory, REPO, tmp_path / "fetched", shard_transfer="file", for_gpu=for_gpu),
        split_in(memory, REPO, tmp_path / "streamed", shard_transfer="stream", for_gpu=for_gpu),
        split_in(memory, REPO, tmp_path / "downloaded", sequential=False, for_gpu=for_gpu),
        split_in(memory, str(folder), tmp_path / "in turn", for_gpu=for_gpu),
    ]
    for other in folders:
        assert {name: data for name, data in contents(other).items() if name.endswith(".safetensors")} == layers
        assert chosen_in(other) == used
    schemes = {name: how for file in layers for name, how in stored_schemes(spec_names(kept, file)).items() if how}
    assert schemes.keys() == used.keys()
    assert schemes == used if for_gpu else {*schemes.values()} <= {*BLOCKS.values(), "Q5_1", "Q5_0", "IQ4_NL"}


def spec_names(folder: Path, file: str) -> list[str]:
    from rabbitllm.formats.safetensors_file import read_header

    return [spec.name for spec in read_header(folder / file, file).tensors]


@pytest.mark.parametrize("for_gpu", [False, True])
def test_pieces_have_the_scheme_of_the_whole_tensor(tmp_path: Path, for_gpu: bool) -> None:
    model = tiny_llama()
    whole = write_meta(tmp_path / "whole", model, ranks=1)
    pieces = write_meta(tmp_path / "pieces", model, ranks=4)
    memory = between(whole, tmp_path / "uniform", for_gpu=for_gpu)
    whole_split = split_in(memory, str(whole), tmp_path / "one", sequential=False, for_gpu=for_gpu)
    pieces_split = split_in(memory, str(pieces), tmp_path / "four", for_gpu=for_gpu)
    assert len({*chosen_in(whole_split).values()}) > 1
    assert chosen_in(pieces_split) == chosen_in(whole_split)
    assert {r.file: r.crc32 for r in manifest_of(pieces_split).layers} == {
        r.file: r.crc32 for r in manifest_of(whole_split).layers
    }


def scene_at(tmp_path: Path, spare: int) -> Scene:
    original = write_shards(tmp_path / "original", cut(llama_tensors(layers=2), 3))
    least = size_at(original, tmp_path / "uniform", "4bit")
    model = tmp_path / "local" / "model"
    return Scene(Call(str(model), compression="auto", max_disk=least + spare), original, model)


@pytest.mark.long
def test_killed_split_is_resumed_with_the_same_bits(tmp_path: Path, crash_server: CrashServer) -> None:
    scene = scene_at(tmp_path, 90_000)
    assert len(set(chosen_in(scene.made).values())) > 1
    for death in sample(scene.steps, 3):
        scene.reset()
        assert crash_server.run(scene.call, death) == KILLED
        scene.check()
        scene.finish()


def test_unfinished_split_keeps_its_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scene = scene_at(tmp_path, 90_000)
    scene.reset()
    folder = interrupted(scene.call)
    earlier = journal.replay(folder)
    assert earlier is not None
    assert earlier.plan.chosen is not None
    assert json.loads((folder / JOURNAL_NAME).read_bytes().partition(b"\n")[0])["journal_version"] == 3
    with caplog.at_level(logging.WARNING):
        assert scene.call.max_disk is not None
        dataclasses.replace(scene.call, max_disk=scene.call.max_disk + 50_000).make()
    assert "keeps its original bit allocation" in caplog.text
    assert scene.state() == scene.finished


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    wide = WIDE if family == "llama" and dtype == torch.float32 else {}
    folder = build_checkpoint(tmp_path / "m", family, dtype=dtype, shards=2, tied=family == "gemma3", **wide)
    memory = between(folder, tmp_path / "uniform")
    if wide:  # 4bit-double is chosen for large models on small disks: here it is given
        memory = 1 << 30
        half_double(folder, tmp_path / "mixed" / "splitted_model.auto")
    model = load(folder, tmp_path / "mixed", memory, exact=True)
    split_folder = tmp_path / "mixed" / "splitted_model.auto"
    assert len({*chosen_in(split_folder).values()}) > 1
    reference = dequantized(folder, tmp_path / "meant", chosen_in(split_folder), dtype)
    expected = run(plain_model(reference, dtype=dtype))
    assert_same(run(model), expected)
    assert_same(run(load(folder, tmp_path / "mixed", 0, exact=True)), expected)
    model = load(folder, tmp_path / "mixed", memory)
    assert not {Tier.STREAMED, Tier.ROUTED} & {*tiers(model).values()}
    quick = run(model).logits
    codes = dequantized(folder, tmp_path / "codes", chosen_in(split_folder), torch.float64)
    assert_as_near(quick, expected.logits, exact_logits(codes, INPUT), routed=family == "qwen3_moe", scheme="4bit")


def half_double(folder: Path, split_folder: Path) -> None:
    """Split with every other group of tensors at 4bit-double, the others at 8bit."""
    request = SplitRequest(LocalCheckpoint(folder), split_folder, {"model_type": "llama"}, SplitOptions(DOUBLE))
    ways = (DOUBLE, "8bit")
    stored = {
        spec.name: scheme
        for index, group in enumerate(groups(plan_split(request).tensors))
        for spec in group.tensors
        if (scheme := scheme_of(spec, ways[index % 2])) is not None
    }
    split(dataclasses.replace(request, options=SplitOptions("auto"), chosen=BitAllocation(stored)))


def load(folder: Path, where: Path, memory: int, **options: Any) -> Any:
    return AutoModel.from_pretrained(
        folder,
        compression="auto",
        layer_shards_saving_path=where,
        device="cpu",
        max_memory={"cpu": memory},
        show_layer_progress=False,
        **options,
    )


@pytest.fixture
def split_folder(tmp_path: Path) -> Path:
    """A split for a disk budget at 4bit and 8bit, in the folder of its checkpoint."""
    folder = write_shards(tmp_path / "model", cut(llama_tensors(layers=3, vocabulary=512), 3))
    allowed = size_at(folder, tmp_path / "uniform", "4bit") + 150_000
    source = Call(str(folder), compression="auto", sequential=False).find()
    prepare.ensure_split(source, SplitOptions("auto", max_disk=allowed, for_gpu=True))
    return source.split_folder


def test_another_budget_gives_a_warning_or_an_error(split_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, before = str(split_folder.parent), contents(split_folder)
    chosen = manifest_of(split_folder).chosen
    assert chosen is not None
    assert chosen.max_disk is not None
    with caplog.at_level(logging.WARNING):
        for same in (None, chosen.max_disk):
            assert Call(source, compression="auto", sequential=False, max_disk=same).make() == split_folder
        assert not caplog.text
        assert Call(source, compression="auto", sequential=False, max_disk=chosen.max_disk * 2).make() == split_folder
    assert "is used unchanged" in caplog.text
    with pytest.raises(SplitMismatchError, match="requested was max_disk=1,000"):
        Call(source, compression="auto", sequential=False, max_disk=1000).make()
    assert contents(split_folder) == before


def test_mixed_split_is_listed_verified_repaired_and_found(split_folder: Path) -> None:
    model, before = str(split_folder.parent), contents(split_folder)
    assert compression_here(model) == "auto"
    assert one_of_model(model, "auto").folder == split_folder
    assert not verify(split_folder).damaged
    layer = "model.layers.1.safetensors"
    raw = bytearray((split_folder / layer).read_bytes())
    raw[len(raw) // 2] ^= 4
    (split_folder / layer).write_bytes(raw)
    damaged = {damage.layer for damage in verify(split_folder).damaged}
    assert len(damaged) == 1
    prepare.repair_split(split_folder, manifest_of(split_folder), damaged, split_folder.parent)
    assert contents(split_folder) == before
    for command in ("ls", "show", "inspect", "verify --compression auto"):
        done = invoke(*command.split(), str(split_folder) if command == "inspect" else model)
        assert "auto" in done.output


def test_scales_of_4bit_tensors_are_fitted(split_folder: Path, tmp_path: Path) -> None:
    chosen = manifest_of(split_folder).chosen
    assert chosen is not None
    source = Call(str(split_folder.parent), str(tmp_path / "fitted"), "auto", sequential=False).find()
    prepare.ensure_split(source, SplitOptions("auto", max_disk=chosen.max_disk, fit_scales=True))
    fitted = manifest_of(source.split_folder)
    assert is_fitted(fitted.quantizer)
    assert fitted.chosen == chosen
    losses = []
    for folder, is_so in (
        (split_folder.parent, False),
        (tmp_path / "fitted", True),
    ):  # what is finished says which it has
        estimate = rabbitllm.plan(
            split_folder.parent, compression="auto", layer_shards_saving_path=folder, device="cpu"
        )
        mixture = next(outlook.mixture for outlook in estimate.outlooks if outlook.compression == "auto")
        assert mixture is not None
        assert mixture.fitted is is_so
        losses.append(mixture.loss)
    assert losses[1] < 0.95 * losses[0]
    checksums = {record.file: record.crc32 for record in manifest_of(split_folder).layers}
    fewer_bits = {name for name, scheme in chosen.schemes.items() if scheme != "8bit"}
    for record in fitted.layers:
        assert (record.crc32 == checksums[record.file]) == fewer_bits.isdisjoint(record.tensors)


def test_damaged_record_is_refused(split_folder: Path) -> None:
    path = split_folder / MANIFEST_NAME
    content = json.loads(path.read_text())
    for schemes_said in ({"2bit": []}, {"4bit": [3]}, []):
        path.write_text(json.dumps({**content, "chosen": {**content["chosen"], "schemes": schemes_said}}))
        with pytest.raises(IncompleteSplitError, match="is damaged"):
            LayerStore(split_folder)
    path.write_text(json.dumps({**content, "chosen": {**content["chosen"], "max_disk": -1}}))
    with pytest.raises(IncompleteSplitError, match="is damaged"):
        LayerStore(split_folder)
    del content["chosen"]
    path.write_text(json.dumps(content))
    with pytest.raises(IncompleteSplitError, match="is damaged"):
        LayerStore(split_folder)


def test_plan_predicts_the_choice(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "llama", dtype=torch.bfloat16, shards=2)
    allowed = size_at(folder, tmp_path / "uniform", "4bit") + 120_000
    command = [str(folder), "--compression", "auto", "--max-disk", str(allowed), "--min-free-disk", "0"]
    done = invoke("plan", *command, "--device", "cpu", "--json")
    record = json.loads(done.stdout)
    outlook = next(entry for entry in record["outlooks"] if entry["compression"] == "auto")
    assert record["choice"]["compression"] == "auto"
    assert f'compression="auto", max_disk="{allowed}"' in " ".join(record["choice"]["call"].replace("\n", " ").split())
    split_folder = Call(str(folder), compression="auto", sequential=False, max_disk=allowed).make()
    assert outlook["output_bytes"] == sum(record.size for record in manifest_of(split_folder).layers) <= allowed
    by_scheme: dict[str, int] = {}
    for share in outlook["mixture"]["shares"]:
        if share["scheme"] is not None:
            by_scheme[share["scheme"]] = by_scheme.get(share["scheme"], 0) + share["tensors"]
    used = [*chosen_in(split_folder).values()]
    assert by_scheme == {scheme: used.count(scheme) for scheme in set(used)}
    mixture = outlook["mixture"]
    assert mixture["compared"] == "q4_k"
    assert mixture["uniform"]["q8_0"] < mixture["loss"] < 1 < mixture["uniform"]["iq4_xs"]
    fitted = invoke("plan", *command, "--device", "cpu", "--json", "--fit-scales")
    estimate = json.loads(fitted.stdout)
    same = next(entry for entry in estimate["outlooks"] if entry["compression"] == "auto")
    assert same["finished"]
    assert (same["mixture"]["loss"], same["mixture"]["fitted"]) == (mixture["loss"], False)
    assert "fit_scales" not in estimate["choice"]["call"]  # what is finished would be refused with it
    where = ["--dir", str(tmp_path / "elsewhere")]
    fitted = invoke("plan", *command, *where, "--device", "cpu", "--json", "--fit-scales")
    estimate = json.loads(fitted.stdout)
    assert "fit_scales=True" in estimate["choice"]["call"]
    fitted_mixture = next(entry for entry in estimate["outlooks"] if entry["compression"] == "auto")["mixture"]
    assert fitted_mixture["fitted"]
    assert fitted_mixture["compared"] == "4bit"
    assert fitted_mixture["uniform"]["4bit"] < 1
    shown = invoke("plan", *command, *where, "--device", "cpu", "--fit-scales")
    assert (
        f"expected loss {fitted_mixture['loss']:.2g} of 4bit's ({fitted_mixture['uniform']['8bit']:.2g} at 8bit, "
        in shown.output
    )
    assert "all with fitted scales" in shown.output
    shown = invoke("plan", *command, "--device", "cpu")
    assert "bits chosen" in shown.output
    assert "bits per weight; expected loss" in shown.output
    assert "Auto is finished" in shown.output


def test_too_small_budget_names_the_least_that_fits(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "m", "llama", dtype=torch.bfloat16, shards=2)
    pull = ["pull", str(folder), "--compression", "auto", "--device", "cpu", "--max-disk"]
    with pytest.raises(NotEnoughSpaceException) as refused:
        invoke(*pull, "1000")
    match = re.search(r"Set max_disk to (\d+)", str(refused.value))
    assert match is not None
    least = match[1]
    assert least in invoke(*pull, "1000", "--dry-run", code=1).output
    invoke(*pull, least, "--dry-run")
    invoke(*pull, least)
