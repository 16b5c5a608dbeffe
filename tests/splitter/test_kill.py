"""A process is killed at any step: the same call finishes, with the same bytes, and leaves no other files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from rabbitllm.storage.durable import Step, observe_steps
from tests.splitter.conftest import MakeScene
from tests.support.builders import INDEX_NAME
from tests.support.crashes import KILLED, CrashServer
from tests.support.scenes import Route, Scene, one_step_in, routes, sample, scene_of_one_file
from tests.support.splitting import Counter, names_in

SAMPLES = 8


def check(scene: Scene, server: CrashServer, *deaths: int) -> None:
    """Kill the call at these steps, one call after the other, and make it once more."""
    scene.reset()
    for death in deaths:
        status = server.run(scene.call, death)
        assert status == KILLED, f"step {death} of {scene.steps}: exit status {status}"
        scene.check()
    scene.finish()


def test_call_without_a_kill_finishes(make_scene: MakeScene, crash_server: CrashServer) -> None:
    scene = make_scene(Route())
    scene.reset()
    assert crash_server.run(scene.call, scene.steps) == 0
    files = scene.state()
    assert files == scene.finished
    assert {name for name in files if "/" not in name} == {"config.json", INDEX_NAME}
    assert len([name for name in files if name.endswith(".safetensors")]) == 5
    assert not [name for name in files if "journal" in name or ".part" in name]


DOUBLE_ROUTES = [Route(compression="4bit-double"), Route(hub=True, compression="4bit-double", transfer="stream")]


@pytest.mark.parametrize("route", [*routes(), *DOUBLE_ROUTES], ids=str)
def test_kill_at_some_steps(make_scene: MakeScene, crash_server: CrashServer, route: Route) -> None:
    scene = make_scene(route)
    for death in sample(scene.steps, SAMPLES):
        check(scene, crash_server, death)


@pytest.mark.long
def test_kill_while_a_single_file_is_split(tmp_path: Path, crash_server: CrashServer) -> None:
    scene = scene_of_one_file(tmp_path, Route())
    for death in (*range(0, scene.steps - 10, 9), *range(scene.steps - 10, scene.steps)):
        check(scene, crash_server, death)


MOMENTS: dict[str, Callable[[Step], bool]] = {
    "the first layer has its name and no marker": lambda s: s.kind == "create" and s.path.suffix == ".done",
    "names are given and not durable": lambda s: s.kind == "sync_folder" and (s.path / "lm_head.safetensors").exists(),
    "a shard is declared used up and still there": lambda s: s.kind == "unlink" and s.path.suffix == ".safetensors",
    "the manifest is written and has no name": lambda s: s.kind == "rename" and s.path.name == "split.json.part",
    "the manifest is there and so is the journal": lambda s: s.kind == "unlink" and s.path.name == "split.journal",
    "the journal is written and has no name": lambda s: s.kind == "rename" and s.path.name == "split.journal.part",
    "a line of the journal is not synced": lambda s: s.kind == "sync" and s.path.name == "split.journal",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_interrupt_at_chosen_steps(make_scene: MakeScene, moment: str) -> None:
    scene = make_scene(Route())
    scene.reset()

    def stop(index: int, step: Step) -> None:
        if stopped or MOMENTS[moment](step):
            stopped.append(step)
            raise KeyboardInterrupt

    stopped: list[Step] = []
    with observe_steps(Counter(stop)), pytest.raises(KeyboardInterrupt):
        scene.call.make()
    assert scene.state() != scene.finished
    scene.call.make()
    assert scene.state() == scene.finished


def test_repeated_kills(make_scene: MakeScene, crash_server: CrashServer) -> None:
    """Each call lives long enough for one shard; the last of them finishes."""
    scene = make_scene(Route(compression="8bit"))
    scene.reset()
    deaths = 0
    while crash_server.run(scene.call, scene.steps // 2) == KILLED:
        deaths += 1
        assert deaths < 4
        scene.check()
    assert deaths >= 1
    assert scene.state() == scene.finished


def test_wrong_order_of_steps_is_detected(make_scene: MakeScene, crash_server: CrashServer) -> None:
    """The negative control: deletion of a shard before its data is durable is detected."""
    scene = make_scene(Route())
    scene.reset()
    assert crash_server.run(scene.call, scene.steps // 2) == KILLED
    scene.check()
    shards = names_in(scene.folder, "*.safetensors")
    assert 0 < len(shards) < 3
    (scene.folder / shards[0]).unlink()
    with pytest.raises(AssertionError, match=f"{shards[0]} is gone"):
        scene.check()
    with pytest.raises(FileNotFoundError, match=shards[0]):
        scene.call.make()


@pytest.mark.long
@pytest.mark.parametrize(
    "route",
    [*routes(delete=[False, True]), *routes(hub=[False], compressions=["8bit", "4bit-double"], delete=[False, True])],
    ids=str,
)
def test_kill_at_every_other_step(make_scene: MakeScene, crash_server: CrashServer, route: Route) -> None:
    scene = make_scene(route)
    for death in one_step_in(2, scene.steps, str(route)):
        check(scene, crash_server, death)


@pytest.mark.long
@pytest.mark.parametrize("route", routes(compressions=[None, "4bit", "8bit", "4bit-double"]), ids=str)
def test_several_deaths_at_random(make_scene: MakeScene, crash_server: CrashServer, route: Route) -> None:
    scene, chance = make_scene(route), random.Random(str(route))
    for _ in range(8):
        scene.reset()
        for _ in range(6):
            if crash_server.run(scene.call, chance.randrange(scene.steps // 2)) != KILLED:
                break
            scene.check()
        scene.finish()
