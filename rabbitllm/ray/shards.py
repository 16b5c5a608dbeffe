"""`rabbitllm pull --ray`: shards filled into layer files by tasks of a Ray cluster, in a shared folder.

Ray runs a task again if its worker or machine died. `splitter/_shard_loop.py` decides what is durable, which layers
are complete and which shards may be deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.terminal import counted
from rabbitllm.errors import ClusterError, OptionError
from rabbitllm.models.pull import Pulled, pull
from rabbitllm.quant.schemes import quantizes_as_bitsandbytes
from rabbitllm.ray._cluster import Node, check_machines, connected, error_of, portable, say
from rabbitllm.splitter.filler import Filled, Filler, ShardFetcher, SplitWork
from rabbitllm.splitter.lock import Lease, LeaseCheck, granted
from rabbitllm.splitter.mover import Mover, open_targets
from rabbitllm.splitter.plan import PlannedShard
from rabbitllm.splitter.sums import ShardChecksums
from rabbitllm.telemetry.profiler import Profiler


def fill_from(shard: PlannedShard, work: SplitWork, lease: Lease, threads: int) -> ShardChecksums:
    """Fill unfinished layer files from a shard: the task of a worker, which may be killed and repeated at any moment.

    Args:
        shard: the shard.
        work: the part of a split that is about this shard (`SplitWork.of_shard`).
        lease: checked before every few MB; without it nothing more is written.
        threads: number of threads that read, quantize and write.

    Returns:
        The checksums of the shard's tensors. All of its bytes are durable.

    Raises:
        ClusterError: the lease was revoked.
        CorruptShardError, HubError, MissingShardError: see `Filler.fill`.
    """
    guard = LeaseCheck(lease)
    guard.check()
    profiler = Profiler(enabled=False)
    layers = list(work.plan.layouts)
    mover = Mover(threads, profiler, guard.check, fitted=work.fitted)
    fetcher = ShardFetcher(work.checkpoint, work.shard_transfer.files, guard.check)
    with open_targets() as targets, contextlib.closing(mover), contextlib.closing(fetcher):
        filler = Filler(work, mover, profiler)
        for _, arriving in fetcher.shards([shard]):
            filler.fill(shard, arriving, targets, layers)
        mover.sync(targets.values())
        return mover.sums.take_with_sources(filler.forms_of(shard, layers))


Part = tuple[PlannedShard, SplitWork]


def next_part(waiting: Sequence[Part], in_work: Iterable[Part], *, apart: bool) -> Part | None:
    """The first part that may be started; None if all have to wait for one in work.

    Args:
        waiting: in the preferred order.
        in_work: parts that are started and not finished.
        apart: whether parts that fill the same layer file exclude each other. Network file systems guarantee that one
            machine sees the writes of another only if it opens the file after the other has closed it (close-to-open,
            nfs(5)); until then each may write back its own version of a page in which both have bytes.
    """
    if not apart:
        return waiting[0] if waiting else None
    busy: set[str] = set()
    for _, work in in_work:
        busy |= work.plan.layouts.keys()
    return next((part for part in waiting if busy.isdisjoint(part[1].plan.layouts)), None)


CPUS_A_TASK = 2
"""Processors that Ray reserves for a shard, and threads that work on it."""
TIMES = 4
"""Attempts at a shard before the death of its workers is attributed to the shard."""
POLL_SECONDS = 0.2
STOP_SECONDS = 10.0
"""Time limit for tasks to stop."""
Fill = Callable[[PlannedShard, SplitWork, Lease, int], ShardChecksums]
"""See `fill_from`."""


class RayShardExecutor:
    """A shard executor of Ray tasks; see `ShardExecutor`. The process must be connected to the cluster.

    Args:
        nodes: its machines.
        at_once: limit of shards in work at a time; None for as many as the processors of the machines allow.
        quantizes: see `check_machines`.
        fill: the task for one shard.

    Raises:
        OptionError: `at_once` is below 1.
    """

    def __init__(self, nodes: Sequence[Node], at_once: int | None, *, quantizes: bool, fill: Fill = fill_from) -> None:
        if at_once is not None and at_once < 1:
            raise OptionError(f"--ray-tasks {at_once} is not a number of shards.", "Use 1 or more, or remove it.")
        self._nodes = nodes
        self._quantizes = quantizes
        self._fill = fill
        self._lease: Lease | None = None
        self._cpus = min(CPUS_A_TASK, *(node.cpus for node in nodes)) if nodes else CPUS_A_TASK
        self.at_once = at_once or sum(node.cpus // self._cpus for node in nodes)

    @contextlib.contextmanager
    def sharing(self, folder: Path, seen: Sequence[Path]) -> Iterator[None]:
        with granted(folder.absolute()) as lease:
            check_machines(self._nodes, lease, [path.absolute() for path in seen], quantizes=self._quantizes)
            self._lease = lease
            try:
                yield
            finally:
                self._lease = None

    def filled(
        self, parts: Sequence[Part], began: Callable[[PlannedShard], None], watch: Callable[[], None]
    ) -> Generator[Filled]:
        import ray

        assert self._lease is not None, "only while the folder is shared"
        task = ray.remote(num_cpus=self._cpus, max_retries=TIMES - 1)(_call)
        waiting, in_work = [*parts], dict[Any, Part]()
        at_once = min((work.at_once for _, work in parts), default=1)
        try:
            while waiting or in_work:
                while len(in_work) < at_once:
                    part = next_part(waiting, in_work.values(), apart=len(self._nodes) > 1)
                    if part is None:
                        break
                    waiting.remove(part)
                    began(part[0])
                    in_work[task.remote(self._fill, *part, self._lease, self._cpus)] = part
                finished, _ = ray.wait([*in_work], timeout=POLL_SECONDS)
                watch()
                for reference in finished:
                    shard = in_work[reference][0]
                    sums = _result(reference, shard)
                    del in_work[reference]
                    yield shard, sums
        finally:
            if in_work:
                self._lease.end()
                # not cancelled: Ray 2.60 was seen to abort the process that cancels a task whose result is just
                # arriving ("Tried to complete task that was not pending")
                with contextlib.suppress(Exception):  # the error that led here is the one to report
                    ray.wait([*in_work], num_returns=len(in_work), timeout=STOP_SECONDS)


def _call(fill: Fill, *arguments: Any) -> ShardChecksums:
    return fill(*arguments)


def _result(reference: Any, shard: PlannedShard) -> ShardChecksums:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        sums: ShardChecksums = ray.get(reference)
    except RayTaskError as error:
        raise error_of(error, shard.name) from None
    except RayError as error:
        raise ClusterError(
            f"The workers that had {shard.name} died, {TIMES} of them one after the other: {type(error).__name__}.",
            "Check on those machines whether memory ran out (dmesg; `ray status`), or use fewer shards at a time "
            "(--ray-tasks). The same call resumes.",
        ) from error
    return sums


def pull_on(address: str, request: LoadRequest, at_once: int | None = None) -> Pulled:
    """Like `pull`, but a Ray cluster fills the layer files.

    Args:
        address: see `connected`.
        request: the model and its split.
        at_once: limit of shards in work at a time; None for as many as the processors of the machines allow.

    Raises:
        ClusterError: the cluster does not answer, or a machine fails a check; nothing was changed.
        RabbitLLMError: see `pull`.
    """
    with connected(address) as nodes:
        executor = RayShardExecutor(nodes, at_once, quantizes=quantizes_as_bitsandbytes(request.spec.compression))
        say(f"{counted(len(nodes), 'machine')}, up to {counted(executor.at_once, 'shard')} at a time")
        return pull(portable(request), executor)
