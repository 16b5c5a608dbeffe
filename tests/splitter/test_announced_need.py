"""The announced need of a split is what it is checked with: exactly that is accepted and kept, less is refused.

The free disk includes only what deletion really frees.
"""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.options import parse_size
from rabbitllm.base.progress import listening
from rabbitllm.base.terminal import size_rounded_up
from rabbitllm.checkpoints.hub_cache import snapshot_of
from rabbitllm.errors import NotEnoughSpaceException
from rabbitllm.models.pull import dry_run, pull, show_dry_run
from rabbitllm.splitter.disk_budget import on_disk
from rabbitllm.storage.folders import Folder
from tests.support.builders import build_checkpoint
from tests.support.hub_fixtures import HubEnvironment
from tests.support.load_requests import asked
from tests.support.peak import Peak
from tests.support.small_disk import SmallDisk, formatted_disk, small_disk
from tests.support.splitting import Counter, contents
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself
from tests.support.ticks import observe_ticks

MIB = 1 << 20
REPO = "org/model"
COMPRESSIONS = (None, "8bit", "4bit", "4bit-double")
FOLDER_ROUTES = ({}, {"sequential": True})
HUB_ROUTES = (
    {"keep_shards": True},
    {"shard_transfer": "file"},
    {"shard_transfer": "stream"},
    {"sequential": True, "shard_transfer": "stream"},
)


def build(folder: Path) -> Path:
    """A checkpoint with a config, whose shards are large compared to its small files."""
    return build_checkpoint(folder, "llama", shards=4, hidden_size=256, intermediate_size=512)


def request_for(name: str | Path, **options: Any) -> LoadRequest:
    return asked(name, **{"min_free_disk": 0, "device": "cpu", **options})


def printed(wish: LoadRequest) -> str:
    out = io.StringIO()
    show_dry_run(dry_run(wish), wish, Console(file=out, width=1000))
    return out.getvalue()


def refusal_of(wish: LoadRequest, folder: Path) -> str:
    """Return the message of a refused pull, which changes no file; small files may come into the hub cache."""
    before = touched(folder)
    assert not dry_run(wish).fits
    with pytest.raises(NotEnoughSpaceException) as error:
        pull(wish)
    assert touched(folder) == before
    return str(error.value)


def touched(folder: Path) -> list[tuple[str, int]]:
    of_the_hub = ("hub/", "rabbitllm/models--org--model/refs/")
    files = contents(folder).items()
    return [(name, len(data)) for name, data in files if "safetensors" in name or not name.startswith(of_the_hub)]


def pulled(wish: LoadRequest, peak: Peak) -> None:
    with observe_ticks(Counter(peak.look)), listening(peak.listen):
        pull(wish)


def limited(wish: LoadRequest, limit: int | str) -> LoadRequest:
    """The same with `--max-disk`."""
    assert wish.split is not None
    return dataclasses.replace(wish, split=dataclasses.replace(wish.split, max_disk=parse_size(limit, "max_disk")))


def check_limit(wish: LoadRequest, folder: Path) -> None:
    estimate = dry_run(wish)
    assert estimate.route is not None
    last = estimate.routes[-1]
    need = last.created_bytes
    message = refusal_of(limited(wish, need - 1), folder)
    figure = _figure(printed(limited(wish, need)), r"written +at most")
    assert f"needs {figure} ({need:,} bytes) of max_disk" in message
    for limit in (need, figure):
        assert dry_run(limited(wish, limit)).fits
    peak = Peak(folder)
    pulled(limited(wish, need), peak)
    assert 0 < peak.most <= last.disk_bytes <= need


def _figure(text: str, before: str) -> str:
    """Return the size after these words."""
    match = re.search(before + r" ([\d.]+ [MG]B) \(", text)
    assert match is not None, text
    return match[1]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("options", FOLDER_ROUTES, ids=str)
def test_max_disk_of_the_announced_need_is_enough_for_a_folder(
    tmp_path: Path, options: dict[str, object], compression: str | None
) -> None:
    folder = build(tmp_path / "model")
    check_limit(request_for(folder, compression=compression, **options), folder)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("options", HUB_ROUTES, ids=str)
def test_max_disk_of_the_announced_need_is_enough_for_a_repository(
    tmp_path: Path, hub_environment: HubEnvironment, options: dict[str, object], compression: str | None
) -> None:
    build(tmp_path / "hub" / REPO)
    check_limit(request_for(REPO, compression=compression, **options), hub_environment.home)


def test_least_max_disk_that_auto_names_is_enough(tmp_path: Path) -> None:
    folder = build(tmp_path / "model")
    message = refusal_of(request_for(folder, compression="auto", max_disk=1000), folder)
    match = re.search(r"max_disk to (\d+), or", message)
    assert match is not None
    least = int(match[1])
    refusal_of(request_for(folder, compression="auto", max_disk=least - 1), folder)
    peak = Peak(folder)
    pulled(request_for(folder, compression="auto", max_disk=least), peak)
    assert peak.most <= least


# The free disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 64 * MIB) as mounted:
        yield mounted


