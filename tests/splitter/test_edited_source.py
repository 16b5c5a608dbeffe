"""A source that is edited during a split, between a kill and the next call, or later, is detected, never mixed in."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from rabbitllm import AutoModel, prepare
from rabbitllm.base import progress
from rabbitllm.checkpoints.checkpoint import WHOLE_BYTES
from rabbitllm.checkpoints.index import INDEX_NAME
from rabbitllm.errors import (
    CorruptShardError,
    IncompleteSplitError,
    OptionError,
    RabbitLLMError,
    SplitMismatchError,
)
from rabbitllm.models.convert import convert
from rabbitllm.splitter import journal
from rabbitllm.splitter.source_check import source_crc32
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store.layer_store import verify
from rabbitllm.store.manifest import JOURNAL_NAME, Manifest, read_manifest
from tests.support.builders import build_checkpoint, cut, llama_tensors, torch_files, write_shards, write_torch
from tests.support.commands import invoke
from tests.support.dying import dying_at
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.splitting import Call, contents, interrupted, layer_files, names_in, steps_of

REPO = "acme/large"
LARGE = {"layers": 2, "hidden": 512, "vocabulary": 8192}
"""Shards of which only a piece of each tensor is sampled."""
COMPRESSIONS = (None, "4bit", "8bit")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_shards(tmp_path_factory.mktemp("original") / "model", cut(llama_tensors(**LARGE), 3))
    assert all(shard.stat().st_size > WHOLE_BYTES for shard in (folder / name for name in shards_of(folder)[::2]))
    return folder


@pytest.fixture
def model(tmp_path: Path, original: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def shards_of(folder: Path) -> list[str]:
    return names_in(folder, "*.safetensors")


def edit(path: Path, *, back: bool = False) -> None:
    """Change a byte in the middle of a tensor, which is not sampled; with `back` restore the time afterwards."""
    before = path.stat()
    with path.open("r+b") as file:
        offset = 8 + int.from_bytes(file.read(8), "little") + 100_001
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    if back:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:  # never within the grain of the clock
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def later(path: Path) -> None:
    """Change the time, and keep the bytes."""
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def expected(original: Path, tmp_path: Path, compression: str | None) -> dict[str, bytes]:
    copy = shutil.copytree(original, tmp_path / "expected" / "model")
    return layer_files(Call(str(copy), compression=compression, sequential=False).make())


def refused(call: Call, pattern: str) -> SplitMismatchError:
    """The error of a call that changes nothing."""
    folder = Path(call.source)
    before = contents(folder) if folder.exists() else {}
    with pytest.raises(SplitMismatchError, match=pattern) as error:
        call.make()
    if before:
        assert contents(folder) == before
    return error.value


# Between a kill and the next call


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_edited_byte_of_a_waiting_shard(model: Path, sequential: bool, compression: str | None) -> None:
    call = Call(str(model), compression=compression, sequential=sequential)
    folder = interrupted(call)
    last = model / "model-00003-of-00003.safetensors"
    edit(last)
    error = refused(
        call, rf"{last} has changed since the split in {folder} was started: its modification time is 20[^+]*[.]$"
    )
    assert f"touch -d @{last.stat().st_mtime_ns // 10**9 - 1}." in error.remedy
    assert ("Do not delete" in error.remedy) is sequential
    assert (f"delete {folder}" in error.remedy) is not sequential


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_edited_byte_of_a_used_shard_that_is_kept(model: Path, compression: str | None, back: bool) -> None:
    call = Call(str(model), compression=compression, sequential=False)
    folder = interrupted(call)
    first = model / "model-00001-of-00003.safetensors"
    edit(first, back=back)
    error = refused(call, rf"{first} has changed since the split in {folder} was started: its bytes differ")
    assert f"to split the changed ones, delete {folder}" in error.remedy


def test_edited_byte_of_a_used_shard_after_a_crash(model: Path) -> None:
    """It is not deleted, which would otherwise be the first step."""
    call = Call(str(model), compression="4bit")
    first = model / "model-00001-of-00003.safetensors"

    def die(step: Step) -> None:
        if step.kind == "unlink" and step.path == first:
            raise KeyboardInterrupt

    with observe_steps(die), pytest.raises(KeyboardInterrupt):
        call.make()
    earlier = journal.replay(model / "splitted_model.4bit")
    assert earlier is not None
    assert earlier.used == {first.name}
    edit(first)
    refused(call, "its bytes differ")
    assert first.exists()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_used_shard_with_another_time_is_compared(
    model: Path, original: Path, tmp_path: Path, compression: str | None
) -> None:
    call = Call(str(model), compression=compression, sequential=False)
    interrupted(call)
    later(model / "model-00001-of-00003.safetensors")
    assert layer_files(call.make()) == expected(original, tmp_path, compression)


def test_copied_folder_is_resumed(model: Path, original: Path, tmp_path: Path) -> None:
    """Other inodes, and the same times, also in whole seconds only."""
    interrupted(Call(str(model), compression="4bit", sequential=False))
    copy = shutil.copytree(model, tmp_path / "copy" / "model")
    for name in shards_of(copy):
        whole = (copy / name).stat().st_mtime_ns // 10**9 * 10**9
        os.utime(copy / name, ns=(whole, whole))
    folder = Call(str(copy), compression="4bit", sequential=False).make()
    assert layer_files(folder) == expected(original, tmp_path, "4bit")


def test_time_that_was_set_back_is_reported(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only samples of a waiting shard are recorded."""
    call = Call(str(model), sequential=False)
    interrupted(call)
    edit(model / "model-00003-of-00003.safetensors", back=True)
    with caplog.at_level(logging.WARNING):
        call.make()
    assert re.search(r"model-00003-of-00003.safetensors may have been modified since the split in", caplog.text)


