"""Several processes split one folder on a file system without locks: no data is lost if any is killed or suspended."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from rabbitllm.errors import InUseError
from rabbitllm.splitter import split as splitting
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.storage.leases import FOLDER_LEASE
from tests.splitter.conftest import MakeScene
from tests.support.crashes import CrashServer
from tests.support.scenes import Route, Scene, assert_same, sample
from tests.support.splitting import Call, contents, names_in
from tests.support.without_flock import DONE, REFUSED, Actor, Ended, WithoutFlock

KILLED = -9
LOCKED = 2
"""Steps before a process has the lease: the folder is made."""
LOST = "may be in use by another process now"
LATE = "is missing; by the index it holds"
"""Said by a process that was stopped before it had the lease, after another has used the shard up."""


@pytest.fixture(scope="module")
def processes(crash_server: CrashServer, tmp_path_factory: pytest.TempPathFactory) -> WithoutFlock:
    return WithoutFlock(crash_server, tmp_path_factory.mktemp("ended"))


def check(scene: Scene, processes: WithoutFlock, ended: list[Ended]) -> None:
    """Nothing is lost, no process has failed in any other way, and the same call still finishes."""
    scene.check()
    for process in ended:
        assert process.status in (DONE, KILLED) or LOST in process.said or LATE in process.said, ended
    assert processes.run(scene.call, Actor()) == [Ended(DONE, "")]
    assert_same(without_leases(scene), scene.finished)


def without_leases(scene: Scene) -> dict[str, bytes]:
    """All files but for leases of processes that were killed or stopped, in the source's folder.

    No process locks that folder any more once the split is finished.
    """
    return {name: data for name, data in scene.state().items() if not name.startswith(FOLDER_LEASE)}


@pytest.mark.parametrize("compression", [None, "4bit"])
@pytest.mark.parametrize("count", [2, 3])
def test_concurrent_processes(
    make_scene: MakeScene, processes: WithoutFlock, count: int, compression: str | None
) -> None:
    scene = make_scene(Route(compression=compression))
    for attempt in range(4):
        scene.reset()
        ended = processes.run(scene.call, *(Actor(seed=1 + count * attempt + index) for index in range(count)))
        assert DONE in [process.status for process in ended], ended
        assert_same(scene.state(), scene.finished)  # without another call, and with no file of a lease left
        check(scene, processes, ended)


def test_killed_holder_is_replaced(make_scene: MakeScene, processes: WithoutFlock) -> None:
    scene = make_scene(Route())
    for death in sample(scene.steps, 4):
        scene.reset()
        ended = processes.run(
            scene.call, Actor(dies_at=death), Actor(begins_last=True), Actor(seed=1, begins_last=True)
        )
        assert [process.status for process in ended] == [KILLED, DONE, DONE], (death, ended)
        assert_same(without_leases(scene), scene.finished)


def test_suspended_holder_stops(make_scene: MakeScene, processes: WithoutFlock) -> None:
    """It continues after another process has finished the split, and changes no file."""
    scene = make_scene(Route())
    for stop in sample(scene.steps - LOCKED, 6):
        scene.reset()
        first, second = processes.run(scene.call, Actor(stops_at=LOCKED + stop), Actor(begins_last=True))
        assert second.status == DONE, (stop, second)
        assert first.status == REFUSED, (stop, first)
        # on a slow machine it may be stopped before it has begun
        assert LOST in first.said or "may have deleted them" in first.said, (stop, first)
        assert_same(without_leases(scene), scene.finished)


@pytest.mark.long
def test_processes_suspended_and_killed_at_random(make_scene: MakeScene, processes: WithoutFlock) -> None:
    scene, chance = make_scene(Route(compression="4bit")), random.Random(4)
    for _ in range(8):
        scene.reset()
        steps = [chance.randrange(scene.steps) for _ in range(3)]
        ended = processes.run(
            scene.call,
            Actor(stops_at=steps[0], seed=steps[0]),
            Actor(dies_at=steps[1], seed=steps[1], begins_last=True),
            Actor(stops_at=steps[2], seed=steps[2]),
        )
        check(scene, processes, ended)


def test_two_folders_from_one_source(make_scene: MakeScene, processes: WithoutFlock, tmp_path: Path) -> None:
    """Each would delete shards that the other needs; the lease on the source admits only one."""
    scene = make_scene(Route())
    calls = [Call(scene.call.source, str(tmp_path / name)) for name in ("one", "two")]
    expected = {name: data for name, data in contents(scene.made).items() if name != splitting.MANIFEST_NAME}
    for attempt in range(3):
        scene.reset()
        ended = processes.run(calls, *(Actor(seed=1 + 2 * attempt + index) for index in range(2)))
        assert sorted(process.status for process in ended) == [DONE, REFUSED], ended
        refused = next(process.said for process in ended if process.status == REFUSED)
        # before it took a shard, while it did, or after the other had used up all
        causes = "this call would delete its shards", "is missing", "used them up, perhaps in another process"
        assert any(cause in refused for cause in causes), refused
        assert names_in(scene.folder, "*.safetensors") == names_in(scene.folder, ".lock*") == []
        done = calls[[process.status for process in ended].index(DONE)].find().split_folder
        assert {name: data for name, data in contents(done).items() if name != splitting.MANIFEST_NAME} == expected
        for call in calls:
            shutil.rmtree(str(call.saving_path), ignore_errors=True)


def test_layer_files_of_another_process_are_kept_if_locks_do_not_work(make_scene: MakeScene) -> None:
    """The other process begins a split, despite the lock, while this process copies config and tokenizer."""
    scene = make_scene(Route())
    for record in (splitting.JOURNAL_NAME, splitting.MANIFEST_NAME):
        scene.reset()
        layer_file = scene.made / "lm_head.safetensors"

        def begin(step: Step, record: str = record, layer_file: Path = layer_file) -> None:
            if step.path.name == "config.json.part" and step.kind == "rename":
                layer_file.write_bytes(b"the only copy")
                (scene.made / record).write_bytes(b"of the other process")

        with observe_steps(begin), pytest.raises(InUseError, match="the locks of this file system do not work"):
            scene.call.make()
        assert layer_file.read_bytes() == b"the only copy"
        assert (scene.made / record).read_bytes() == b"of the other process"
    assert len(names_in(scene.folder, "*.safetensors")) == 3


def test_journal_of_another_process_is_kept(make_scene: MakeScene) -> None:
    scene = make_scene(Route())
    scene.reset()
    journal = scene.made / splitting.JOURNAL_NAME

    def begin(step: Step) -> None:
        if step.path.name == "split.journal.part" and step.kind == "sync":
            journal.write_bytes(b"of the other process")

    with observe_steps(begin), pytest.raises(InUseError, match="began a split there although this one has locked"):
        scene.call.make()
    assert journal.read_bytes() == b"of the other process"
    assert len(names_in(scene.folder, "*.safetensors")) == 3
