"""Splits and batches on a Ray cluster of one machine: eight logical processors, so four shards or workers at a time."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")


from rabbitllm import prepare
from rabbitllm.base import progress
from rabbitllm.base.options import ShardPolicy, SplitOptions
from rabbitllm.batch_jobs.api import batch
from rabbitllm.batch_jobs.display import Progress
from rabbitllm.batch_jobs.inputs import InputScan
from rabbitllm.batch_jobs.items import BatchAnswer, Defaults, Generate, Item, JobLimits
from rabbitllm.batch_jobs.job import BatchJob, work
from rabbitllm.batch_jobs.journal import BatchJournal
from rabbitllm.errors import (
    ClusterError,
    CorruptShardError,
    HubError,
    NotEnoughSpaceException,
    OptionError,
    ResultsError,
)
from rabbitllm.models.pull import Shards, pull
from rabbitllm.ray import _cluster as cluster_module
from rabbitllm.ray import lines as lines_module
from rabbitllm.ray._answerer import WorkerInfo, WorkerJob
from rabbitllm.ray._cluster import connected, nodes
from rabbitllm.ray.lines import RayAnswers, WorkerPool, answering_on, in_chunks
from rabbitllm.ray.shards import CPUS_A_TASK, RayShardExecutor, pull_on
from rabbitllm.splitter import journal
from rabbitllm.splitter.lock import LEASE_NAME, Lease, granted
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.builders import build_checkpoint
from tests.support.hub_fixtures import HubEnvironment
from tests.support.load_requests import asked
from tests.support.local_hub import LocalHub
from tests.support.ray_cluster import (
    CPUS,
    Differing,
    Dying,
    Failing,
    Puzzled,
    Slow,
    dying_always,
    dying_once,
    from_local_hub,
    local_cluster,
    processes,
)
from tests.support.splitting import Call, Counter, contents

SHARDS = 6
AT_ONCE = CPUS // CPUS_A_TASK


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with local_cluster() as address:
        yield address


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "hare", "llama", shards=SHARDS)


def shards_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*-of-*"))


@contextlib.contextmanager
def broken_off(step_kind: str, index: int) -> Iterator[None]:
    """Ends what runs in the context at a step of this kind, counted from 0: from then on nothing changes the disk."""

    def stop(count: int, step: Step) -> None:
        steps.extend([step] if step.kind == step_kind else [])
        if len(steps) > index:
            raise KeyboardInterrupt

    steps: list[Step] = []
    with observe_steps(Counter(stop)), pytest.raises(KeyboardInterrupt):
        yield


def local(source: Path, to: Path, compression: str | None = None) -> dict[str, bytes]:
    """What this process alone makes of a checkpoint."""
    return contents(pull(asked(source, compression, folder=to)).entry.folder)


@pytest.mark.long
def test_cluster_split_equals_a_local_one(cluster: str, source: Path, tmp_path: Path) -> None:
    expected = local(source, tmp_path / "local")
    pulled = pull_on(cluster, asked(source, folder=tmp_path / "spread"))
    assert contents(pulled.entry.folder) == expected
    assert pulled.shards is Shards.KEPT
    assert pull_on("auto", asked(source, folder=tmp_path / "spread")).before


@pytest.mark.long
def test_a_killed_worker_is_replaced(cluster: str, source: Path, tmp_path: Path) -> None:
    expected = local(source, tmp_path / "local")
    marker = tmp_path / "died"
    executor = RayShardExecutor(nodes(), None, quantizes=False, fill=dying_once(marker, 7))
    assert executor.at_once == AT_ONCE
    pulled = pull(asked(source, folder=tmp_path / "spread", sequential=True), executor)
    assert len(marker.read_text().split()) == 3
    assert contents(pulled.entry.folder) == expected
    assert pulled.shards is Shards.DELETED
    assert shards_in(source) == []


@pytest.mark.long
def test_a_shard_that_kills_each_of_its_workers_is_an_error(cluster: str, source: Path, tmp_path: Path) -> None:
    before = contents(source)
    executor = RayShardExecutor(nodes(), None, quantizes=False, fill=dying_always)
    with pytest.raises(ClusterError, match="died, 4 of them"):
        pull(asked(source, folder=tmp_path / "spread", sequential=True), executor)
    assert contents(source) == before
    assert not (tmp_path / "spread" / "splitted_model" / LEASE_NAME).exists()


def test_interrupted_driver_is_resumed(cluster: str, source: Path, tmp_path: Path) -> None:
    """On the cluster or without it; what was used up is not asked for again."""
    expected = local(source, tmp_path / "local")
    call = Call(str(source), str(tmp_path / "spread"))
    options = SplitOptions(shards=ShardPolicy.DELETE_USED)
    folder = call.find().split_folder

    def spread() -> None:
        prepare.ensure_split(call.find(), options, executor=RayShardExecutor(nodes(), 2, quantizes=False))

    with broken_off("unlink", 2):
        spread()
    earlier = journal.replay(folder)
    assert earlier is not None
    assert len(earlier.used) == 3
    assert len(shards_in(source)) == SHARDS - 2
    with broken_off("rename", 1):
        spread()
    call.make()
    assert contents(folder) == expected
    assert shards_in(source) == []
    (folder / LEASE_NAME).write_text("of a call that was killed when all was done")
    call.make()
    assert contents(folder) == expected


@pytest.mark.long
@pytest.mark.parametrize("transfer", ["file", "stream"])
def test_each_task_fetches_its_shard(
    cluster: str, tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, transfer: str
) -> None:
    build_checkpoint(tmp_path / "hub" / "org" / "rabbit", "llama", shards=SHARDS)
    wish = functools.partial(asked, "org/rabbit", shard_transfer=transfer)
    expected = contents(pull(wish(folder=tmp_path / "local")).entry.folder)
    fill = from_local_hub(hub_environment.url, tmp_path / "elsewhere")
    pulled = pull(wish(folder=tmp_path / "spread"), RayShardExecutor(nodes(), 3, quantizes=False, fill=fill))
    assert contents(pulled.entry.folder) == expected
    assert pulled.shards is Shards.FETCHED


def test_too_small_disk_is_refused_before_the_first_byte(cluster: str, source: Path, tmp_path: Path) -> None:
    executor = RayShardExecutor(nodes(), None, quantizes=False)
    with pytest.raises(NotEnoughSpaceException):
        pull(asked(source, folder=tmp_path / "spread", max_disk=1 << 16), executor)
    assert not (tmp_path / "spread").exists()


def test_damaged_shard_raises_the_local_error(cluster: str, source: Path, tmp_path: Path) -> None:
    spread, spoilt = tmp_path / "spread", shards_in(source)[4]
    executor = RayShardExecutor(nodes(), 1, quantizes=False)

    def spoil(event: progress.Event) -> None:
        if isinstance(event, progress.SplitStarted):
            (source / spoilt).write_bytes((source / spoilt).read_bytes()[:-100])

    with progress.listening(spoil), pytest.raises(CorruptShardError, match=spoilt):
        pull(asked(source, folder=spread, sequential=True), executor)
    earlier = journal.replay(spread / "splitted_model")
    assert earlier is not None
    assert earlier.used == set(shards_in(source)).symmetric_difference(shard.name for shard in earlier.plan.shards)
    assert len(earlier.used) == 4


def test_every_machine_is_checked_first(
    cluster: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with granted(tmp_path) as lease:
        cluster_module.check_machines(nodes(), lease, [source], quantizes=True)
        with pytest.raises(ClusterError, match=r"does not see .*\.lease"):
            cluster_module.check_machines(nodes(), Lease(tmp_path, "another"), [], quantizes=False)
        with pytest.raises(ClusterError, match="nowhere, where the source is"):
            cluster_module.check_machines(nodes(), lease, [tmp_path / "nowhere"], quantizes=False)
        monkeypatch.setattr(cluster_module, "__version__", "0.1")
        with pytest.raises(ClusterError, match=r"this machine has 0\.1"):
            cluster_module.check_machines(nodes(), lease, [], quantizes=False)
    with pytest.raises(ClusterError, match="this machine has 0"), connected(cluster):
        pull_on(cluster, asked(source, folder=tmp_path / "spread"))
    assert not (tmp_path / "spread").exists()


def test_versions_of_bitsandbytes_must_agree_where_its_schemes_are_used(
    cluster: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "version_of", lambda package: "0.1")
    with pytest.raises(ClusterError, match=r"has bitsandbytes .*; this machine has 0\.1"):
        pull_on(cluster, asked(source, "4bit", folder=tmp_path / "4bit"))
    assert not (tmp_path / "4bit").exists()
    with broken_off("write", 0):  # not refused: it begins
        pull_on(cluster, asked(source, "q8_0", folder=tmp_path / "blocks"))


def test_keeping_shards_where_only_one_machine_has_them_is_refused(
    cluster: str, tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    build_checkpoint(tmp_path / "hub" / "org" / "rabbit", "llama", shards=2)
    with pytest.raises(OptionError, match="workers on other machines"):
        pull_on(cluster, asked("org/rabbit", keep_shards=True, folder=tmp_path / "spread"))


# Batches


def lines_of(count: int) -> list[dict[str, object]]:
    """Prompts of several lengths, scores and a line that nothing can be made of."""
    lines: list[dict[str, object]] = [
        {"id": f"line {n}", "prompt": "the rabbit and the hare " * (1 + n % 3) + str(n), "max_new_tokens": 4 + n % 5}
        for n in range(count)
    ]
    lines[3] = {"id": "scored", "context": "the rabbit", "continuation": " and the hare"}
    lines[7] = {"id": "nonsense"}
    return lines


def write_lines(path: Path, lines: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def items(count: int) -> list[Item]:
    return [Item(index, index, Generate("x", 1)) for index in range(count)]


def taken(workers: int, count: int, worker: type) -> Generator[list[BatchAnswer]]:
    """Answers of stand-ins for models, which are quick, by real actors."""
    job = WorkerJob(asked("any"), "any", JobLimits(sequences=2))
    lines = items(count)
    chunks = in_chunks(range(count), workers, 2)
    return RayAnswers(WorkerPool(workers, 1, 0, workers), job, worker).answered(chunks, lines.__getitem__)


def pids(name: str) -> list[int]:
    """Of actors that are in a method of this name."""
    ids = []
    for process in processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie
            if f"ray::{name}" in " ".join(process.cmdline()):
                ids.append(process.pid)
    return ids


@pytest.mark.long
def test_each_line_is_answered_once_despite_killed_workers(cluster: str) -> None:
    """Of what a killed worker had, only that is done again which had no answer yet."""
    answers, killed = list[BatchAnswer](), list[int]()
    for group in taken(4, 96, Slow):
        answers += group
        if len(answers) > 10 * (1 + len(killed)) and len(killed) < 2 and (at_work := pids("Slow.answer")):
            os.kill(at_work[0], signal.SIGKILL)
            killed.append(at_work[0])
    assert len({*killed}) == 2
    assert sorted(answer.index for answer in answers) == list(range(96))
    assert {answer.line["pid"] for answer in answers} - {*killed}


@pytest.mark.long
def test_unplaced_workers_are_reported(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with what is wanted and what is there; they begin as soon as there is one."""
    import ray

    monkeypatch.setattr(lines_module, "PLACE_SECONDS", 1.0)
    job, messages = WorkerJob(asked("any"), "any", JobLimits(sequences=2)), list[str]()
    holder = ray.remote(Slow).options(num_cpus=CPUS - 1).remote(job)
    ray.get(holder.__ray_ready__.remote())

    def tell(line: str) -> None:
        messages.append(line)
        ray.kill(holder)

    answers = RayAnswers(WorkerPool(1, 2, 0, 1), job, Slow, report=tell).answered([[0, 1]], items(2).__getitem__)
    assert sorted(answer.index for group in answers for answer in group) == [0, 1]
    (line,) = messages
    assert "1 of 1 worker has no place" in line
    assert f"each wants 2 processors of one machine; free in all: 1 of {CPUS} processors" in line


