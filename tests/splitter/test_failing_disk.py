"""A disk fails at any step: the error is clear, no data is lost, no file stays open, and the same call resumes."""

from __future__ import annotations

import contextlib
import errno
import os
import random

import pytest

from rabbitllm.errors import DiskFullError, StorageError
from rabbitllm.store.manifest import JOURNAL_NAME
from tests.splitter.conftest import MakeScene
from tests.support.failing_disk import FAULTS, Fault, room_for, short_writes
from tests.support.leftovers import none_left
from tests.support.scenes import Route, Scene, one_step_in, routes, sample
from tests.support.splitting import failing, interrupted
from tests.support.ticks import observe_ticks

SAMPLES = 3


def error_of(fault: Fault) -> type[Exception]:
    """Return the error of a call, which must be one of this package."""
    return DiskFullError if fault.code == errno.ENOSPC else StorageError


def causes_of(error: BaseException) -> list[BaseException]:
    """Yield an error and its causes."""
    return [error, *(causes_of(error.__cause__) if error.__cause__ is not None else [])]


def fail_and_resume(scene: Scene, fault: Fault, index: int) -> None:
    """Make the call on a disk that fails at a step, check the state, and make the call on a sound disk."""
    scene.reset()
    error = fault.error()
    with (
        none_left(scene.folder),
        observe_ticks(fault.observer(index, error)),
        pytest.raises(error_of(fault), match=os.strerror(fault.code)) as failed,
    ):
        scene.call.make()
    assert error in causes_of(failed.value)
    scene.check()
    with none_left(scene.folder):
        scene.finish()


@pytest.mark.parametrize("route", routes(), ids=str)
def test_failure_at_some_steps(make_scene: MakeScene, route: Route) -> None:
    scene = make_scene(route)
    for fault in FAULTS.values():
        for index in sample(scene.count(fault.kinds), SAMPLES):
            fail_and_resume(scene, fault, index)


def test_each_file_that_cannot_be_created(make_scene: MakeScene) -> None:
    """Files of several layers are open; if one cannot be created, the others are closed."""
    scene = make_scene(Route())
    for index in range(scene.count(("create",))):
        fail_and_resume(scene, Fault(errno.ENOSPC, ("create",)), index)


@pytest.mark.long
@pytest.mark.usefixtures("one_open_file")
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_failure_where_one_file_is_open_at_a_time(make_scene: MakeScene, compression: str | None) -> None:
    scene = make_scene(Route(compression=compression))
    for fault in FAULTS.values():
        for index in sample(scene.count(fault.kinds), 2 * SAMPLES):
            fail_and_resume(scene, fault, index)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("route", routes(), ids=str)
def test_failure_at_every_other_step(make_scene: MakeScene, route: Route, fault: str) -> None:
    scene, kinds = make_scene(route), FAULTS[fault].kinds
    for index in one_step_in(2, scene.count(kinds), str(route), fault):
        fail_and_resume(scene, FAULTS[fault], index)


@pytest.mark.long
@pytest.mark.parametrize("route", routes(), ids=str)
def test_consecutive_failures(make_scene: MakeScene, route: Route) -> None:
    scene, chance = make_scene(route), random.Random(str(route))
    for _ in range(30):
        scene.reset()
        for _ in range(5):
            fault = FAULTS[chance.choice(list(FAULTS))]
            fail = fault.observer(chance.randrange(scene.count(fault.kinds)))
            with none_left(scene.folder), observe_ticks(fail), contextlib.suppress(error_of(fault)):
                scene.call.make()
            scene.check()
        scene.finish()


# Writes that take less than they were given


@pytest.mark.parametrize("route", routes(), ids=str)
def test_short_writes(make_scene: MakeScene, route: Route) -> None:
    scene, chance = make_scene(route), random.Random(1)
    scene.reset()
    with none_left(scene.folder), short_writes(lambda length: chance.randint(1, length)):
        scene.finish()


def fill_and_resume(scene: Scene, room: int) -> None:
    """Make the call with a limit of written bytes, and then on a sound disk."""
    scene.reset()
    with (
        none_left(scene.folder),
        room_for(room),
        pytest.raises(DiskFullError, match=os.strerror(errno.ENOSPC)),
    ):
        scene.call.make()
    scene.check()
    scene.finish()


@pytest.mark.parametrize("route", routes(), ids=str)
def test_full_disk_cuts_a_write_short(make_scene: MakeScene, route: Route) -> None:
    scene, chance = make_scene(route), random.Random(2)
    for _ in range(SAMPLES):
        fill_and_resume(scene, chance.randrange(sum(map(len, scene.truth.layers.values()))))


@pytest.mark.long
@pytest.mark.parametrize("route", routes(), ids=str)
def test_writes_cut_short_at_any_length(make_scene: MakeScene, route: Route) -> None:
    scene, chance = make_scene(route), random.Random(3)
    for _ in range(150):
        fill_and_resume(scene, chance.randrange(sum(map(len, scene.truth.layers.values()))))


def test_torn_journal_line_that_cannot_be_ended(make_scene: MakeScene) -> None:
    """A call that finds a torn line ends it before it writes its own; that may fail too."""
    scene = make_scene(Route())
    line = b'{"used":"model-00002-of-00003.safetensors"'
    for length in (1, len(line) // 2, len(line)):
        scene.reset()
        interrupted(scene.call)
        with (scene.made / JOURNAL_NAME).open("ab") as journal:
            journal.write(line[:length])
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        with (
            none_left(scene.folder),
            failing(error, lambda index, step: step.path.name.startswith(JOURNAL_NAME), ("write",)),
            pytest.raises(OSError, match=os.strerror(errno.EIO)),
        ):
            scene.call.make()
        scene.check()
        scene.finish()
