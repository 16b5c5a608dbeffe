"""`rabbitllm batch --ray`: unanswered lines of a journal, answered by actors of a Ray cluster.

The input is read and the results are written here, by one process, as without a cluster: so the order is kept, each
line gets one answer, and a batch begun on a cluster can be finished without it. Each answer reaches this process as
soon as it is complete. A line is assigned to one worker, which has loaded its model once; only if that worker is lost,
its unanswered lines are assigned to another one. Why actors and not Ray Data, whose unit is a block of rows, is in
docs/guides/several-machines.md.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.terminal import counted
from rabbitllm.batch_jobs.inputs import InputScan
from rabbitllm.batch_jobs.items import BatchAnswer, Item, JobLimits
from rabbitllm.batch_jobs.job import digest_of
from rabbitllm.batch_jobs.journal import BatchJournal
from rabbitllm.errors import ClusterError, OptionError
from rabbitllm.quant.schemes import quantizes_as_bitsandbytes
from rabbitllm.ray._answerer import Answerer, WorkerInfo, WorkerJob
from rabbitllm.ray._cluster import Node, check_machines, connected, error_of, portable, say


def answering_on(
    address: str, request: LoadRequest, limits: JobLimits, workers: int | None = None
) -> Callable[[InputScan, BatchJournal], Generator[list[BatchAnswer]]]:
    """A function that provides the answers missing in a journal.

    Args:
        address: see `_cluster.connected`.
        request: the model, its split and its run.
        limits: limits of the batch of one worker.
        workers: see `worker_pool`.

    Raises:
        ClusterError, OptionError: see `connected`, `check_machines`, `worker_pool`, `RayAnswers`; raised on first use.
        ResultsError: the journal was begun with other weights.
    """

    def answers_of(scan: InputScan, journal: BatchJournal) -> Generator[list[BatchAnswer]]:
        order = [int(index) for index in scan.ordered(journal.missing())]
        with connected(address) as nodes:
            pool = worker_pool(nodes, workers)
            check_machines(nodes, None, [], quantizes=quantizes_as_bitsandbytes(request.spec.compression))
            say(f"{counted(len(nodes), 'machine')}, {counted(pool.workers, 'worker')}; loading the model …")
            draft = portable(limits.draft) if isinstance(limits.draft, LoadRequest) else limits.draft
            work = replace(limits, draft=draft)
            job = WorkerJob(portable(request), request.spec.name, work, scan.longest(limits.sequences), pool.share)
            chunks = in_chunks(order, pool.workers, limits.sequences)

            def check(about: WorkerInfo) -> None:
                if about.source is not None:
                    journal.check_weights(digest_of(about.source))

            yield from RayAnswers(pool, job, check=check).answered(chunks, scan.item)

    return answers_of


PASSFULS = 4
"""Limit of a chunk, in full passes: the last passes of each chunk are not full."""
MIN_CHUNKS = 2
"""Minimum number of chunks per worker, if there are enough lines: a slow worker then delays the end less."""


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """The workers of a batch.

    Attributes:
        workers: number of workers.
        cpus, gpus: reserved by Ray for each.
        share: limit of workers on one machine.
    """

    workers: int
    cpus: int
    gpus: int
    share: int


def worker_pool(nodes: Sequence[Node], workers: int | None = None) -> WorkerPool:
    """A worker for each GPU; where there is none, one for each machine.

    Args:
        nodes: the machines.
        workers: number wanted by the user; None for the default.

    Raises:
        OptionError: the number is below 1, or above the number of processors or GPUs.
    """
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    count = (gpus or len(nodes)) if workers is None else workers
    most = gpus or cpus
    if not 1 <= count <= most:
        unit = "GPUs" if gpus else "processors"
        raise OptionError(
            f"--ray-workers {count} is not possible on a cluster of {most} {unit}.", f"Use 1 to {most}, or remove it."
        )
    if gpus:
        return WorkerPool(count, 1, 1, min(count, max(node.gpus for node in nodes)))
    share = -(-count // len(nodes))
    return WorkerPool(count, max(1, min(node.cpus for node in nodes) // share), 0, share)


def in_chunks(order: Sequence[int], workers: int, sequences: int) -> list[list[int]]:
    """Split lines, in the given order, into chunks of equal length; the last one may be shorter.

    Args:
        order: indices of lines.
        workers: number of workers, each of which answers one chunk after the other.
        sequences: limit of lines in one pass.
    """
    size = max(1, min(PASSFULS * sequences, -(-len(order) // (workers * MIN_CHUNKS))))
    return [list(order[begin : begin + size]) for begin in range(0, len(order), size)]


POLL_SECONDS = 0.5
PLACE_SECONDS, REPEAT_SECONDS = 10.0, 60.0
"""Seconds until an unplaced worker is reported, and between such reports. Placement normally takes seconds."""
MAX_LOST = 4
"""Number of consecutively lost workers, without an answer in between, that is an error."""


@dataclass(slots=True)
class _LineWorker:
    """An actor.

    Attributes:
        since: `time.monotonic()` of its creation.
        placed: reference that resolves when the actor has started; None from then on.
        loading: reference that resolves when its model is ready; None from then on.
        answers: its stream of answers while it works.
        unanswered: its items without an answer, by index.
    """

    actor: Any
    since: float
    placed: Any
    loading: Any
    answers: Any = None
    unanswered: dict[int, Item] | None = None


@dataclass(eq=False)
class RayAnswers:
    """The workers of one batch. The process must be connected to the cluster.

    Args:
        pool: number of workers, and the resources of each.
        job: job of every worker.
        worker: the actor class.
        check: called with the first ready worker, before any answer; may raise to stop.
        report: called with messages for the user.
    """

    pool: WorkerPool
    job: WorkerJob
    worker: type[Any] = Answerer
    check: Callable[[WorkerInfo], None] = lambda about: None
    report: Callable[[str], None] = say
    _reported_at: float = field(default=float("-inf"), init=False)
    _workers: list[_LineWorker] = field(default_factory=list, init=False)
    _about: WorkerInfo | None = field(default=None, init=False)
    _lost: int = field(default=0, init=False)

    def answered(self, chunks: Sequence[Sequence[int]], item: Callable[[int], Item]) -> Generator[list[BatchAnswer]]:
        """Answers to lines, in groups that are complete at the same time.

        Args:
            chunks: indices of lines, each line once; a worker answers one chunk after the other.
            item: reads a line.

        Raises:
            ClusterError: workers are lost repeatedly, or have different models.
            RabbitLLMError, OSError, MemoryError: a worker's own error.
        """
        import ray

        waiting = deque(list(chunk) for chunk in chunks)
        try:
            for _ in range(min(self.pool.workers, len(waiting))):
                self._workers.append(self._start_worker())
            while waiting or any(worker.unanswered for worker in self._workers):
                for worker in self._workers:
                    if waiting and worker.loading is None and worker.answers is None:
                        worker.unanswered = {index: item(index) for index in waiting.popleft()}
                        answer = worker.actor.answer.options(num_returns="streaming")
                        worker.answers = answer.remote([*worker.unanswered.values()])
                busy = {reference: w for w in self._workers if (reference := w.loading or w.answers) is not None}
                finished, _ = ray.wait([*busy], timeout=POLL_SECONDS)
                for reference in finished:
                    yield from self._handle_report(busy[reference], waiting)
                self._report_unplaced()
        finally:
            for worker in self._workers:
                _kill(worker)

    def _start_worker(self) -> _LineWorker:
        import ray

        options = {"num_cpus": self.pool.cpus, "num_gpus": self.pool.gpus, "scheduling_strategy": "SPREAD"}
        actor = ray.remote(self.worker).options(max_restarts=0, **options).remote(self.job)
        return _LineWorker(actor, time.monotonic(), actor.__ray_ready__.remote(), actor.ready.remote())

    def _report_unplaced(self) -> None:
        """Report workers that cannot be placed: Ray waits without a message."""
        import ray

        unplaced = {worker.placed: worker for worker in self._workers if worker.placed is not None}
        if not unplaced:
            return
        for placed in ray.wait([*unplaced], num_returns=len(unplaced), timeout=0)[0]:
            unplaced.pop(placed).placed = None
        now = time.monotonic()
        late = [worker for worker in unplaced.values() if now - worker.since >= PLACE_SECONDS]
        if late and now - self._reported_at >= REPEAT_SECONDS:
            self._reported_at = now
            cluster: Any = ray  # its functions are untyped
            self.report(wait_notice(self.pool, len(late), cluster.cluster_resources(), cluster.available_resources()))

    def _handle_report(self, worker: _LineWorker, waiting: deque[list[int]]) -> Generator[list[BatchAnswer]]:
        """Handle a report of a worker: that it is ready, some answers, the end of its chunk, or its loss."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        try:
            if worker.loading is not None:
                self._compare(ray.get(worker.loading))
                worker.loading = None
                return
            assert worker.unanswered is not None
            try:
                group: list[BatchAnswer] = ray.get(next(worker.answers))
            except StopIteration:
                if worker.unanswered:
                    waiting.appendleft([*worker.unanswered])
                worker.answers = worker.unanswered = None
                return
        except RayTaskError as error:
            raise error_of(error, "lines of the batch") from None
        except RayError as error:
            self._replace(worker, waiting, error)
            return
        new = [answer for answer in group if worker.unanswered.pop(answer.index, None) is not None]
        if new:
            self._lost = 0
            yield new

    def _replace(self, worker: _LineWorker, waiting: deque[list[int]], error: Exception) -> None:
        self._lost += 1
        if self._lost >= MAX_LOST:
            raise ClusterError(
                f"The workers that had lines of the batch died, {MAX_LOST} of them one after the other: "
                f"{type(error).__name__}.",
                "Check on those machines whether memory ran out (dmesg; `ray status`). Fewer workers (--ray-workers) "
                "or lines at a time (--sequences) need less. Finished answers are kept: the same command resumes.",
            ) from error
        self._workers.remove(worker)
        _kill(worker)  # it may be alive but unreachable
        if worker.unanswered:
            waiting.appendleft([*worker.unanswered])
        self._workers.append(self._start_worker())

    def _compare(self, about: WorkerInfo) -> None:
        if self._about is None:
            self.check(about)
            self._about = about
        elif (why := about.differs_from(self._about)) is not None:
            raise ClusterError(
                f"The model on {about.host} differs from the one on {self._about.host}: {why}.",
                "Put one split directory into a folder that all machines share (--dir), or delete the wrong one. GPUs "
                "and processors do not answer alike: use machines of one kind.",
            )


def wait_notice(pool: WorkerPool, late: int, total: Mapping[str, float], free: Mapping[str, float]) -> str:
    """The message about workers that have not started.

    Args:
        pool: the resources of each worker.
        late: their number.
        total, free: resources of the cluster, as Ray counts them.
    """
    kinds = [("processor", "CPU", pool.cpus), ("GPU", "GPU", pool.gpus)]
    needed = " and ".join(counted(count, unit) for unit, _, count in kinds if count)
    available = ", ".join(
        f"{free.get(name, 0):g} of {total.get(name, 0):g} {unit}s" for unit, name, count in kinds if count
    )
    subject = f"{late} of {counted(pool.workers, 'worker')} {'has' if late == 1 else 'have'}"
    return (
        f"{subject} no place on the cluster yet: each wants {needed} of one machine; free in all: {available}. "
        "`ray status` says what has them. Waiting …"
    )


def _kill(worker: _LineWorker) -> None:
    import ray

    with contextlib.suppress(Exception):  # the error that led here is the one to report
        ray.kill(worker.actor)