def test_another_length(model: Path) -> None:
    call = Call(str(model), sequential=False)
    folder = interrupted(call)
    last = model / "model-00003-of-00003.safetensors"
    with last.open("ab") as file:
        file.write(b" ")
    with pytest.raises(RabbitLLMError) as error:
        call.make()
    assert last.name in str(error.value)
    assert not (folder / "split.json").exists()


def test_other_samples_are_a_change(model: Path) -> None:
    call = Call(str(model), sequential=False)
    folder = interrupted(call)
    other = write_shards(model.parent / "other", cut(llama_tensors(**LARGE, seed=1), 3))
    shutil.copyfile(other / "model-00003-of-00003.safetensors", model / "model-00003-of-00003.safetensors")
    refused(call, rf"{model} has changed since the split in {folder} was started: its shard model-00003")


def test_journal_of_an_earlier_version_is_resumed(model: Path, original: Path, tmp_path: Path) -> None:
    call = Call(str(model), compression="4bit", sequential=False)
    folder = interrupted(call)
    head, *lines = (folder / JOURNAL_NAME).read_text().splitlines()
    content = json.loads(head)
    for shard in content["shards"]:
        assert shard.pop("stat")[0] == shard["size"]
    used = [json.loads(line) for line in lines]
    for line in used:
        assert line.pop("source_crc32")
    (folder / JOURNAL_NAME).write_text("".join(json.dumps(line) + "\n" for line in (content, *used)))
    for name in shards_of(model):
        later(model / name)
    assert layer_files(call.make()) == expected(original, tmp_path, "4bit")
    manifest = read_manifest(folder)
    assert manifest is not None
    assert set(manifest.source_checksums) == set(shards_of(model)[1:])


# While it runs


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_shard_that_is_modified_while_it_is_read(model: Path, compression: str | None) -> None:
    call = Call(str(model), compression=compression)
    second = model / "model-00002-of-00003.safetensors"

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.BytesDone) and event.shard == second.name:
            later(second)

    with progress.listening(listen), pytest.raises(CorruptShardError, match="was modified while it was being split"):
        call.make()
    folder = call.find().split_folder
    earlier = journal.replay(folder)
    assert earlier is not None
    assert earlier.used == {"model-00001-of-00003.safetensors"}
    layers = [layer for layer, shards in earlier.plan.layer_map.layer_to_shards.items() if second.name in shards]
    assert layers
    assert not any((folder / earlier.plan.layouts[layer].file_name).exists() for layer in layers)


