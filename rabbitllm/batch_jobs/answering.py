"""Answers to items of all kinds: shared by the command line, the API and the workers of a cluster."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rabbitllm.batch_jobs.asking import refused_line
from rabbitllm.batch_jobs.generation import Watch, generated
from rabbitllm.batch_jobs.items import BatchAnswer, Item, JobLimits, Refused
from rabbitllm.batch_jobs.likelihoods import scored
from rabbitllm.batch_jobs.order import ERRORS, GENERATIONS, kind_of, ordered

LIMITS = JobLimits()


def answers(
    model: Any, items: Sequence[Item], limits: JobLimits = LIMITS, name: str = "model"
) -> Iterator[BatchAnswer]:
    """Answers to items, each as soon as it is complete.

    Args:
        model: a model from `AutoModel.from_pretrained`; nothing else may call it meanwhile.
        items: the items, in any order.
        limits: limits of the batch.
        name: the model's name in answers of OpenAI's form.

    Raises:
        RabbitLLMError, OSError, MemoryError: the run cannot continue; the remaining items have no answer.
        MissingPackageError: a line is in OpenAI's format, and the packages that read those are not installed.
    """
    for group in answered(model, name, ordered(items), limits):
        yield from group


def answered(
    model: Any, name: str, items: Iterable[Item], limits: JobLimits, watch: Watch = lambda facts: None
) -> Generator[list[BatchAnswer]]:
    """Answers, in groups that are complete at the same time.

    Args:
        model, name, limits: see `answers`.
        items: in an efficient order, as `order` makes it; taken from the iterator as there is room.
        watch: called with a function that returns the statistics of the generating batch, from any thread.
    """
    for kind, group in groupby(items, lambda item: kind_of(item.asked)):
        if kind == ERRORS:
            yield from ([_refused(item)] for item in group)
        elif kind == GENERATIONS:
            yield from generated(model, name, group, limits, watch)
        else:
            yield from scored(model, name, group, limits)


def _refused(item: Item) -> BatchAnswer:
    assert isinstance(item.asked, Refused)
    line = refused_line(item, item.asked.message, item.asked.code, as_call=item.asked.as_call)
    return BatchAnswer(item.index, item.key, line, is_error=True)
