"""Damaged layers are made again from the shards that they need, and from no others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch

from rabbitllm import prepare
from rabbitllm.checkpoints import fetch
from rabbitllm.errors import (
    CorruptShardError,
    HubError,
    IncompleteSplitError,
    MissingShardError,
    OptionError,
    SplitMismatchError,
)
from rabbitllm.models.remove import plan_removal
from rabbitllm.storage.durable import Step
from rabbitllm.store.layer_store import verify
from rabbitllm.store.manifest import Manifest, read_manifest
from tests.support.builders import build_checkpoint, cut, llama_tensors, write_shards
from tests.support.commands import invoke
from tests.support.dying import Death
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import Faults, LocalHub
from tests.support.splitting import Counter, contents, names_in, split
from tests.support.ticks import observe_ticks

REPO = "acme/tiny"
LAYER = "model.layers.1.safetensors"


@pytest.fixture
def split_folder(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> Path:
    write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(layers=6, vocabulary=512), 6))
    return split(REPO, compression="4bit")


def manifest_of(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def spoil(folder: Path, *files: str) -> None:
    for file in files:
        raw = bytearray((folder / file).read_bytes())
        raw[len(raw) // 2] ^= 4
        (folder / file).write_bytes(raw)


def repair(folder: Path, original: Path | None = None) -> None:
    damaged = {damage.layer for damage in verify(folder).damaged}
    assert damaged
    prepare.repair_split(folder, manifest_of(folder), damaged, original)


def test_only_needed_shards_are_fetched(split_folder: Path, local_hub: LocalHub, tmp_path: Path) -> None:
    whole = contents(split_folder)
    needed = next(record.shards for record in manifest_of(split_folder).layers if record.file == LAYER)
    assert 1 <= len(needed) < 6
    spoil(split_folder, LAYER)
    local_hub.forget_requests()
    repair(split_folder)
    assert contents(split_folder) == whole
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "hub" / REPO).glob("*.safetensors")}
    twice = {name for name, size in sizes.items() if local_hub.downloads(name) > 1}  # once for its header
    assert twice == set(needed)


@pytest.mark.parametrize("kept", range(7))
def test_shards_in_the_hub_cache_stay(
    kept: int, tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    """A repair deletes only the shards that it has fetched."""
    shards = write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(layers=6, vocabulary=512), 6))
    split_folder = split(REPO, compression="4bit", sequential=False)
    whole = contents(split_folder)
    snapshot = next((hub_environment.cache / "models--acme--tiny" / "snapshots").iterdir())
    for name in names_in(shards, "*.safetensors")[kept:]:
        (snapshot / name).resolve().unlink()
        (snapshot / name).unlink()
    before = contents(snapshot)
    assert len(names_in(snapshot, "*.safetensors")) == kept
    spoil(split_folder, LAYER)
    repair(split_folder)
    assert contents(split_folder) == whole
    assert contents(snapshot) == before


def test_missing_layers_are_made_again(split_folder: Path) -> None:
    whole = contents(split_folder)
    for file in (LAYER, "lm_head.safetensors", f"{LAYER}.done"):
        (split_folder / file).unlink()
    repair(split_folder)
    assert contents(split_folder) == whole


def test_unavailable_hub_leaves_the_split_unchanged(
    split_folder: Path, local_hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_pause", lambda failures: 0.0)
    spoil(split_folder, LAYER)
    before = contents(split_folder)
    local_hub.faults = Faults(status=503, status_times=-1)
    with pytest.raises(HubError):
        repair(split_folder)
    assert contents(split_folder) == before


@pytest.mark.parametrize("state", ["gone", "cut"])
@pytest.mark.parametrize("parts", [1, 6])
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_other_shards_are_not_needed(tmp_path: Path, state: str, parts: int, is_interrupted: bool) -> None:
    """A folder may have kept only the shards of the damaged layers, and what is left of the others may be damaged."""
    model = write_shards(tmp_path / "model", cut(llama_tensors(layers=6, vocabulary=512, dtype=torch.bfloat16), 6))
    split_folder = split(model, tmp_path / "out", compression="4bit", sequential=False)
    whole, manifest = contents(split_folder), manifest_of(split_folder)
    needed = next(record.shards for record in manifest.layers if record.file == LAYER)
    others = [model / name for name in sorted(manifest.source.fingerprints) if name not in needed][:parts]
    for path in others:
        path.unlink() if state == "gone" else os.truncate(path, 4)
    spoil(split_folder, LAYER)
    words = ["--repair", "--original", str(model)]
    if is_interrupted:
        interrupt_repair(split_folder, *words[1:])
        named = str(model), "--dir", str(tmp_path / "out"), "--compression", "4bit"
        finish = f"Finish it: {shlex.join(['rabbitllm', 'verify', str(split_folder), *words])}"
        for command in (["pull", *named, "--sequential"], ["plan", *named])[: 1 + (state == "gone")]:
            with pytest.raises(IncompleteSplitError, match="was interrupted") as refused:
                invoke(*command)
            assert refused.value.remedy == finish
        kept = {record.file for record in manifest.layers} - {LAYER}
        assert kept < {path.name for path in plan_removal(split_folder).files}
    assert run(str(split_folder), *words)[0] == 0
    assert contents(split_folder) == whole
    assert {*needed} <= {*names_in(model, "*.safetensors")}


def test_a_needed_shard_is_needed(tmp_path: Path) -> None:
    model = write_shards(tmp_path / "model", cut(llama_tensors(layers=6, vocabulary=512), 6))
    split_folder = split(model, tmp_path / "out", sequential=False)
    needed = next(record.shards for record in manifest_of(split_folder).layers if record.file == LAYER)
    spoil(split_folder, LAYER)
    before = contents(split_folder)
    raw = (model / needed[0]).read_bytes()
    (model / needed[0]).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises((SplitMismatchError, CorruptShardError), match=r"has other contents|differs from its checksum"):
        repair(split_folder, model)
    (model / needed[0]).unlink()
    with pytest.raises(MissingShardError, match=f"lacks 1 of the shards in its index: {needed[0]}"):
        repair(split_folder, model)
    assert contents(split_folder) == before


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_without_a_hub_its_cache_is_used(
    tmp_path: Path,
    local_hub: LocalHub,
    hub_environment: HubEnvironment,
    is_interrupted: bool,
) -> None:
    """The snapshot stays as it is, and is compared with the hub's digests."""
    write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(layers=6, vocabulary=512), 6))
    split_folder = split(REPO, compression="4bit", sequential=False)
    whole, manifest = contents(split_folder), manifest_of(split_folder)
    needed = next(record.shards for record in manifest.layers if record.file == LAYER)
    snapshot = next((hub_environment.cache / "models--acme--tiny" / "snapshots").iterdir())
    for name in set(manifest.source.fingerprints) - {*needed}:
        (snapshot / name).resolve().unlink()
        (snapshot / name).unlink()
    before = contents(snapshot)
    local_hub.stop()
    spoil(split_folder, LAYER)
    if is_interrupted:
        interrupt_repair(split_folder)
    assert run(str(split_folder), "--repair")[0] == 0
    assert contents(split_folder) == whole
    assert contents(snapshot) == before
    spoil(split_folder, LAYER)
    blob = (snapshot / needed[0]).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    before = contents(split_folder)
    with pytest.raises(CorruptShardError, match="differs from its checksum"):
        repair(split_folder)
    (snapshot / needed[0]).unlink()
    with pytest.raises(HubError, match="did not answer"):
        repair(split_folder)
    assert contents(split_folder) == before


