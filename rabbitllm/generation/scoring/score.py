"""Scores texts in shared passes, in a single one if there is room.

    texts ── rejected: at once
          └─ tasks ── micro-batches ── passes ── results after each
                          ↑ texts of a failed micro-batch, one by one

In a pass micro-batches go through each unit one after the other, while its weights are resident. Unlike the
generations of a batch they meet nowhere else, so that only one of them is computed at a time. Streamed experts are the
exception: they compute the rows of several together, else each micro-batch would load them again.

    unit 1: A B C D   unit 2: A B C D   …   head: A B C D
            between its turns the tensors of a micro-batch may be offloaded (`activation_offload.py`)
"""

from __future__ import annotations

import importlib.util
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rabbitllm.engine.devices import OutOfDeviceMemory
from rabbitllm.engine.placement import READY, Tier
from rabbitllm.errors import BatchError, RabbitLLMError, ScoringError, missing_package
from rabbitllm.generation.coroutines import Coroutine, Coroutines, PendingCall, RowKind, SyncPoint, called, rowwise
from rabbitllm.generation.packed_batch import NotPackable, can_be_packed, grouped, shares_keys
from rabbitllm.generation.request import ModelLimits
from rabbitllm.generation.scoring.activation_offload import ActivationOffload, NoRoom, tensors_in
from rabbitllm.generation.scoring.forward import Keep, Relay, ScoringForward
from rabbitllm.generation.scoring.micro_batches import MicroBatch, TextLayout
from rabbitllm.generation.scoring.plan import ScoringLimits, ScoringPlan, check_scores, form_of, limits_of, planned
from rabbitllm.generation.scoring.tasks import Room, Scored, ScoredText, Task, problem_of, tasks_of
from rabbitllm.telemetry.passes import PassInput

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)

ROOM = Room()
REMEDY = "If memory is short, give fewer tokens to a micro-batch, or load the model with less of it in memory."
"""Advice after an unexpected error while a text is scored."""
_WITHOUT_LOADING = (Tier.ROWS, *READY)
"""Tiers of an input embedding for which a call loads nothing that the next call needs too."""


