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
from huggingface_hub import snapshot_download
from typer.testing import CliRunner

from rabbitllm.cli.main import app
from rabbitllm.errors import SplitError
from rabbitllm.models.library import HALF_REMOVED, look
from rabbitllm.models.remove import Removal, original_of, plan_removal, refuse_only_copy, remove
from rabbitllm.splitter.lock import locked
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store import locations
from rabbitllm.store.manifest import MANIFEST_NAME
from tests.support.builders import build_checkpoint, cut, llama_tensors, write_shards
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import Faults, LocalHub
from tests.support.splitting import Call, contents, interrupted, occupied

SHARDS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "hare", cut(llama_tensors(), SHARDS))


def split(folder: Path, **options: object) -> Path:
    return Call(str(folder), **{"compression": "4bit", "sequential": False, **options}).make()  # type: ignore[arg-type]


def test_a_whole_one_goes_and_its_checkpoint_stays(folder: Path) -> None:
    before = contents(folder)
    made = split(folder)
    size = occupied(made)
    plan = plan_removal(made)
    assert plan.nbytes == size
    assert remove(plan) == pytest.approx(size, abs=3 * 4096)
    assert contents(folder) == before
    assert not made.exists()
    assert split(folder) == made  # and can be made again


@pytest.mark.parametrize("shards", [1, 2])
def test_an_unfinished_one_goes_too(folder: Path, shards: int) -> None:
    before = contents(folder)
    made = interrupted(Call(str(folder), compression="8bit", sequential=False), shards)
    remove(plan_removal(made))
    assert contents(folder) == before


def test_one_of_a_repository_takes_its_own_folders_along(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    build_checkpoint(tmp_path / "hub" / "org/rabbit", "llama", shards=2)
    made = [Call("org/rabbit", compression=c).make() for c in (None, "4bit")]
    remove(plan_removal(made[0]))
    assert made[1].exists()
    remove(plan_removal(made[1]))
    assert not made[1].parent.exists()
    assert [path.name for path in (locations.home() / "models--org--rabbit").iterdir()] == ["refs"]


def test_one_of_rabbitllm_1_goes(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "hare", "llama")
    before = contents(folder)
    old = folder / "splitted_model"
    old.mkdir()
    (old / "lm_head.safetensors").write_bytes(b"x")
    (old / "lm_head.safetensors.done").touch()
    plan = plan_removal(old)
    assert original_of(plan.entry).there
    remove(plan)
    assert contents(folder) == before


# What is refused, with nothing touched

FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file": lambda made: (made / "notes.md").write_text("mine"),
    "a text": lambda made: _later(made, made / "notes.txt"),
    "an old text": lambda made: _older(made / "notes.txt"),
    "old results": lambda made: _older(made / "results.json"),
    "old code": lambda made: _older(made / "train.py"),
    "a text that the checkpoint's folder links to": lambda made: _linked_to(made.parent, made / "notes.txt"),
    "another file among the fetched ones": lambda made: _in_folder(made / ".staging" / "mine.txt"),
    "another file among the templates": lambda made: _in_folder(made / "additional_chat_templates" / "mine.txt"),
    "another layer": lambda made: (made / "adapter.safetensors").write_bytes(b"mine"),
    "a folder": lambda made: (made / "mine").mkdir(),
    "a link": lambda made: (made / "model.extra.safetensors").symlink_to("/etc/hosts"),
    "a link instead of a config": lambda made: _linked(made / "config.json"),
    "a pipe": lambda made: os.mkfifo(made / "pipe.json"),
}


def _later(made: Path, path: Path) -> None:
    path.write_text("mine")
    written = (made / MANIFEST_NAME).stat().st_mtime
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


@pytest.mark.parametrize("what", FOREIGN)
def test_something_foreign_inside(folder: Path, what: str) -> None:
    made = split(folder)
    FOREIGN[what](made)
    before = sorted(made.rglob("*"))
    with pytest.raises(SplitError, match="1 item that RabbitLLM did not write"):
        plan_removal(made)
    assert sorted(made.rglob("*")) == before


