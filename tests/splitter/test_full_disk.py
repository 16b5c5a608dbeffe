"""Disks that are really full: the predicted peak is enough, less is refused, and a split survives a full disk."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rabbitllm.base.options import SplitOptions
from rabbitllm.errors import DiskFullError, NotEnoughSpaceException
from rabbitllm.storage.durable import Step, observe_steps
from tests.splitter.conftest import MakeScene
from tests.support import splitting
from tests.support.builders import llama_tensors
from tests.support.hub_fixtures import HubEnvironment
from tests.support.leftovers import none_left
from tests.support.local_hub import LocalHub
from tests.support.scenes import Route, Scene, assert_same, one_step_in, routes, sample
from tests.support.small_disk import NAMESPACE, SmallDisk, namespace_works, small_disk, why_not
from tests.support.splitting import Counter, contents
from tests.support.swift_disk import real_disk  # noqa: F401  a fixture that applies by itself
from tests.support.ticks import observe_ticks

MIB = 1 << 20
LARGE = {"layers": 3, "hidden": 256, "vocabulary": 2048}
"""Shards far larger than the other files of the split directory."""
MARGIN = 64 * 1024
IN_TURN = routes(sequential=[True])
PEAKS = [*IN_TURN, *routes(hub=[False], sequential=[False])]

Mount = Callable[[Route], SmallDisk]


@pytest.fixture
def mount(tmp_path: Path, hub_environment: HubEnvironment, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    """Mounts a disk for the scene of a route: at the checkpoint's folder, or the Hugging Face home."""
    if "min_free" in {field.name for field in dataclasses.fields(SplitOptions)}:  # the whole disk may be used
        monkeypatch.setattr(splitting, "SplitOptions", functools.partial(SplitOptions, min_free=0))
    folders = {True: hub_environment.home, False: tmp_path / "local"}
    mounted = []

    def make(route: Route) -> SmallDisk:
        context = small_disk(folders[route.hub], 64 * MIB)
        mounted.append(context)
        return context.__enter__()

    yield make
    for context in mounted:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("route", PEAKS, ids=str)
def test_predicted_peak_is_enough(make_scene: MakeScene, mount: Mount, route: Route) -> None:
    disk = mount(route)
    scene = make_scene(route, llama_tensors(**LARGE))
    scene.reset()
    disk.leave(scene.peak + MARGIN)
    free: list[int] = []
    with none_left(scene.folder), observe_steps(lambda step: free.append(disk.free)):
        scene.call.make()
    if not route.hub:  # nor is more asked for than is needed; what a network has brought by then varies
        assert min(free) < 2 * MARGIN
    disk.give_back()
    scene.finish()


def fits(scene: Scene, disk: SmallDisk, hub: LocalHub, free: int) -> bool:
    """Make the call with this much space: it finishes, or is refused without a change."""
    scene.reset()
    before = contents(scene.folder)
    disk.leave(free)
    hub.forget_requests()
    with none_left(scene.folder):
        try:
            scene.call.make()
        except NotEnoughSpaceException as refused:
            assert "free on the disk of" in refused.problem  # noqa: PT017
            disk.give_back()
            assert not scene.made.exists()
            if scene.hub:
                assert hub.body_bytes(".safetensors") <= len(scene.truth.shards) * (256 << 10)  # their headers
            else:
                assert contents(scene.folder) == before
            return False
    disk.give_back()
    assert_same(scene.state(), scene.finished)
    return True


