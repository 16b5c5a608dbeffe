"""Finished splits: of this source or of another, what is cleared away, and what is loaded without any of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from rabbitllm import prepare
from rabbitllm.base.options import ShardPolicy, SplitOptions
from rabbitllm.errors import SplitMismatchError
from rabbitllm.storage.durable import observe_steps
from tests.prepare.conftest import REPO
from tests.support.builders import INDEX_NAME, cut, llama_tensors, write_shards
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.splitting import Call, Counter, contents, interrupted, names_in, split

# Finished


def test_finished_split_of_a_repository_asks_for_no_weights(
    repository: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    made = split(REPO)
    local_hub.forget_requests()
    source = Call(REPO).find()
    assert source.finished
    assert source.split_folder == source.config_folder == made
    prepare.ensure_split(source, SplitOptions(shards=ShardPolicy.DELETE_USED))
    assert [request.path for request in local_hub.requests] == [f"/api/models/{REPO}"]
    assert local_hub.body_bytes() == 0
    shutil.rmtree(hub_environment.cache)
    local_hub.forget_requests()
    assert split(REPO) == made
    assert local_hub.body_bytes() == 0


def test_split_directory_loads_alone(model: Path, tmp_path: Path, local_hub: LocalHub) -> None:
    made = Path(shutil.copytree(split(model, compression="4bit"), tmp_path / "moved" / "renamed"))
    shutil.rmtree(model)
    for compression in (None, "4bit"):
        source = Call(str(made), compression=compression).find()
        assert source.finished
        assert source.split_folder == source.config_folder == made
        prepare.ensure_split(source, SplitOptions(compression))
    with pytest.raises(SplitMismatchError, match="is a split at compression 4bit; 8bit was asked for") as refused:
        Call(str(made), compression="8bit").find()
    assert "Leave compression out, or name the original checkpoint." in str(refused.value)
    assert local_hub.requests == []


def test_used_up_checkpoint_has_its_split_in_its_folder(model: Path) -> None:
    made = split(model, delete_original=True)
    assert names_in(model) == ["config.json", "splitted_model"]
    (model / "config.json").unlink()
    source = Call(str(model)).find()
    assert source.finished
    assert source.config_folder == made
    assert split(model) == made


def test_what_a_crash_left_of_a_finished_split_is_cleared_away(model: Path) -> None:
    made = split(model, sequential=False)
    before = contents(made)
    (made / "split.journal").write_text("{}")
    (made / ".staging").mkdir()
    (made / ".staging" / "x.part").touch()
    assert split(model, sequential=False) == made
    assert contents(made) == before
    assert not (made / ".staging").exists()


def test_what_a_crash_left_of_the_original_is_deleted(repository: Path, hub_environment: HubEnvironment) -> None:
    """The manifest was there, and the small files in the hub cache were still to be removed."""
    made = split(REPO)
    links = [path for path in hub_environment.cache.rglob("*") if path.is_symlink()]
    assert sorted(path.name for path in links) == ["config.json", INDEX_NAME]
    assert split(REPO, delete_original=True) == made
    assert not any(path.is_symlink() for path in hub_environment.cache.rglob("*"))


def test_finished_split_on_a_read_only_mount(model: Path) -> None:
    made = split(model)

    def refuse(number: int, step: object) -> None:
        raise OSError(30, "Read-only file system")

    with observe_steps(Counter(refuse)):
        assert split(model) == made


# Another model's


def test_finished_split_of_another_folder(model: Path, other: Path, tmp_path: Path) -> None:
    saving_path = tmp_path / "splits"
    split(other, saving_path, sequential=False)
    before = contents(tmp_path)
    for delete in (False, True):
        with pytest.raises(SplitMismatchError) as refused:
            split(model, saving_path, delete_original=delete)
        assert f"{saving_path / 'splitted_model'} was split from other, not from {model}: its shard" in str(
            refused.value
        )
        assert "Split into another folder (layer_shards_saving_path)" in str(refused.value)
    assert contents(tmp_path) == before
    assert split(model, saving_path, compression="4bit")  # has a directory of its own


@pytest.mark.parametrize("delete", [False, True])
def test_finished_split_of_a_repository_is_no_folders(
    repository: Path, other: Path, tmp_path: Path, delete: bool
) -> None:
    """Their fingerprints cannot be compared, so nothing of the folder is believed to be in the split."""
    split(REPO, tmp_path / "splits")
    before = contents(other)
    with pytest.raises(SplitMismatchError, match="it was made from a repository on the hub, not from a folder"):
        split(other, tmp_path / "splits", delete_original=delete)
    assert contents(other) == before


def test_finished_split_of_a_folder_is_no_repositorys(repository: Path, other: Path, tmp_path: Path) -> None:
    split(other, tmp_path / "splits")
    with pytest.raises(SplitMismatchError, match="was split from other, not from acme/tiny"):
        split(REPO, tmp_path / "splits")


def test_finished_split_of_another_repository_or_commit(
    repository: Path, other: Path, tmp_path: Path, local_hub: LocalHub
) -> None:
    split(REPO, tmp_path / "splits")
    write_shards(tmp_path / "hub" / "acme" / "second", cut(llama_tensors(seed=6), 3))
    with pytest.raises(SplitMismatchError, match=r"acme/tiny at commit .* is not acme/second at commit"):
        split("acme/second", tmp_path / "splits")
    local_hub.add_revision(REPO, "main", other)
    with pytest.raises(SplitMismatchError, match=r"acme/tiny at commit .* is not acme/tiny at commit"):
        split(REPO, tmp_path / "splits")


def with_a_new_readme(repository: Path, tmp_path: Path) -> Path:
    changed = shutil.copytree(repository, tmp_path / "changed")
    (changed / "README.md").write_text("Now with a picture.")
    return changed


def test_commit_that_changes_no_weights_uses_the_split_that_is_there(
    repository: Path, tmp_path: Path, local_hub: LocalHub
) -> None:
    made = split(REPO)
    local_hub.add_revision(REPO, "main", with_a_new_readme(repository, tmp_path))
    assert local_hub.commit(REPO) != made.parent.name
    local_hub.forget_requests()
    assert split(REPO) == made
    assert local_hub.body_bytes(".safetensors") == 0
    assert split(REPO, local_files_only=True) == made
    assert split(REPO, compression="4bit").parent.name == local_hub.commit(REPO)  # none at that compression


def test_unfinished_split_goes_on_after_a_commit_that_changes_no_weights(
    repository: Path, tmp_path: Path, local_hub: LocalHub
) -> None:
    begun = interrupted(Call(REPO), shards=1)
    local_hub.add_revision(REPO, "main", with_a_new_readme(repository, tmp_path))
    local_hub.forget_requests()
    assert split(REPO) == begun
    assert local_hub.downloads("model-00001-of-00003.safetensors") == 0


def test_saving_path_is_the_same_after_a_commit_that_changes_no_weights(
    repository: Path, tmp_path: Path, local_hub: LocalHub
) -> None:
    made = split(REPO, tmp_path / "splits")
    local_hub.add_revision(REPO, "main", with_a_new_readme(repository, tmp_path))
    assert split(REPO, tmp_path / "splits") == made


def test_used_up_folder_of_another_name_is_not_taken_for_the_one_that_was_split(model: Path, tmp_path: Path) -> None:
    made = split(model, tmp_path / "splits")
    assert split(model, tmp_path / "splits") == made  # its name is what is left of it
    other = shutil.copytree(model, tmp_path / "other")
    with pytest.raises(SplitMismatchError, match="has no shard left by which to tell") as refused:
        split(other, tmp_path / "splits")
    assert str(made) in refused.value.remedy
    beside = split(write_shards(tmp_path / "third", cut(llama_tensors(), 3)))
    renamed = beside.parent.rename(tmp_path / "renamed")
    assert split(renamed) == renamed / beside.name  # it moved with its split


def test_snapshot_given_as_a_folder_is_the_repository(repository: Path, tmp_path: Path) -> None:
    made = split(REPO, tmp_path / "splits")
    snapshot = Path(snapshot_download(REPO))
    assert split(snapshot, tmp_path / "splits") == made
    assert len(names_in(snapshot, "*.safetensors")) == 3  # a finished split frees nothing unless it is told to
    assert split(snapshot, tmp_path / "splits", delete_original=True) == made
    assert not snapshot.exists()
