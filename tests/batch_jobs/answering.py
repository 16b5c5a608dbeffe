"""Items, answered by one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rabbitllm.batch_jobs.answers import answered
from rabbitllm.batch_jobs.inputs import ordered
from rabbitllm.batch_jobs.items import BatchAnswer, Item, JobLimits

LIMITS = JobLimits(sequences=4)


def answers(model: Any, items: Sequence[Item], limits: JobLimits = LIMITS, name: str = "model") -> list[BatchAnswer]:
    """The answers in the order of their completion."""
    return [answer for group in answered(model, name, ordered(items), limits) for answer in group]