@pytest.mark.long
def test_repeatedly_dying_workers_are_an_error(cluster: str) -> None:
    with pytest.raises(ClusterError, match="died, 4 of them"):
        list(taken(2, 8, Dying))
    assert pids("Dying") == []


@pytest.mark.long
def test_worker_errors_are_raised(cluster: str) -> None:
    with pytest.raises(HubError, match="no answer"):
        list(taken(1, 8, Failing))
    with pytest.raises(ClusterError, match="KeyError: 'what'"):
        list(taken(1, 8, Puzzled))


@pytest.mark.long
def test_workers_with_different_models_are_refused(cluster: str) -> None:
    with pytest.raises(ClusterError, match="differs from the one on"):
        list(taken(2, 8, Differing))


def spread_batch(
    source: Path,
    out: Path,
    model: Path,
    limits: JobLimits,
    elsewhere: Callable[[InputScan, BatchJournal], Generator[list[BatchAnswer]]],
) -> Progress:
    return work(BatchJob(source, out, asked(model, dtype="float32"), Defaults(), limits, elsewhere=elsewhere))


def test_cluster_batch_equals_a_local_one(cluster: str, tmp_path: Path) -> None:
    """Float32, greedy; begun here and finished by a worker."""
    model = build_checkpoint(tmp_path / "hare", "llama")
    source, out = write_lines(tmp_path / "in.jsonl", lines_of(24)), tmp_path / "out.jsonl"
    batch(str(model), source, tmp_path / "local.jsonl", dtype="float32")
    elsewhere = answering_on(cluster, asked(model, dtype="float32"), JobLimits(), workers=1)
    with pytest.raises(KeyboardInterrupt):
        spread_batch(source, out, model, JobLimits(), lambda survey, journal: here(5, tmp_path / "local.jsonl", survey))
    record = spread_batch(source, out, model, JobLimits(), elsewhere)
    assert (record.done, record.resumed, record.errors) == (24, 5, 1)
    assert out.read_bytes() == (tmp_path / "local.jsonl").read_bytes()


