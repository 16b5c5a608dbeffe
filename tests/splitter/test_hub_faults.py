"""A hub or a network that fails during a sequential split: right bytes, or a clear error and the same call goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from rabbitllm.base import progress
from rabbitllm.checkpoints import fetch
from rabbitllm.errors import HubError, RabbitLLMError, SplitMismatchError
from rabbitllm.store.manifest import MANIFEST_NAME
from tests.splitter.conftest import MakeScene
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.leftovers import none_left
from tests.support.local_hub import Faults, LocalHub
from tests.support.scenes import REPO, Route, Scene, Truth, assert_same, routes
from tests.support.splitting import interrupted, names_in, split

SECOND = "model-00002-of-00003.safetensors"
ON_HUB = routes(hub=[True], sequential=[True])
FOR_EVER = -1


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses of fetches instead of waiting."""
    waited: list[float] = []
    monkeypatch.setattr(fetch, "time", SimpleNamespace(sleep=waited.append))
    return waited


@dataclass(frozen=True)
class Case:
    """What goes wrong with the second shard, once the split is planned.

    Attributes:
        faults: given the shard's size.
        error: what the first call has to say; "" if it has to finish, None if it may do either.
        advice: what the error says is to be done.
        pauses: how long the hub asks to be left alone, seconds.
    """

    faults: Callable[[int], Faults]
    error: str | None = ""
    advice: str = "Make the same call again"
    pauses: tuple[float, ...] = ()


