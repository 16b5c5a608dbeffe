"""Finished splits are checked, and splits are made by one process at a time."""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file

from rabbitllm import prepare
from rabbitllm.base.options import ShardPolicy, SplitOptions
from rabbitllm.errors import (
    CheckpointNotFoundError,
    MissingShardError,
    NotEnoughSpaceException,
    OptionError,
    RabbitLLMError,
    SplitMismatchError,
)
from rabbitllm.models.convert import convert
from rabbitllm.models.remove import plan_removal, remove
from rabbitllm.prepare import _finding
from rabbitllm.splitter import journal
from rabbitllm.splitter.lock import HOLDER_NAME, LOCK_NAME
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.storage.folders import folder_at
from rabbitllm.store.manifest import JOURNAL_NAME
from tests.prepare.conftest import REPO
from tests.support.builders import (
    INDEX_NAME,
    SINGLE_NAME,
    TORCH_INDEX_NAME,
    build_checkpoint,
    cut,
    llama_tensors,
    write_shards,
)
from tests.support.dying import dying_at
from tests.support.forked import in_a_fork
from tests.support.gguf_files import write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.splitting import Call, Counter, contents, interrupted, layer_files, names_in, split, steps_of
from tests.support.workers import Worker

# Finished


def test_finished_split_of_a_repository_requests_no_weights(
    repository: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    folder = split(REPO)
    local_hub.forget_requests()
    source = Call(REPO).find()
    assert source.finished
    assert source.split_folder == source.config_folder == folder
    prepare.ensure_split(source, SplitOptions(shards=ShardPolicy.DELETE_USED))
    assert [request.path for request in local_hub.requests] == [f"/api/models/{REPO}"]
    assert local_hub.body_bytes() == 0
    shutil.rmtree(hub_environment.cache)
    local_hub.forget_requests()
    assert split(REPO) == folder
    assert local_hub.body_bytes() == 0


def test_split_directory_loads_alone(model: Path, tmp_path: Path, local_hub: LocalHub) -> None:
    folder = Path(shutil.copytree(split(model, compression="4bit"), tmp_path / "moved" / "renamed"))
    shutil.rmtree(model)
    for compression in (None, "4bit"):
        source = Call(str(folder), compression=compression).find()
        assert source.finished
        assert source.split_folder == source.config_folder == folder
        prepare.ensure_split(source, SplitOptions(compression))
    with pytest.raises(SplitMismatchError, match="is a split at compression 4bit; requested was 8bit") as refused:
        Call(str(folder), compression="8bit").find()
    assert "Remove the compression option" in str(refused.value)
    assert local_hub.requests == []


def test_used_checkpoint_has_its_split_in_its_folder(model: Path) -> None:
    folder = split(model, delete_original=True)
    assert names_in(model) == ["config.json", "splitted_model"]
    (model / "config.json").unlink()
    source = Call(str(model)).find()
    assert source.finished
    assert source.config_folder == folder
    assert split(model) == folder


def test_leftovers_of_a_crash_in_a_finished_split_are_removed(model: Path) -> None:
    folder = split(model, sequential=False)
    before = contents(folder)
    (folder / "split.journal").write_text("{}")
    (folder / ".staging").mkdir()
    (folder / ".staging" / "x.part").touch()
    assert split(model, sequential=False) == folder
    assert contents(folder) == before
    assert not (folder / ".staging").exists()


@pytest.mark.parametrize("killed_at", [1, 2, 5, 9])
def test_a_split_where_a_removal_was_killed_leaves_no_record_of_it(model: Path, killed_at: int) -> None:
    folder = split(model, sequential=False)
    before = contents(folder)
    with dying_at(killed_at) as death:
        remove(plan_removal(folder))
    assert death.step is not None
    assert (folder / "split.json.removed").exists()
    assert split(model, sequential=False) == folder
    assert contents(folder) == before


def test_original_left_by_a_crash_is_deleted(repository: Path, hub_environment: HubEnvironment) -> None:
    """The manifest existed, and the small files in the hub cache were not yet removed."""
    folder = split(REPO)
    links = [path for path in hub_environment.cache.rglob("*") if path.is_symlink()]
    assert sorted(path.name for path in links) == ["config.json", INDEX_NAME]
    assert split(REPO, delete_original=True) == folder
    assert not any(path.is_symlink() for path in hub_environment.cache.rglob("*"))


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("name", [SINGLE_NAME, "tiny-Q8_0.gguf"])
def test_original_of_one_file_left_by_a_crash_is_deleted(
    tmp_path: Path, hub_environment: HubEnvironment, name: str, sequential: bool
) -> None:
    """The manifest existed. Unlike an index, such a file of weights may be gone from the hub cache by then."""
    served = tmp_path / "hub" / REPO
    if name == SINGLE_NAME:
        write_shards(served, {name: llama_tensors(layers=1)}, index=False)
    else:
        served.mkdir(parents=True)
        write_gguf(served / name)
    snapshot_download(REPO)
    call = Call(REPO, sequential=sequential, delete_original=True)

    def die(step: Step) -> None:
        if step.kind == "unlink" and step.path.name == JOURNAL_NAME:
            raise KeyboardInterrupt

    with observe_steps(die), pytest.raises(KeyboardInterrupt):
        call.make()
    folder = call.make()
    left = [path for path in hub_environment.cache.rglob("*") if path.is_symlink() or path.parent.name == "blobs"]
    assert left == []
    assert call.make() == folder


@pytest.mark.parametrize("outtype", ["auto", "bf16"])
def test_a_gguf_file_left_by_a_crash_is_deleted_by_the_same_conversion(tmp_path: Path, outtype: str) -> None:
    """Its checksum is of values in another dtype than its own."""
    (tmp_path / "model").mkdir()
    file = write_gguf(tmp_path / "model" / "m.gguf")

    def die(step: Step) -> None:
        if step.kind == "unlink" and step.path == file:
            raise KeyboardInterrupt

    with observe_steps(die), pytest.raises(KeyboardInterrupt):
        convert(file, tmp_path / "out", outtype=outtype, delete_original=True)
    convert(file, tmp_path / "out", outtype=outtype, delete_original=True)
    assert not file.exists()


@pytest.mark.parametrize("verified", [True, False])
def test_a_repository_of_one_file_is_compared_if_requested(
    tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub, verified: bool
) -> None:
    write_shards(tmp_path / "hub" / REPO, {SINGLE_NAME: llama_tensors(layers=1)}, index=False)
    folder = split(REPO, sequential=False)
    [link] = hub_environment.cache.rglob(SINGLE_NAME)
    with link.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    local_hub.forget_requests()
    if verified:
        with pytest.raises(SplitMismatchError, match="its bytes differ"):
            split(REPO, sequential=False, verify_source=True)
    else:
        assert split(REPO, sequential=False) == folder
    assert local_hub.body_bytes() == 0


def test_finished_split_on_a_read_only_mount(model: Path) -> None:
    folder = split(model)

    def refuse(index: int, step: object) -> None:
        raise OSError(30, "Read-only file system")

    with observe_steps(Counter(refuse)):
        assert split(model) == folder


# Another model's


def test_finished_split_of_another_folder(model: Path, other: Path, tmp_path: Path) -> None:
    saving_path = tmp_path / "splits"
    split(other, saving_path, sequential=False)
    before = contents(tmp_path)
    for delete in (False, True):
        with pytest.raises(SplitMismatchError) as refused:
            split(model, saving_path, delete_original=delete)
        assert f"{saving_path / 'splitted_model'} was split from other; requested was {model}: its shard" in str(
            refused.value
        )
        assert "Split into another folder (--dir, layer_shards_saving_path" in str(refused.value)
    assert contents(tmp_path) == before
    assert split(model, saving_path, compression="4bit")  # has a directory of its own


@pytest.mark.parametrize("delete", [False, True])
def test_finished_split_of_a_repository_refuses_a_folder(
    repository: Path, other: Path, tmp_path: Path, delete: bool
) -> None:
    """Their fingerprints cannot be compared, so the split is not accepted for the folder."""
    split(REPO, tmp_path / "splits")
    before = contents(other)
    with pytest.raises(SplitMismatchError, match="it was made from a repository on the hub, not from a folder"):
        split(other, tmp_path / "splits", delete_original=delete)
    assert contents(other) == before


def test_finished_split_of_a_folder_refuses_a_repository(repository: Path, other: Path, tmp_path: Path) -> None:
    split(other, tmp_path / "splits")
    with pytest.raises(SplitMismatchError, match="was split from other; requested was acme/tiny"):
        split(REPO, tmp_path / "splits")


def test_finished_split_of_another_repository_or_commit(
    repository: Path, other: Path, tmp_path: Path, local_hub: LocalHub
) -> None:
    split(REPO, tmp_path / "splits")
    write_shards(tmp_path / "hub" / "acme" / "second", cut(llama_tensors(seed=6), 3))
    with pytest.raises(SplitMismatchError, match=r"acme/tiny; requested was acme/second: it is another repository"):
        split("acme/second", tmp_path / "splits")
    local_hub.add_revision(REPO, "main", other)
    with pytest.raises(SplitMismatchError, match=r"another source named acme/tiny: its commit is"):
        split(REPO, tmp_path / "splits")


def with_a_new_readme(repository: Path, tmp_path: Path) -> Path:
    changed = shutil.copytree(repository, tmp_path / "changed")
    (changed / "README.md").write_text("Now with a picture.")
    return changed


def test_commit_with_the_same_weights_uses_the_existing_split(
    repository: Path, tmp_path: Path, local_hub: LocalHub
) -> None:
    folder = split(REPO)
    local_hub.add_revision(REPO, "main", with_a_new_readme(repository, tmp_path))
    assert local_hub.commit(REPO) != folder.parent.name
    local_hub.forget_requests()
    assert split(REPO) == folder
    assert local_hub.body_bytes(".safetensors") == 0
    assert split(REPO, local_files_only=True) == folder
    assert split(REPO, compression="4bit").parent.name == local_hub.commit(REPO)  # none at that compression


def test_unfinished_split_is_resumed_after_a_commit_with_the_same_weights(
    repository: Path, tmp_path: Path, local_hub: LocalHub
) -> None:
    begun = interrupted(Call(REPO), shards=1)
    local_hub.add_revision(REPO, "main", with_a_new_readme(repository, tmp_path))
    local_hub.forget_requests()
    assert split(REPO) == begun
    assert local_hub.downloads("model-00001-of-00003.safetensors") == 0


def test_copies_of_another_commit_are_named(
    repository: Path, tmp_path: Path, local_hub: LocalHub, caplog: pytest.LogCaptureFixture
) -> None:
    folder = split(REPO)
    changed = with_a_new_readme(repository, tmp_path)
    local_hub.add_revision(REPO, "main", changed)
    assert split(REPO) == folder
    assert "not the same" not in caplog.text
    (changed / "chat_template.jinja").write_text("{{ messages[0].content }}")
    local_hub.add_revision(REPO, "main", changed)
    assert split(REPO) == folder
    commit = local_hub.commit(REPO)
    assert f"has the weights of commit {commit}, but not the same chat_template.jinja;" in caplog.text


@pytest.mark.parametrize("is_finished", [False, True])
def test_commit_with_a_further_shard_is_split(
    repository: Path, tmp_path: Path, local_hub: LocalHub, is_finished: bool
) -> None:
    """A commit that adds a shard, such as the layer for further tokens, has the earlier shards unchanged."""
    call = Call(REPO)
    folder = call.make() if is_finished else interrupted(call)
    split(REPO, tmp_path / "splits")
    grown = shutil.copytree(repository, tmp_path / "grown")
    index = json.loads((grown / INDEX_NAME).read_text())
    write_shards(grown, {"model-mtp.safetensors": {"model.layers.9.mlp.up_proj.weight": torch.ones(64, 64)}})
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-mtp.safetensors"
    (grown / INDEX_NAME).write_text(json.dumps(index))
    local_hub.add_revision(REPO, "main", grown)
    own = call.make()
    assert own != folder
    assert (own / "model.layers.9.safetensors").exists()
    with pytest.raises(SplitMismatchError, match="its commit is"):
        split(REPO, tmp_path / "splits")


def test_saving_path_is_the_same_after_a_commit_with_the_same_weights(
    repository: Path, tmp_path: Path, local_hub: LocalHub
) -> None:
    folder = split(REPO, tmp_path / "splits")
    local_hub.add_revision(REPO, "main", with_a_new_readme(repository, tmp_path))
    assert split(REPO, tmp_path / "splits") == folder


def test_used_folder_with_another_name_is_refused(model: Path, tmp_path: Path) -> None:
    folder = split(model, tmp_path / "splits")
    assert split(model, tmp_path / "splits") == folder  # its name is what is left of it
    other = shutil.copytree(model, tmp_path / "other")
    with pytest.raises(SplitMismatchError, match="has none of the shards that were split") as refused:
        split(other, tmp_path / "splits")
    assert str(folder) in refused.value.remedy
    third = split(write_shards(tmp_path / "third", cut(llama_tensors(), 3)))
    renamed = third.parent.rename(tmp_path / "renamed")
    assert split(renamed) == renamed / third.name  # it moved with its split


def test_folder_without_weights_does_not_get_the_split_of_another(model: Path, tmp_path: Path) -> None:
    folder = split(model, tmp_path / "out")
    assert split(model, tmp_path / "out") == folder  # all its shards are used up
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(SplitMismatchError, match="has none of the shards that were split"):
        split(empty, tmp_path / "out")


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_with_other_shards_are_refused(model: Path, tmp_path: Path, parts: int) -> None:
    """In another folder of the same name, and in the same folder, where they replaced the former weights."""
    inside, out = split(model, sequential=False), split(model, tmp_path / "out", sequential=False)
    other = write_shards(tmp_path / "b" / model.name, cut(llama_tensors(seed=1), parts))
    shutil.move(inside, other / inside.name)
    before = contents(other)
    for place in (None, out.parent):
        with pytest.raises(SplitMismatchError, match=r"the folder has other weights now, model\.") as refused:
            split(other, place, delete_original=True)
        assert "load the split directory" in refused.value.remedy
    assert contents(other) == before


def with_torch_files(folder: Path) -> Path:
    """The same checkpoint in files of `torch.save`; its one file has an index."""
    for file in sorted(folder.glob("*.safetensors")):
        name = f"pytorch_{file.stem}.bin"
        torch.save(tensors := load_file(file), folder / name)
        (folder / TORCH_INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
        file.unlink()
    (folder / INDEX_NAME).unlink()
    return folder


DELETIONS = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize(("sequential", "delete_original"), DELETIONS)
def test_other_weights_in_the_folder_do_not_stop_the_same_call(
    tmp_path: Path, sequential: bool, delete_original: bool
) -> None:
    """The index stays, or the folder would begin with the other file; in another format that is ignored."""

    def twice(folder: Path) -> None:
        other = tmp_path / f"new-{folder.name}"
        copied = shutil.copytree(folder, tmp_path / f"{folder.name}-to-convert")
        for source, call in ((folder, split), (copied, functools.partial(convert, folder=other))):
            for _ in range(2):
                call(source, sequential=sequential, delete_original=delete_original)
            assert names_in(source, "*.bin") == ["x.bin"]

    extra = with_torch_files(write_shards(tmp_path / "other", cut(llama_tensors(seed=1), 1)))
    torch_files = with_torch_files(write_shards(tmp_path / "torch", cut(llama_tensors(), 1)))
    safetensors = write_shards(tmp_path / "safetensors", cut(llama_tensors(), 2))
    single = write_shards(tmp_path / "single", cut(llama_tensors(), 1))
    next(single.glob("*.safetensors")).rename(single / SINGLE_NAME)
    (single / INDEX_NAME).unlink()
    for folder in (torch_files, safetensors, single):
        shutil.copy(next(extra.glob("*.bin")), folder / "x.bin")
        twice(folder)


IN_MEMORY = Path("/dev/shm")


@pytest.mark.parametrize(("sequential", "delete_original"), DELETIONS)
def test_shards_on_a_disk_are_not_deleted_for_a_split_in_memory(
    model: Path, sequential: bool, delete_original: bool
) -> None:
    """A restart would lose both."""
    if not IN_MEMORY.is_dir() or not folder_at(IN_MEMORY).in_memory or folder_at(model).in_memory:
        pytest.skip("no disk, or no folder in memory")
    before = contents(model)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        for finished in (False, True):
            if finished:
                split(model, Path(folder), sequential=False)
            if finished and not delete_original:
                continue
            with pytest.raises(OptionError, match=r"is in memory: a restart would lose .* Nothing was deleted"):
                split(model, Path(folder), sequential=sequential, delete_original=delete_original)
            assert contents(model) == before
        copy = shutil.copytree(model, Path(folder) / "copy")
        split(copy, Path(folder) / "split", sequential=sequential, delete_original=delete_original)
        assert not names_in(copy, "*.safetensors")


@pytest.mark.parametrize(("sequential", "delete_original"), DELETIONS)
def test_a_file_is_not_deleted_where_other_weights_would_take_its_place(
    model: Path, tmp_path: Path, sequential: bool, delete_original: bool
) -> None:
    tensors = {name: tensor for shard in cut(llama_tensors(seed=1), 1).values() for name, tensor in shard.items()}
    save_file(tensors, model / SINGLE_NAME)
    before = contents(model)
    for call in (split, functools.partial(convert, folder=tmp_path / "new")):
        with pytest.raises(OptionError, match=rf"has {INDEX_NAME}, too, which the same call would take"):
            call(model, sequential=sequential, delete_original=delete_original)
        assert contents(model) == before
    split(model, sequential=False)
    if delete_original:
        with pytest.raises(OptionError, match="nothing was deleted"):
            split(model, sequential=sequential, delete_original=True)
    (model / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SINGLE_NAME)}))
    for _ in range(2):
        split(model, tmp_path / "splits", sequential=sequential, delete_original=delete_original)