@pytest.mark.long
def test_other_weights_of_the_same_name_are_refused(cluster: str, tmp_path: Path) -> None:
    messages = list[str]()

    def check(about: WorkerInfo) -> None:
        messages.append(about.computes)
        raise ResultsError("It was begun with other weights.")

    job = WorkerJob(asked("any"), "any", JobLimits())
    workers = RayAnswers(WorkerPool(1, 1, 0, 1), job, Slow, check)
    with pytest.raises(ResultsError):
        list(workers.answered([[0]], items(1).__getitem__))
    assert messages == ["nothing"]


def here(count: int, answers: Path, survey: InputScan) -> Generator[list[BatchAnswer]]:
    """The first answers of a finished output, and then an interrupt."""
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    yield [BatchAnswer(index, survey.item(index).key, lines[index], "error" in lines[index]) for index in range(count)]
    raise KeyboardInterrupt


@pytest.mark.long
def test_command_survives_a_killed_worker(cluster: str, tmp_path: Path) -> None:
    """Nothing lost, nothing twice, and the output of one process, byte by byte."""
    model = build_checkpoint(tmp_path / "hare", "llama")
    source, out = write_lines(tmp_path / "in.jsonl", lines_of(200)), tmp_path / "out.jsonl"
    batch(str(model), source, tmp_path / "local.jsonl", dtype="float32")
    command = [sys.executable, "-m", "rabbitllm", "batch", str(model), str(source), "-o", str(out), "--json"]
    options = ["--dtype", "float32", "--sequences", "4", "--ray", cluster, "--ray-workers", "4"]
    journal, killed = tmp_path / "out.jsonl.journal", 0
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as running:
        while running.poll() is None and not killed:
            begun = journal.exists() and len(journal.read_bytes().splitlines()) > 20
            if begun and (at_work := pids("Answerer.answer")):
                os.kill(at_work[0], signal.SIGKILL)
                killed = at_work[0]
            time.sleep(0.01)
        output = running.communicate()[0]
    assert killed
    assert running.returncode == 0
    record = json.loads(output)
    assert (record["lines"], record["resumed"], record["errors"]) == (200, 0, 1)
    assert out.read_bytes() == (tmp_path / "local.jsonl").read_bytes()


@pytest.mark.long
def test_killed_command_is_resumed(cluster: str, source: Path, tmp_path: Path) -> None:
    """`rabbitllm pull --ray`, killed while it splits; the same command finishes, with the same bytes."""
    expected = local(source, tmp_path / "local", "8bit")
    command = [sys.executable, "-m", "rabbitllm", "pull", str(source), "--dir", str(tmp_path / "spread")]
    options = ["--compression", "8bit", "--sequential", "--ray", cluster, "--ray-tasks", "2"]
    folder = tmp_path / "spread" / "splitted_model.8bit"
    with subprocess.Popen([*command, *options]) as running:
        while running.poll() is None:
            state = journal.glance(folder) if (folder / "split.journal").exists() else None
            if state is not None and state.used:
                running.kill()
            time.sleep(0.005)
    assert running.returncode == -signal.SIGKILL
    result = subprocess.run([*command, *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert contents(folder) == expected
    assert shards_in(source) == []
