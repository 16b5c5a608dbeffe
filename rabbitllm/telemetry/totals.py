"""Stages, their totals, and the stage that limits. Independent of clocks and threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

READ = "read"
QUANTIZE = "quantise"
WRITE = "write"
SYNC = "sync"
SHARD_WAIT = "wait for shards"
READ_WAIT = "wait for disk"
UPLOAD = "copy to device"
PINNED_UPLOAD = "copy from page-locked RAM"
UPLOAD_WAIT = "wait for copies"
DEQUANTIZE = "dequantise"
COMPUTE = "compute"
FETCH = "fetch"
EXPERTS_ON_DEVICE = "experts on the device"
EXPERTS_IN_HOST_MEMORY = "experts in page-locked RAM"
EXPERTS_READ = "experts on the disk"
EXPERT_TIERS = (EXPERTS_ON_DEVICE, EXPERTS_IN_HOST_MEMORY, EXPERTS_READ)
"""Counts rather than work: the tiers of the experts that a pass used, and their bytes."""

HIDDEN_STAGES = frozenset({SHARD_WAIT})
"""Not work: the time between a layer's first and last tensor. Listed, but never the bottleneck."""
COPIES = (UPLOAD, PINNED_UPLOAD)
"""Copies to a device: of weights read for this pass, and of weights kept in host memory."""
OVERLAPPED_STAGES = frozenset({READ, *COPIES})
"""Stages in the background of a pass; time that was not hidden appears as `READ_WAIT` and `UPLOAD_WAIT`."""
CALLER_STAGES = (READ_WAIT, UPLOAD_WAIT, DEQUANTIZE, COMPUTE)
"""Stages of the caller of a pass, in the order of a layer."""


@dataclass(frozen=True, slots=True)
class Total:
    """The total of one stage.

    Attributes:
        seconds: of all its threads together, waiting included.
        count: number of records.
        nbytes: bytes moved.
        cpu_seconds: core-seconds of `seconds`; 0 where only the time was recorded.
        threads: number of threads in it.
    """

    seconds: float
    count: int
    nbytes: int
    cpu_seconds: float = 0.0
    threads: int = 1

    @property
    def busy_seconds(self) -> float:
        """Duration in seconds if its threads shared the work evenly."""
        return self.seconds / self.threads

    def plus(self, other: Total) -> Total:
        """The sum of both, with the larger number of threads."""
        return Total(
            self.seconds + other.seconds,
            self.count + other.count,
            self.nbytes + other.nbytes,
            self.cpu_seconds + other.cpu_seconds,
            max(self.threads, other.threads),
        )


NOTHING = Total(0.0, 0, 0)


def limit_of(stages: Mapping[str, Total]) -> str | None:
    """The stage with the longest busy time among those that make the caller wait; None without any.

    A pass that mostly waits for its weights waits for the disk or, if they took longer, for copies to the device.
    """
    blocking = [stage for stage in stages if stage not in HIDDEN_STAGES]
    if READ_WAIT in stages or COMPUTE in stages:
        blocking = [stage for stage in blocking if stage not in OVERLAPPED_STAGES]
    if not blocking:
        return None
    longest = max(blocking, key=lambda stage: stages[stage].busy_seconds)
    copied, read = copies_of(stages), stages.get(READ, NOTHING)
    return UPLOAD if longest == READ_WAIT and copied.busy_seconds > read.busy_seconds else longest


def copies_of(stages: Mapping[str, Total]) -> Total:
    """The sum of both kinds: they share a link, so their times add up."""
    first, second = (stages.get(stage, NOTHING) for stage in COPIES)
    return first.plus(second)