def score(
    model: StreamedModel,
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
        OSError, RabbitLLMError: the weights cannot be read, there is no room for waiting micro-batches, or a value in
            the model is beyond the range of float16.
    """
    if importlib.util.find_spec("greenlet") is None:
        raise missing_package("Scoring needs", "greenlet", "batch")
    check_scores(model)
    limits, has_head = ModelLimits.of(model), model.get_output_embeddings() is not None
    if model.shared_passes is not None:
        raise BatchError("The model is busy with other requests.", "Score when these are finished.")
    sound = []
    for number, text in enumerate(texts):
        problem = problem_of(text, limits, has_head=has_head, truncate=room.truncate)
        if problem is None:
            sound.append(number)
        else:
            yield Scored(text.index, tokens=len(text.continuation), error=problem)
    indices = [text.index for text in texts]
    tasks = tasks_of(texts, sound, limits.context, shared=not room.exact)
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
            space = limits_of(model, room)
            forward = ScoringForward(
                model, packed=form is TextLayout.PACKED, whole=room.exact, logits_bytes=space.logits_bytes, keep=keep
            )
            found, failed = _pass(model, forward, batches, space, indices, exact=room.exact)
            yield from found
            for batch, error in failed:
                then = _then(form, batch, error, some_passed=bool(found))
                if then is None:
                    yield from _refused(batch, indices, error)
                else:
                    again.setdefault(then, []).extend(batch.tasks)
        waiting += [(tasks, form) for form, tasks in again.items()]


def _then(form: TextLayout, batch: MicroBatch, error: Exception, *, some_passed: bool) -> TextLayout | None:
    """The layout in which the texts of a failed micro-batch are retried; None if they are not retried."""
    if isinstance(error, NotPackable):
        logger.warning("Texts do not share their prefixes: %s.", error)
        return TextLayout.EQUAL
    if isinstance(error, NoRoom) and some_passed:
        logger.warning("Another pass computes the texts that did not fit in memory: %s.", error)
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


def _pass(
    model: StreamedModel,
    forward: ScoringForward,
    batches: Sequence[MicroBatch],
    limits: ScoringLimits,
    indices: Sequence[int],
    *,
    exact: bool,
) -> tuple[list[Scored], list[tuple[MicroBatch, Exception]]]:
    """Take micro-batches through the model in one pass over its weights.

    Returns:
        The results, and the micro-batches without results, each with its error.

    Raises:
        OSError, RabbitLLMError: the weights cannot be read.
    """
    found: dict[int, list[Scored]] = {}
    relays = [Relay() for _ in range(len(batches) + 1)]
    fixed = frozenset(one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers()))
    with ActivationOffload(limits.near, limits.host, limits.disk, limits.folder, fixed=fixed) as offload:
        runner = MicroBatchRunner(
            model, offload, exact=exact, alone=len(batches) == 1, experts_rows=limits.experts_rows
        )

        def work_of(number: int, batch: MicroBatch) -> Callable[[], None]:
            def work() -> None:
                ids = forward.ids(batch)
                runner.coroutines.wait_for_pass((), {"input_ids": ids})
                with model.streamer.memory_explained():
                    found[number] = forward(batch, ids, indices, relays[number], relays[number + 1])

            return work

        try:
            with forward.installed():
                works = (work_of(number, batch) for number, batch in enumerate(batches))
                coroutines = [runner.coroutines.add(work) for work in works]
                runner.run(coroutines)
        finally:
            runner.coroutines.close()
    failed = []
    for number, (batch, coroutine) in enumerate(zip(batches, coroutines, strict=True)):
        if number in found:
            continue
        error = coroutine.error
        if not isinstance(error, Exception):
            raise error or ScoringError("A micro-batch returned no result.")
        if isinstance(error, OSError | RabbitLLMError) and not isinstance(error, ScoringError | OutOfDeviceMemory):
            raise error
        failed.append((batch, error))
    return [one for number in sorted(found) for one in found[number]], failed


class MicroBatchRunner:
    """Runs a pass of micro-batches, which take turns at the units of a model.

    Args:
        model: a streamed model.
        offload: offloads the tensors of micro-batches that wait.
        exact: compute experts too for each micro-batch by itself.
        alone: whether there is only one micro-batch, for which nothing is offloaded.
        experts_rows: maximum rows that go through a layer's experts together, unless one micro-batch has more.

    Attributes:
        coroutines: the coroutines, each of which computes a micro-batch.
    """

    def __init__(
        self, model: StreamedModel, offload: ActivationOffload, *, exact: bool, alone: bool, experts_rows: int
    ) -> None:
        self._model = model
        self._offload = offload
        self._alone = alone
        self._experts_rows = experts_rows
        self._embeddings: dict[Coroutine, list[torch.Tensor]] = {}
        self._pooled = {id(source.module) for pool in model.streamer.pools.values() for source in pool.sources}
        placed = {id(model.get_submodule(placed.unit)): placed for placed in model.placement.units}
        embedding = placed.get(id(model.get_input_embeddings()))
        self._looks_up_alone = embedding is not None and embedding.tier in _WITHOUT_LOADING
        executors = model.streamer.executors
        self._boundaries = (
            {key: executors[one.device].boundary for key, one in placed.items()} if len(executors) > 1 else {}
        )
        self.coroutines = Coroutines(
            model, self._kind_of, self._compute, self._before_resuming, self._after_running, exact=exact
        )

    def run(self, coroutines: Sequence[Coroutine]) -> None:
        """Run the pass; afterwards each of the coroutines has ended."""
        with self._model.joint_pass(PassInput(1, sum(coroutine.tokens for coroutine in coroutines))):
            self.coroutines.run(coroutines)

    def _kind_of(self, module: nn.Module) -> RowKind | None:
        if id(module) in self._pooled:
            return RowKind.EXPERTS
        if module is not self._model.get_input_embeddings():
            return None
        return RowKind.IDS if isinstance(module, nn.Embedding) else rowwise(module)

    def _before_resuming(self, coroutine: Coroutine, answer: Any) -> None:
        self._offload.take(coroutine)
        point = None if coroutine.call is None else coroutine.call.point
        if point is not None and point.kind is RowKind.IDS:
            self._embeddings[coroutine] = tensors_in([answer])

    def _after_running(self, coroutine: Coroutine) -> None:
        if coroutine.dead:
            self._offload.drop(coroutine)
            self._embeddings.pop(coroutine, None)
        elif not self._alone:
            call = coroutine.pending
            tensors = [*tensors_in([call.args, call.kwargs]), *self._embeddings.get(coroutine, ())]
            try:
                self._offload.leave(coroutine, tensors)
            except Exception as error:  # no room to offload it
                self.coroutines.throw(coroutine, error)

    def _compute(self, point: SyncPoint, waiting: Sequence[Coroutine]) -> None:
        if point.kind is RowKind.IDS and self._looks_up_alone:
            for coroutine in waiting:
                call = coroutine.pending
                try:
                    answer = called(point.module, *call.args, **call.kwargs)
                except Exception as error:
                    self.coroutines.throw(coroutine, error)
                else:
                    self.coroutines.resume(coroutine, answer)
            return
        if point.kind is None:
            self._take_turns(point, waiting)
            return
        for group in self._groups(waiting) if point.kind is RowKind.EXPERTS else [waiting]:
            for coroutine in group:
                self._offload.take(coroutine)
            if self.coroutines.compute_rows(point, group):
                continue
            if point.is_unit:
                self._take_turns(point, group)
            else:
                for coroutine in group:
                    self.coroutines.resume(coroutine, coroutine.pending)

    def _groups(self, waiting: Sequence[Coroutine]) -> list[Sequence[Coroutine]]:
        """Groups of coroutines whose rows go through a layer's experts together."""
        given = [coroutine.pending.args for coroutine in waiting]
        rows = [len(args[0]) if args else self._experts_rows for args in given]
        return [waiting[group] for group in grouped(rows, self._experts_rows)]

    def _take_turns(self, point: SyncPoint, waiting: Sequence[Coroutine]) -> None:
        """Run a unit's hooks once, and between them every coroutine's calls, until all have left it.

        The hooks get no inputs, since most of them are offloaded: the boundary between devices is run for each
        coroutine.
        """
        module = point.module
        boundary = self._boundaries.get(id(module))

        def forward(*args: Any, **kwargs: Any) -> None:
            for coroutine, following in zip(waiting, [*waiting[1:], waiting[0]], strict=True):
                if following is not coroutine:
                    self._offload.prefetch(following)
                while coroutine.call is not None and coroutine.call.point is point:  # the head, for several slices
                    call = coroutine.call
                    self._offload.take(coroutine)
                    moved = boundary(module, call.args, call.kwargs) if boundary is not None else None
                    self.coroutines.resume(coroutine, call if moved is None else PendingCall(point, *moved))
            self.coroutines.leave(point, waiting)

        with point.replaced(forward):
            called(module)
