"""A worker of a batch: prepares its model once, then answers lines.

Runs in a separate process that may be killed at any moment: nothing is stored in it alone. Independent of clusters and
journals.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rabbitllm.auto_model import LoadRequest
from rabbitllm.batch_jobs.items import BatchAnswer, Item, JobLimits
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.store.manifest import BitAllocation

WEIGHTS, CACHE = 0.5, 0.3
"""Shares of a worker's part of free memory, for weights and for the KV cache, when workers share a machine."""


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """The job of every worker of a batch.

    Attributes:
        request: the model, by a name that is valid on every machine.
        name: the model's name in answers of OpenAI's form.
        limits: limits of the batch.
        longest: see `InputScan.longest`; memory is reserved for these lines.
        share: number of workers on one machine.
    """

    request: LoadRequest
    name: str
    limits: JobLimits
    longest: tuple[int, ...] = ()
    share: int = 1


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The description of a ready worker.

    Attributes:
        host, pid: its machine and process.
        source: the source of its split; None without one.
        compression: compression of the split.
        computes: dtype and kind of device.
        chosen: the bits of each tensor in a mixed split.
    """

    host: str
    pid: int
    source: SourceIdentity | None
    compression: str | None
    computes: str
    chosen: BitAllocation | None = None

    def differs_from(self, other: WorkerInfo) -> str | None:
        """The reason, for a message, why two workers would give different answers; None if no difference is known."""
        if self.computes != other.computes:
            return f"it computes in {self.computes}, the other in {other.computes}"
        if self.compression != other.compression:
            return f"its split is at compression {self.compression}, the other at {other.compression}"
        if self.chosen is not None and other.chosen is not None and self.chosen.schemes != other.chosen.schemes:
            return "its split has other bits for some tensors than the other's (pull it once, into a shared folder)"
        if self.source is not None and other.source is not None:
            return self.source.differs_from(other.source)
        return None


class Answerer:
    """A worker.

    Args:
        job: the job of the batch.
    """

    def __init__(self, job: WorkerJob) -> None:
        self._job = job
        self._model: Any = None
        self._limits = job.limits

    def ready(self) -> WorkerInfo:
        """Prepare the model: split it first, unless that is done.

        Of several workers on one machine, or with one shared folder, one splits and the others wait.

        Raises:
            RabbitLLMError: see `pull` and `AutoModel.from_pretrained`.
        """
        from rabbitllm.batch_jobs.job import BatchModel

        job = self._with_its_share()
        loaded = BatchModel.load(job.request, job.longest, job.limits)
        self._model = loaded.model
        self._model.pass_line = None
        self._limits = replace(job.limits, cache_bytes=loaded.cache_bytes, draft=loaded.draft)
        computes = f"{str(self._model.dtype).removeprefix('torch.')} on {self._model.device.type}"
        process = socket.gethostname(), os.getpid()
        if (split := loaded.manifest) is None:
            return WorkerInfo(*process, None, None, computes)
        return WorkerInfo(*process, split.source, split.compression, computes, split.chosen)

    def answer(self, items: Sequence[Item]) -> Generator[list[BatchAnswer]]:
        """Answers to lines, in groups that are complete at the same time; see `answers.answered`."""
        from rabbitllm.batch_jobs.answers import answered
        from rabbitllm.batch_jobs.inputs import ordered

        yield from answered(self._model, self._job.name, ordered(items), self._limits)

    def _with_its_share(self) -> WorkerJob:
        """The job, with limits of memory and disk if several workers share the machine."""
        import psutil

        from rabbitllm.generation.cache_manager import default_file_bytes
        from rabbitllm.generation.swap import default_folder

        job = self._job
        if job.share == 1:
            return job
        if job.limits.cache_disk is None:
            job = replace(job, limits=replace(job.limits, cache_disk=default_file_bytes(default_folder()) // job.share))
        if job.request.run.max_memory is not None:
            return job
        part = psutil.virtual_memory().available // job.share
        limits = replace(job.limits, cache_bytes=job.limits.cache_bytes or int(part * CACHE))
        run = replace(job.request.run, max_memory={"cpu": int(part * WEIGHTS)})
        return replace(job, request=replace(job.request, run=run), limits=limits)
