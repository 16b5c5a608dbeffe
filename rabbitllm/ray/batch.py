"""`rabbitllm batch --ray`: unanswered lines of a journal, answered by the machines of a cluster.

The input is read and the results are written here, by one process, as without a cluster: so the order is kept, each
line gets one answer, and a batch begun on a cluster can be finished without it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.options import expand
from rabbitllm.base.terminal import counted
from rabbitllm.batch_jobs.input_scan import InputScan
from rabbitllm.batch_jobs.items import BatchAnswer, JobLimits
from rabbitllm.batch_jobs.journal import BatchJournal
from rabbitllm.batch_jobs.loading import digest_of
from rabbitllm.ray.answerer import WorkerInfo, WorkerJob
from rabbitllm.ray.chunks import in_chunks, staff_of
from rabbitllm.ray.cluster import connected, say
from rabbitllm.ray.node_check import check_machines
from rabbitllm.ray.ray_answers import RayAnswers


def answering_on(
    address: str, request: LoadRequest, name: str, limits: JobLimits, workers: int | None = None
) -> Callable[[InputScan, BatchJournal], Generator[list[BatchAnswer]]]:
    """A function that provides the answers missing in a journal.

    Args:
        address: see `cluster.connected`.
        request: the model, its split and its run.
        name: the model's name as the user gave it.
        limits: limits of the batch of one worker.
        workers: see `chunks.staff_of`.

    Raises:
        ClusterError, OptionError: see `connected`, `check_machines`, `staff_of`, `RayAnswers`; raised on first use.
        ResultsError: the journal was begun with other weights.
    """

    def elsewhere(survey: InputScan, journal: BatchJournal) -> Generator[list[BatchAnswer]]:
        order = [int(index) for index in survey.ordered(journal.missing())]
        with connected(address) as nodes:
            staff = staff_of(nodes, workers)
            check_machines(nodes, None, [], quantizes=request.spec.compression is not None)
            say(f"{counted(len(nodes), 'machine')}, {counted(staff.workers, 'worker')}; they get the model ready …")
            job = WorkerJob(everywhere(request), name, limits, _longest(survey, limits.sequences), staff.share)
            chunks = in_chunks(order, staff.workers, limits.sequences)

            def check(about: WorkerInfo) -> None:
                if (weights := digest_of(about.source)) is not None:
                    journal.check_weights(weights)

            yield from RayAnswers(staff, job, check=check).answered(chunks, survey.item)

    return elsewhere


def everywhere(request: LoadRequest) -> LoadRequest:
    """The same request, with paths that do not depend on the working directory."""
    spec = request.spec
    path = expand(spec.name)
    name = str(path.absolute()) if spec.name and path.exists() else spec.name
    folder = spec.folder.absolute() if spec.folder is not None else None
    return replace(request, spec=replace(spec, name=name, folder=folder))


def _longest(survey: InputScan, count: int) -> tuple[tuple[int, int], ...]:
    found = sorted(zip(survey.lengths, survey.kinds, strict=True), reverse=True)
    return tuple((int(length), int(kind)) for length, kind in found[:count])
