"""A power cut at any step: what was not synced may be gone, and the same call still finishes with the same bytes."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rabbitllm.durable import Step, observe_steps
from rabbitllm.errors import IncompleteSplitError
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.power_cut import Recorder
from tests.support.splitting import contents, split

LOST, KEPT = "what is uncertain is lost", "what is uncertain is kept"
WORST = "what was made is lost, what was deleted is gone"


class Scene:
    """A split that was recorded, and what it left."""

    def __init__(
        self, tmp_path: Path, compression: str | None, *, ignore: Callable[[Step], bool] = lambda step: False
    ) -> None:
        self.compression = compression
        self.again = tmp_path / "again" / "model"
        recorded = write_shards(tmp_path / "recorded" / "model", cut(llama_tensors(layers=2), 3))
        self.recorder = Recorder(recorded, ignore=ignore)
        with observe_steps(self.recorder):
            split(recorded, compression=compression)
        self.finished = contents(recorded)

    def survives_all(self, cuts: Iterable[int], how: str | int) -> None:
        keep = choices(how)
        for upto in cuts:
            self.survives(upto, keep)

    def survives(self, upto: int, keep: Callable[[Step], bool]) -> None:
        """Cut the power before this step, make the same call, and compare."""
        shutil.rmtree(self.again, ignore_errors=True)
        self.recorder.rebuild(self.again, upto, keep)
        split(self.again, compression=self.compression)
        assert contents(self.again) == self.finished, f"cut before step {upto} of {len(self.recorder.steps)}"


def choices(how: str | int) -> Callable[[Step], bool]:
    if isinstance(how, int):
        chance = random.Random(how)
        return lambda step: chance.random() < 0.5
    if how == WORST:
        return lambda step: step.kind == "unlink"
    return lambda step: how == KEPT


def test_rebuilding_all_steps_gives_what_was_left(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "4bit")
    scene.recorder.rebuild(scene.again, len(scene.recorder.steps), choices(KEPT))
    found = contents(scene.again)
    assert {name: data.rstrip(b"\0") for name, data in found.items()} == {
        name: data.rstrip(b"\0") for name, data in scene.finished.items()
    }


@pytest.mark.parametrize("compression", [None, "8bit"])
@pytest.mark.parametrize("how", [LOST, WORST, 1])
def test_power_cut(tmp_path: Path, compression: str | None, how: str | int) -> None:
    scene = Scene(tmp_path, compression)
    last = len(scene.recorder.steps)
    scene.survives_all(sorted({*range(0, last, 4 if compression is None else 9), last}), how)


@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_a_sync_that_were_forgotten_would_be_noticed(tmp_path: Path, forgotten: str) -> None:
    """The negative control: were the steps the same without their syncs, something would be lost somewhere."""
    scene = Scene(tmp_path, None, ignore=lambda step: step.kind == forgotten)
    with pytest.raises((AssertionError, FileNotFoundError, IncompleteSplitError)):
        scene.survives_all(range(0, len(scene.recorder.steps) + 1, 3), WORST)


@pytest.mark.long
@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
@pytest.mark.parametrize("how", [LOST, WORST, KEPT, *range(4)])
def test_power_cut_at_every_step(tmp_path: Path, compression: str | None, how: str | int) -> None:
    scene = Scene(tmp_path, compression)
    scene.survives_all(range(len(scene.recorder.steps) + 1), how)
