"""Disk use that `rabbitllm plan` predicts for a checkpoint above 1 GB, and disk use of the split, on every route."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rabbitllm.checkpoints.checkpoint import Release
from rabbitllm.checkpoints.hub import HubRepository
from rabbitllm.estimate.split_estimate import ROUTES
from tests.cli.test_plan import LOCAL_ROUTES, REPO, call_on, plan, routes
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.hub_fixtures import HubEnvironment
from tests.support.peak import Peak

pytestmark = pytest.mark.long

CLOSE = 1.02
"""The estimate may be so many times the true value, and never less than it."""
COMPRESSIONS = [None, "4bit"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    tensors = cut(llama_tensors(layers=9, hidden=2048, vocabulary=48_000), 5)
    folder = write_shards(tmp_path_factory.mktemp("at-size"), tensors)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 1e9
    yield folder
    for path in folder.glob("*.safetensors"):
        path.unlink()


def linked(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint again, without its bytes again: a split reads shards and unlinks them."""
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        os.link(path, folder / path.name)
    return folder


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 20:  # blobs of the hub's cache among them
            path.unlink()


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", LOCAL_ROUTES)
def test_peak_of_a_folder(checkpoint: Path, tmp_path: Path, name: str, compression: str | None) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")  # a shard with a second name would free nothing
    predicted = routes(plan(folder), compression)[name]
    peak = Peak(folder)
    peak.during(call_on(name, str(folder), compression))
    assert peak.most <= predicted.disk_bytes <= CLOSE * peak.most


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", list(ROUTES))
def test_peak_of_a_repository(
    checkpoint: Path,
    tmp_path: Path,
    hub_environment: HubEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    compression: str | None,
) -> None:
    linked(checkpoint, tmp_path / "hub" / REPO)
    predicted = routes(plan(REPO), compression)[name]
    peak = Peak(hub_environment.home)
    if name == "sequential_ahead":
        let_the_next_shard_come_first(monkeypatch, peak)
    peak.during(call_on(name, REPO, compression, max_disk=predicted.created_bytes))
    assert peak.most <= predicted.disk_bytes <= CLOSE * peak.most


def let_the_next_shard_come_first(monkeypatch: pytest.MonkeyPatch, peak: Peak) -> None:
    """Make the next shard be there, whole, before one is given up: the most that fetching ahead can take."""
    release = HubRepository.release

    def late(repository: HubRepository, shard: str, *, only_staged: bool = False) -> Release:
        names = sorted(name for name in repository.files if name.endswith(".safetensors"))
        for following in names[names.index(shard) + 1 :][:1]:
            deadline = time.monotonic() + 600
            while not has_come(repository, following):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        peak.look()
        return release(repository, shard, only_staged=only_staged)

    monkeypatch.setattr(HubRepository, "release", late)


def has_come(repository: HubRepository, shard: str) -> bool:
    staged = repository.staged(shard)
    return staged.exists() and staged.stat().st_size == repository.files[shard].size