@pytest.mark.parametrize("same_bytes", [True, False])
def test_shard_that_is_replaced_before_its_turn(model: Path, original: Path, tmp_path: Path, same_bytes: bool) -> None:
    """By a file of the same size and time, as tools that copy write it: of another model it would make a mixture."""
    other = write_shards(tmp_path / "other", cut(llama_tensors(**LARGE, seed=1), 3))
    third = model / "model-00003-of-00003.safetensors"
    replacement = Path(shutil.copy2((model if same_bytes else other) / third.name, tmp_path / "replacement"))
    os.utime(replacement, ns=(third.stat().st_atime_ns, third.stat().st_mtime_ns))

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardStarted) and event.shard == third.name and replacement.exists():
            os.replace(replacement, third)

    call = Call(str(model))
    with progress.listening(listen):
        if same_bytes:
            assert layer_files(call.make()) == expected(original, tmp_path, None)
            assert not third.exists()
        else:
            with pytest.raises(CorruptShardError, match="was modified while it was being split: its bytes differ"):
                call.make()
            assert third.exists()


# The sums that are noted


@pytest.mark.parametrize("compression", [None, "8bit", "4bit", "4bit-double"])
@pytest.mark.parametrize("kind", ["safetensors", "odd torch files", "ranks"])
def test_recorded_checksum_is_that_of_the_used_data(tmp_path: Path, kind: str, compression: str | None) -> None:
    """At any step of death, also between a layer's name and its journal entry."""
    cuts = cut(llama_tensors(layers=2, hidden=192, vocabulary=200), 3)
    if kind == "safetensors":
        source = write_shards(tmp_path / "model", cuts)
    elif kind == "ranks":
        source = write_meta(tmp_path / "model", tiny_llama(), ranks=2)
    else:
        source = write_torch(tmp_path / "model", torch_files(cuts), index=True)
    recorded: list[dict[str, int]] = []
    call = Call(str(source), compression=compression, sequential=False)
    copy = Path(shutil.copytree(source, tmp_path / "counted"))
    steps = steps_of(dataclasses.replace(call, source=str(copy)))
    for death in (steps, *range(0, steps, max(steps // 12, 1))):
        again = dataclasses.replace(call, saving_path=str(tmp_path / f"out-{death}"))
        with dying_at(death):
            again.make()
        manifest = read_manifest(again.make())
        assert manifest is not None
        recorded.append(dict(manifest.source_checksums))
    earlier = journal.replay(interrupted(dataclasses.replace(call, saving_path=str(tmp_path / "begun"))))
    assert earlier is not None
    sums = {shard.name: source_crc32(source / shard.name, shard.tensors) for shard in earlier.plan.shards}
    assert all(noted == sums for noted in recorded)


# With verify_source


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_checksums_recorded_first_detect_any_change(model: Path, compression: str | None) -> None:
    call = Call(str(model), compression=compression, verify_source=True)
    interrupted(call)
    edit(model / "model-00003-of-00003.safetensors", back=True)
    for verifies in (True, False):
        refused(dataclasses.replace(call, verify_source=verifies), "its bytes differ")


def test_checksums_recorded_first_accept_an_intact_copy(model: Path, original: Path, tmp_path: Path) -> None:
    call = Call(str(model), compression="4bit", verify_source=True)
    interrupted(call)
    for name in shards_of(model):
        (model / name).unlink()
        shutil.copyfile(original / name, model / name)
    later(model / "model-00003-of-00003.safetensors")
    assert layer_files(call.make()) == expected(original, tmp_path, "4bit")


def test_change_that_keeps_the_time_during_the_split(model: Path) -> None:
    call = Call(str(model), verify_source=True)
    last = model / "model-00003-of-00003.safetensors"

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone) and event.number == 1:
            edit(last, back=True)

    with (
        progress.listening(listen),
        pytest.raises(CorruptShardError, match="differs from its checksum"),
    ):
        call.make()
    assert last.exists()
    folder = model / "splitted_model"
    assert not (folder / "lm_head.safetensors").exists()
    edit(last, back=True)  # the same bit once more
    assert call.make() == folder


def test_verify_source_detects_an_edit_in_a_copy(model: Path, tmp_path: Path) -> None:
    call = Call(str(model), sequential=False)
    interrupted(call)
    copy = shutil.copytree(model, tmp_path / "copy" / "model")
    edit(copy / "model-00001-of-00003.safetensors", back=True)
    refused(dataclasses.replace(call, source=str(copy), verify_source=True), "its bytes differ")


def test_shards_without_checksums_are_reported(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    call = Call(str(model), sequential=False)
    interrupted(call)
    dataclasses.replace(call, verify_source=True).make()
    assert f"2 shards of {model} have no recorded checksum" in caplog.text


# Shards in the hub cache, of which the hub says the digest


@pytest.fixture
def cached(
    tmp_path: Path, original: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> Callable[[str], Path]:
    """Return the path of a shard in the hub cache, which has all of them."""
    shutil.copytree(original, tmp_path / "hub" / REPO)
    Call(REPO, sequential=False).make()
    [snapshot] = hub_environment.cache.glob("models--*/snapshots/*")
    return lambda shard_number: (snapshot / f"model-{shard_number}-of-00003.safetensors").resolve()


@pytest.mark.parametrize("sequential", [True, False])
def test_cached_shard_edited_before_the_split(cached: Callable[[str], Path], sequential: bool) -> None:
    edit(cached("00002"), back=True)
    call = Call(REPO, compression="4bit", sequential=sequential, verify_source=True)
    with pytest.raises(CorruptShardError, match="differs from its digest on the hub"):
        call.make()
    assert cached("00001").exists()


@pytest.mark.parametrize("sequential", [True, False])
def test_cached_shard_edited_or_touched_during_the_split(cached: Callable[[str], Path], sequential: bool) -> None:
    call = Call(REPO, compression="4bit", sequential=sequential)
    interrupted(call)
    edit(cached("00003"))
    refused(call, "its bytes differ")
    edit(cached("00003"))
    call.make()


# A finished split


def test_original_modified_after_the_split(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    call = Call(str(model), compression="4bit", sequential=False)
    folder = call.make()
    caplog.clear()
    call.make()
    assert caplog.text == ""
    first = model / "model-00001-of-00003.safetensors"
    edit(first, back=True)
    future = (folder / "split.json").stat().st_mtime_ns + 10**9
    for shard in model.glob("*.safetensors"):
        os.utime(shard, ns=(future, future))
    call.make()
    (warning,) = caplog.messages
    assert f"{model} was modified after the split in {folder} was made ({first.name}, " in warning
    refused(dataclasses.replace(call, verify_source=True), rf"{first} has changed since the split in {folder} was made")
    edit(first)
    caplog.clear()
    dataclasses.replace(call, verify_source=True).make()
    assert caplog.text == ""


def test_original_with_other_samples(model: Path) -> None:
    call = Call(str(model), compression="4bit", sequential=False)
    folder = call.make()
    other = write_shards(model.parent / "other", cut(llama_tensors(**LARGE, seed=1), 3))
    shutil.copyfile(other / "model-00002-of-00003.safetensors", model / "model-00002-of-00003.safetensors")
    error = refused(call, rf"{model} has changed since it was split into {folder}: its shard model-00002")
    assert f"load {folder}" in error.remedy


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("delete", [False, True])
def test_original_with_a_further_shard(tmp_path: Path, is_finished: bool, delete: bool) -> None:
    """Its tensors were left out of a split that counted as complete."""
    tensors = llama_tensors(layers=4)
    parts = cut(tensors, 4)
    model = write_shards(tmp_path / "model", dict([*parts.items()][:3]))
    call = Call(str(model), sequential=not is_finished, delete_original=delete and not is_finished)
    call.make() if is_finished else interrupted(call)
    write_shards(model, dict([*parts.items()][3:]))
    index = {name: shard for shard, names in parts.items() for name in names}
    (model / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    refused(dataclasses.replace(call, delete_original=delete), "it has a further shard, model-00004-of-00004.safet")


def test_repair_refuses_an_edited_original(model: Path) -> None:
    folder = Call(str(model), sequential=False).make()
    manifest = read_manifest(folder)
    assert manifest is not None
    whole = contents(folder)
    record = manifest.layers[0]
    with (folder / record.file).open("r+b") as file:
        file.seek(record.size - 10)
        file.write(b"damaged")
    damaged = {damage.layer for damage in verify(folder).damaged}
    for name in shards_of(model):
        edit(model / name, back=True)
    before = contents(folder)
    with pytest.raises(CorruptShardError, match=r"differs from its checksum\. Nothing was changed"):
        prepare.repair_split(folder, manifest, damaged, model)
    assert contents(folder) == before  # the other tensors of the damaged layer may be nowhere else
    for name in shards_of(model):
        edit(model / name, back=True)
    prepare.repair_split(folder, manifest, damaged, model)
    assert contents(folder) == whole


# Before a deletion


def killed_before_the_deletion(call: Call, shard: Path) -> None:
    """Make the call until the shard is used up by the journal, and about to be deleted."""

    def die(step: Step) -> None:
        if step.kind == "unlink" and step.path == shard:
            raise KeyboardInterrupt

    with observe_steps(die), pytest.raises(KeyboardInterrupt):
        call.make()
    assert shard.exists()


def replace_by_another_file(shard: Path, source: Path) -> None:
    """Put a copy of `source` there: another inode, with the size and the time of the file that was there."""
    before = shard.stat()
    copy = shard.with_name("copy")
    shutil.copyfile(source, copy)
    os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(copy, shard)
    now = shard.stat()
    assert now.st_ino != before.st_ino
    assert (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("is_edited", [True, False])
def test_replaced_used_shard_is_compared_before_its_deletion(
    model: Path, original: Path, tmp_path: Path, is_edited: bool
) -> None:
    call = Call(str(model), compression="4bit")
    first = model / shards_of(model)[0]
    killed_before_the_deletion(call, first)
    other = Path(shutil.copyfile(original / first.name, tmp_path / "other"))
    if is_edited:
        edit(other)
    replace_by_another_file(first, other)
    if is_edited:
        refused(call, "its bytes differ")
        assert first.exists()
    else:
        assert layer_files(call.make()) == expected(original, tmp_path, "4bit")
        assert not shards_of(model)


@pytest.mark.parametrize("lacks", [("source_crc32",), ("source_crc32", "stat")])
def test_used_shard_without_checksum_is_kept(
    model: Path, lacks: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The journal of an earlier version has no checksum of it."""
    call = Call(str(model), compression="4bit")
    first = model / shards_of(model)[0]
    killed_before_the_deletion(call, first)
    journal_path = model / "splitted_model.4bit" / JOURNAL_NAME
    lines = [json.loads(line) for line in journal_path.read_text().splitlines()]
    for entry in (*lines, *lines[0]["shards"]):
        for key in lacks:
            entry.pop(key, None)
    journal_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    replace_by_another_file(first, first)
    call.make()
    assert shards_of(model) == [first.name]
    assert f"{first} is kept: it has changed since it was split, or no checksum shows that it has not" in caplog.text


def test_shard_modified_just_before_its_deletion_is_kept(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    call = Call(str(model))
    second = model / shards_of(model)[1]
    listed: list[str] = []

    def listen(step: Step) -> None:
        if step.kind == "sync" and step.path.name == JOURNAL_NAME and not listed:
            earlier = journal.replay(step.path.parent)
            if earlier is not None and second.name in earlier.used:
                listed.append(second.name)
                edit(second, back=True)

    with observe_steps(listen):
        call.make()
    assert listed == shards_of(model) == [second.name]
    assert f"{second} is kept: it has changed since it was split" in caplog.text


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("index", [0, 2])
def test_an_edited_original_of_a_finished_split_is_not_deleted(
    model: Path, index: int, sequential: bool, back: bool
) -> None:
    """No other shard is deleted either: the checkpoint stays whole."""
    folder = Call(str(model), compression="4bit", sequential=False).make()
    shard = model / shards_of(model)[index]
    edit(shard, back=back)
    call = Call(str(model), compression="4bit", sequential=sequential, delete_original=True)
    error = refused(
        call, rf"{shard} has changed since the split in {folder} was made: its bytes differ\. Nothing was del"
    )
    assert "remove verify_source and delete_original" in error.remedy
    edit(shard)
    call.make()
    assert names_in(model, "*.safetensors*") == []


def test_original_edited_before_its_remaining_shards_are_deleted(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = model / shards_of(model)[0]

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone) and event.number == 2:
            edit(first, back=True)

    with progress.listening(listen):
        Call(str(model), sequential=False, delete_original=True).make()
    assert names_in(model, "*.safetensors*") == [first.name, "model.safetensors.index.json"]
    assert f"{first} is kept: it has changed since it was split" in caplog.text


def test_the_original_of_a_damaged_split_is_not_deleted(model: Path) -> None:
    folder = Call(str(model), sequential=False).make()
    whole = contents(folder)
    with (folder / "lm_head.safetensors").open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"damaged")
    before = contents(model)
    call = Call(str(model), sequential=False, delete_original=True)
    with pytest.raises(
        IncompleteSplitError, match=rf"is damaged \(lm_head\.safetensors\), so {model} is not del"
    ) as error:
        call.make()
    assert f"rabbitllm verify {folder} --repair" in error.value.remedy
    assert contents(model) == before
    prepare.repair_split(folder, require(read_manifest(folder)), {"lm_head"}, model)
    assert contents(call.make()) == whole
    assert names_in(model, "*.safetensors*") == []


def require(manifest: Manifest | None) -> Manifest:
    assert manifest is not None
    return manifest


def test_an_original_without_recorded_checksums_is_not_deleted(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Call(str(model), sequential=False).make()
    record = json.loads((folder / "split.json").read_text())
    assert len(record["source"].pop("crc32")) == 3
    (folder / "split.json").write_text(json.dumps(record))
    before = contents(model)
    Call(str(model), sequential=False, delete_original=True).make()
    assert contents(model) == before
    assert f"3 shards of {model} have no recorded checksum; they are neither compared nor deleted" in caplog.text


def test_an_edited_shard_in_the_hub_cache_is_not_deleted(cached: Callable[[str], Path]) -> None:
    edit(cached("00002"), back=True)
    call = Call(REPO, sequential=False, delete_original=True)
    with pytest.raises(SplitMismatchError, match=r"its bytes differ\. Nothing was deleted"):
        call.make()
    assert all(cached(shard_number).exists() for shard_number in ("00001", "00002", "00003"))
    edit(cached("00002"))
    call.make()
    assert not any(cached(shard_number).exists() for shard_number in ("00001", "00002", "00003"))


def test_an_edited_file_is_not_deleted_by_a_conversion(tmp_path: Path) -> None:
    """The first one was killed when the conversion was complete, and the file about to be deleted."""
    [shard] = write_shards(tmp_path / "model", cut(llama_tensors(**LARGE), 1)).glob("*.safetensors")
    source = shard.rename(tmp_path / "x.safetensors")

    def die(step: Step) -> None:
        if step.kind == "unlink" and step.path == source:
            raise KeyboardInterrupt

    with observe_steps(die), pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", delete_original=True)
    edit(source, back=True)
    with pytest.raises(SplitMismatchError, match=r"its bytes differ\. Nothing was deleted"):
        convert(source, tmp_path / "out", delete_original=True)
    assert source.exists()
    edit(source)
    convert(source, tmp_path / "out", delete_original=True)
    assert not source.exists()


# What a user types


def test_options(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "hare", "llama", shards=2)
    words = ["pull", str(folder), "--verify-source", "--device", "cpu"]
    invoke(*words)
    AutoModel.from_pretrained(folder, verify_source=True, device="cpu")
    first = folder / names_in(folder, "*-of-*")[0]
    with first.open("r+b") as file:
        file.seek(first.stat().st_size - 1)
        file.write(b"\x01")
    with pytest.raises(SplitMismatchError, match="has changed since"):
        AutoModel.from_pretrained(folder, verify_source=True, device="cpu")
    for command in (["run", str(folder), "hello"], ["batch", str(folder), "in.jsonl", "-o", "out.jsonl"]):
        assert "--verify-source" in invoke(command[0], "--help").output
    with pytest.raises(OptionError, match="verify_source=True works only while splitting"):
        AutoModel.from_pretrained(folder, verify_source=True, split=False, device="cpu")


@pytest.mark.parametrize("how", ["link", "hard link", "hub cache"])
def test_shards_that_are_one_file_lose_no_tensor(tmp_path: Path, hub_environment: HubEnvironment, how: str) -> None:
    """The index puts half of a shard's tensors into another name of its file, which is needed later."""
    shards = cut(llama_tensors(), 3)
    name = min(shards)
    folder = write_shards(tmp_path / "hub" / "org" / "model", shards)
    expected = layer_files(Call(str(folder), str(tmp_path / "expected"), sequential=False).make())
    index = json.loads((folder / INDEX_NAME).read_text())
    second = [tensor for tensor, shard in index["weight_map"].items() if shard == name][::2]
    index["weight_map"] |= dict.fromkeys(second, f"z-{name}")
    (folder / INDEX_NAME).write_text(json.dumps(index))
    if how == "link":
        (folder / f"z-{name}").symlink_to(name)
    else:
        os.link(folder / name, folder / f"z-{name}")
    source = str(folder)
    if how == "hub cache":
        source = "org/model"
        snapshot_download(source)
    made = Call(source, str(tmp_path / "made")).make()
    assert layer_files(made) == expected
    if how != "hub cache":
        assert (folder / name).exists() == (how == "link")
