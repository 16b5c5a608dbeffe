"""Stages of work, passes over all layers, and their totals. Independent of clocks, threads and models.

Prefill and decode have little in common, so their passes are summed separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median

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
PLAN = "plan"
LOAD = "load"
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
BETWEEN_LAYERS = "between layers"
"""The rest of the caller's time in a pass."""


def shown(stage: str) -> str:
    """A stage as reports spell it; programs depend on the other spelling."""
    return stage.replace("quantise", "quantize")


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
    slowest = max(blocking, key=lambda stage: stages[stage].busy_seconds)
    copied, read = copies_of(stages), stages.get(READ, NOTHING)
    return UPLOAD if slowest == READ_WAIT and copied.busy_seconds > read.busy_seconds else slowest


def copies_of(stages: Mapping[str, Total]) -> Total:
    """The sum of both kinds: they share a link, so their times add up."""
    first, second = (stages.get(stage, NOTHING) for stage in COPIES)
    return first.plus(second)


PROMPT = "prompt"
FURTHER = "further"
KINDS = (PROMPT, FURTHER)


@dataclass(frozen=True, slots=True)
class PassInput:
    """The input of a pass.

    Attributes:
        batch: number of sequences.
        length: input positions per sequence.
        past: positions already in the KV cache; None without a cache, or with one that does not report it.
        logits: positions whose logits are requested; None if unknown.
    """

    batch: int
    length: int
    past: int | None = None
    logits: int | None = None

    @property
    def kind(self) -> str:
        """`PROMPT` for prefill: the first pass of a sequence, or one without all logits; else `FURTHER` (decode)."""
        if self.past is None:
            return PROMPT if self.length > 1 and self.logits != self.length else FURTHER
        return PROMPT if self.past == 0 or (self.logits is not None and self.logits < self.length) else FURTHER

    def made(self, then: PassInput) -> int | None:
        """Tokens that a pass made, by the length of the cache when the next pass (`then`) begins; None if unknown.

        Of candidates (prompt lookup, an assistant) the cache keeps the correct ones, and one token more than these was
        made. A pass whose next one still belongs to the prompt made none.
        """
        if self.past is None or then.past is None or then.past < self.past:
            return None
        if self.kind == FURTHER:
            return (then.past - self.past) * self.batch
        if then.kind == PROMPT:
            return 0
        candidates = (self.logits or 1) - 1
        kept = then.past - self.past - (self.length - candidates)
        return (kept + 1) * self.batch if kept >= 0 else None


class _StageSum:
    """The figures that follow from stages and their wall time, of one pass or of several."""

    __slots__ = ()
    stages: Mapping[str, Total]
    wall: float

    @property
    def disk_bytes(self) -> int:
        """Bytes read from disk."""
        return self.stages.get(READ, NOTHING).nbytes

    @property
    def copied_bytes(self) -> int:
        """Bytes copied from host memory to a device."""
        return copies_of(self.stages).nbytes

    @property
    def overlap(self) -> float:
        """max(moving weights, computing) / wall: 1 if the shorter of both is completely hidden.

        Moving is the longer of reading and copying, which overlap too; computing includes dequantizing.
        """
        moving = max(self.stages.get(READ, NOTHING).busy_seconds, copies_of(self.stages).busy_seconds)
        computing = sum(self.stages.get(stage, NOTHING).busy_seconds for stage in (COMPUTE, DEQUANTIZE))
        return max(moving, computing) / self.wall if self.wall > 0 else 0.0

    @property
    def bottleneck(self) -> str | None:
        """See `limit_of`."""
        return limit_of(self.stages)


@dataclass(frozen=True, slots=True)
class Pass(_StageSum):
    """One forward pass of a model.

    Attributes:
        number: counted from 1.
        start: its start, in seconds of `time.perf_counter`.
        wall: duration in seconds.
        entry: its input.
        made: tokens made, over the whole batch; None if unknown.
        stages: totals since the end of the previous pass, including prefetch for the next one.
    """

    number: int
    start: float
    wall: float
    entry: PassInput
    made: int | None
    stages: Mapping[str, Total]

    @property
    def kind(self) -> str:
        """`PROMPT` or `FURTHER`."""
        return self.entry.kind

    @property
    def tokens(self) -> int:
        """Input tokens: batch times length."""
        return self.entry.batch * self.entry.length


