"""The user's hub cache: which folders are part of it, and freeing what is in it without breaking what else uses it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import scan_cache_dir, snapshot_download

from rabbitllm.checkpoints.hub_cache import (
    CachedSnapshot,
    check_in_cache,
    free_file,
    free_rest,
    freed_bytes,
    snapshot_of,
)
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import UnsafePathError
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.hub_fixtures import HubEnvironment, point_at
from tests.support.local_hub import LocalHub
from tests.support.splitting import Call, names_in, occupied, split

REPO = "acme/tiny"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def snapshot(local_hub: LocalHub, hub_environment: HubEnvironment, tmp_path: Path) -> CachedSnapshot:
    write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(), 2))
    cached = snapshot_of(Path(snapshot_download(REPO)))
    assert cached is not None
    return cached


@pytest.fixture
def sibling(local_hub: LocalHub, snapshot: CachedSnapshot, tmp_path: Path) -> Path:
    """Another commit with the first shard in common, in the cache too."""
    tensors = cut(llama_tensors(), 2)
    tensors[SECOND] = {name: tensor * 2 for name, tensor in tensors[SECOND].items()}
    local_hub.add_revision(REPO, "v2", write_shards(tmp_path / "second", tensors))
    return Path(snapshot_download(REPO, revision="v2"))


def test_snapshot(snapshot: CachedSnapshot, hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    assert snapshot == CachedSnapshot(hub_environment.cache, "models--acme--tiny", local_hub.commit(REPO))
    assert snapshot.repo_id == REPO
    assert names_in(snapshot.folder, "*.safetensors") == [FIRST, SECOND]


def test_freed_bytes_are_predicted(snapshot: CachedSnapshot, sibling: Path, hub_environment: HubEnvironment) -> None:
    """Nothing of a blob that another revision uses, or that has a second name, or lies on another disk."""
    device = hub_environment.cache.stat().st_dev
    told = freed_bytes(snapshot, [FIRST, SECOND, "not there"], device)
    before = occupied(hub_environment.cache)
    assert free_file(snapshot, SECOND) > 0
    assert list(told) == [SECOND]
    assert told[SECOND] <= before - occupied(hub_environment.cache) <= told[SECOND] + 4096  # a long link takes a block
    assert freed_bytes(snapshot, [FIRST], device) == freed_bytes(snapshot, [], device) == {}
    cached = snapshot_of(sibling)
    assert cached is not None
    assert list(freed_bytes(cached, [FIRST, SECOND], device)) == [SECOND]
    assert freed_bytes(cached, [SECOND], device + 1) == {}
    os.link((sibling / SECOND).resolve(), hub_environment.home / "kept")
    assert freed_bytes(cached, [SECOND], device) == {}


@pytest.mark.parametrize("path", ["", "..", "../..", "../../blobs", "sub"])
def test_folders_that_are_no_snapshot(snapshot: CachedSnapshot, path: str, tmp_path: Path) -> None:
    if path:
        assert snapshot_of(snapshot.folder / path) is None
    assert snapshot_of(tmp_path) is None


def test_freeing_a_file_frees_its_blob(snapshot: CachedSnapshot, hub_environment: HubEnvironment) -> None:
    blob = (snapshot.folder / FIRST).resolve()
    size = blob.stat().st_size
    before = occupied(hub_environment.cache)
    assert free_file(snapshot, FIRST) == size
    assert not blob.exists()
    assert names_in(snapshot.folder, "*.safetensors") == [SECOND]
    assert before - occupied(hub_environment.cache) >= size
    assert free_file(snapshot, FIRST) == 0  # once more, as after a crash
    assert scan_cache_dir(hub_environment.cache).warnings == []


@contextlib.contextmanager
def dying_at_deletion(cache: Path, last: int) -> Iterator[None]:
    """Break off before a deletion below a folder, of which so many are carried out, also by huggingface_hub."""
    count = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("unlink", "remove"):
            delete = getattr(os, name)

            def break_off(path: Path, *rest: Any, delete: Callable[..., None] = delete, **options: Any) -> None:
                if Path(path).is_relative_to(cache) and next(count) == last:
                    raise KeyboardInterrupt
                delete(path, *rest, **options)

            patch.setattr(os, name, break_off)
        with contextlib.suppress(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("last", [0, 1])
def test_a_crash_leaves_no_blob_without_a_link(
    snapshot: CachedSnapshot, hub_environment: HubEnvironment, last: int
) -> None:
    with dying_at_deletion(hub_environment.cache, last):
        free_file(snapshot, FIRST)
    assert scan_cache_dir(hub_environment.cache).warnings == []
    free_file(snapshot, FIRST)
    assert names_in(snapshot.folder, "*.safetensors") == [SECOND]
    blobs = [path.resolve().name for path in snapshot.folder.iterdir()]
    assert names_in(snapshot.folder.parent.parent / "blobs") == sorted(blobs)


@pytest.mark.parametrize("as_folder", [False, True])
@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("last", [0, 1])
def test_the_same_call_frees_what_a_crash_left(
    snapshot: CachedSnapshot, hub_environment: HubEnvironment, last: int, *, sequential: bool, as_folder: bool
) -> None:
    call = Call(
        str(snapshot.folder) if as_folder else REPO,
        str(hub_environment.home / "made"),
        sequential=sequential,
        delete_original=not sequential,
    )
    blobs = snapshot.folder.parent.parent / "blobs"
    shards = {(snapshot.folder / name).resolve() for name in (FIRST, SECOND)}
    with dying_at_deletion(blobs.parent, last):
        call.make()
    assert len(names_in(snapshot.folder, "*.safetensors")) == 2 - last
    assert call.make().is_dir()
    assert not any(shard.exists() for shard in shards)
    assert names_in(snapshot.folder, "*.safetensors") == []


def test_blobs_on_another_disk(snapshot: CachedSnapshot) -> None:
    """Where the folder of blobs is a link."""
    blob = (snapshot.folder / FIRST).resolve()

    def refuse(step: Step) -> None:
        if step.kind == "rename":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    with observe_steps(refuse):
        assert free_file(snapshot, FIRST) > 0
    assert not blob.exists()
    assert names_in(snapshot.folder, "*.safetensors") == [SECOND]


def test_blob_of_another_revision_is_kept(snapshot: CachedSnapshot, sibling: Path) -> None:
    content = (sibling / FIRST).read_bytes()
    assert free_file(snapshot, FIRST) == 0
    assert free_file(snapshot, SECOND) > 0
    assert names_in(snapshot.folder, "*.safetensors") == []
    assert (sibling / FIRST).read_bytes() == content
    assert (sibling / SECOND).exists()
    second = snapshot_of(sibling)
    assert second is not None
    assert free_file(second, FIRST) == len(content)  # no other snapshot has it now


def test_absent_file(snapshot: CachedSnapshot) -> None:
    assert free_file(snapshot, "nothing.safetensors") == 0
    assert free_file(CachedSnapshot(snapshot.cache, snapshot.repo_folder, "0" * 40), FIRST) == 0
    assert names_in(snapshot.folder, "*.safetensors") == [FIRST, SECOND]


def test_cache_behind_a_link(local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a small home holds a link to a large disk: the hub's library resolves it."""
    write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(), 2))
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "hf_home").symlink_to(tmp_path / "large_disk")
    environment = point_at(local_hub.url, tmp_path / "hf_home", monkeypatch)
    snapshot_download(REPO)
    before = occupied(tmp_path / "large_disk")
    result = split(REPO)
    assert result.is_relative_to(environment.home)
    assert list(tmp_path.glob("large_disk/hub/**/*.safetensors")) == []
    weights = sum(tensor.nbytes for tensor in llama_tensors().values())
    assert before - occupied(tmp_path / "large_disk" / "hub") > weights