def test_snapshot_folder_is_the_repository(repository: Path, tmp_path: Path) -> None:
    folder = split(REPO, tmp_path / "splits")
    snapshot = Path(snapshot_download(REPO))
    assert split(snapshot, tmp_path / "splits") == folder
    assert len(names_in(snapshot, "*.safetensors")) == 3  # a finished split frees nothing unless it is told to
    assert split(snapshot, tmp_path / "splits", delete_original=True) == folder
    assert not snapshot.exists()


# Splits that are made: what missing shards lead to, and several processes and threads at once.


ROOT = Path(__file__).parents[2]


# Shards that are gone


def test_missing_shards_and_a_split_at_another_compression(model: Path) -> None:
    split(model, compression="4bit")
    with pytest.raises(MissingShardError) as missing:
        split(model)
    assert "lacks 3 of the shards in its index" in missing.value.problem
    assert missing.value.remedy == (
        "Another split may have deleted them. Load or resume that one: "
        f"compression='4bit' in {model}/splitted_model.4bit."
    )


def test_a_single_file_used_up_by_a_split_at_a_compression(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    made = split(folder, compression="4bit")
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint") as absent:
        split(folder)
    assert absent.value.remedy.endswith(f"Load or resume that one: compression='4bit' in {made}.")


def test_missing_shards_and_an_unfinished_split(model: Path, tmp_path: Path) -> None:
    begun = interrupted(Call(str(model), compression="8bit"), 2)
    for compression, out in ((None, None), ("8bit", tmp_path / "out")):
        with pytest.raises(MissingShardError, match="Load or resume") as missing:
            split(model, out, compression=compression)
        assert f"compression='8bit' in {begun}." in missing.value.remedy


def test_missing_shards_and_splits_at_two_other_compressions(model: Path) -> None:
    split(model, sequential=False)
    split(model, compression="8bit")
    with pytest.raises(MissingShardError, match=r"compression=None in .* or compression='8bit' in "):
        split(model, compression="4bit")


def test_missing_shards_and_no_other_split(model: Path) -> None:
    next(model.glob("*.safetensors")).unlink()
    with pytest.raises(MissingShardError) as missing:
        split(model)
    assert missing.value.remedy.startswith("Add the missing shards")


# Two at once


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[tuple[Worker, Worker]]:
    with Worker(tmp_path / "first.txt") as first, Worker(tmp_path / "second.txt") as second:
        yield first, second


@pytest.mark.parametrize("sequential", [True, False])
def test_two_processes_race_on_one_checkpoint(workers: tuple[Worker, Worker], tmp_path: Path, sequential: bool) -> None:
    """Without the lock each process would remove the other's unfinished files, or write into them."""
    expected = contents(split(write_shards(tmp_path / "quiet" / "model", cut(llama_tensors(), 3)), sequential=False))
    for turn in range(6):
        model = write_shards(tmp_path / str(turn) / "model", cut(llama_tensors(), 3))
        for worker in workers:
            worker.begin(Call(str(model), sequential=sequential))
        folders = {worker.result() for worker in workers}
        assert folders == {model / "splitted_model"}
        assert contents(folders.pop()) == expected
        assert len(names_in(model, "*.safetensors")) == (0 if sequential else 3)


@pytest.mark.parametrize("delete", [True, False])
def test_two_processes_race_on_a_checkpoint_of_one_file(
    workers: tuple[Worker, Worker], tmp_path: Path, delete: bool
) -> None:
    """The file is deleted once it is used up, also while another process searches for it."""
    shards = {SINGLE_NAME: llama_tensors()}
    quiet = write_shards(tmp_path / "quiet" / "model", shards, index=False)
    expected = contents(split(quiet, sequential=False))
    for turn in range(6):
        model = write_shards(tmp_path / str(turn) / "model", shards, index=False)
        for worker in workers:
            worker.begin(Call(str(model), delete_original=delete))
        for folder in [worker.result() for worker in workers]:  # both are done, and the lock is free
            assert contents(folder) == expected
        assert names_in(model) == ["config.json", "splitted_model"]


@pytest.mark.long
@pytest.mark.parametrize("sequential", [True, False])
def test_two_processes_race_on_a_repository(
    repository: Path, model: Path, tmp_path: Path, sequential: bool, workers: tuple[Worker, Worker]
) -> None:
    expected = layer_files(split(model))
    for turn in range(3):
        for worker in workers:
            worker.begin(Call(REPO, str(tmp_path / f"splits-{turn}"), sequential=sequential))
        folders = {worker.result() for worker in workers}
        (folder,) = folders
        assert layer_files(folder) == expected
        assert not [name for name in names_in(folder) if name.startswith(".")]


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.97])
def test_waiting_process_resumes_the_split_of_a_killed_one(
    workers: tuple[Worker, Worker], model: Path, tmp_path: Path, sequential: bool, part: float
) -> None:
    first, second = workers
    quiet = Call(str(write_shards(tmp_path / "quiet" / "model", cut(llama_tensors(), 3))), sequential=sequential)
    pause_at = int(steps_of(quiet) * part)
    call = Call(str(model), sequential=sequential)
    first.begin(call, pause_at)
    first.wait_for_pause()
    second.begin(call)
    message = second.wait_for_stderr("; waiting.")
    assert message.startswith(
        f"{model / 'splitted_model'} is in use by process {first.process.pid} on {socket.gethostname()} since "
    )
    before = contents(model / "splitted_model")
    time.sleep(0.3)
    assert contents(model / "splitted_model") == before  # it waits indeed
    first.process.kill()
    folder = second.result()
    assert contents(folder) == contents(quiet.find().split_folder)
    assert second.stderr.count("; waiting.") == 1
    assert names_in(model, "*.safetensors") == names_in(Path(quiet.source), "*.safetensors")


