"""A split directory is removed, whole or not, and nothing else ever is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file

from rabbitllm.errors import CheckpointNotFoundError, IncompleteSplitError, SplitError
from rabbitllm.models.library import HALF_REMOVED, look
from rabbitllm.models.remove import Removal, original_of, plan_removal, refuse_only_copy, remove
from rabbitllm.splitter import journal
from rabbitllm.splitter.lock import locked
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store import locations
from rabbitllm.store.manifest import MANIFEST_NAME, is_finished
from tests.support.builders import build_checkpoint, cut, llama_tensors, read_tensors, write_shards
from tests.support.commands import invoke
from tests.support.dying import dying_at
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import Faults, LocalHub
from tests.support.pausing import Paused
from tests.support.splitting import Call, contents, interrupted, occupied

SHARDS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "hare", cut(llama_tensors(), SHARDS))


def split(folder: Path, **options: object) -> Path:
    return Call(str(folder), **{"compression": "4bit", "sequential": False, **options}).make()  # type: ignore[arg-type]


def test_finished_split_is_removed(folder: Path) -> None:
    before = contents(folder)
    split_folder = split(folder)
    size = occupied(split_folder)
    plan = plan_removal(split_folder)
    assert plan.nbytes == size
    assert remove(plan) == pytest.approx(size, abs=3 * 4096)
    assert contents(folder) == before
    assert not split_folder.exists()
    assert split(folder) == split_folder  # and can be made again


@pytest.mark.parametrize("with_lock", [False, True])
@pytest.mark.parametrize("home_only", [False, True])
def test_empty_folders_of_a_killed_removal_go_with_the_next(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home_only: bool, with_lock: bool
) -> None:
    """It was killed behind the last file: the same command finds no split, and leaves no folder."""
    monkeypatch.setenv("RABBITLLM_HOME", str(tmp_path / "home"))
    name = "acme/hare" if home_only else str(folder)
    left = tmp_path / "home" / "models--acme--hare" / ("f" * 40) / "splitted_model" if home_only else None
    empty = left or folder / "splitted_model.4bit"
    empty.mkdir(parents=True)
    if with_lock:
        (empty / ".lock").touch()
    other = tmp_path / "home" / "models--acme--fox" / "splitted_model"
    other.mkdir(parents=True)
    with pytest.raises(CheckpointNotFoundError):
        invoke("rm", name, "--yes")
    assert not (tmp_path / "home" / "models--acme--hare").exists()
    assert not (folder / "splitted_model.4bit").exists()
    assert other.is_dir()
    assert contents(folder)


@pytest.mark.parametrize("shards", [1, 2])
def test_unfinished_split_is_removed(folder: Path, shards: int) -> None:
    before = contents(folder)
    split_folder = interrupted(Call(str(folder), compression="8bit", sequential=False), shards)
    remove(plan_removal(split_folder))
    assert contents(folder) == before


def test_split_of_a_repository_is_removed_with_its_folders(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    build_checkpoint(tmp_path / "hub" / "org/rabbit", "llama", shards=2)
    folders = [Call("org/rabbit", compression=c).make() for c in (None, "4bit")]
    remove(plan_removal(folders[0]))
    assert folders[1].exists()
    remove(plan_removal(folders[1]))
    assert not folders[1].parent.exists()
    assert [path.name for path in (locations.home() / "models--org--rabbit").iterdir()] == ["refs"]


def test_split_of_rabbitllm_1_is_removed(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "hare", "llama")
    before = contents(folder)
    old = folder / "splitted_model"
    old.mkdir()
    save_file({"lm_head.weight": read_tensors(folder)["lm_head.weight"]}, old / "lm_head.safetensors")
    (old / "lm_head.safetensors.done").touch()
    plan = plan_removal(old)
    assert original_of(plan.entry).there
    remove(plan)
    assert contents(folder) == before


# What is refused, with nothing touched

FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file": lambda target: (target / "notes.md").write_text("mine"),
    "a text": lambda target: _later(target, target / "notes.txt"),
    "an old text": lambda target: _older(target / "notes.txt"),
    "old results": lambda target: _older(target / "results.json"),
    "old code": lambda target: _older(target / "train.py"),
    "a text that the checkpoint's folder links to": lambda target: _linked_to(target.parent, target / "notes.txt"),
    "another file among the fetched ones": lambda target: _in_folder(target / ".staging" / "mine.txt"),
    "another file among the templates": lambda target: _in_folder(target / "additional_chat_templates" / "mine.txt"),
    "another layer": lambda target: (target / "adapter.safetensors").write_bytes(b"mine"),
    "a folder": lambda target: (target / "mine").mkdir(),
    "a link": lambda target: (target / "model.extra.safetensors").symlink_to("/etc/hosts"),
    "a link instead of a config": lambda target: _linked(target / "config.json"),
    "a pipe": lambda target: os.mkfifo(target / "pipe.json"),
}


def _later(split_folder: Path, path: Path) -> None:
    path.write_text("mine")
    written = (split_folder / MANIFEST_NAME).stat().st_mtime
    os.utime(path, (written + 10, written + 10))


def _older(path: Path) -> None:
    path.write_text("mine")
    os.utime(path, (0, 0))


def _linked_to(folder: Path, path: Path) -> None:
    _older(path)
    (folder / path.name).symlink_to(path)


def _in_folder(path: Path) -> None:
    path.parent.mkdir()
    _older(path)


def _linked(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hosts")


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_files_are_refused(folder: Path, case: str) -> None:
    split_folder = split(folder)
    FOREIGN[case](split_folder)
    before = sorted(split_folder.rglob("*"))
    with pytest.raises(SplitError, match="1 item that RabbitLLM did not write"):
        plan_removal(split_folder)
    assert sorted(split_folder.rglob("*")) == before


def test_edited_configs_are_removed(folder: Path) -> None:
    split_folder = split(folder)
    _later(split_folder, split_folder / "config.json")
    remove(plan_removal(split_folder))
    assert not split_folder.exists()


def test_copies_from_the_checkpoint_are_removed(folder: Path) -> None:
    """It is recognised by its bytes, which the checkpoint still has; code by the config that names it, too."""
    (folder / "results.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_hare.Hare"}}))
    for name in ("modeling_hare.py", "train.py"):
        (folder / name).write_text("import torch\n")
    before, made = contents(folder), split(folder)
    (made / "modeling_hare.py").write_text("import torch  # edited\n")
    remove(plan_removal(made))
    assert contents(folder) == before
    made = split(folder)
    (made / "train.py").write_text("import torch  # edited\n")
    with pytest.raises(SplitError, match=r"did not write: train\.py"):
        plan_removal(made)


def test_copies_are_named_before_they_go(folder: Path) -> None:
    result = invoke("rm", split(folder), "--yes")
    assert re.search(r"copies +config\.json", result.stderr)


def test_folder_without_a_split_is_refused(folder: Path, tmp_path: Path) -> None:
    for place in (folder, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SplitError, match="is not a split directory"):
            plan_removal(place)
    split_folder = split(folder)
    (tmp_path / "link").symlink_to(split_folder)
    with pytest.raises(SplitError, match="is a link to"):
        plan_removal(tmp_path / "link")
    (split_folder / MANIFEST_NAME).write_text("{}")
    with pytest.raises(SplitError, match=r"cannot be identified .*[^.]\. Nothing"):
        plan_removal(split_folder)
    assert split_folder.exists()


def test_split_in_use_is_refused(folder: Path) -> None:
    split_folder = split(folder)
    plan = plan_removal(split_folder)
    code = f"""