def test_another_source_is_refused(split_folder: Path, tmp_path: Path) -> None:
    spoil(split_folder, LAYER)
    before = contents(split_folder)
    other = write_shards(tmp_path / "other", cut(llama_tensors(layers=6, vocabulary=512), 6))
    with pytest.raises(SplitMismatchError, match="cannot be repaired from other: it was made from a repository"):
        repair(split_folder, other)
    assert contents(split_folder) == before


def test_local_split_needs_the_path_of_its_checkpoint(tmp_path: Path) -> None:
    model = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    split_folder = split(model, sequential=False)
    whole = contents(split_folder)
    spoil(split_folder, LAYER)
    shards = [path.rename(tmp_path / path.name) for path in sorted(model.glob("*.safetensors"))]
    with pytest.raises(OptionError, match="split from a folder named 'model'"):
        repair(split_folder)
    for path in shards:
        path.rename(model / path.name)
    changed = write_shards(tmp_path / "changed" / "model", cut(llama_tensors(seed=3), 3))
    with pytest.raises(SplitMismatchError, match="has other contents"):
        repair(split_folder, changed)
    spoiled = contents(split_folder)
    for parts in (1, 2):  # the same model even, but no shard to read
        other = write_shards(tmp_path / f"in {parts}", cut(llama_tensors(), parts))
        with pytest.raises(SplitMismatchError, match=f"it has a further shard, model-00001-of-0000{parts}"):
            repair(split_folder, other)
        assert contents(split_folder) == spoiled
    fewer = write_shards(tmp_path / "fewer" / "model", dict([*cut(llama_tensors(), 3).items()][:1]))
    with pytest.raises(SplitMismatchError, match=r"it has other shards, without model-0000\d-of-00003"):
        repair(split_folder, fewer)
    repair(split_folder, model)
    assert contents(split_folder) == whole
    assert len(names_in(model, "*.safetensors")) == 3