def test_configs_may_have_been_edited(folder: Path) -> None:
    made = split(folder)
    _later(made, made / "config.json")
    remove(plan_removal(made))
    assert not made.exists()


def test_what_was_copied_from_the_checkpoint_goes(folder: Path) -> None:
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
    result = CliRunner().invoke(app, ["rm", str(split(folder)), "--yes"], catch_exceptions=False)
    assert re.search(r"copies +config\.json", result.stderr)


def test_what_is_no_split_directory(folder: Path, tmp_path: Path) -> None:
    for place in (folder, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SplitError, match="is not a split directory"):
            plan_removal(place)
    made = split(folder)
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(SplitError, match="is a link to"):
        plan_removal(tmp_path / "link")
    (made / MANIFEST_NAME).write_text("{}")
    with pytest.raises(SplitError, match="cannot be identified"):
        plan_removal(made)
    assert made.exists()


def test_one_that_is_worked_on(folder: Path) -> None:
    made = split(folder)
    plan = plan_removal(made)
    code = f"""
import sys
from pathlib import Path
from rabbitllm.splitter.lock import locked
with locked(Path({str(made)!r})):
    print("locked", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        before = contents(made)
        with pytest.raises(SplitError, match=rf"is in use by process {other.pid}"):
            remove(plan)
        assert contents(made).keys() == before.keys()
        other.communicate("")
    remove(plan)
    assert not made.exists()


def test_one_that_changed_since_it_was_looked_at(folder: Path) -> None:
    made = split(folder)
    plan = plan_removal(made)
    (made / "tokenizer.json").write_text("{}")
    with pytest.raises(SplitError, match="has changed since the check"):
        remove(plan)
    assert (made / MANIFEST_NAME).exists()


def test_the_lock_is_held_during_a_removal(folder: Path) -> None:
    made = split(folder)
    held: list[bool] = []

    def watch(step: Step) -> None:
        if step.kind == "unlink" and not held:
            held.append((made / ".lock").exists())

    with observe_steps(watch):
        remove(plan_removal(made))
    assert held == [True]
    with locked(made):
        pass


# A crash at any step leaves something that is never taken for whole, and that can be removed again


@pytest.mark.parametrize("kind", ["whole", "unfinished"])
def test_a_crash_at_any_step(folder: Path, tmp_path: Path, kind: str) -> None:
    before = contents(folder)
    call = Call(str(folder), compression="4bit", sequential=False)
    made = call.make() if kind == "whole" else interrupted(call, 2)
    kept = shutil.copytree(made, tmp_path / "kept")
    steps: list[Step] = []
    plan = plan_removal(made)
    with observe_steps(steps.append):
        remove(plan)
    assert len(steps) > 10
    for number, step in enumerate(steps):
        shutil.copytree(kept, made)
        seen: list[Step] = []

        def crash(step: Step, at: int = number, seen: list[Step] = seen) -> None:
            if len(seen) == at:
                raise KeyboardInterrupt
            seen.append(step)

        plan = plan_removal(made)
        with observe_steps(crash), pytest.raises(KeyboardInterrupt):
            remove(plan)
        left = look(made)
        if left is None:  # nothing of it is there any more
            assert contents(folder) == before, step
            shutil.rmtree(made, ignore_errors=True)
            continue
        assert left.state == HALF_REMOVED or number == 0
        remove(plan_removal(made))
        assert contents(folder) == before, step


# Is it the only copy?


def test_a_kept_original_is_recognised(folder: Path, tmp_path: Path) -> None:
    removal = plan_removal(split(folder))
    assert original_of(removal.entry).where == f"in {folder}"
    elsewhere = plan_removal(split(folder, saving_path=str(tmp_path / "out")))
    assert not original_of(elsewhere.entry).there
    assert original_of(elsewhere.entry, folder).there
    refuse_only_copy(elsewhere, original_of(elsewhere.entry, folder))


def test_a_used_up_original_makes_it_the_only_copy(folder: Path) -> None:
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
def test_of_an_unfinished_one_only_what_is_used_up_counts(folder: Path, sequential: bool) -> None:
    made = interrupted(Call(str(folder), compression="4bit", sequential=sequential), 2)
    found = original_of(plan_removal(made).entry)
    assert found.there is not sequential
    if sequential:
        assert "2 of its 2 shards not in" in found.where


@pytest.fixture
def of_a_repository(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> Removal:
    build_checkpoint(tmp_path / "hub" / "org/rabbit", "llama", shards=2)
    return plan_removal(Call("org/rabbit").make())


def test_a_repository_that_is_there(of_a_repository: Removal, local_hub: LocalHub) -> None:
    local_hub.forget_requests()
    assert original_of(of_a_repository.entry).there
    assert local_hub.requests == []
    found = original_of(of_a_repository.entry, asks_hub=True)
    assert (found.there, found.where.startswith("on the hub, org/rabbit at commit ")) == (True, True)
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
def test_a_repository_that_is_not_there(
    of_a_repository: Removal, local_hub: LocalHub, tmp_path: Path, change: Callable[[LocalHub, Path], str]
) -> None:
    why = change(local_hub, tmp_path / "hub" / "org/rabbit")
    before, made = contents(of_a_repository.entry.folder), str(of_a_repository.entry.folder)
    with pytest.raises(
        SplitError, match="may be the only copy of this model: the hub cache has 0 of the 2 sh"
    ) as caught:
        CliRunner().invoke(app, ["rm", made, "--yes"], catch_exceptions=False)
    assert f"shards of org/rabbit, and the hub was asked: {why}" in re.sub(
        r"There is no folder .* and ", "", str(caught.value)
    )
    assert "Pass --only-copy" in caught.value.remedy
    assert "run the command again with a connection" in caught.value.remedy
    assert contents(of_a_repository.entry.folder) == before
    result = CliRunner().invoke(app, ["rm", made, "--yes", "--only-copy"], catch_exceptions=False)
    assert (result.exit_code, of_a_repository.entry.folder.exists()) == (0, False)


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_complete_copy_in_the_hub_cache_is_enough(
    of_a_repository: Removal, local_hub: LocalHub, is_complete: bool
) -> None:
    snapshot = Path(snapshot_download("org/rabbit"))
    local_hub.stop()
    if not is_complete:
        next(snapshot.glob("*.safetensors")).unlink()
    found = original_of(of_a_repository.entry, asks_hub=True)
    assert found.there is is_complete
    assert (found.where == f"in the hub cache, {snapshot}") is is_complete
    assert ("the hub cache has 1 of the 2 shards of org/rabbit" in found.where) is not is_complete


def test_an_unfinished_one_of_a_repository(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    """An unfinished split needs the shards that it has used, and no others."""
    build_checkpoint(tmp_path / "hub" / "org/rabbit", "llama", shards=2)
    removal = plan_removal(interrupted(Call("org/rabbit"), 1))
    assert original_of(removal.entry, asks_hub=True).there
    local_hub.stop()
    found = original_of(removal.entry, asks_hub=True)
    assert "the hub cache has 0 of the 1 shard of org/rabbit" in found.where


def test_of_rabbitllm_1_the_checkpoint_around_it_is_the_original(tmp_path: Path) -> None:
    old = tmp_path / "hare" / "splitted_model"
    old.mkdir(parents=True)
    (old / "lm_head.safetensors").write_bytes(b"x")
    (old / "lm_head.safetensors.done").touch()
    plan = plan_removal(old)
    assert not original_of(plan.entry).there
    build_checkpoint(old.parent, "llama")
    assert original_of(plan.entry).there
