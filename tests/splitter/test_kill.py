"""A process that is killed at any step: the same call finishes, with the same bytes, and leaves nothing behind."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rabbitllm.durable import Step, observe_steps
from tests.support.builders import INDEX_NAME, SINGLE_NAME, cut, llama_tensors, write_shards
from tests.support.crashes import KILLED, CrashServer
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.splitting import Call, Counter, contents, names_in, steps_of

REPO = "acme/tiny"
SAMPLES = 25


class Scene:
    """A checkpoint that can be put back as it was, and the call that is killed."""

    def __init__(self, call: Call, make: Callable[[], None], folders: tuple[Path, ...]) -> None:
        self.call = call
        self._make = make
        self._folders = folders
        self.reset()
        self.steps = steps_of(call)
        self.finished = self.state()

    def reset(self) -> None:
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._make()

    def state(self) -> list[dict[str, bytes]]:
        """Every file, the finished split's and the source's, but for what a hub cache keeps to itself."""
        found = [contents(folder) for folder in self._folders]
        own = (".locks/", "/trees/")
        return [{name: data for name, data in files.items() if not any(p in name for p in own)} for files in found]

    def sample(self) -> list[int]:
        return sorted({round(number * (self.steps - 1) / (SAMPLES - 1)) for number in range(SAMPLES)})


@pytest.fixture
def local_scene(tmp_path: Path) -> Callable[..., Scene]:
    def make(**options: object) -> Scene:
        model = tmp_path / "local" / "model"
        tensors = llama_tensors(layers=2)
        call = Call(str(model), **options)  # type: ignore[arg-type]
        return Scene(call, lambda: (write_shards(model, cut(tensors, 3)), None)[1], (model,))

    return make


@pytest.fixture
def single_scene(tmp_path: Path) -> Callable[..., Scene]:
    """A checkpoint of one file, which is its own index: when it is used up, nothing of it is left."""

    def make(**options: object) -> Scene:
        model = tmp_path / "single" / "model"
        shards = {SINGLE_NAME: llama_tensors(layers=2)}
        call = Call(str(model), **options)  # type: ignore[arg-type]
        return Scene(call, lambda: (write_shards(model, shards, index=False), None)[1], (model,))

    return make


@pytest.fixture
def hub_scene(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> Callable[..., Scene]:
    write_shards(tmp_path / "hub" / REPO, cut(llama_tensors(layers=2), 3))

    def make(**options: object) -> Scene:
        call = Call(REPO, hub_url=hub_environment.url, hub_home=str(hub_environment.home), **options)  # type: ignore[arg-type]
        return Scene(call, lambda: None, (hub_environment.home,))

    return make


def check(scene: Scene, server: CrashServer, *deaths: int) -> None:
    """Kill the call at these steps, one call after the other, and make it once more."""
    scene.reset()
    for death in deaths:
        status = server.run(scene.call, death)
        assert status == KILLED, f"step {death} of {scene.steps}: exit status {status}"
    scene.call.make()
    assert scene.state() == scene.finished, f"killed at {deaths} of {scene.steps}"


def test_call_that_is_not_killed_finishes(local_scene: Callable[..., Scene], crash_server: CrashServer) -> None:
    scene = local_scene()
    scene.reset()
    assert crash_server.run(scene.call, scene.steps) == 0
    assert scene.state() == scene.finished
    (files,) = scene.finished
    assert {name for name in files if "/" not in name} == {"config.json", INDEX_NAME}
    assert len([name for name in files if name.endswith(".safetensors")]) == 5
    assert not [name for name in files if "journal" in name or ".part" in name]


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_local_sequential(
    local_scene: Callable[..., Scene], crash_server: CrashServer, compression: str | None
) -> None:
    scene = local_scene(compression=compression)
    for death in scene.sample():
        check(scene, crash_server, death)


def test_local_sequential_of_one_file(single_scene: Callable[..., Scene], crash_server: CrashServer) -> None:
    scene = single_scene()
    for death in (*range(0, scene.steps - 10, 9), *range(scene.steps - 10, scene.steps)):
        check(scene, crash_server, death)


def test_hub_sequential(hub_scene: Callable[..., Scene], crash_server: CrashServer) -> None:
    scene = hub_scene()
    for death in scene.sample():
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
def test_broken_off_at_a_chosen_moment(local_scene: Callable[..., Scene], moment: str) -> None:
    scene = local_scene()
    scene.reset()

    def stop(number: int, step: Step) -> None:
        if stopped or MOMENTS[moment](step):
            stopped.append(step)
            raise KeyboardInterrupt

    stopped: list[Step] = []
    with observe_steps(Counter(stop)), pytest.raises(KeyboardInterrupt):
        scene.call.make()
    assert scene.state() != scene.finished
    scene.call.make()
    assert scene.state() == scene.finished


def test_killed_again_and_again(local_scene: Callable[..., Scene], crash_server: CrashServer) -> None:
    """Each call lives long enough for one shard; the last of them finishes."""
    scene = local_scene(compression="8bit")
    scene.reset()
    deaths = 0
    while crash_server.run(scene.call, scene.steps // 2) == KILLED:
        deaths += 1
        assert deaths < 4
    assert deaths >= 1
    assert scene.state() == scene.finished


def test_a_kill_is_noticed_where_the_order_is_wrong(
    local_scene: Callable[..., Scene], crash_server: CrashServer
) -> None:
    """The negative control: were the shard deleted first, this is what would be seen."""
    scene = local_scene()
    scene.reset()
    middle = scene.steps // 2
    assert crash_server.run(scene.call, middle) == KILLED
    left = names_in(Path(scene.call.source), "*.safetensors")
    assert 0 < len(left) < 3
    (Path(scene.call.source) / left[0]).unlink()
    with pytest.raises(FileNotFoundError, match=left[0]):
        scene.call.make()


@pytest.mark.long
@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
@pytest.mark.parametrize("delete", [True, False])
@pytest.mark.parametrize("sequential", [True, False])
def test_every_step_of_a_local_split(
    local_scene: Callable[..., Scene],
    crash_server: CrashServer,
    compression: str | None,
    delete: bool,
    sequential: bool,
) -> None:
    scene = local_scene(compression=compression, sequential=sequential, delete_original=delete)
    for death in range(scene.steps):
        check(scene, crash_server, death)


@pytest.mark.long
@pytest.mark.parametrize("delete", [True, False])
@pytest.mark.parametrize("sequential", [True, False])
def test_every_step_of_a_hub_split(
    hub_scene: Callable[..., Scene], crash_server: CrashServer, delete: bool, sequential: bool
) -> None:
    scene = hub_scene(sequential=sequential, delete_original=delete)
    for death in range(scene.steps):
        check(scene, crash_server, death)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_several_deaths_at_random(local_scene: Callable[..., Scene], crash_server: CrashServer, seed: int) -> None:
    scene = local_scene(compression=random.Random(seed).choice([None, "4bit", "8bit"]))
    scene.reset()
    chance = random.Random(seed)
    for _ in range(6):
        if crash_server.run(scene.call, chance.randrange(scene.steps // 2)) != KILLED:
            break
    scene.call.make()
    assert scene.state() == scene.finished
