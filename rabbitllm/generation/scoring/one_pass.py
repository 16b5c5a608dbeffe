"""One pass over the weights with some micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rabbitllm.errors import RabbitLLMError, ScoringError
from rabbitllm.generation.joint_pass import Member
from rabbitllm.generation.scoring.activation_offload import ActivationOffload, keys_of
from rabbitllm.generation.scoring.forward import Keep, ScoringForward
from rabbitllm.generation.scoring.held import held
from rabbitllm.generation.scoring.micro_batches import MicroBatch, TextLayout
from rabbitllm.generation.scoring.plan import ScoringLimits
from rabbitllm.generation.scoring.records import Scored
from rabbitllm.generation.scoring.segment_cache import Relay
from rabbitllm.generation.scoring.turns import TakingTurns

LEAST_BYTES = 1 << 12
"""Smaller tensors are not offloaded; most larger ones are hidden states."""


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a pass.

    Attributes:
        scored: the results.
        failed: micro-batches without results, each with its error.
        written: bytes that were offloaded to the file.
    """

    scored: list[Scored]
    failed: list[tuple[MicroBatch, Exception]]
    written: int


def one_pass(
    model: Any,
    batches: Sequence[MicroBatch],
    form: TextLayout,
    limits: ScoringLimits,
    indices: Sequence[int],
    *,
    exact: bool,
    keep: Keep | None = None,
) -> Done:
    """Take micro-batches through the model together.

    Args:
        model: a streamed model.
        batches: micro-batches that take turns at its units, in this order.
        form: layout of the micro-batches.
        limits: memory and disk limits.
        indices: indices of all texts, see `ScoredText.index`.
        exact: see `Room`.
        keep: see `ScoringForward`.

    Raises:
        OSError, RabbitLLMError: the weights cannot be read.
    """
    forward = ScoringForward(
        model, packed=form is TextLayout.PACKED, whole=exact, logits_bytes=limits.logits_bytes, keep=keep
    )
    found: dict[int, list[Scored]] = {}
    failed: list[tuple[MicroBatch, Exception]] = []
    fixed = keys_of([*model.parameters(), *model.buffers()])
    with ActivationOffload(limits.near, limits.host, limits.disk, limits.folder, fixed) as offload:

        def after(member: Member) -> None:
            if member.dead:
                offload.over(member)
            elif len(batches) > 1:
                call = member.waits
                assert call is not None
                offload.leave(member, held(member.gr_frame, (call.args, call.kwargs), LEAST_BYTES))

        turns = TakingTurns(
            model,
            exact=exact,
            before=offload.take,
            after=after,
            soon=offload.expect,
            experts_rows=limits.experts_rows,
        )
        try:
            with forward.installed():
                relays = [Relay() for _ in range(len(batches) + 1)]
                members = [
                    turns.add(_work(turns, forward, number, batch, indices, found, relays))
                    for number, batch in enumerate(batches)
                ]
                turns.run(members)
        finally:
            turns.close()
        for number, (batch, member) in enumerate(zip(batches, members, strict=True)):
            if number in found:
                continue
            error = member.error
            if not isinstance(error, Exception):
                raise error or ScoringError("A micro-batch has ended without a result.")
            if isinstance(error, OSError | RabbitLLMError) and not isinstance(error, ScoringError):
                raise error
            failed.append((batch, error))
        return Done([one for number in sorted(found) for one in found[number]], failed, offload.written)


def _work(
    turns: TakingTurns,
    forward: ScoringForward,
    number: int,
    batch: MicroBatch,
    indices: Sequence[int],
    found: dict[int, list[Scored]],
    relays: Sequence[Relay],
) -> Any:
    def work() -> None:
        ids = forward.ids(batch)
        turns.come_in((), {"input_ids": ids})
        found[number] = forward(batch, ids, indices, relays[number], relays[number + 1])

    return work