def test_link_to_a_snapshot(snapshot: CachedSnapshot, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(snapshot.folder)
    assert snapshot_of(tmp_path / "link") == snapshot
    assert LocalCheckpoint(tmp_path / "link").index.shards == (FIRST, SECOND)


def test_the_rest_of_a_snapshot(snapshot: CachedSnapshot, sibling: Path) -> None:
    before = {path.name: path.read_bytes() for path in sibling.iterdir()}
    assert free_rest(snapshot) == []  # there are weights, of which nothing is known here
    for shard in (FIRST, SECOND):
        (snapshot.folder / shard).unlink()
    removed = free_rest(snapshot)
    assert {path.name for path in removed} == before.keys() - {FIRST, SECOND}
    assert not snapshot.folder.exists()
    assert {path.name: path.read_bytes() for path in sibling.iterdir()} == before
    assert free_rest(snapshot) == []


def test_mirror_with_the_same_commit_stays(snapshot: CachedSnapshot) -> None:
    """A repository that was renamed or copied with its history."""
    mirrors = [snapshot.cache / f"models--acme--mirror-{index}" for index in range(4)]
    for mirror in mirrors:
        shutil.copytree(snapshot.folder.parent.parent, mirror, symlinks=True)
    before = [sorted(mirror.rglob("*")) for mirror in mirrors]
    for shard in (FIRST, SECOND):
        (snapshot.folder / shard).unlink()
    assert free_rest(snapshot)
    assert not snapshot.folder.exists()
    assert [sorted(mirror.rglob("*")) for mirror in mirrors] == before


def test_files_of_the_user_keep_a_snapshot(snapshot: CachedSnapshot, caplog: pytest.LogCaptureFixture) -> None:
    (snapshot.folder / "results.csv").write_text("only here")
    for shard in (FIRST, SECOND):
        (snapshot.folder / shard).unlink()
    assert free_rest(snapshot) == []
    assert (snapshot.folder / "results.csv").read_text() == "only here"
    assert "is kept, since it has files that are not the hub's: results.csv." in caplog.text


def test_links_to_blobs_are_accepted(snapshot: CachedSnapshot) -> None:
    check_in_cache(snapshot.folder / FIRST, snapshot)
    store = snapshot.cache / "blobs" / "ab"
    store.mkdir(parents=True)
    (store / "shared").touch()
    (snapshot.folder / "shared").symlink_to(store / "shared")
    check_in_cache(snapshot.folder / "shared", snapshot)


@pytest.mark.parametrize(
    "target", ["{tmp}/elsewhere", "/etc/passwd", "../../refs/main", "../../../models--x--y/blobs/a"]
)
def test_link_outside_the_cache_is_refused(snapshot: CachedSnapshot, tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").touch()
    (snapshot.folder / "bad").symlink_to(target.format(tmp=tmp_path))
    with pytest.raises(UnsafePathError, match="is a link that leads out of the hub cache") as refused:
        check_in_cache(snapshot.folder / "bad", snapshot)
    assert "Nothing was opened or deleted." in str(refused.value)


def test_snapshot_as_a_local_checkpoint(
    snapshot: CachedSnapshot, local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = LocalCheckpoint(snapshot.folder)
    metadata = checkpoint.metadata(FIRST)
    assert metadata is not None
    assert metadata.fingerprint == f"sha256:{(snapshot.folder / FIRST).resolve().name}"
    identity = checkpoint.identity([metadata])
    assert (identity.kind, identity.name, identity.commit) == ("hub", REPO, local_hub.commit(REPO))
    release = checkpoint.release(FIRST)
    assert release.freed == metadata.size
    assert checkpoint.metadata(FIRST) is None
    checkpoint.release(SECOND)
    removed = checkpoint.discard_rest()
    assert "config.json" in {path.name for path in removed}
    assert not snapshot.folder.exists()
