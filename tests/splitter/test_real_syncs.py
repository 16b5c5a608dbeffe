"""The system calls of a split: what the next step depends on is really synced, not only announced (`durable.Step`)."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from rabbitllm.splitter.split import STAGING_NAME
from rabbitllm.storage import durable
from rabbitllm.storage.durable import Log
from rabbitllm.store.layer_file import SCRATCH_SUFFIX
from rabbitllm.store.manifest import JOURNAL_NAME, MANIFEST_NAME
from tests.splitter.conftest import MakeScene
from tests.support.dying import dying_at
from tests.support.real_syncs import SystemCall, recorded
from tests.support.scenes import Route, Scene
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself


class Disk:
    """Data that is not durable yet, after each call.

    Attributes:
        written: files with bytes that were not synced.
        named: folders in which names were not synced.
    """

    def __init__(self) -> None:
        self.written = set[Path]()
        self.named = set[Path]()

    def follow(self, call: SystemCall) -> None:
        match call.name:
            case "fsync":
                self.written.discard(call.path)
                self.named.discard(call.path)
            case "write" | "truncate":
                self.written.add(call.path)
            case "replace":
                assert call.target is not None
                assert call.path not in self.written, f"{call.path} gets its name before it is synced"
                self.named |= {call.path.parent, call.target.parent}
            case "unlink":
                self.written.discard(call.path)
                self.named.add(call.path.parent)
            case "mkdir":
                self.named.add(call.path.parent)

    def certain(self, what: str, but: Callable[[Path], bool] = lambda path: False) -> None:
        """Nothing is left to sync when this happens."""
        written = sorted(str(path) for path in self.written if not but(path))
        assert not written, f"{what}, and not synced: {written}"
        assert not self.named, f"{what}, and names not synced in {sorted(map(str, self.named))}"


def is_scratch(path: Path) -> bool:
    return path.name.endswith(SCRATCH_SUFFIX)


def follow(scene: Scene, calls: list[SystemCall], shards: Callable[[Path], bool]) -> int:
    """Follow the calls below a scene's folder; return how many shards were deleted."""
    disk, deleted = Disk(), 0
    for call in calls:
        if call.path != scene.folder.parent and not call.path.is_relative_to(scene.folder):
            continue
        if call.path.is_relative_to(scene.folder / "hub"):  # huggingface_hub's cache
            continue
        if call.path.name.startswith(".lock") or (STAGING_NAME in call.path.parts and not shards(call.path)):
            continue  # describes a running process, or can be fetched again
        if call.name == "unlink" and shards(call.path):
            # scales that wait for nothing more are in a scratch file until the layer's name is durable
            disk.certain(f"{call.path} is deleted", is_scratch)
            deleted += 1
        elif call.name == "unlink" and is_scratch(call.path):
            # others may have been removed just before, of layers that were complete with the same shard
            assert all(map(is_scratch, disk.written)), f"{call.path} is removed, and not synced: {disk.written}"
        elif call.name == "write" and call.path.name == JOURNAL_NAME:
            disk.certain(f"the journal goes on at {call}", is_scratch)
        elif call.name == "unlink" and call.path.name == JOURNAL_NAME:
            disk.certain("the journal is removed")
        disk.follow(call)
    assert not disk.written
    return deleted


ROUTES = [
    Route(),
    Route(compression="4bit-double"),
    Route(delete_original=True),
    Route(hub=True, compression="4bit"),
    Route(hub=True, transfer="stream"),
    Route(sequential=False),
]


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="paths of descriptors are those of Linux")
@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_dependencies_of_each_step_are_synced(make_scene: MakeScene, route: Route) -> None:
    scene = make_scene(route)
    scene.reset()
    with recorded() as calls:
        scene.call.make()
    local = not route.hub and (route.sequential or route.delete_original)
    names = {path.name for path in scene.original.glob("*.safetensors")}
    deleted = follow(scene, calls, lambda path: path.name in names and scene.made not in path.parents)
    assert deleted == (3 if local else 0)
    entries = [call.name == "write" and call.path.name == JOURNAL_NAME for call in calls]
    removed = [call.name == "unlink" and is_scratch(call.path) for call in calls]
    order = "".join("+" if entry else "-" * scratch for entry, scratch in zip(entries, removed, strict=True))
    # one for each shard, and before scratch files go the sums of their layers
    assert re.fullmatch(r"((\+-+)*\+){3}", order)
    assert ("-" in order) is (route.compression == "4bit-double")
    last = [call for call in calls if call.path in (scene.made, scene.made / JOURNAL_NAME)]
    assert [call.name for call in last[-2:]] == ["fsync", "unlink"]
    assert any(call.target == scene.made / MANIFEST_NAME for call in calls)