def check_free_disk(wish: LoadRequest, disk: SmallDisk, folder: Path) -> None:
    """The announced free disk is enough, and a block less is not."""
    need = dry_run(wish).routes[-1].disk_bytes
    disk.leave(on_disk(need) - 4096)
    disk_error = refusal_of(wish, folder)
    assert f"needs {size_rounded_up(need)} ({need:,} bytes) of free disk" in disk_error
    disk.leave(on_disk(need))
    assert dry_run(wish).fits
    pull(wish)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("options", FOLDER_ROUTES, ids=str)
def test_free_disk_of_the_announced_need_is_enough_for_a_folder(
    disk: SmallDisk, options: dict[str, object], compression: str | None
) -> None:
    folder = build(disk.path / "model")
    check_free_disk(request_for(folder, compression=compression, **options), disk, folder)


@pytest.mark.parametrize("options", HUB_ROUTES, ids=str)
def test_free_disk_of_the_announced_need_is_enough_for_a_repository(
    tmp_path: Path, hub_environment: HubEnvironment, options: dict[str, object]
) -> None:
    build(tmp_path / "hub" / REPO)
    with small_disk(hub_environment.home, 64 * MIB) as disk:
        dry_run(request_for(REPO))  # what only asking leaves in the hub cache
        check_free_disk(request_for(REPO, compression="4bit", **options), disk, hub_environment.home)


def test_shards_on_another_disk_free_no_space(tmp_path: Path, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "in_memory", False)  # as of a disk: shards are not deleted for a split in memory
    folder = build(tmp_path / "model")
    wish = request_for(folder, folder=disk.path / "out", sequential=True)
    route = dry_run(wish).route
    assert route is not None
    assert route.disk_bytes == route.created_bytes
    check_free_disk(wish, disk, tmp_path / "model")


def linked(folder: Path) -> Path:
    """Each shard gets a second name, elsewhere."""
    elsewhere = folder.with_name("kept")
    elsewhere.mkdir()
    for shard in folder.glob("*.safetensors"):
        os.link(shard, elsewhere / shard.name)
    return elsewhere


def behind_links(folder: Path) -> Path:
    """Each shard is a link to a file in a subfolder."""
    elsewhere = folder / "weights"
    elsewhere.mkdir()
    for shard in folder.glob("*.safetensors"):
        shard.rename(elsewhere / shard.name)
        shard.symlink_to(Path("weights") / shard.name)
    return elsewhere


def reflinked(folder: Path) -> Path:
    """Each shard shares its blocks with a copy."""
    elsewhere = folder.with_name("kept")
    subprocess.run(["cp", "-r", "--reflink=always", str(folder), str(elsewhere)], check=True)
    subprocess.run(["sync", "-f", str(folder)], check=True)
    return elsewhere


@pytest.mark.parametrize("share", [linked, behind_links], ids=["hard links", "links"])
def test_linked_shards_free_no_space(disk: SmallDisk, share: object) -> None:
    folder = build(disk.path / "model")
    kept = share(folder)  # type: ignore[operator]
    before = contents(kept)
    wish = request_for(folder, sequential=True)
    route = dry_run(wish).route
    assert route is not None
    assert route.disk_bytes == route.created_bytes
    check_free_disk(wish, disk, folder)
    assert contents(kept) == before


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_shards_that_share_blocks_free_no_space(tmp_path: Path, kind: str) -> None:
    with formatted_disk(tmp_path / "disk", kind, 400 * MIB) as disk:
        folder = build(disk.path / "model")
        subprocess.run(["sync", "-f", str(folder)], check=True)
        alone = dry_run(request_for(folder, sequential=True)).route
        reflinked(folder)
        shared = dry_run(request_for(folder, sequential=True)).route
        assert alone is not None
        assert shared is not None
        assert alone.disk_bytes < shared.disk_bytes
        assert shared.disk_bytes == shared.created_bytes


def test_holes_free_no_space(disk: SmallDisk) -> None:
    """A shard of zeros that was copied with holes has the same length and takes no disk."""
    folder = build(disk.path / "model")
    dense = dry_run(request_for(folder, sequential=True)).route
    for shard in folder.glob("*.safetensors"):
        with shard.open("r+b") as file:
            size, header = shard.stat().st_size, 8 + int.from_bytes(file.read(8), "little")
            file.truncate(header)
            file.truncate(size)
    sparse = dry_run(request_for(folder, sequential=True)).route
    assert dense is not None
    assert sparse is not None
    assert sparse.disk_bytes > dense.disk_bytes
    check_free_disk(request_for(folder, sequential=True), disk, folder)


def test_blob_of_another_revision_frees_no_space(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    build(tmp_path / "hub" / REPO)
    pull(request_for(REPO, keep_shards=True))
    wish = request_for(REPO, compression="4bit", sequential=True)
    alone = dry_run(wish).route
    [first] = hub_environment.cache.glob("models--*/snapshots/*")
    assert snapshot_of(first) is not None
    shutil.copytree(first, first.with_name("f" * 40), symlinks=True)
    shared = dry_run(wish).route
    assert alone is not None
    assert shared is not None
    assert alone.disk_bytes < shared.disk_bytes
    assert shared.disk_bytes == shared.created_bytes