@dataclass(frozen=True, slots=True)
class PassSums(_StageSum):
    """Sums of passes of one kind.

    Attributes:
        passes: number of passes.
        wall: seconds of all passes.
        tokens: input tokens.
        made: tokens made by the `made_passes` passes for which they are known.
        stages: totals by stage.
    """

    passes: int = 0
    wall: float = 0.0
    tokens: int = 0
    made: int = 0
    made_passes: int = 0
    stages: Mapping[str, Total] = field(default_factory=dict)

    def plus(self, step: Pass) -> PassSums:
        """The sums with one pass added."""
        return PassSums(
            self.passes + 1,
            self.wall + step.wall,
            self.tokens + step.tokens,
            self.made + (step.made or 0),
            self.made_passes + (step.made is not None),
            {
                stage: self.stages.get(stage, NOTHING).plus(step.stages.get(stage, NOTHING))
                for stage in {**self.stages, **step.stages}
            },
        )

    @property
    def caller_seconds(self) -> dict[str, float]:
        """Stage of the caller that occurred -> mean seconds of it in a pass; the last one is `BETWEEN_LAYERS`."""
        totals = {stage: self.stages.get(stage, NOTHING) for stage in CALLER_STAGES}
        spent = {stage: total.busy_seconds / self.passes for stage, total in totals.items() if total.count}
        return {**spent, BETWEEN_LAYERS: max(self.wall / self.passes - sum(spent.values()), 0.0)}

    @property
    def made_per_pass(self) -> float | None:
        """Mean number of tokens made by a pass; None if known for none."""
        return self.made / self.made_passes if self.made_passes else None


def sums_of(passes: Iterable[Pass], before: Mapping[str, PassSums]) -> dict[str, PassSums]:
    """Kind -> sums of these passes added to earlier sums; kinds without passes are left out."""
    sums = {kind: before.get(kind, PassSums()) for kind in KINDS}
    for step in passes:
        sums[step.kind] = sums[step.kind].plus(step)
    return {kind: total for kind, total in sums.items() if total.passes}


def median_of(passes: Iterable[Pass], kind: str) -> float:
    """Median wall time of the passes of a kind, in seconds; 0 without any."""
    walls = [step.wall for step in passes if step.kind == kind]
    return median(walls) if walls else 0.0


def median_pass(passes: Iterable[Pass]) -> Pass | None:
    """The pass with the wall time nearest to the median, of decode passes if there are any; None without passes."""
    steps = list(passes)
    candidates = [step for step in steps if step.kind == FURTHER] or steps
    if not candidates:
        return None
    middle = median(step.wall for step in candidates)
    return min(candidates, key=lambda step: abs(step.wall - middle))


_DEPTHS = 4
"""How many depths of drafts are shown."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """What drafts brought.

    Attributes:
        passes: number of passes, with drafts or without.
        tokens: tokens of the answer, which these passes brought.
        checked: by depth, number of drafted tokens that passes checked, those before them being right.
        right: by depth, how many of them were right.
        seconds: time in which tokens were drafted.
        whole: time of all.
        name: what proposed; "none" if nothing could.
    """

    passes: int = 0
    tokens: int = 0
    checked: tuple[int, ...] = ()
    right: tuple[int, ...] = ()
    seconds: float = 0.0
    whole: float = 0.0
    name: str = "none"

    def plus(self, other: Drafts) -> Drafts:
        """The sum of both."""

        def sums(ours: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(map(sum, zip_longest(ours, theirs, fillvalue=0)))

        return Drafts(
            self.passes + other.passes,
            self.tokens + other.tokens,
            sums(self.checked, other.checked),
            sums(self.right, other.right),
            self.seconds + other.seconds,
            self.whole + other.whole,
            other.name if other.passes else self.name,
        )

    @property
    def tokens_per_pass(self) -> float:
        """Tokens that the mean pass brought."""
        return self.tokens / max(self.passes, 1)

    @property
    def by_depth(self) -> list[float]:
        """The share of right tokens at each depth."""
        return [right / count for right, count in zip(self.right, self.checked, strict=True) if count]

    @property
    def share(self) -> float:
        """The share of time in drafts."""
        return self.seconds / max(self.whole, 1e-9)

    def words(self) -> str:
        """In a line: tokens a pass, what proposed, the right ones by depth, and the share of time in drafts."""
        tokens, time = f"{self.tokens_per_pass:.1f} tokens a pass", f"{self.share:.0%} of the time"
        if not (shares := [f"{share:.0%}" for share in self.by_depth]):
            return f"{tokens}: {self.name} proposed no token, in {time}"
        more = " …" if len(shares) > _DEPTHS else ""
        return f"{tokens} by {self.name}, right {' '.join(shares[:_DEPTHS])}{more} by depth, {time}"
