"""Scores texts in shared passes, in a single one if there is room.

texts ── rejected: at once
      └─ tasks ── micro-batches ── passes ── results after each
                      ↑ texts of a failed micro-batch, one by one
"""

from __future__ import annotations

import importlib.util
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rabbitllm.errors import BatchError, MissingPackageError, RabbitLLMError, ScoringError
from rabbitllm.generation.packed_batch import NotPackable, can_be_packed, shares_keys
from rabbitllm.generation.scoring.activation_offload import NoRoom
from rabbitllm.generation.scoring.forward import Keep
from rabbitllm.generation.scoring.micro_batches import MicroBatch, TextLayout
from rabbitllm.generation.scoring.one_pass import one_pass
from rabbitllm.generation.scoring.plan import ScoringPlan, ability_of, form_of, limits_of, planned
from rabbitllm.generation.scoring.records import Room, Scored, ScoredText
from rabbitllm.generation.scoring.tasks import Task, problem_of, tasks_of

logger = logging.getLogger(__name__)

ROOM = Room()
REMEDY = "If memory is short, give fewer tokens to a micro-batch, or load the model with less of it in memory."
"""Advice after an unexpected error while a text is scored."""


def score(
    model: Any,
    texts: Sequence[ScoredText],
    room: Room = ROOM,
    *,
    on_plan: Callable[[ScoringPlan], None] = lambda plan: None,
    keep: Keep | None = None,
) -> Iterator[Scored]:
    """Yield the results of texts, in any order: rejected texts at once, the others after their pass.

    Computes in the caller's thread while it waits for the next result. The model must not be used otherwise until the
    last result.

    Args:
        model: a causal model as `AutoModel.from_pretrained` returns it.
        texts: any number of texts.
        room: limits and options.
        on_plan: called with the plan before the passes, and again before failed texts are retried.
        keep: called with the hidden states that predict each continuation, in place of computing probabilities.

    Raises:
        OptionError: the model cannot score, or `room` is invalid.
        MissingPackageError: greenlet is not installed.
        BatchError: the model is answering requests.
        OSError, RabbitLLMError: the weights cannot be read, or there is no room for waiting micro-batches.
    """
    if importlib.util.find_spec("greenlet") is None:
        raise MissingPackageError("Scoring needs the package greenlet, which is not installed.", "pip install greenlet")
    ability = ability_of(model)
    if model.shared_passes is not None:
        raise BatchError("The model answers other requests at the moment.", "Score when these are done.")
    sound = []
    for number, text in enumerate(texts):
        problem = problem_of(text, ability, truncate=room.truncate)
        if problem is None:
            sound.append(number)
        else:
            yield Scored(text.index, tokens=len(text.continuation), error=problem)
    indices = [text.index for text in texts]
    tasks = tasks_of(texts, sound, ability.context, shared=not room.exact)
    hands_on = not (can_be_packed(model) and shares_keys(model))  # a layer's KV cache exists during its turn only
    waiting = deque([(tasks, form_of(model, exact=room.exact))] if tasks else [])
    while waiting:
        tasks, form = waiting.popleft()
        streams = not model.placement.is_resident
        plan = planned(tasks, form, limits_of(model, room), streamed=streams, hands_on=hands_on)
        logger.info("scoring %s", plan)
        on_plan(plan)
        again: dict[TextLayout, list[Task]] = {}
        for batches in plan.passes:
            done = one_pass(model, batches, form, limits_of(model, room), indices, exact=room.exact, keep=keep)
            yield from done.scored
            for batch, error in done.failed:
                then = _then(form, batch, error, some_passed=bool(done.scored))
                if then is None:
                    yield from _refused(batch, indices, error)
                else:
                    again.setdefault(then, []).extend(batch.tasks)
        waiting += [(tasks, form) for form, tasks in again.items()]


def _then(form: TextLayout, batch: MicroBatch, error: Exception, *, some_passed: bool) -> TextLayout | None:
    """The layout in which the texts of a failed micro-batch are retried; None if they are not retried."""
    if isinstance(error, NotPackable):
        logger.warning("Texts do not share what they begin with: %s.", error)
        return TextLayout.EQUAL
    if isinstance(error, NoRoom) and some_passed:
        logger.warning("A further pass is made for what had no room: %s.", error)
        return form
    logger.warning("A micro-batch has failed.", exc_info=error)
    return TextLayout.ALONE if len(batch.tasks) > 1 else None


def _refused(batch: MicroBatch, indices: Sequence[int], error: Exception) -> Iterator[Scored]:
    shown = (
        error
        if isinstance(error, RabbitLLMError)
        else ScoringError(f"The text could not be scored: {type(error).__name__}: {error}", REMEDY)
    )
    for one in batch.tasks[0].asked:
        yield Scored(indices[one.number], tokens=len(one.targets), error=shown)