# The command


def run(*arguments: str) -> tuple[int, str]:
    result = invoke("verify", *arguments, code=None)
    return result.exit_code, result.stdout


def test_command_on_a_sound_directory(split_folder: Path, local_hub: LocalHub) -> None:
    local_hub.forget_requests()
    code, text = run(str(split_folder))
    assert code == 0
    assert "9 layer files, 4bit, of acme/tiny at " in text
    assert "sound: every checksum, shape and tensor matches" in text
    assert re.search(r"\([\d.,]+ (MB|bytes) read in [\d.]+ s\)", text)
    assert local_hub.requests == []


def test_command_names_and_repairs_damage(split_folder: Path) -> None:
    whole = contents(split_folder)
    spoil(split_folder, LAYER)
    code, text = run(str(split_folder))
    assert code == 1
    assert "1 of 9 layer files are damaged" in text
    assert f"  {LAYER}: its checksum is " in text
    shards = len(next(record.shards for record in manifest_of(split_folder).layers if record.file == LAYER))
    assert f"To repair (downloads {shards} of 6 shards again): rabbitllm verify {split_folder} --repair" in text
    code, text = run(str(split_folder), "--repair")
    assert code == 0
    assert text.endswith("repaired: 1 layer file\n")
    assert contents(split_folder) == whole


@pytest.mark.parametrize("kind", ["hub", "around", "elsewhere"])
def test_an_interrupted_repair_is_finished_by_the_same_command(split_folder: Path, tmp_path: Path, kind: str) -> None:
    """From a hub, from the folder around the split, and from an original that is named."""
    words = []
    if kind != "hub":
        model = write_shards(tmp_path / "model", cut(llama_tensors(dtype=torch.float16), 3))
        split_folder = split(model, tmp_path / "out" if kind == "elsewhere" else None, sequential=False)
        words = ["--original", str(model)] if kind == "elsewhere" else []
    whole, command = contents(split_folder), shlex.join(["rabbitllm", "verify", str(split_folder), "--repair", *words])
    for moment in (("create", f"{LAYER}.part"), ("rename", "split.json.part"), ("unlink", "split.journal")):

        def stop(index: int, step: Step, moment: tuple[str, str] = moment) -> None:
            if (step.kind, step.path.name) == moment:
                raise Death

        spoil(split_folder, LAYER)
        with observe_ticks(Counter(stop)), pytest.raises(Death):
            run(str(split_folder), "--repair", *words)
        if not (split_folder / "split.json").exists():
            with pytest.raises(IncompleteSplitError, match=f"The repair of {split_folder} was interrupted") as error:
                run(str(split_folder))
            assert error.value.remedy == f"Finish it: {command}"
            assert command in invoke("ls", split_folder, columns=400).stdout
        assert run(str(split_folder), "--repair", *words)[0] == 0
        assert contents(split_folder) == whole, moment


def interrupt_repair(folder: Path, *words: str, kind: str = "create", name: str = f"{LAYER}.part") -> None:
    """Begin to repair, and stop at a step."""

    def stop(index: int, step: Step) -> None:
        if (step.kind, step.path.name) == (kind, name):
            raise Death

    with observe_ticks(Counter(stop)), pytest.raises(Death):
        run(str(folder), "--repair", *words)


def test_layers_that_a_repair_leaves_keep_their_checksums(split_folder: Path) -> None:
    """They may be damaged while it waits: their files are not what says which bytes they had."""
    whole, other = contents(split_folder), "model.layers.4.safetensors"
    spoil(split_folder, LAYER)
    interrupt_repair(split_folder)
    spoil(split_folder, other)
    code, text = run(str(split_folder), "--repair")
    assert (code, text.splitlines()[-1]) == (0, "repaired: 1 layer file")
    assert f"  {other}: its checksum is " in text
    assert contents(split_folder) == whole


@pytest.mark.parametrize("left", [None, 0, 5_000])
@pytest.mark.parametrize("kind", ["hub", "around", "elsewhere"])
@pytest.mark.parametrize("again", [False, True])
def test_a_layer_that_is_lost_during_a_repair_is_made_again(
    split_folder: Path, tmp_path: Path, kind: str, left: int | None, again: bool
) -> None:
    """From its shards, which the repair did not need before; also if it is interrupted there once more."""
    words = []
    if kind != "hub":
        model = build_checkpoint(tmp_path / "model", "llama", shards=3)
        split_folder = split(model, tmp_path / "out" if kind == "elsewhere" else None, sequential=False)
        words = ["--original", str(model)] if kind == "elsewhere" else []
    whole, layers = contents(split_folder), manifest_of(split_folder).layers
    needed = next(record.shards for record in layers if record.file == LAYER)
    lost = [record.file for record in layers if set(record.shards).isdisjoint(needed)][:2]
    assert lost
    spoil(split_folder, LAYER)
    interrupt_repair(split_folder, *words)
    for name in lost:
        if left is None:
            (split_folder / name).unlink()
        else:
            os.truncate(split_folder / name, left)
    if again:
        interrupt_repair(split_folder, *words, kind="rename", name=f"{lost[0]}.part")
        assert (split_folder / f"{lost[0]}.part").exists()
    assert run(str(split_folder), "--repair", *words)[0] == 0
    assert contents(split_folder) == whole


