"""A Ray cluster on this machine with more logical processors than real ones; tasks that die, and quick workers.

What tasks and workers are made of is looked up here by other processes, so it is at the top of a module.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from rabbitllm.batch_jobs.items import BatchAnswer, Item
from rabbitllm.errors import HubError
from rabbitllm.ray._answerer import WorkerInfo, WorkerJob
from rabbitllm.ray.shards import fill_from
from rabbitllm.splitter.filler import SplitWork
from rabbitllm.splitter.lock import Lease
from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.hub_fixtures import point_at
from tests.support.splitting import Counter

CPUS = 8
OBJECT_STORE_BYTES = 80 << 20

Fill = Callable[[PlannedShard, SplitWork, Lease, int], Mapping[str, tuple[int, ...]]]


@contextlib.contextmanager
def local_cluster(cpus: int = CPUS) -> Iterator[str]:
    """The address of a cluster that this process is connected to while the context is open; nothing is left of it."""
    import ray

    before = processes()
    folder = tempfile.mkdtemp(prefix="rr-", dir="/tmp")
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")
    try:
        started = ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=folder,
            log_to_driver=False,
            logging_level="ERROR",
        )
        yield str(started.address_info["address"])
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    _, alive = psutil.wait_procs(processes() - before, timeout=600)
    assert not alive, f"left running: {alive}"


def processes() -> set[psutil.Process]:
    """All that this process has started, directly or not."""
    return set(psutil.Process().children(recursive=True))


def dying_once(marker: Path, index: int) -> Fill:
    """A filling whose worker kills itself before a step that changes the disk, the first time it comes to it."""
    return functools.partial(_fill_and_die, marker, index)


def _fill_and_die(
    marker: Path, index: int, shard: PlannedShard, work: SplitWork, lease: Lease, threads: int
) -> Mapping[str, tuple[int, ...]]:
    def die(number: int, step: Step) -> None:
        if number == index and not marker.exists():
            marker.write_text(f"{os.getpid()} {shard.name} {step.kind}")
            os.kill(os.getpid(), signal.SIGKILL)

    with observe_steps(Counter(die)):
        return fill_from(shard, work, lease, threads)


def dying_always(shard: PlannedShard, work: SplitWork, lease: Lease, threads: int) -> Mapping[str, tuple[int, ...]]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def from_local_hub(url: str, home: Path) -> Fill:
    """A filling by workers that find the hub there."""
    return functools.partial(_fill_from_hub, url, home)


def _fill_from_hub(
    url: str, home: Path, shard: PlannedShard, work: SplitWork, lease: Lease, threads: int
) -> Mapping[str, tuple[int, ...]]:
    patch = pytest.MonkeyPatch()
    try:
        point_at(url, home, patch)
        return fill_from(shard, work, lease, threads)
    finally:
        patch.undo()


@dataclass(frozen=True)
class Filling:
    """A shard that was filled by a worker: on which node, into which layers, and from when to when, in seconds."""

    shard: str
    node: str
    layers: frozenset[str]
    begin: float
    end: float


def recording(folder: Path, seconds: float) -> Fill:
    """A filling that takes so long at least, and writes down what it did; see `recorded`."""
    return functools.partial(_fill_and_record, folder, seconds)


def recorded(folder: Path) -> list[Filling]:
    """What fillings wrote down that came to their end."""
    records = [json.loads(path.read_text()) for path in folder.iterdir()]
    return [Filling(**{**record, "layers": frozenset(record["layers"])}) for record in records]


def _fill_and_record(
    folder: Path, seconds: float, shard: PlannedShard, work: SplitWork, lease: Lease, threads: int
) -> Mapping[str, tuple[int, ...]]:
    import ray

    begin = time.time()
    sums = fill_from(shard, work, lease, threads)
    time.sleep(seconds)
    node = ray.get_runtime_context().get_node_id()
    said = {"shard": shard.name, "node": node, "layers": [*work.plan.layouts], "begin": begin, "end": time.time()}
    (folder / f"{shard.name}.{node}").write_text(json.dumps(said))
    return sums


class Slow:
    """A worker without a model, that takes a while over each line."""

    def __init__(self, job: WorkerJob) -> None:
        self.about = WorkerInfo("here", os.getpid(), None, None, "nothing")

    def ready(self) -> WorkerInfo:
        return self.about

    def answer(self, items: Sequence[Item]) -> Generator[list[BatchAnswer]]:
        for item in items:
            time.sleep(0.02)
            yield [BatchAnswer(item.index, item.key, {"pid": os.getpid()})]


class Dying(Slow):
    def answer(self, items: Sequence[Item]) -> Generator[list[BatchAnswer]]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield []


class Failing(Slow):
    def ready(self) -> WorkerInfo:
        raise HubError("There was no answer.", "Try again.")


class Puzzled(Slow):
    def answer(self, items: Sequence[Item]) -> Generator[list[BatchAnswer]]:
        yield [BatchAnswer(items[0].index, items[0].key, {})]
        raise KeyError("what")


class Differing(Slow):
    def ready(self) -> WorkerInfo:
        return replace(self.about, computes=f"float{os.getpid()}")

    def answer(self, items: Sequence[Item]) -> Generator[list[BatchAnswer]]:
        time.sleep(300)  # until the other one is there
        yield []
