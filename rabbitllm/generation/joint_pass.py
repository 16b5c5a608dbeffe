"""Several generations that go through the model together, so that each unit's weights are loaded once for all.

Every generation (a member) runs the model's own code with its own KV cache, in a greenlet of one thread. At a unit it
waits for the others. Then the unit's hooks run once, and each member's call is computed. Inside a layer members meet
again at every module that computes each row independently (linear layers, embeddings, routed experts): the rows of all
members go through it as one matrix. Everything else, above all attention, is computed for each member alone: nothing
is padded, and no data can get from one sequence into another.

    a pass   members come in ── unit ── meet ── linear: one product ── meet ── … ── unit ── … ── members are out
    a member comes in with the inputs of its forward, and is out when it waits for the next pass or has ended

If the model allows it (`packed_families.py`), members do not go through the layers by themselves: their rows are
packed into one forward (`carriers.py`, `packed.py`), whose outputs are returned to them where they came in. Members
that cannot be packed meet this forward as if it were one more member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from rabbitllm.engine.forwards import RowProducts
from rabbitllm.errors import OptionError
from rabbitllm.generation.cache_file import CacheFile
from rabbitllm.generation.carriers import Carrier, Carrying
from rabbitllm.generation.members import Alone, Left, MeetingPoint, Member, MemberCall, call_of, together
from rabbitllm.generation.packed import PackedForward
from rabbitllm.generation.packed_cache import NotPackable
from rabbitllm.generation.rows import RowKind, joined, rowwise
from rabbitllm.telemetry.passes import PassInput


class JointPasses:
    """Lets members meet at the modules of a model.

    Args:
        model: a streamed model.
        exact: compute each member's rows separately in every module, so that its results are bitwise those that it
            would have alone.
        packing: pack members into one forward if possible.
        max_rows: maximum rows of a packed forward; with more rows several packed forwards go through each layer, one
            after the other. None for no limit.
        file: file in which members may have their KV cache; members that are not packed get theirs back in memory.
    """

    def __init__(
        self,
        model: Any,
        *,
        exact: bool = False,
        packing: bool = True,
        max_rows: int | None = None,
        file: CacheFile | None = None,
    ) -> None:
        if model.hosts is not None:
            raise OptionError(
                "Some of the model's layers are on other hosts, which answer one call at a time.",
                "Call model.generate, with several prompts as one batch; or load the model without hosts.",
            )
        self._model = model
        self._exact = exact
        self._hub: greenlet | None = None
        self.members: list[Member] = []
        self._carrying = Carrying(PackedForward.of(model, file) if packing and not exact else None, max_rows)
        self._file = file
        head = model.get_output_embeddings()
        self._products = RowProducts(model) if not exact else None
        units = {id(model.get_submodule(placed.unit)) for placed in model.placement.units}
        self._points: list[MeetingPoint] = []
        for module in model.modules():
            is_unit = id(module) in units
            kind = self._kind(module)
            if is_unit or (kind and not exact):
                self._points.append(MeetingPoint(module, kind, is_unit=is_unit))
        self._head = next((point for point in self._points if point.module is head), None)
        for point in self._points:
            point.module._compiled_call_impl = self._at(point)
        model.shared_passes = self

    def close(self) -> None:
        """Take all members out, and restore the model."""
        for member in list(self.members):
            self.take_out(member)
        for point in self._points:
            point.module._compiled_call_impl = None
        if self._products is not None:
            self._products.close()
        self._model.shared_passes = None

    def add(self, work: Callable[[], None], behind_head: Callable[[bool], None] = lambda goes_on: None) -> Member:
        """Start a member; it stops before its first pass.

        Args:
            work, behind_head: see `Member`.
        """
        member = Member(work, behind_head)
        self.members.append(member)
        self._go_on(member, None)
        return member

    def take_out(self, member: Member) -> None:
        """End a member between two passes."""
        self._end(member, Left())

    def run(self, members: Sequence[Member]) -> None:
        """Run one pass for some members; afterwards each of them has ended or waits for the next one.

        An error in a member ends only that member (see its `error`); an error with the weights ends all.
        """
        inside = list(members)
        if not inside:
            return
        with self._model.joint_pass(_entry(inside)):
            carriers = self._carrying.carriers(inside)
            carried = {member for carrier in carriers for member in carrier.members}
            others = [member for member in inside if member not in carried]
            if self._file is not None:
                caches = [cache for carrier in carriers for cache in carrier.caches]
                self._file.begin(caches, [member.brings[1] for member in others])
            if len(carriers) == 1 and not others:
                carriers[0]()
            else:
                others += [Member(carrier, meets_inside=len(carriers) == 1) for carrier in carriers]
            with self._carrying.attending(len(carriers)):
                for member in others:
                    self._go_on(member, None)
                while here := [member for member in others if member.waits is not None and not member.is_outside]:
                    self._meet(here)
            for carrier in carriers:
                self._answer(carrier)

    def _kind(self, module: nn.Module) -> RowKind | None:
        """How members' rows go through a module together; None if they do not."""
        if module is self._model.get_input_embeddings() and isinstance(module, nn.Embedding):
            return RowKind.IDS  # some embeddings also scale each row
        return rowwise(module)

    # called by members -----------------------------------------------------------------------------------------------

    def is_member(self) -> bool:
        """Whether the caller is a member."""
        return isinstance(getcurrent(), Member)

    def come_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait for the next pass; called by the model in a member, with the inputs of its forward.

        Returns:
            The output of the forward if it was packed; else None.
        """
        return self._wait(MemberCall(None, args, kwargs))

    def _wait(self, call: MemberCall) -> Any:
        member = getcurrent()
        assert isinstance(member, Member)
        assert self._hub is not None
        member.waits = call
        gradients = torch.is_grad_enabled()  # belongs to the thread, and `generate` changes it
        try:
            return self._hub.switch()
        finally:
            torch.set_grad_enabled(gradients)

    def _at(self, point: MeetingPoint) -> Callable[..., Any]:
        ordinary: Callable[..., Any] = point.module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            member = getcurrent()
            # experts are loaded by the rows routed to them, and so for the rows of all members
            brings = point.is_unit or point.rowwise is RowKind.EXPERTS
            if not isinstance(member, Member) or not (brings or member.meets_inside):
                return ordinary(*args, **kwargs)
            answer = self._wait(MemberCall(point, args, kwargs))
            if isinstance(answer, Alone):
                return point.forward(*answer.args, **answer.kwargs)
            return answer

        return call

    # in the hub ------------------------------------------------------------------------------------------------------

    def _go_on(self, member: Member, answer: Any) -> None:
        """Run a member until it waits again or ends."""
        at = member.waits
        computed = at is not None and at.point is None and answer is not None
        drawing = computed or (at is not None and at.point is self._head and self._head is not None)
        if drawing:
            member.behind_head(True)
        self._switch(member, lambda: member.switch(answer))
        if drawing:
            member.behind_head(False)
        if member.dead and member in self.members:
            self.members.remove(member)

    def _switch(self, member: Member, into: Callable[[], Any]) -> None:
        self._hub = member.parent = getcurrent()
        member.waits = None
        gradients = torch.is_grad_enabled()
        into()
        torch.set_grad_enabled(gradients)

    def _answer(self, carrier: Carrier) -> None:
        """Pass the members of a carrier their outputs or its error."""
        if carrier.error is not None and not isinstance(carrier.error, Exception):
            raise carrier.error
        if isinstance(carrier.error, NotPackable):
            self._carrying.end(carrier.error)
        for number, member in enumerate(carrier.members):
            if carrier.error is None:
                self._go_on(member, carrier.outputs[number])
            else:
                self._end(member, _copy_of(carrier.error))

    def _end(self, member: Member, error: BaseException) -> None:
        throw: Callable[..., Any] = member.throw
        self._switch(member, lambda: throw(error))
        if not member.dead:  # it caught the exception
            self._end(member, error)
        elif member in self.members:
            self.members.remove(member)

    def _meet(self, members: Sequence[Member]) -> None:
        """Compute the calls at the meeting point where most members wait."""
        point, here = together(members)
        try:
            # a lookup of rows does not round
            if point.rowwise is not None and (point.rowwise is RowKind.IDS or not self._exact):
                self._through_as_rows(point, here)
            elif point.is_unit:
                self._through_a_unit(point, here)
            else:
                self._each(point, here)
        except Exception as error:  # from the weights, or from a product of all members' rows
            for member in here:
                if not member.dead:
                    self._end(member, _copy_of(error))

    def _through_as_rows(self, point: MeetingPoint, members: Sequence[Member]) -> None:
        calls = [call_of(member) for member in members]
        assert point.rowwise is not None
        batch = joined(point.rowwise, [(call.args, call.kwargs) for call in calls])
        if batch is None:
            (self._through_a_unit if point.is_unit else self._each)(point, members)
            return
        try:
            answers = batch.parts(called(point.module, *batch.args))
        except Exception:
            if len(members) == 1:
                raise
            for member in members:  # if the input of one cannot be computed, only that one ends
                self._meet([member])
            return
        for member, answer in zip(members, answers, strict=True):
            self._go_on(member, answer)

    def _each(self, point: MeetingPoint, members: Sequence[Member]) -> None:
        for member in members:
            call = call_of(member)
            self._go_on(member, Alone(call.args, call.kwargs))

    def _through_a_unit(self, point: MeetingPoint, members: Sequence[Member]) -> None:
        """Run a unit's hooks once, and between them every member's call, until all have left it."""
        calls = [call_of(member) for member in members]

        def all_of_them(*brought: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
            for member, (args, kwargs) in zip(members, brought, strict=True):
                self._go_on(member, Alone(args, kwargs))
            while inside := [member for member in members if member.is_inside_a_unit]:
                self._meet(inside)

        with point.replaced(all_of_them):
            called(point.module, *((call.args, call.kwargs) for call in calls))


def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's ordinary call, with its hooks."""
    call: Callable[..., Any] = module._call_impl
    return call(*args, **kwargs)


def _entry(members: Iterable[Member]) -> PassInput:
    """The input of a pass: the tokens of all members."""
    return PassInput(1, sum(member.tokens for member in members), None, None)


def _copy_of(error: Exception) -> Exception:
    """A copy of the error for each member, since every raise extends the traceback of an error."""
    try:
        copy = type(error)(*error.args)
    except Exception:
        copy = RuntimeError(str(error))
    copy.__cause__ = error
    return copy
