"""A sequential split that is killed before any of its steps on the disk: the same call finishes it, to the same bytes.

At each moment every tensor is in a shard that is there or in the split directory; so the original may be gone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frozen import seam
from tests.frozen.support import checkpoints
from tests.frozen.support.states import SCHEMES
from tests.frozen.test_on_disk import digests, golden_digests
from tests.support.one_thread import one_thread as one_thread

DRAWN = 4
"""Steps from which on nothing is carried out in the short run."""


@pytest.fixture(scope="module")
def crashes() -> Iterator[seam.Crashes]:
    with seam.Crashes() as started:
        yield started


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(tmp_path_factory.mktemp("original") / "model")


def fresh(original: Path, folder: Path) -> Path:
    """A folder with nothing but a copy of the checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder / "model")
    return folder


def steps_of(call: seam.Call) -> int:
    """How many steps the call takes when it is not killed."""
    with seam.steps() as seen:
        assert seam.make(call) == 0
    return len(seen)


def check(crashes: seam.Crashes, original: Path, folder: Path, scheme: str, deaths: range | list[int]) -> None:
    """Kill the call before each of these steps, each time with a fresh checkpoint, and make it once more."""
    expected = golden_digests()[f"cut {scheme}"]
    call = {"command": ["pull", "model", "--sequential", *SCHEMES[scheme]], "folder": str(folder)}
    for death in deaths:
        fresh(original, folder)
        assert crashes.run(call, death) == seam.KILLED, death
        assert seam.make(call) == 0, death
        assert digests(folder) == expected, death


@pytest.mark.parametrize("scheme", ["none", "4bit-double"])
@pytest.mark.long
def test_dead_from_drawn_steps_on(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """A stand-in for kills, in this process."""
    monkeypatch.chdir(tmp_path)
    folder = fresh(original, tmp_path / "work")
    call = {"command": ["pull", "model", "--sequential", *SCHEMES[scheme]], "folder": str(folder)}
    count = steps_of(call)
    assert digests(folder) == golden_digests()[f"cut {scheme}"]
    for number in range(DRAWN):
        fresh(original, folder)
        assert seam.dead_from(call, count * (2 * number + 1) // (2 * DRAWN))
        assert digests(folder) != golden_digests()[f"cut {scheme}"]
        assert seam.make(call) == 0
        assert digests(folder) == golden_digests()[f"cut {scheme}"]


@pytest.mark.long
def test_killed_at_every_third_step(
    crashes: seam.Crashes, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = fresh(original, tmp_path / "work")
    count = steps_of({"command": ["pull", "model", "--sequential"], "folder": str(folder)})
    assert count > 50
    check(crashes, original, folder, "none", range(0, count, 3))


@pytest.mark.long
def test_killed_again_and_again(
    crashes: seam.Crashes, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call gets a few steps further than the one before it, and dies."""
    monkeypatch.chdir(tmp_path)
    folder = fresh(original, tmp_path / "work")
    call = {"command": ["pull", "model", "--sequential", *SCHEMES["4bit"]], "folder": str(folder)}
    died = 0
    while crashes.run(call, 11 + died) == seam.KILLED:
        died += 1
        assert died < 200
    assert died > 5
    assert digests(folder) == golden_digests()["cut 4bit"]