def test_a_lost_layer_whose_shard_is_gone_or_changed_stops_a_repair(tmp_path: Path) -> None:
    model = build_checkpoint(tmp_path / "model", "llama", shards=3)
    split_folder = split(model, sequential=False)
    whole = contents(split_folder)
    spoil(split_folder, LAYER)
    interrupt_repair(split_folder)
    (split_folder / "model.embed_tokens.safetensors").unlink()
    before = contents(split_folder)
    (first, *_) = sorted(model.glob("*.safetensors"))
    raw = first.read_bytes()
    first.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(SplitMismatchError, match="has changed since the split"):
        run(str(split_folder), "--repair")
    first.unlink()
    with pytest.raises(OptionError, match=f"{model} lacks {first.name}"):
        run(str(split_folder), "--repair")
    with pytest.raises(IncompleteSplitError, match=rf"missing or cut; it held tensors of {first.name}"):
        invoke("pull", model)
    assert contents(split_folder) == before
    first.write_bytes(raw)
    assert run(str(split_folder), "--repair")[0] == 0
    assert contents(split_folder) == whole


@pytest.mark.parametrize("option", ["--sequential", "--delete-original"])
@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_call_that_finishes_a_repair_deletes_nothing_unread(tmp_path: Path, option: str, is_damaged: bool) -> None:
    """The layers that the repair leaves are compared first: the shards are their only other copy."""
    model = build_checkpoint(tmp_path / "model", "llama", shards=3)
    split_folder = split(model, sequential=False)
    whole, shards = contents(split_folder), names_in(model, "*.safetensors")
    spoil(split_folder, LAYER)
    interrupt_repair(split_folder)
    if is_damaged:
        spoil(split_folder, "model.layers.2.safetensors")
    with pytest.raises(IncompleteSplitError) if is_damaged else contextlib.nullcontext():
        invoke("pull", str(model), option)
    assert names_in(model, "*.safetensors") == (shards if is_damaged else [])
    assert run(str(split_folder), "--repair")[0] == 0
    assert contents(split_folder) == whole


def test_command_in_json(split_folder: Path) -> None:
    code, text = run(str(split_folder), "--json")
    record = json.loads(text)
    assert (code, record["sound"], record["layers"], record["damaged"]) == (0, True, 9, [])
    spoil(split_folder, LAYER)
    code, text = run(str(split_folder), "--json")
    record = json.loads(text)
    assert (code, record["sound"], [d["file"] for d in record["damaged"]]) == (1, False, [LAYER])


def test_command_on_a_local_split_asks_for_the_original(tmp_path: Path) -> None:
    model = write_shards(tmp_path / "model", cut(llama_tensors(dtype=torch.float16), 3))
    split_folder = split(model)
    spoil(split_folder, LAYER)
    code, text = run(str(split_folder))
    assert code == 1
    assert "To repair, if the checkpoint still has model-00002-of-00003.safetensors" in text
    assert "it may hold the only copy" in text
    with pytest.raises(OptionError, match=r"and .* lacks model-00002-of-00003\.safetensors"):
        run(str(split_folder), "--repair")


def test_command_repairs_a_local_split_from_the_folder_around_it(tmp_path: Path) -> None:
    model = write_shards(tmp_path / "model", cut(llama_tensors(dtype=torch.float16), 3))
    split_folder = split(model, sequential=False)
    whole, shards = contents(split_folder), {path: path.read_bytes() for path in model.glob("*.safetensors")}
    spoil(split_folder, LAYER)
    code, text = run(str(split_folder))
    assert code == 1
    assert f"of 3 shards in {model}): rabbitllm verify {split_folder} --repair\n" in text
    code, text = run(str(split_folder), "--repair")
    assert (code, contents(split_folder)) == (0, whole)
    assert {path: path.read_bytes() for path in shards} == shards
    write_shards(model, cut(llama_tensors(seed=5, dtype=torch.float16), 3))  # another model's
    spoil(split_folder, LAYER)
    with pytest.raises(SplitMismatchError):
        run(str(split_folder), "--repair")
