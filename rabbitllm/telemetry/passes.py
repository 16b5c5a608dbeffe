"""One walk over all layers as a record, and many of them as sums. Knows no clocks and no models.

Prefill and decode have little in common, so their passes are summed separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from rabbitllm.telemetry.totals import COMPUTE, DEQUANTIZE, NOTHING, READ, Total, copies_of, limit_of

PROMPT = "prompt"
FURTHER = "further"
KINDS = (PROMPT, FURTHER)


@dataclass(frozen=True, slots=True)
class PassInput:
    """What goes into a pass.

    Attributes:
        batch: sequences.
        length: positions of each that go in.
        past: positions that the KV cache has already; None without a cache, or with one that does not tell.
        asked: positions whose logits are asked for; None if that was not said.
    """

    batch: int
    length: int
    past: int | None = None
    asked: int | None = None

    @property
    def kind(self) -> str:
        """`PROMPT` for prefill: the first pass of a sequence, or one without all logits; else `FURTHER` (decode)."""
        if self.past is None:
            return PROMPT if self.length > 1 else FURTHER
        return PROMPT if self.past == 0 or (self.asked is not None and self.asked < self.length) else FURTHER

    def made(self, then: PassInput) -> int | None:
        """Tokens that a pass made, by what the cache holds when the next one (`then`) begins; None if unknown.

        Of candidates (prompt lookup, an assistant) the cache keeps those that were right, and one token more than
        these was made. A pass of which the next one is still prompt made none.
        """
        if self.past is None or then.past is None or then.past <= self.past:
            return None
        if self.kind == FURTHER:
            return (then.past - self.past) * self.batch
        if then.kind == PROMPT:
            return 0
        candidates = (self.asked or 1) - 1
        kept = then.past - self.past - (self.length - candidates)
        return (kept + 1) * self.batch if kept >= 0 else None


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward of a model.

    Attributes:
        number: counted from 1.
        start: when it began, in seconds of `time.perf_counter`.
        wall: seconds.
        entry: what went in.
        made: tokens that came of it, over the whole batch, as far as that is known.
        stages: what each stage took since the pass before ended; reading ahead for the next one is in it.
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
        """That went in: batch times length."""
        return self.entry.batch * self.entry.length

    @property
    def overlap(self) -> float:
        """See `overlap_of`."""
        return overlap_of(self.stages, self.wall)

    @property
    def bottleneck(self) -> str | None:
        """See `limit_of`."""
        return limit_of(self.stages)


@dataclass(frozen=True, slots=True)
class PassSums:
    """Passes of one kind together.

    Attributes:
        passes: how many.
        wall: seconds, of all.
        tokens: that went in.
        made: tokens that came of those of which it is known; `made_passes` of them.
        stages: what each took.
    """

    passes: int = 0
    wall: float = 0.0
    tokens: int = 0
    made: int = 0
    made_passes: int = 0
    stages: Mapping[str, Total] = field(default_factory=dict)

    def plus(self, one: Pass) -> PassSums:
        """With one more."""
        return PassSums(
            self.passes + 1,
            self.wall + one.wall,
            self.tokens + one.tokens,
            self.made + (one.made or 0),
            self.made_passes + (one.made is not None),
            {
                stage: self.stages.get(stage, NOTHING).plus(one.stages.get(stage, NOTHING))
                for stage in {**self.stages, **one.stages}
            },
        )

    @property
    def made_per_pass(self) -> float | None:
        """Mean of tokens that came of a pass; None if that is known of none."""
        return self.made / self.made_passes if self.made_passes else None

    @property
    def disk_bytes(self) -> int:
        """Read from the disk."""
        return self.stages.get(READ, NOTHING).nbytes

    @property
    def copied_bytes(self) -> int:
        """Copied from host memory to a device."""
        return copies_of(self.stages).nbytes

    @property
    def overlap(self) -> float:
        """See `overlap_of`."""
        return overlap_of(self.stages, self.wall)

    @property
    def bottleneck(self) -> str | None:
        """See `limit_of`."""
        return limit_of(self.stages)


def sums_of(passes: Iterable[Pass], before: Mapping[str, PassSums]) -> dict[str, PassSums]:
    """Kind -> sums of these passes and of those that were summed before; kinds without any are left out."""
    sums = {kind: before.get(kind, PassSums()) for kind in KINDS}
    for one in passes:
        sums[one.kind] = sums[one.kind].plus(one)
    return {kind: total for kind, total in sums.items() if total.passes}


def median_of(passes: Iterable[Pass], kind: str) -> float:
    """Median wall time of the passes of a kind, seconds; 0 without any."""
    found = [one.wall for one in passes if one.kind == kind]
    return median(found) if found else 0.0


def median_pass(passes: Iterable[Pass]) -> Pass | None:
    """The one whose wall time is nearest to the median, of further tokens if there are any; None without passes."""
    known = list(passes)
    chosen = [one for one in known if one.kind == FURTHER] or known
    if not chosen:
        return None
    middle = median(one.wall for one in chosen)
    return min(chosen, key=lambda one: abs(one.wall - middle))


def overlap_of(stages: Mapping[str, Total], wall: float) -> float:
    """max(moving weights, computing) / wall: 1 where the shorter of both is hidden altogether.

    Moving is the longer of reading and copying, which overlap too; computing is dequantizing and computing.
    """
    moving = max(stages.get(READ, NOTHING).busy_seconds, copies_of(stages).busy_seconds)
    computing = stages.get(COMPUTE, NOTHING).busy_seconds + stages.get(DEQUANTIZE, NOTHING).busy_seconds
    return max(moving, computing) / wall if wall > 0 else 0.0