import sys
from pathlib import Path
from rabbitllm.splitter.lock import locked
with locked(Path({str(split_folder)!r})):
    print("locked", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        before = contents(split_folder)
        with pytest.raises(SplitError, match=rf"is in use by process {process.pid}"):
            remove(plan)
        assert contents(split_folder).keys() == before.keys()
        process.communicate("")
    remove(plan)
    assert not split_folder.exists()


def test_split_that_changed_since_the_plan_is_refused(folder: Path) -> None:
    split_folder = split(folder)
    plan = plan_removal(split_folder)
    (split_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(SplitError, match="has changed since the check"):
        remove(plan)
    assert (split_folder / MANIFEST_NAME).exists()


def test_lock_is_held_during_a_removal(folder: Path) -> None:
    split_folder = split(folder)
    states: list[bool] = []

    def watch(step: Step) -> None:
        if step.kind == "unlink" and not states:
            states.append((split_folder / ".lock").exists())

    with observe_steps(watch):
        remove(plan_removal(split_folder))
    assert states == [True]
    with locked(split_folder):
        pass


# A crash at any step leaves something that is never taken for whole, and that can be removed again


@pytest.mark.parametrize("state", ["whole", "unfinished"])
def test_removal_resumes_after_a_crash(folder: Path, tmp_path: Path, state: str) -> None:
    before = contents(folder)
    call = Call(str(folder), compression="4bit", sequential=False)
    split_folder = call.make() if state == "whole" else interrupted(call, 2)
    copy = shutil.copytree(split_folder, tmp_path / "kept")
    steps: list[Step] = []
    plan = plan_removal(split_folder)
    with observe_steps(steps.append):
        remove(plan)
    assert len(steps) > 10
    for index, step in enumerate(steps):
        shutil.copytree(copy, split_folder)
        done: list[Step] = []

        def crash(step: Step, stop: int = index, done: list[Step] = done) -> None:
            if len(done) == stop:
                raise KeyboardInterrupt
            done.append(step)

        plan = plan_removal(split_folder)
        with observe_steps(crash), pytest.raises(KeyboardInterrupt):
            remove(plan)
        entry = look(split_folder)
        if entry is None:  # nothing of it is there any more
            assert contents(folder) == before, step
            shutil.rmtree(split_folder, ignore_errors=True)
            continue
        assert entry.state == HALF_REMOVED or index == 0
        assert index == 0 or not is_finished(split_folder), step
        remove(plan_removal(split_folder))
        assert contents(folder) == before, step


@pytest.mark.parametrize("state", ["whole", "unfinished"])
@pytest.mark.parametrize("command", [["verify"], ["verify", "--repair"], ["run", "hi"], ["pull", "--sequential"]])
def test_what_is_partly_removed_is_named_so(folder: Path, state: str, command: list[str]) -> None:
    """No command takes the layer files that are left for a checkpoint, or for nothing at all."""
    call = Call(str(folder), compression="4bit", sequential=False)
    split_folder = call.make() if state == "whole" else interrupted(call, 2)
    with dying_at(4):
        remove(plan_removal(split_folder))
    before = contents(split_folder)
    with pytest.raises(IncompleteSplitError, match=f"{split_folder} is partly removed") as error:
        invoke(command[0], split_folder, *command[1:])
    assert contents(split_folder) == before
    assert f"Finish that: rabbitllm rm {split_folder}. " in error.value.remedy
    assert invoke("rm", split_folder, "--yes", code=0)
    assert not split_folder.exists()


@pytest.mark.parametrize("state", ["whole", "unfinished"])
@pytest.mark.parametrize("at", [2, 4, 9])
def test_what_is_partly_removed_is_made_again(folder: Path, state: str, at: int) -> None:
    """All shards are there, so nothing that is left in it is the only copy."""
    call = Call(str(folder), compression="4bit-double", sequential=False)
    whole = contents(call.make())
    if state == "unfinished":
        shutil.rmtree(call.find().split_folder)
        interrupted(call, 2)
    with dying_at(at):
        remove(plan_removal(call.find().split_folder))
    assert contents(call.make()) == whole


# Is it the only copy?


def test_kept_original_is_recognised(folder: Path, tmp_path: Path) -> None:
    removal = plan_removal(split(folder))
    assert original_of(removal.entry).where == f"in {folder}"
    elsewhere = plan_removal(split(folder, saving_path=str(tmp_path / "out")))
    assert not original_of(elsewhere.entry).there
    assert original_of(elsewhere.entry, folder).there
    refuse_only_copy(elsewhere, original_of(elsewhere.entry, folder))


def test_damaged_original_is_none(folder: Path) -> None:
    """A fingerprint is of some of the bytes of a large shard: all of them are read."""
    tensors = {"model.embed_tokens.weight": torch.zeros(1500, 1024)}
    write_shards(folder, {"model-00001-of-00001.safetensors": {**llama_tensors(), **tensors}})
    for path in folder.glob("model-0000*-of-00003.safetensors"):
        path.unlink()
    made = split(folder, compression=None)
    [shard] = folder.glob("model-00001-of-00001.safetensors")
    time = shard.stat().st_mtime_ns
    with shard.open("r+b") as file:
        file.seek(3 << 20)
        file.write(b"damaged")
    os.utime(shard, ns=(time, time))
    entry = plan_removal(made).entry
    original = original_of(entry)
    assert not original.there
    assert "its bytes differ" in original.where
    with pytest.raises(SplitError, match="only copy"):
        invoke("rm", made, "--yes")


def test_used_up_original_makes_the_split_the_only_copy(folder: Path) -> None:
    plan = plan_removal(split(folder, sequential=True))
    original = original_of(plan.entry)
    assert (original.there, f"{SHARDS} of its {SHARDS} shards not in {folder}" in original.where) == (False, True)
    with pytest.raises(SplitError, match="may be the only copy") as caught:
        refuse_only_copy(plan, original)
    assert "--only-copy" in caught.value.remedy


def test_other_weights_of_the_same_name_are_not_the_original(folder: Path) -> None:
    plan = plan_removal(split(folder))
    write_shards(folder, cut(llama_tensors(seed=9), SHARDS))
    assert not original_of(plan.entry).there


@pytest.mark.parametrize("sequential", [True, False])
def test_original_of_an_unfinished_split(folder: Path, sequential: bool) -> None:
    split_folder = interrupted(Call(str(folder), compression="4bit", sequential=sequential), 2)
    original = original_of(plan_removal(split_folder).entry)
    assert original.there is not sequential
    if sequential:
        assert "2 of its 2 shards not in" in original.where


def test_original_of_a_half_repaired_split(folder: Path) -> None:
    """The layers that the repair leaves are also made of the shards that it reads once more."""
    split_folder = split(folder)
    (split_folder / "model.layers.0.safetensors").unlink()
    with Paused("repair", folder=split_folder, original=folder) as other:
        other.is_killed()
    assert original_of(plan_removal(split_folder).entry).where == f"in {folder}"
    progress = journal.glance(split_folder)
    assert progress is not None
    for shard in progress.shards - progress.used:
        (folder / shard).unlink()
    plan = plan_removal(split_folder)
    with pytest.raises(SplitError, match="may be the only copy"):
        refuse_only_copy(plan, original_of(plan.entry))


@pytest.fixture
def of_a_repository(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> Removal:
    build_checkpoint(tmp_path / "hub" / "org/rabbit", "llama", shards=2)
    return plan_removal(Call("org/rabbit").make())


def test_available_repository(of_a_repository: Removal, local_hub: LocalHub) -> None:
    local_hub.forget_requests()
    assert original_of(of_a_repository.entry).there
    assert local_hub.requests == []
    original = original_of(of_a_repository.entry, asks_hub=True)
    assert (original.there, original.where.startswith("on the hub, org/rabbit at commit ")) == (True, True)
    assert local_hub.body_bytes(".safetensors") == 0


def gone(hub: LocalHub, folder: Path) -> str:
    shutil.rmtree(folder)
    return r"no repository 'org/rabbit' on the hub that this token may see"


def gated(hub: LocalHub, folder: Path) -> str:
    hub.token, hub.faults = "hf_right", Faults(gated=True)
    return "org/rabbit is gated"


def offline(hub: LocalHub, folder: Path) -> str:
    hub.stop()
    return "The hub did not answer for org/rabbit"


def overwritten(hub: LocalHub, folder: Path) -> str:
    build_checkpoint(folder, "llama", shards=2, seed=5)
    return "org/rabbit has no such revision"


@pytest.mark.parametrize("change", [gone, gated, offline, overwritten])
def test_unavailable_repository(
    of_a_repository: Removal, local_hub: LocalHub, tmp_path: Path, change: Callable[[LocalHub, Path], str]
) -> None:
    why = change(local_hub, tmp_path / "hub" / "org/rabbit")
    before, name = contents(of_a_repository.entry.folder), str(of_a_repository.entry.folder)
    with pytest.raises(
        SplitError, match="may be the only copy of this model: the hub cache has 0 of the 2 sh"
    ) as caught:
        invoke("rm", name, "--yes")
    assert f"shards of org/rabbit, and the hub was asked: {why}" in re.sub(
        r"There is no folder .* and ", "", str(caught.value)
    )
    assert "Pass --only-copy" in caught.value.remedy
    assert "run the command again with a connection" in caught.value.remedy
    assert contents(of_a_repository.entry.folder) == before
    result = invoke("rm", name, "--yes", "--only-copy")
    assert (result.exit_code, of_a_repository.entry.folder.exists()) == (0, False)


def test_truncated_copy_in_the_hub_cache_is_no_original(of_a_repository: Removal, local_hub: LocalHub) -> None:
    snapshot = Path(snapshot_download("org/rabbit"))
    local_hub.stop()
    blob = next(snapshot.glob("*.safetensors")).resolve()
    blob.write_bytes(blob.read_bytes()[:100])
    assert not original_of(of_a_repository.entry, asks_hub=True).there


@pytest.mark.parametrize("is_complete", [True, False])
def test_complete_copy_in_the_hub_cache_is_an_original(
    of_a_repository: Removal, local_hub: LocalHub, is_complete: bool
) -> None:
    snapshot = Path(snapshot_download("org/rabbit"))
    local_hub.stop()
    if not is_complete:
        next(snapshot.glob("*.safetensors")).unlink()
    original = original_of(of_a_repository.entry, asks_hub=True)
    assert original.there is is_complete
    assert (original.where == f"in the hub cache, {snapshot}") is is_complete
    assert ("the hub cache has 1 of the 2 shards of org/rabbit" in original.where) is not is_complete


def test_unfinished_split_of_a_repository(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> None:
    """An unfinished split needs the shards that it has used, and no others."""
    build_checkpoint(tmp_path / "hub" / "org/rabbit", "llama", shards=2)
    removal = plan_removal(interrupted(Call("org/rabbit"), 1))
    assert original_of(removal.entry, asks_hub=True).there
    local_hub.stop()
    original = original_of(removal.entry, asks_hub=True)
    assert "the hub cache has 0 of the 1 shard of org/rabbit" in original.where


def test_original_of_a_rabbitllm_1_split(tmp_path: Path) -> None:
    old = tmp_path / "hare" / "splitted_model"
    old.mkdir(parents=True)
    weight = llama_tensors()["lm_head.weight"]
    save_file({"lm_head.weight": weight}, old / "lm_head.safetensors")
    (old / "lm_head.safetensors.done").touch()
    plan = plan_removal(old)
    assert not original_of(plan.entry).there
    write_shards(old.parent, cut(llama_tensors(), 2))
    assert original_of(plan.entry).there
    save_file({"lm_head.weight": weight[:-1]}, old / "lm_head.safetensors")  # of another model
    assert not original_of(plan.entry).there
    save_file({"lm_head.weight": weight}, old / "lm_head.safetensors")
    next(old.parent.glob("model-*")).write_bytes(b"")
    assert not original_of(plan.entry).there
