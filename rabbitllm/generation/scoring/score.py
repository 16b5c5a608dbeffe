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
from rabbitllm.errors import BatchError, MissingPackageError, RabbitLLMError, ScoringError
from rabbitllm.generation.joint_pass import JointPasses, MeetingPoint, Member, MemberCall, RowKind, call_of, called
from rabbitllm.generation.packed_batch import NotPackable, can_be_packed, grouped, shares_keys
from rabbitllm.generation.request import ModelLimits
from rabbitllm.generation.scoring.activation_offload import ActivationOffload, NoRoom, tensors_in
from rabbitllm.generation.scoring.forward import Keep, Relay, ScoringForward
from rabbitllm.generation.scoring.micro_batches import MicroBatch, TextLayout
from rabbitllm.generation.scoring.plan import ScoringLimits, ScoringPlan, check_scores, form_of, limits_of, planned
from rabbitllm.generation.scoring.tasks import Room, Scored, ScoredText, Task, problem_of, tasks_of

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)

ROOM = Room()
REMEDY = "If memory is short, give fewer tokens to a micro-batch, or load the model with less of it in memory."
"""Advice after an unexpected error while a text is scored."""
_BY_THEMSELVES = (Tier.ROWS, *READY)
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
        raise MissingPackageError(
            "Scoring needs the package greenlet, which is not installed.", "Run pip install greenlet."
        )
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
        turns = TakingTurns(model, offload, exact=exact, alone=len(batches) == 1, experts_rows=limits.experts_rows)

        def work_of(number: int, batch: MicroBatch) -> Callable[[], None]:
            def work() -> None:
                ids = forward.ids(batch)
                turns.come_in((), {"input_ids": ids})
                with model.streamer.memory_explained():
                    found[number] = forward(batch, ids, indices, relays[number], relays[number + 1])

            return work

        try:
            with forward.installed():
                members = [turns.add(work_of(number, batch)) for number, batch in enumerate(batches)]
                turns.run(members)
        finally:
            turns.close()
    failed = []
    for number, (batch, member) in enumerate(zip(batches, members, strict=True)):
        if number in found:
            continue
        error = member.error
        if not isinstance(error, Exception):
            raise error or ScoringError("A micro-batch has ended without a result.")
        if isinstance(error, OSError | RabbitLLMError) and not isinstance(error, ScoringError | OutOfDeviceMemory):
            raise error
        failed.append((batch, error))
    return [one for number in sorted(found) for one in found[number]], failed


class TakingTurns(JointPasses):
    """Lets micro-batches take turns at the units of a model.

    Args:
        model: a streamed model.
        offload: offloads the tensors of members that wait.
        exact: compute experts too for each micro-batch by itself.
        alone: whether there is only one micro-batch, for which nothing is offloaded.
        experts_rows: maximum rows that go through a layer's experts together, unless one member has more.
    """

    def __init__(
        self, model: StreamedModel, offload: ActivationOffload, *, exact: bool, alone: bool, experts_rows: int
    ) -> None:
        self._offload = offload
        self._alone = alone
        self._experts_rows = experts_rows
        self._embeddings: dict[Member, list[torch.Tensor]] = {}
        self._pooled = {id(source.module) for pool in model.streamer.pools.values() for source in pool.sources}
        placed = {id(model.get_submodule(placed.unit)): placed for placed in model.placement.units}
        embedding = placed.get(id(model.get_input_embeddings()))
        self._brings_rows = embedding is not None and embedding.tier in _BY_THEMSELVES
        executors = model.streamer.executors
        self._boundaries = (
            {key: executors[one.device].boundary for key, one in placed.items()} if len(executors) > 1 else {}
        )
        super().__init__(model, exact=exact, packing=False)

    def _kind(self, module: nn.Module) -> RowKind | None:
        if id(module) in self._pooled:
            return RowKind.EXPERTS
        return super()._kind(module) if module is self._model.get_input_embeddings() else None

    def _go_on(self, member: Member, answer: Any) -> None:
        self._offload.take(member)
        point = None if member.waits is None else member.waits.point
        if point is not None and point.rowwise is RowKind.IDS:
            self._embeddings[member] = tensors_in([answer])
        super()._go_on(member, answer)
        if member.dead:
            self._drop(member)
        elif not self._alone:
            call = call_of(member)
            try:
                self._offload.leave(member, [*tensors_in([call.args, call.kwargs]), *self._embeddings.get(member, ())])
            except Exception as error:  # no room to offload it
                self._end(member, error)

    def _end(self, member: Member, error: BaseException) -> None:
        super()._end(member, error)
        self._drop(member)

    def _drop(self, member: Member) -> None:
        self._offload.over(member)
        self._embeddings.pop(member, None)

    def _through_as_rows(self, point: MeetingPoint, members: Sequence[Member]) -> None:
        if point.rowwise is RowKind.IDS and self._brings_rows:
            for member in members:
                call = call_of(member)
                try:
                    answer = called(point.module, *call.args, **call.kwargs)
                except Exception as error:
                    self._end(member, error)
                else:
                    self._go_on(member, answer)
            return
        for group in self._groups(members) if point.rowwise is RowKind.EXPERTS else [members]:
            for member in group:
                self._offload.take(member)
            super()._through_as_rows(point, group)

    def _groups(self, members: Sequence[Member]) -> list[list[Member]]:
        """Groups of members whose rows go through a layer's experts together."""
        given = [call_of(member).args for member in members]
        rows = [len(args[0]) if args else self._experts_rows for args in given]
        return [list(members[group]) for group in grouped(rows, self._experts_rows)]

    def _through_a_unit(self, point: MeetingPoint, members: Sequence[Member]) -> None:
        """Run a unit's hooks once, and between them every member's calls, until all have left it.

        The hooks get no inputs, since most of them are offloaded: the boundary between devices is run for each member.
        """
        module = point.module
        boundary = self._boundaries.get(id(module))

        def all_of_them(*args: Any, **kwargs: Any) -> None:
            for member, following in zip(members, [*members[1:], members[0]], strict=True):
                if following is not member:
                    self._offload.expect(following)
                while member.waits is not None and member.waits.point is point:  # the head, for several slices
                    call = member.waits
                    self._offload.take(member)
                    brought = boundary(module, call.args, call.kwargs) if boundary is not None else None
                    self._go_on(member, call if brought is None else MemberCall(point, *brought))
            while inside := [member for member in members if member.waits_inside(point)]:
                self._meet(inside)

        with point.replaced(all_of_them):
            called(module)
