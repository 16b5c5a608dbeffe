"""Calls with kills, full disks, lost connections and wrong bytes, in any order: no data is lost, the last one finishes.

The rules of a machine are what may happen to a call, its invariants what must be true after each of them. Which rules
may come next, and what they are given, never depends on how a call ended: with threads and a network that is not the
same in each run, and Hypothesis takes a machine whose choices differ for a flaky one. So there are no preconditions on
it, moments are numbered without regard to the pieces of a body (`tests.support.ticks`), and no run is asked how many
calls died. That the machines can fail is shown with planted bugs instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import random
import shutil
import threading
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rabbitllm.base import progress
from rabbitllm.checkpoints.fetch import RemoteFile
from rabbitllm.errors import CorruptShardError, DiskFullError, HubError, RabbitLLMError, SplitMismatchError
from rabbitllm.splitter import journal
from rabbitllm.splitter._shard_loop import ShardLoop
from rabbitllm.splitter.mover import FillTarget, Mover
from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.splitter.sums import ShardChecksums
from rabbitllm.storage.durable import Step, observe_steps
from rabbitllm.store.manifest import MANIFEST_NAME, read_manifest
from tests.splitter.conftest import MakeScene
from tests.support.builders import cut, llama_tensors, write_shards
from tests.support.crashes import KILLED, CrashServer
from tests.support.draws import draws
from tests.support.dying import Death, dying_at
from tests.support.failing_disk import FAULTS, room_for
from tests.support.leftovers import none_left, wait_for_threads
from tests.support.local_hub import Faults, LocalHub
from tests.support.power_cut import Recorder
from tests.support.scenes import COMPRESSIONS, REPO, Route, Scene, Truth, assert_same, routes, scene_in_folder
from tests.support.splitting import names_in, occupied, split
from tests.support.ticks import observe_ticks

BOOKKEEPING = 64 * 1024
"""Bytes on the disk that are no weights: journal, manifest and config."""
MOMENTS = st.sampled_from(range(100))
"""When something happens, in hundredths of the steps of an undisturbed call."""
FINISHED = "finished"
Observing = Callable[[Callable[[Step], None]], contextlib.AbstractContextManager[None]]
"""`observe_steps` or `observe_ticks`."""
SHORT = 100
"""Examples below which a run makes the same choices each time."""


class Machine(RuleBasedStateMachine):
    """Events during a call, for any source."""

    server: ClassVar[CrashServer | None] = None
    ends: ClassVar[Counter[str]]
    """How calls ended."""

    scene: Scene | None = None

    def start(self, scene: Scene) -> None:
        """Reset a scene, and begin with it."""
        scene.reset()
        self.scene = scene
        self.call = scene.call
        self.made = scene.made
        self.finished = False
        self.torn = False

    @property
    def current(self) -> Scene:
        assert self.scene is not None
        return self.scene

    @property
    def ours(self) -> Path:
        """A folder in which only the package writes."""
        raise NotImplementedError

    def begin_recording(self) -> None:
        """Treat the current state of the disk as durable."""
        self.recorder = Recorder(self.ours)

    def look(self, step: Step | None = None) -> None:
        """Check that disk use is at most the predicted one."""
        raise NotImplementedError

    def may_raise(self, error: Exception) -> bool:
        """Whether the state of the world explains this error."""
        return False

    def attempt(self, how: str, context: contextlib.AbstractContextManager[object], code: int | None = None) -> bool:
        """Make the call while something happens, and say whether it finished; its error may have this code."""
        end = FINISHED
        with none_left(self.current.folder), context:
            try:
                self.made = self.call.make()
            except Death:
                end = "died"
                raise
            except (OSError, RabbitLLMError) as error:
                end = type(error).__name__
                full = code == errno.ENOSPC and isinstance(error, DiskFullError)
                expected = full or (code not in (None, errno.ENOSPC) and getattr(error, "errno", None) == code)
                if not expected and not self.may_raise(error):
                    raise
            finally:
                self.ends[f"{how}: {end}"] += 1
        self.finished = end == FINISHED
        return self.finished

    def at(self, moment: int, kinds: tuple[str, ...] = ()) -> int:
        """The number of the step at a moment, among those of some kinds."""
        return moment * (self.current.count(kinds) if kinds else self.current.steps) // 100

    @rule(moment=MOMENTS)
    def dies(self, moment: int) -> None:
        self.go_on()
        self.attempt("dies", dying_at(self.at(moment), self.look, self.recorder))

    @precondition(lambda self: self.server is not None)
    @rule(moment=MOMENTS)
    def is_killed(self, moment: int) -> None:
        assert self.server is not None
        self.go_on()
        self.ends["is killed"] += self.server.run(self.call, self.at(moment)) == KILLED
        self.begin_recording()

    @rule(name=st.sampled_from(list(FAULTS)), moment=MOMENTS)
    def has_a_failing_disk(self, name: str, moment: int) -> None:
        self.go_on()
        fault = FAULTS[name]
        fail = fault.observer(self.at(moment, fault.kinds))

        def forget(step: Step) -> None:
            try:
                fail(step)
            except OSError:
                if step.kind == "sync":
                    self.recorder.lose_sync(step)
                raise

        self.attempt(name, watched(self.look, forget, self.recorder), fault.code)

    @rule(room=st.integers(0, 300_000))
    def runs_out_of_space(self, room: int) -> None:
        self.go_on()
        with room_for(room):
            self.attempt("runs out of space", watched(self.look, by=observe_steps), errno.ENOSPC)
        self.begin_recording()

    @rule(seed=st.integers(0, 5))
    def loses_power(self, seed: int) -> None:
        """Lose all data that is not durable, or half of it at random."""
        chance = random.Random(seed)
        shutil.rmtree(self.ours)
        self.ours.mkdir()
        self.recorder.rebuild(self.ours, len(self.recorder.steps), lambda step: seed > 1 and chance.random() < 0.5)
        self.begin_recording()
        self.torn, self.finished = True, False

    @rule()
    def lives(self) -> None:
        """Make an undisturbed call; a second one changes no file."""
        self.go_on()
        for how in ("lives", "lives again"):
            if self.attempt(how, watched(self.look, self.recorder)):
                self.check_finished()

    def go_on(self) -> None:
        """Start over if the last call has finished."""
        if self.finished:
            self.begin_again()

    def begin_again(self) -> None:
        """Reset everything."""
        raise NotImplementedError

    def check_finished(self) -> None:
        """Check that a finished call leaves the files of an undisturbed one."""
        raise NotImplementedError

    @invariant()
    def is_sound(self) -> None:
        if self.scene is not None:
            self.look()
            self.check()

    def check(self) -> None:
        """Check that no data is lost, and that unfinished files do not look complete."""
        raise NotImplementedError


@contextlib.contextmanager
def watched(*observers: Callable[[Step], None], by: Observing = observe_ticks) -> Iterator[None]:
    """Show every step to several observers; threads that are left at the end are waited for."""

    def watch(step: Step) -> None:
        for observer in observers:
            observer(step)

    before = set(threading.enumerate())
    with by(watch):
        yield
        wait_for_threads(before)


class FolderMachine(Machine):
    """A checkpoint in a folder; on the sequential route what its shards held exists nowhere else."""

    scenes: ClassVar[Mapping[Route, Scene]]

    @initialize(compression=st.sampled_from(COMPRESSIONS), sequential=st.sampled_from([True, True, False]))
    def begin(self, compression: str | None, sequential: bool) -> None:
        self.start(self.scenes[Route(compression=compression, sequential=sequential)])
        self.begin_recording()

    @property
    def ours(self) -> Path:
        return self.current.folder

    def look(self, step: Step | None = None) -> None:
        assert occupied(self.ours) - self.current.at_start <= self.current.peak + BOOKKEEPING

    def check(self) -> None:
        self.current.check()

    def check_finished(self) -> None:
        assert_same(self.current.state(), self.current.finished)

    def begin_again(self) -> None:
        self.start(self.current)
        self.begin_recording()

    def teardown(self) -> None:
        if self.scene is not None and not self.finished:
            self.lives()


@dataclasses.dataclass(frozen=True)
class Commit:
    """A commit of the repository: its files, and what a split makes of them at each compression."""

    files: Path
    truths: Mapping[str | None, Truth]


SHARD_NAMES = st.sampled_from([f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)])
HUB_FAULTS = st.one_of(
    st.builds(Faults, only=SHARD_NAMES, cut_after=st.integers(0, 90_000), cut_times=st.sampled_from([1, 3, -1])),
    st.builds(Faults, only=SHARD_NAMES, cut_after=st.integers(1, 90_000), ignore_range=st.just(True)),
    st.builds(Faults, only=SHARD_NAMES, flip_byte=st.integers(0, 90_000), flip_times=st.sampled_from([1, -1])),
    st.builds(
        Faults,
        only=SHARD_NAMES,
        short_by=st.integers(1, 60_000),
        short_tail=st.sampled_from([0, 1, 1000]),
        short_times=st.sampled_from([1, -1]),
    ),
    st.builds(
        Faults, only=SHARD_NAMES, status=st.sampled_from([429, 500, 503, 404]), status_times=st.sampled_from([1, 4, -1])
    ),
    st.builds(Faults, only=SHARD_NAMES, address_uses=st.integers(0, 1), cut_after=st.integers(1, 90_000)),
)


class HubMachine(Machine):
    """A repository whose hub fails, goes away, and moves its branch to other weights and back."""

    scenes: ClassVar[Mapping[str | None, list[Scene]]]
    """Compression -> one scene for each transfer."""
    hub: ClassVar[LocalHub]
    commits: ClassVar[Mapping[str, Commit]]
    """The first is the scenes' own."""

    here = True

    @initialize(compression=st.sampled_from(COMPRESSIONS), chosen=st.booleans(), redirect=st.booleans())
    def begin(self, compression: str | None, chosen: bool, redirect: bool) -> None:
        """With ``chosen`` the caller names the folder, so that all commits share one."""
        self.compression = compression
        self.chosen = chosen
        self.hub.redirect = redirect
        self.faults = Faults()
        self.move_to(next(iter(self.commits)))
        self.scene = self.scenes[compression][0]
        self.begin_again()

    def begin_again(self) -> None:
        self.start(self.current)
        self.transfers(self.scenes[self.compression].index(self.current))
        self.ours.mkdir(parents=True)
        self.begin_recording()

    @precondition(lambda self: len(self.scenes[self.compression]) > 1)
    @rule(index=st.integers(0, 1))
    def transfers(self, index: int) -> None:
        self.scene = self.scenes[self.compression][index]
        place = str(self.ours / "chosen") if self.chosen else None
        self.call = dataclasses.replace(self.current.call, saving_path=place)

    @property
    def ours(self) -> Path:
        return self.current.folder / "rabbitllm"

    def directories(self) -> dict[Path, str | None]:
        """The split directories, each with the commit that it says it is of."""
        commits: dict[Path, str | None] = {}
        for folder in (path for path in self.ours.rglob("splitted_model*") if path.is_dir()):
            manifest, earlier = read_manifest(folder), journal.replay(folder)
            made_from = manifest.source if manifest is not None else earlier.plan.source if earlier else None
            commits[folder] = made_from.commit if made_from is not None else None
        return commits

    def look(self, step: Step | None = None) -> None:
        peak = max(scene.peak for scene in self.scenes[self.compression])
        for folder in self.ours.rglob("splitted_model*"):
            assert occupied(folder) <= peak + BOOKKEEPING

    def check(self) -> None:
        for folder, commit in self.directories().items():
            if commit is None:
                assert names_in(folder, "*.safetensors") == []
            else:
                self.truth_of(commit).check(folder, None)

    def truth_of(self, commit: str) -> Truth:
        return self.commits[commit].truths[self.compression]

    def is_of(self, folder: Path, commit: str) -> bool:
        """Whether a split directory has the weights of a commit."""
        source_commit = self.directories().get(folder)
        return source_commit is not None and self.truth_of(source_commit) is self.truth_of(commit)

    def check_finished(self) -> None:
        assert (self.made / MANIFEST_NAME).exists()
        assert names_in(self.made) == names_in_finished(self.truth_of(self.commit))
        self.check()

    def may_raise(self, error: Exception) -> bool:
        if isinstance(error, SplitMismatchError):
            return self.chosen and not any(self.is_of(folder, self.pinned) for folder in self.directories())
        faulty = self.faults != Faults() or not self.here or self.torn
        return faulty and isinstance(error, HubError | CorruptShardError) and bool(error.remedy)

    def attempt(self, how: str, context: contextlib.AbstractContextManager[object], code: int | None = None) -> bool:
        self.pinned = self.commit
        was_here = self.here

        def arm(event: progress.Event) -> None:
            if isinstance(event, progress.SplitStarted):
                self.hub.faults = dataclasses.replace(self.faults)
            if isinstance(event, progress.ShardDone) and event.number == self.moves_after:
                self.move_to(self.moves_next)
            if isinstance(event, progress.ShardDone) and event.number == self.leaves_after:
                self.leave()

        with progress.listening(arm):
            finished = super().attempt(how, context, code)
        self.hub.faults = Faults()
        if finished:
            self.torn = False
            assert not was_here or self.is_of(self.made, self.pinned)
        return finished

    @rule(faults=HUB_FAULTS)
    def hub_will_fail(self, faults: Faults) -> None:
        self.faults = faults

    @rule()
    def hub_recovers(self) -> None:
        self.faults = Faults()
        if not self.here:
            self.hub.start()
            self.here = True

    leaves_after = 0

    @rule(after=st.integers(0, 2))
    def hub_leaves(self, after: int) -> None:
        """At once, or after this many used shards."""
        self.leaves_after = after
        if not after:
            self.leave()

    def leave(self) -> None:
        self.leaves_after = 0
        if self.here:
            self.hub.stop()
            self.here = False

    moves_after = 0
    moves_next = ""

    @rule(after=st.integers(0, 2), index=st.integers(0, 2))
    def branch_moves(self, after: int, index: int) -> None:
        """At once, or after this many used shards."""
        self.moves_after, self.moves_next = after, list(self.commits)[index]
        if not after:
            self.move_to(self.moves_next)

    def move_to(self, commit: str) -> None:
        self.moves_after = 0
        self.commit, self.finished = commit, False
        assert self.hub.add_revision(REPO, "main", self.commits[commit].files) == commit

    def teardown(self) -> None:
        if self.scene is None:
            return
        self.hub_recovers()
        self.leaves_after = self.moves_after = 0
        begun = [commit for commit in self.directories().values() if commit is not None]
        if self.chosen and begun:
            self.move_to(begun[0])
        if not self.attempt("lives", watched(self.look)):  # what power was lost over is fetched once more
            assert self.attempt("lives", watched(self.look))
        self.check_finished()