@pytest.mark.parametrize("route", PEAKS, ids=str)
def test_less_than_the_predicted_peak_is_refused(
    make_scene: MakeScene, mount: Mount, local_hub: LocalHub, route: Route
) -> None:
    disk = mount(route)
    scene = make_scene(route, llama_tensors(**LARGE))
    assert not fits(scene, disk, local_hub, scene.peak // 2)
    if not (route.hub and route.transfer == "file"):  # there less may do, if no shard is fetched ahead
        assert not fits(scene, disk, local_hub, scene.peak - MARGIN)
    scene.finish()


@pytest.mark.parametrize("route", routes(compressions=[None], sequential=[True]), ids=str)
def test_tokenizer_counts_in_the_peak(make_scene: MakeScene, mount: Mount, local_hub: LocalHub, route: Route) -> None:
    """It is copied into the split directory, and from a hub through the hub cache."""
    disk = mount(route)
    scene = make_scene(route, llama_tensors(**LARGE), {"tokenizer.json": b" " * MIB})
    outcomes = [fits(scene, disk, local_hub, scene.peak + MARGIN + more) for more in range(-MIB, 3 * MIB, MIB // 2)]
    assert outcomes == sorted(outcomes)
    assert True in outcomes


@pytest.mark.long
@pytest.mark.parametrize("route", PEAKS, ids=str)
def test_begun_split_is_resumed_on_any_disk(
    make_scene: MakeScene, mount: Mount, local_hub: LocalHub, route: Route
) -> None:
    """There is no size between those that are refused and those that succeed."""
    disk = mount(route)
    scene = make_scene(route, llama_tensors(**LARGE))
    refused, enough = 0, scene.peak + MARGIN
    while enough - refused > 2048:
        between = (refused + enough) // 2
        if fits(scene, disk, local_hub, between):
            enough = between
        else:
            refused = between
    for free in range(enough - 24_000, enough + 24_000, 3000):
        assert fits(scene, disk, local_hub, free) == (free >= enough) or abs(free - enough) <= 4096  # whole pages


# Another process takes the space


def run_out_and_resume(scene: Scene, disk: SmallDisk, last_step: int, free_bytes: int) -> bool:
    """Make the call, fill the disk before one of its steps, free it, and call again; return whether it failed."""
    scene.reset()

    def take(index: int, step: Step) -> None:
        if index == last_step:
            disk.leave(free_bytes)

    failed = False
    with none_left(scene.folder), observe_ticks(Counter(take)):
        try:
            scene.call.make()
        except (NotEnoughSpaceException, DiskFullError):
            failed = True
    disk.give_back()
    scene.check()
    scene.finish()
    return failed


@pytest.mark.parametrize("route", routes(), ids=str)
def test_disk_fills_up_in_the_middle(make_scene: MakeScene, mount: Mount, route: Route) -> None:
    disk = mount(route)
    scene = make_scene(route)
    failures = 0
    for last_step in sample(scene.steps, 4):
        for free_bytes in (0, 30_000):
            failures += run_out_and_resume(scene, disk, last_step, free_bytes)
    assert failures >= 3


@pytest.mark.parametrize("route", IN_TURN, ids=str)
def test_disk_fills_up_during_a_large_write(make_scene: MakeScene, mount: Mount, route: Route) -> None:
    disk = mount(route)
    scene = make_scene(route, llama_tensors(**LARGE))
    middle = scene.steps // 2
    assert sum(run_out_and_resume(scene, disk, middle, free_bytes) for free_bytes in (0, 5_000, 30_001)) >= 2


@pytest.mark.long
@pytest.mark.parametrize("free_bytes", [0, 4096, 10_000, 30_000, 100_000])
@pytest.mark.parametrize("route", routes(), ids=str)
def test_disk_fills_up_at_every_third_step(make_scene: MakeScene, mount: Mount, route: Route, free_bytes: int) -> None:
    disk = mount(route)
    scene = make_scene(route)
    failures = sum(
        run_out_and_resume(scene, disk, last_step, free_bytes)
        for last_step in one_step_in(3, scene.steps, str(route), free_bytes)
    )
    if free_bytes < 100_000:  # which is more than what some routes still need at any step
        assert failures > (scene.steps // 12 if free_bytes < 30_000 else 0)


def test_in_a_separate_namespace() -> None:
    """If this process may not mount, another one in a namespace runs these tests."""
    reason = why_not()
    if reason is None:
        pytest.skip("the tests of this file could mount their disks themselves")
    if not namespace_works():
        pytest.skip(f"{reason}; nor is there a namespace to be had")
    ran = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "pytest", "-m", "not long", "-p", "no:cacheprovider", __file__],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