@pytest.mark.usefixtures("one_open_file")
def test_file_is_synced_before_it_is_closed_for_another(make_scene: MakeScene) -> None:
    scene = make_scene(Route())
    scene.reset()
    with recorded() as calls:
        scene.call.make()
    assert follow(scene, calls, lambda path: path.parent == scene.folder and path.suffix == ".safetensors") == 3


def test_resumed_split_syncs_the_journal_that_it_trusts(make_scene: MakeScene) -> None:
    """Data of a dead process is visible but may not be durable, in the journal and in the folder."""
    scene = make_scene(Route())
    scene.reset()
    with dying_at(0, kinds=("unlink",)):
        scene.call.make()
    with recorded() as calls:
        scene.call.make()
    journal = scene.made / JOURNAL_NAME
    shard = next(index for index, call in enumerate(calls) if call.name == "unlink" and call.path.suffix != ".part")
    before = [call.name for call in calls[:shard] if call.path == journal]
    assert before == ["write", "fsync"]
    assert calls[shard + 1] == SystemCall("fsync", calls[shard].path.parent)


@pytest.mark.parametrize("number", sorted({*durable.NO_FOLDER_SYNC}))
@pytest.mark.parametrize("route", [Route(delete_original=True), Route(hub=True, sequential=False)], ids=str)
def test_split_where_folders_have_no_sync(
    make_scene: MakeScene, route: Route, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in VirtualBox's shared folders; files are synced there as anywhere."""
    scene = make_scene(route)
    scene.reset()
    folders, files = refuse_syncs(monkeypatch, number, of_folders=True)
    scene.finish()
    assert scene.made in folders
    assert scene.made / JOURNAL_NAME in files


@pytest.mark.parametrize(("number", "of_folders"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.EINVAL, False)])
def test_other_errors_of_a_sync_are_raised(
    tmp_path: Path, number: int, of_folders: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_syncs(monkeypatch, number, of_folders=of_folders)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as raised:
        durable.write_whole(tmp_path / "file", b"content")
    assert raised.value.filename == str(tmp_path if of_folders else tmp_path / "file.part")


def refuse_syncs(monkeypatch: pytest.MonkeyPatch, number: int, *, of_folders: bool) -> tuple[list[Path], list[Path]]:
    """Refuse syncs of folders, or of files, with this error; return the folders and files of all syncs to come."""
    sync, folders, files = os.fsync, list[Path](), list[Path]()

    def refuse(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        (folders if is_folder else files).append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        if is_folder == of_folders:
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    return folders, files


def test_line_is_synced_before_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    log = Log(path)
    with recorded() as calls:
        log.append("line")
    log.close()
    assert calls == [SystemCall("write", path), SystemCall("fsync", path)]


def test_each_new_folder_is_synced_in_its_parent(tmp_path: Path) -> None:
    with recorded() as calls:
        durable.make_folder(tmp_path / "a" / "b")
    assert [(call.name, call.path.name) for call in calls] == [
        ("mkdir", "a"),
        ("fsync", tmp_path.name),
        ("mkdir", "b"),
        ("fsync", "a"),
    ]


def test_whole_file_and_its_name_are_synced(tmp_path: Path) -> None:
    with recorded() as calls:
        durable.write_whole(tmp_path / "file", b"content")
    part = tmp_path / "file.part"
    assert calls == [
        SystemCall("write", part),
        SystemCall("fsync", part),
        SystemCall("replace", part, tmp_path / "file"),
        SystemCall("fsync", tmp_path),
    ]