def names_in_finished(truth: Truth) -> list[str]:
    layers = [name + suffix for name in truth.layers for suffix in ("", ".done")]
    return sorted([*layers, "config.json", MANIFEST_NAME])


def run(
    machine: type[Machine], examples: int, steps: int, phases: Collection[Phase] = tuple(Phase), **attributes: object
) -> Counter[str]:
    """Run a machine, and say how its calls ended; a short run makes the same choices each time."""
    ends: Counter[str] = Counter()
    case = type(machine.__name__, (machine,), {**attributes, "ends": ends})
    run_state_machine_as_test(
        case,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=examples < SHORT,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return ends


# Folders


@pytest.fixture
def folder_scenes(tmp_path: Path) -> dict[Route, Scene]:
    return {route: scene_in_folder(tmp_path / str(route), route) for route in routes(hub=[False])}


def test_folder(folder_scenes: Mapping[Route, Scene]) -> None:
    ends = run(FolderMachine, 16, 12, scenes=folder_scenes)
    assert ends["dies: died"] > 0
    assert sum(count for end, count in ends.items() if "StorageError" in end) > 0


@pytest.mark.long
def test_folder_at_length(folder_scenes: Mapping[Route, Scene], crash_server: CrashServer) -> None:
    ends = run(FolderMachine, 200, 30, scenes=folder_scenes, server=crash_server)
    assert ends["dies: died"] > 50
    assert ends["is killed"] > 50


# Hubs


@pytest.fixture
def hub_attributes(
    make_scene: MakeScene, local_hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, object]:
    """Three commits: the scenes' own, one with other weights, and one that changes no weights."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    on_hub = routes(hub=[True], sequential=[True])
    scenes = {
        compression: [make_scene(route) for route in on_hub if route.compression == compression]
        for compression in COMPRESSIONS
    }
    original = scenes[None][0].original
    other = write_shards(tmp_path / "other", cut(llama_tensors(layers=2, seed=7), 3))
    same = shutil.copytree(original, tmp_path / "same")
    (same / "README.md").write_text("A readme.\n")
    truths = {compression: scenes_at[0].truth for compression, scenes_at in scenes.items()}
    other_truths = {
        c: Truth(other, split(other, tmp_path / "others", compression=c, sequential=False)) for c in COMPRESSIONS
    }
    commits = {
        local_hub.add_revision(REPO, "main", folder): Commit(folder, commit_truths)
        for folder, commit_truths in ((original, truths), (other, other_truths), (same, truths))
    }
    return {"scenes": scenes, "hub": local_hub, "commits": commits}


def test_hub(hub_attributes: Mapping[str, object]) -> None:
    run(HubMachine, draws(20), 12, **hub_attributes)


@pytest.mark.long
def test_hub_at_length(hub_attributes: Mapping[str, object], crash_server: CrashServer) -> None:
    run(HubMachine, 200, 30, **hub_attributes, server=crash_server)


# Machines that can fail


def release_before_the_journal_entry(
    loop: ShardLoop,
    shard: PlannedShard,
    checksums: ShardChecksums,
    targets: dict[str, FillTarget],
    closed: Sequence[str] = (),
) -> None:
    mark_used = loop._journal.mark_used

    def released(name: str, *entry: Any) -> None:
        loop._release(shard)
        mark_used(name, *entry)

    with unittest.mock.patch.object(loop._journal, "mark_used", released):
        _complete(loop, shard, checksums, targets, closed)


_complete = ShardLoop._complete
PLANTED: Mapping[str, tuple[type, str, Callable[..., object]]] = {
    "layer files are not durable": (Mover, "sync", lambda mover, targets: None),
    "a shard is deleted too soon": (ShardLoop, "_complete", release_before_the_journal_entry),
    "a digest is not compared": (RemoteFile, "check", lambda file, digest: None),
}


def find(bug: str, machine: type[Machine], attributes: Mapping[str, object], patch: pytest.MonkeyPatch) -> None:
    """Make sure that a machine finds a bug, whether or not it does so again when Hypothesis asks for it once more."""
    owner, name, planted = PLANTED[bug]
    patch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, RabbitLLMError, FlakyFailure)):
        run(machine, 2000, 12, **attributes, phases=[Phase.generate])  # it ends with the first that finds the bug


@pytest.mark.parametrize(
    "bug", ["layer files are not durable", pytest.param("a shard is deleted too soon", marks=pytest.mark.long)]
)
@pytest.mark.long
def test_bug_is_found_in_a_folder(
    folder_scenes: Mapping[Route, Scene], bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(bug, FolderMachine, {"scenes": folder_scenes}, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("bug", ["layer files are not durable", "a digest is not compared"])
def test_bug_is_found_over_a_hub(
    hub_attributes: Mapping[str, object], bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(bug, HubMachine, hub_attributes, monkeypatch)
