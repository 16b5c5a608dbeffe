"""The work of answers: passes, tokens and bytes from each tier, as the difference of two states of a profiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rabbitllm.telemetry.passes import PassSums
from rabbitllm.telemetry.totals import EXPERT_TIERS, NOTHING, PINNED_UPLOAD, READ, UPLOAD

PLACES: Mapping[str, str] = {
    READ: "from the disk",
    UPLOAD: "of that copied to the device",
    PINNED_UPLOAD: "from page-locked RAM to the device",
}
"""Stage -> source of its bytes, in words."""


@dataclass(frozen=True, slots=True)
class AnswerWork:
    """The work of an answer.

    Attributes:
        passes: number of passes over all layers.
        tokens: number of tokens in those passes.
        moved: stage -> bytes moved.
        experts: stage -> number of experts found there.
    """

    passes: int = 0
    tokens: int = 0
    moved: Mapping[str, int] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)

    def plus(self, other: AnswerWork) -> AnswerWork:
        """The sum of both."""
        return AnswerWork(
            self.passes + other.passes,
            self.tokens + other.tokens,
            _sum(self.moved, other.moved),
            _sum(self.experts, other.experts),
        )


def work_between(before: Mapping[str, PassSums], after: Mapping[str, PassSums]) -> AnswerWork:
    """The work between two states of a profiler.

    Args:
        before, after: kind of pass -> sums, as in `Profiler.sums`.
    """
    found = AnswerWork()
    for kind, total in after.items():
        earlier = before.get(kind, PassSums())
        since = {
            stage: (spent.nbytes - then.nbytes, spent.count - then.count)
            for stage, spent in total.stages.items()
            for then in (earlier.stages.get(stage, NOTHING),)
        }
        found = found.plus(
            AnswerWork(
                total.passes - earlier.passes,
                total.tokens - earlier.tokens,
                {stage: nbytes for stage, (nbytes, _) in since.items() if stage in PLACES and nbytes},
                {stage: count for stage, (_, count) in since.items() if stage in EXPERT_TIERS and count},
            )
        )
    return found


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}