def test_process_that_waited_deletes_the_original_if_requested(workers: tuple[Worker, Worker], model: Path) -> None:
    first, second = workers
    first.begin(Call(str(model), sequential=False), pause_at=5)
    first.wait_for_pause()
    second.begin(Call(str(model), sequential=False, delete_original=True))
    second.wait_for_stderr("; waiting.")
    first.go_on()
    assert first.result() == second.result()
    assert names_in(model) == ["config.json", "splitted_model"]
    assert Call(str(model)).find().finished


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint of one file, which is its own index."""
    return write_shards(tmp_path / "model", {SINGLE_NAME: llama_tensors()}, index=False)


def test_split_finished_by_another_process_during_the_search(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = _finding.LocalCheckpoint

    def open_too_late(*arguments: Any) -> Any:
        monkeypatch.undo()
        split(single)
        return opened(*arguments)

    monkeypatch.setattr(_finding, "LocalCheckpoint", open_too_late)
    source = Call(str(single)).find()
    assert source.finished
    prepare.ensure_split(source, SplitOptions(shards=ShardPolicy.DELETE_USED))


def test_journal_removed_during_the_search(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(Call(str(single)))
    replayed = journal.replay

    def replay_too_late(folder: Path) -> Any:
        monkeypatch.undo()
        split(single)
        (folder / "split.journal").read_bytes()  # as it does once it has seen that there is one
        return replayed(folder)

    monkeypatch.setattr(journal, "replay", replay_too_late)
    assert Call(str(single)).find().finished


def test_shard_removed_during_the_search(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(Call(str(single)))
    (single / SINGLE_NAME).touch()  # as it was before it was released

    def read_too_late(path: Path, name: str) -> Any:
        monkeypatch.undo()
        path.unlink()
        return path.read_bytes()

    monkeypatch.setattr("rabbitllm.checkpoints.local.read_shard_header", read_too_late)
    assert not Call(str(single)).find().finished
    assert split(single)


def test_threads_of_one_process_exclude_each_other(model: Path, tmp_path: Path) -> None:
    quiet = split(write_shards(tmp_path / "quiet" / "model", cut(llama_tensors(), 3)), sequential=False)
    expected = contents(quiet)
    for compression in (None, "8bit", None):
        again = write_shards(tmp_path / "again" / "model", cut(llama_tensors(), 3))
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(split, again, compression=compression, sequential=False) for _ in range(3)]
        folders = {call.result() for call in calls}
        assert len(folders) == 1
        files = contents(folders.pop())
        assert compression or files == expected
        assert not [name for name in files if name.startswith(".")]
        shutil.rmtree(again)


def test_refused_split_leaves_no_folder(model: Path, repository: Path, tmp_path: Path) -> None:
    for source in (str(model), REPO):
        for sequential in (True, False):
            with pytest.raises(NotEnoughSpaceException):
                split(source, tmp_path / "new" / "splits", max_disk=1000, sequential=sequential)
            assert not (tmp_path / "new").exists()
    (model / INDEX_NAME).write_text('{"weight_map": {"x": "../y"}}')
    with pytest.raises(RabbitLLMError):
        split(model, tmp_path / "new" / "splits")
    assert not (tmp_path / "new").exists()


def test_lock_files_of_a_killed_process_are_removed(model: Path) -> None:
    folder = split(model)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / LOCK_NAME).touch()
    (folder / HOLDER_NAME).write_text("{")
    assert split(model) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_lock_file_of_another_user_does_not_lock_out_this_one(model: Path) -> None:
    """Into whose finished split anyone may write, in a container's shared folder."""
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own folders are this user's alone
        folder = Path(shutil.copytree(split(model), Path(open_to_all) / "splitted_model"))
        (folder / LOCK_NAME).touch(0o644)
        Path(open_to_all).chmod(0o755)
        folder.chmod(0o777)
        before = contents(folder)

        def load_as_another() -> Path:
            os.setuid(65534)
            return split(folder)

        assert in_a_fork(load_as_another) == folder
        assert contents(folder) == before


@pytest.mark.long
def test_finished_split_in_an_unwritable_folder(model: Path) -> None:
    """As a user who may only read it; it has all files that a kill can leave."""
    split_folder = split(model)
    for name in (LOCK_NAME, HOLDER_NAME, "split.journal"):
        (split_folder / name).write_text("{")
    before = contents(split_folder)
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own folders are this user's alone
        folder = Path(shutil.copytree(split_folder, Path(open_to_all) / "splitted_model"))
        Path(open_to_all).chmod(0o755)
        folder.chmod(0o555)
        code = f"""
import os
from tests.support.splitting import Call, contents
from pathlib import Path
import rabbitllm.prepare, torch
if os.geteuid() == 0:
    os.setuid(65534)
for delete in (False, True):
    assert Call({str(folder)!r}, delete_original=delete).make() == Path({str(folder)!r})
try:
    Path({str(folder)!r}, "new").touch()
except PermissionError:
    print("read-only")
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert (done.stdout, done.returncode) == ("read-only\n", 0), done.stderr
        assert contents(folder) == before
        folder.chmod(0o755)