CASES = {
    "cut in the middle": Case(lambda size: Faults(cut_after=size // 2)),
    "cut before the first byte, three times": Case(lambda size: Faults(cut_after=0, cut_times=3)),
    "cut every 20,000 bytes": Case(lambda size: Faults(cut_after=20_000, cut_times=FOR_EVER)),
    "cut before the first byte, for ever": Case(
        lambda size: Faults(cut_after=0, cut_times=FOR_EVER), "could not be read past byte 0"
    ),
    "too many requests": Case(lambda size: Faults(status=429, status_times=2, retry_after="7"), pauses=(7.0, 7.0)),
    "too many requests, for ever": Case(
        lambda size: Faults(status=429, status_times=FOR_EVER, retry_after="7"), "HTTP 429"
    ),
    "out of service": Case(lambda size: Faults(status=503, status_times=3)),
    "out of service, for ever": Case(lambda size: Faults(status=503, status_times=FOR_EVER), "HTTP 503"),
    "no ranges, and cut": Case(lambda size: Faults(ignore_range=True, cut_after=size // 2)),
    "no ranges, and cut twice": Case(lambda size: Faults(ignore_range=True, cut_after=size // 2, cut_times=2)),
    "no length, and cut": Case(lambda size: Faults(omit_length=True, cut_after=size // 2)),
    "a bit flipped once": Case(lambda size: Faults(flip_byte=size - 5000, flip_times=1), None),
    "a bit flipped each time": Case(lambda size: Faults(flip_byte=size - 5000), "arrived with sha256"),
    "a bit of the header flipped once": Case(lambda size: Faults(flip_byte=20, flip_times=1), None),
    "a bit of the header flipped each time": Case(lambda size: Faults(flip_byte=20), None),
    "the last bit flipped each time": Case(lambda size: Faults(flip_byte=size - 1), "arrived with sha256"),
    "short, with a clean end": Case(lambda size: Faults(short_by=size // 3)),
    "short each time, with a clean end": Case(lambda size: Faults(short_by=5000, short_times=FOR_EVER)),
    "short in the middle": Case(lambda size: Faults(short_by=size // 3, short_tail=1000), None),
    "short in the middle each time": Case(
        lambda size: Faults(short_by=4096, short_tail=1000, short_times=FOR_EVER), "arrived with sha256"
    ),
    "an address that can be used once, and a cut": Case(lambda size: Faults(address_uses=1, cut_after=size // 2)),
    "an address that can be used once, and two cuts": Case(
        lambda size: Faults(address_uses=1, cut_after=size // 3, cut_times=2)
    ),
    "an address that has run out on arrival": Case(lambda size: Faults(address_uses=0, address_times=1)),
    "addresses that have run out, for ever": Case(lambda size: Faults(address_uses=0), "403"),
    "no such file any more": Case(lambda size: Faults(status=404, status_times=FOR_EVER), "404"),
    "gated from now on": Case(lambda size: Faults(gated=True), "is gated", "Accept the terms"),
}


def arm(hub: LocalHub, faults: Faults) -> Callable[[progress.Event], None]:
    """Return a listener that enables the faults of the second shard when the split is planned."""
    faults.only = SECOND

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.SplitStarted):
            hub.forget_requests()
            hub.faults = faults

    return listen


def call_with(scene: Scene, hub: LocalHub, faults: Faults) -> RabbitLLMError | None:
    """Make the call with these faults, check the state, end the faults, and return the error."""
    with none_left(scene.folder):
        try:
            with progress.listening(arm(hub, faults)):
                scene.call.make()
        except RabbitLLMError as error:
            return error
        finally:
            hub.faults = Faults()
            scene.check()
    return None


def check(scene: Scene, hub: LocalHub, case: Case, pauses: list[float]) -> None:
    size = len(scene.truth.shards[SECOND])
    scene.reset()
    error = call_with(scene, hub, case.faults(size))
    if error is None:
        assert not case.error, "no error was raised"
        assert_same(scene.state(), scene.finished)
        requests = [request for request in hub.requests if request.file == SECOND and "/resolve/" in request.path]
        assert len(requests) > 1, "nothing went wrong"
    else:
        assert case.error is None or case.error, f"an error was raised: {error}"
        assert case.error is None or case.error in error.problem
        assert case.advice in error.remedy
        touched = {span.file for span in scene.truth.spans[SECOND]}
        assert touched.isdisjoint(names_in(scene.made)), "a layer got its name without this shard"
    assert sum(pauses) >= sum(case.pauses)
    scene.finish()


@pytest.mark.parametrize("case", CASES)
def test_fault(make_scene: MakeScene, local_hub: LocalHub, pauses: list[float], case: str) -> None:
    local_hub.redirect = True
    check(make_scene(Route(hub=True)), local_hub, CASES[case], pauses)


@pytest.mark.parametrize("route", [route for route in ON_HUB if route != Route(hub=True)], ids=str)
def test_some_faults_on_other_routes(
    make_scene: MakeScene, local_hub: LocalHub, pauses: list[float], route: Route
) -> None:
    local_hub.redirect = True
    scene = make_scene(route)
    for case in ("cut in the middle", "a bit flipped each time", "short in the middle", "no ranges, and cut"):
        check(scene, local_hub, CASES[case], pauses)


@pytest.mark.long
@pytest.mark.parametrize("route", ON_HUB, ids=str)
@pytest.mark.parametrize(
    ("redirect", "case"),
    [
        (redirect, name)
        for name, case in CASES.items()
        for redirect in (False, True)
        if redirect or case.faults(1).address_uses is None  # there are addresses only where something is redirected
    ],
)
def test_every_fault_on_every_route(
    make_scene: MakeScene, local_hub: LocalHub, pauses: list[float], case: str, route: Route, redirect: bool
) -> None:
    local_hub.redirect = redirect
    check(make_scene(route), local_hub, CASES[case], pauses)


@pytest.mark.parametrize("route", ON_HUB, ids=str)
def test_permanently_wrong_bit_that_is_repaired_later(make_scene: MakeScene, local_hub: LocalHub, route: Route) -> None:
    scene = make_scene(route)
    scene.reset()
    for _ in range(3):
        error = call_with(scene, local_hub, Faults(flip_byte=len(scene.truth.shards[SECOND]) - 77))
        assert isinstance(error, HubError)
        assert "the hub says" in error.problem
    scene.finish()


@pytest.mark.parametrize("route", ON_HUB, ids=str)
def test_hub_that_is_unavailable_for_a_time(make_scene: MakeScene, local_hub: LocalHub, route: Route) -> None:
    scene = make_scene(route)
    scene.reset()

    def leave(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone) and event.number == 1:
            local_hub.stop()

    for _ in range(2):  # the second one finds it gone from the start
        with none_left(scene.folder), progress.listening(leave), pytest.raises(HubError) as failed:
            scene.call.make()
        assert "Make the same call again" in failed.value.remedy
        scene.check()
    local_hub.start()
    scene.finish()


# The branch moves


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkpoint with the same names and shapes, and other weights."""
    return write_shards(tmp_path / "other", cut(llama_tensors(layers=2, seed=7), 3))


def moving(hub: LocalHub, to: Path, after: int = 1) -> Callable[[progress.Event], None]:
    """Return a listener that moves the branch after this many used shards."""

    def listen(event: progress.Event) -> None:
        if isinstance(event, progress.ShardDone) and event.number == after:
            hub.add_revision(REPO, "main", to)

    return listen


def check_finished(truth: Truth, folder: Path) -> None:
    assert (folder / MANIFEST_NAME).exists()
    truth.check(folder, None)


@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("route", ON_HUB, ids=str)
def test_branch_that_moves_between_two_shards(
    make_scene: MakeScene, local_hub: LocalHub, other: Path, route: Route, after: int
) -> None:
    scene = make_scene(route)
    scene.reset()
    commit = local_hub.commit(REPO)
    local_hub.forget_requests()
    with progress.listening(moving(local_hub, other, after)):
        assert scene.call.make() == scene.made
    assert local_hub.commit(REPO) != commit
    assert_same(scene.state(), scene.finished)
    paths = [request.path for request in local_hub.requests if request.file.endswith(".safetensors")]
    assert paths
    assert all(commit in path for path in paths)
    folder = scene.call.make()  # now of the other commit
    assert folder != scene.made
    check_finished(Truth(other, split(other, compression=route.compression, sequential=False)), folder)
    check_finished(scene.truth, scene.made)


@pytest.mark.parametrize("route", ON_HUB, ids=str)
def test_branch_that_has_moved_when_a_split_is_resumed(
    make_scene: MakeScene, local_hub: LocalHub, other: Path, route: Route
) -> None:
    """Each commit has its own split directory, so the next call makes the other one; neither gets the other's bytes."""
    scene = make_scene(route)
    scene.reset()
    interrupted(scene.call)
    original = local_hub.add_revision(REPO, "first", scene.original)
    local_hub.add_revision(REPO, "main", other)
    folder = scene.call.make()
    assert folder != scene.made
    check_finished(Truth(other, split(other, compression=route.compression, sequential=False)), folder)
    scene.check()
    local_hub.add_revision(REPO, "main", scene.original)
    assert local_hub.commit(REPO) == original
    assert scene.call.make() == scene.made
    check_finished(scene.truth, scene.made)


@pytest.mark.parametrize("route", ON_HUB, ids=str)
def test_branch_that_has_moved_when_a_split_is_resumed_in_a_separate_folder(
    make_scene: MakeScene, local_hub: LocalHub, other: Path, tmp_path: Path, route: Route
) -> None:
    scene = make_scene(route)
    saving_path = str(tmp_path / "splits")
    call = route.call(REPO, saving_path=saving_path)
    folder = interrupted(call)
    local_hub.add_revision(REPO, "main", other)
    for _ in range(2):
        with pytest.raises(
            SplitMismatchError, match=r"another source named acme/tiny: its commit is \w+, not \w+"
        ) as refused:
            call.make()
        assert "Split into another folder" in refused.value.remedy
        scene.truth.check(folder, None)
    local_hub.add_revision(REPO, "main", scene.original)
    assert call.make() == folder
    check_finished(scene.truth, folder)
