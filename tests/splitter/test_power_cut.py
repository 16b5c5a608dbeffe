"""A power cut at any step: unsynced data may be lost, and the same call still finishes with the same bytes."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rabbitllm.errors import IncompleteSplitError, SplitMismatchError
from rabbitllm.storage.durable import Step, observe_steps
from tests.splitter.conftest import MakeScene
from tests.support.dying import dying_at
from tests.support.power_cut import Recorder
from tests.support.scenes import Route, Scene, assert_same, one_step_in, routes, sample, scene_of_one_file

LOST, KEPT = "what is uncertain is lost", "what is uncertain is kept"
WORST = "what was made is lost, what was deleted is gone"


class Recorded:
    """Calls on a scene that were recorded, and can be replayed up to any step."""

    def __init__(
        self,
        scene: Scene,
        *,
        first_dies_at: int | None = None,
        sync_fails: bool = False,
        ignore: Callable[[Step], bool] = lambda step: False,
    ) -> None:
        """Record the call; with ``first_dies_at`` it is made twice, the first time up to that step.

        With ``sync_fails`` it ends there because that step, a sync, fails, and what was to be synced is forgotten.
        """
        self.scene = scene
        scene.reset()
        self.recorder = Recorder(scene.folder, ignore=ignore)
        if first_dies_at is not None:
            with dying_at(first_dies_at, self.recorder) as death:
                scene.call.make()
            if sync_fails and death.step is not None and death.step.kind == "sync":
                self.recorder.lose_sync(death.step)
        self.begin = len(self.recorder.steps)
        with observe_steps(self.recorder):
            scene.call.make()
        self.cache = scene.folder.with_name("cache")
        if scene.hub:
            shutil.rmtree(self.cache, ignore_errors=True)
            shutil.copytree(scene.folder / "hub", self.cache, symlinks=True)

    @property
    def steps(self) -> int:
        return len(self.recorder.steps)

    def survives_all(self, cuts: Iterable[int], how: str | int) -> None:
        keep = choices(how)
        for upto in cuts:
            self.survives(upto, keep)

    def survives(self, upto: int, keep: Callable[[Step], bool]) -> None:
        """Cut the power before this step, make the same call, and compare."""
        scene = self.scene
        shutil.rmtree(scene.folder)
        scene.folder.mkdir()
        self.recorder.rebuild(scene.folder, upto, keep)
        if scene.hub and keep(Step("cache", scene.folder)):
            shutil.copytree(self.cache, scene.folder / "hub", symlinks=True)
        scene.check()
        scene.call.make()
        assert_same(scene.ours(scene.state()), scene.ours(scene.finished))


def choices(how: str | int) -> Callable[[Step], bool]:
    if isinstance(how, int):
        chance = random.Random(how)
        return lambda step: chance.random() < 0.5
    if how == WORST:
        return lambda step: step.kind == "unlink"
    return lambda step: how == KEPT


@pytest.mark.parametrize("route", routes(sequential=[True], compressions=["4bit"]), ids=str)
def test_rebuilding_all_steps_gives_the_final_state(make_scene: MakeScene, route: Route) -> None:
    scene = make_scene(route)
    recorded = Recorded(scene)
    shutil.rmtree(scene.folder)
    scene.folder.mkdir()
    recorded.recorder.rebuild(scene.folder, recorded.steps, choices(KEPT))
    rebuilt, finished = scene.ours(scene.state()), scene.ours(scene.finished)
    assert {name: data.rstrip(b"\0") for name, data in rebuilt.items()} == {
        name: data.rstrip(b"\0") for name, data in finished.items()
    }


@pytest.mark.parametrize("how", [LOST, WORST, 1])
@pytest.mark.parametrize("route", routes(), ids=str)
def test_power_cut(make_scene: MakeScene, route: Route, how: str | int) -> None:
    recorded = Recorded(make_scene(route))
    recorded.survives_all(sample(recorded.steps + 1, 12), how)


@pytest.mark.parametrize("how", [LOST, WORST])
def test_power_cut_while_scales_wait(make_scene: MakeScene, how: str) -> None:
    recorded = Recorded(make_scene(Route(compression="4bit-double")))
    recorded.survives_all(sample(recorded.steps + 1, 12), how)


@pytest.mark.usefixtures("one_open_file")
@pytest.mark.parametrize("how", [LOST, WORST])
@pytest.mark.parametrize("compression", [None, "4bit-double"])
def test_power_cut_where_one_file_is_open_at_a_time(make_scene: MakeScene, compression: str | None, how: str) -> None:
    recorded = Recorded(make_scene(Route(compression=compression)))
    layers = [step for step in recorded.recorder.steps if step.path.name.endswith((".safetensors.part", ".journal"))]
    kinds = [step.kind if step.path.suffix == ".part" else "journal" for step in layers]
    assert ("sync", "write") in itertools.pairwise(kinds), "no file was closed for another"
    recorded.survives_all(sample(recorded.steps + 1, 20), how)


@pytest.mark.parametrize("how", [LOST, WORST])
def test_power_cut_while_a_single_file_is_split(tmp_path: Path, how: str) -> None:
    recorded = Recorded(scene_of_one_file(tmp_path, Route()))
    recorded.survives_all(sample(recorded.steps + 1, 12), how)


@pytest.mark.parametrize("forgotten", ["sync", "sync_folder"])
def test_missing_sync_is_detected(make_scene: MakeScene, forgotten: str) -> None:
    """The negative control: without the syncs the same steps would lose data."""
    recorded = Recorded(make_scene(Route()), ignore=lambda step: step.kind == forgotten)
    with pytest.raises((AssertionError, FileNotFoundError, IncompleteSplitError, SplitMismatchError)):
        recorded.survives_all(range(0, recorded.steps + 1, 3), WORST)


# A crash, the same call again, and then a power cut: the second call must not build on what only looked durable


def crash_then_cut(scene: Scene, crash: int, how: str, cuts: int | None = None, *, sync_fails: bool = False) -> None:
    recorded = Recorded(scene, first_dies_at=crash, sync_fails=sync_fails)
    later = recorded.steps + 1 - recorded.begin
    for index in sample(later, cuts or later):
        recorded.survives(recorded.begin + index, choices(how))


@pytest.mark.parametrize("how", [LOST, WORST])
def test_power_cut_after_a_crash(make_scene: MakeScene, how: str) -> None:
    scene = make_scene(Route())
    for crash in sample(scene.steps, 10):
        crash_then_cut(scene, crash, how, 8)


@pytest.mark.parametrize("how", [LOST, WORST])
def test_power_cut_after_a_crash_before_each_sync(make_scene: MakeScene, how: str) -> None:
    """The next call sees data that was written but not synced."""
    scene = make_scene(Route())
    for crash in [index for index, kind in enumerate(scene.kinds) if kind in ("sync", "sync_folder")]:
        crash_then_cut(scene, crash, how, 5)


@pytest.mark.long
def test_power_cut_after_a_sync_that_failed(make_scene: MakeScene) -> None:
    """The pages that could not be written are clean afterwards: no later sync makes them durable."""
    scene = make_scene(Route())
    for crash in [index for index, kind in enumerate(scene.kinds) if kind == "sync"]:
        crash_then_cut(scene, crash, WORST, 5, sync_fails=True)


@pytest.mark.usefixtures("one_open_file")
@pytest.mark.parametrize("how", [LOST, WORST])
@pytest.mark.long
def test_power_cut_after_a_crash_where_one_file_is_open_at_a_time(make_scene: MakeScene, how: str) -> None:
    scene = make_scene(Route())
    for crash in [index for index, kind in enumerate(scene.kinds) if kind == "sync"]:
        crash_then_cut(scene, crash, how, 3)
        crash_then_cut(scene, crash, how, 3, sync_fails=True)


@pytest.mark.long
@pytest.mark.parametrize("how", [LOST, WORST, 0, 1])
@pytest.mark.parametrize(
    "route", [*routes(), *routes(hub=[False], delete=[True]), *routes(hub=[False], compressions=["8bit"])], ids=str
)
def test_power_cut_at_every_other_step(make_scene: MakeScene, route: Route, how: str | int) -> None:
    recorded = Recorded(make_scene(route))
    recorded.survives_all(one_step_in(2, recorded.steps + 1, str(route), how), how)


@pytest.mark.long
@pytest.mark.parametrize("how", [LOST, WORST])
@pytest.mark.parametrize("route", routes(sequential=[True]), ids=str)
def test_power_cut_at_any_step_after_a_crash_at_any_step(make_scene: MakeScene, route: Route, how: str) -> None:
    scene = make_scene(route)
    for crash in one_step_in(5 if route.hub else 2, scene.steps, str(route), how):
        crash_then_cut(scene, crash, how, 8)
