"""Stages, what each took, and which of them is the limit. Knows nothing of clocks and threads."""

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
"""Not work but counts: where the experts that a pass used were found, and their bytes."""

HIDDEN_STAGES = frozenset({SHARD_WAIT})
"""Not work: the time between a layer's first tensor and its last. Listed, but never the bottleneck."""
COPIES = (UPLOAD, PINNED_UPLOAD)
"""To a device: of what was read for this pass, and of what is kept in host memory."""
OVERLAPPED_STAGES = frozenset({READ, *COPIES})
"""Done in the background of a pass; what of them was not hidden shows as `READ_WAIT` and `UPLOAD_WAIT`."""
CALLER_STAGES = (READ_WAIT, UPLOAD_WAIT, DEQUANTIZE, COMPUTE)
"""What the caller of a pass spends its time on, in the order in which a layer does."""


@dataclass(frozen=True, slots=True)
class Total:
    """What one stage took.

    Attributes:
        seconds: of all threads that were in it together, waiting included.
        count: number of records.
        nbytes: bytes moved.
        cpu_seconds: core-seconds of `seconds`; 0 where only the time was told.
        threads: that were in it.
    """

    seconds: float
    count: int
    nbytes: int
    cpu_seconds: float = 0.0
    threads: int = 1

    @property
    def busy_seconds(self) -> float:
        """How long it would keep its threads busy if they shared it evenly."""
        return self.seconds / self.threads

    def plus(self, other: Total) -> Total:
        """Both together, in as many threads as the one that had more."""
        return Total(
            self.seconds + other.seconds,
            self.count + other.count,
            self.nbytes + other.nbytes,
            self.cpu_seconds + other.cpu_seconds,
            max(self.threads, other.threads),
        )


NOTHING = Total(0.0, 0, 0)


def limit_of(stages: Mapping[str, Total]) -> str | None:
    """The stage that kept its threads busy longest, among those that make the caller wait; None without any.

    A pass that mostly waits for its weights waits for the disk or, where they took longer, for copies to the device.
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
    """Of both kinds together: they share a link, so their times add up."""
    first, second = (stages.get(stage, NOTHING) for stage in COPIES)
    return first.plus(second)
