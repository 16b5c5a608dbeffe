"""One pass in which micro-batches go through each unit one after the other, while its weights are resident.

Unlike the generations of a batch they meet nowhere else, so that only one of them is computed at a time. Streamed
experts are the exception: they compute the rows of several together, else each micro-batch would load them again.

    unit 1: A B C D   unit 2: A B C D   …   head: A B C D
            between turns the caller may offload the tensors of a micro-batch (`after`) and restore them (`before`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from rabbitllm.engine.placement import READY, Tier
from rabbitllm.generation.joint_pass import Alone, JointPasses, MeetingPoint, Member, RowKind, call_of, called
from rabbitllm.generation.packed_batch import grouped

_BY_THEMSELVES = (Tier.ROWS, *READY)
"""Tiers of an input embedding for which a call loads nothing that the next call needs too."""


class TakingTurns(JointPasses):
    """Lets micro-batches take turns at the units of a model.

    Args:
        model: a streamed model.
        exact: compute experts too for each micro-batch by itself.
        before: called with a member before it continues.
        after: called with a member when it waits again or has ended.
        soon: called with the member of the next turn before the current one continues.
        experts_rows: maximum rows that go through a layer's experts together, unless one member has more.
    """

    def __init__(
        self,
        model: Any,
        *,
        exact: bool = False,
        before: Callable[[Member], None] = lambda member: None,
        after: Callable[[Member], None] = lambda member: None,
        soon: Callable[[Member], None] = lambda member: None,
        experts_rows: int = 1 << 62,
    ) -> None:
        self._before, self._after, self._soon = before, after, soon
        self._experts_rows = experts_rows
        self._pooled = {id(source.module) for pool in model.streamer.pools.values() for source in pool.sources}
        tiers = {placed.unit: placed.tier for placed in model.placement.units}
        named = {id(model.get_submodule(unit)): tier for unit, tier in tiers.items()}
        self._brings_rows = named.get(id(model.get_input_embeddings())) in _BY_THEMSELVES
        self._boundaries = (
            {
                id(model.get_submodule(placed.unit)): model.streamer.lanes[placed.device].boundary
                for placed in model.placement.units
            }
            if len(model.streamer.lanes) > 1
            else {}
        )
        super().__init__(model, exact=exact, packing=False)

    def _kind(self, module: nn.Module) -> RowKind | None:
        if id(module) in self._pooled:
            return RowKind.EXPERTS
        return super()._kind(module) if module is self._model.get_input_embeddings() else None

    def _go_on(self, member: Member, answer: Any) -> None:
        self._before(member)
        super()._go_on(member, answer)
        try:
            self._after(member)
        except Exception as error:  # no room to offload it
            self._end(member, error)

    def _through_as_rows(self, point: MeetingPoint, members: Sequence[Member]) -> None:
        if point.rowwise is RowKind.IDS and self._brings_rows:
            for member in members:
                assert member.waits is not None
                self._one_by_one(point, member)
            return
        for group in self._groups(members) if point.rowwise is RowKind.EXPERTS else [members]:
            for member in group:
                self._before(member)
            super()._through_as_rows(point, group)

    def _one_by_one(self, point: MeetingPoint, member: Member) -> None:
        call = member.waits
        assert call is not None
        try:
            answer = called(point.module, *call.args, **call.kwargs)
        except Exception as error:
            self._end(member, error)
            return
        self._go_on(member, answer)

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
                    self._soon(following)
                while member.waits is not None and member.waits.point is point:  # the head, for several slices
                    call = member.waits
                    self._before(member)
                    brought = boundary(module, call.args, call.kwargs) if boundary is not None else None
                    self._go_on(member, Alone(*(brought or (call.args, call.kwargs))))
            while inside := [member for member in members if member.is_inside_a_unit]:
                self._meet(inside)

        with point.replaced(all_of_them):
            called(module)
