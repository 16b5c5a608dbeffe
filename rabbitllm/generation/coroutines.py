"""Several generations that go through the model together, so that each unit's weights are loaded once for all.

Every generation (a member) runs the model's own code with its own KV cache, in a greenlet of one thread. At a unit it
waits for the others. Then the unit's hooks run once, and each member's call is computed. Inside a layer members meet
again at every module that computes each row independently (linear layers, embeddings, routed experts): the rows of all
members go through it as one matrix. Everything else, above all attention, is computed for each member alone: nothing
is padded, and no data can get from one sequence into another.

    a pass   members come in ── unit ── meet ── linear: one product ── meet ── … ── unit ── … ── members are out
    a member comes in with the inputs of its forward, and is out when it waits for the next pass or has ended

If the model allows it, members do not go through the layers by themselves: their rows are packed into one forward
(`packed_batch.py`), whose outputs are returned to them where they came in. Members that cannot be packed meet this
forward as if it were one more member.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from transformers.pytorch_utils import Conv1D

from rabbitllm.engine.expert_finding import is_routed
from rabbitllm.engine.forwards import RowProducts
from rabbitllm.engine.pass_line import entry_of
from rabbitllm.errors import OptionError
from rabbitllm.generation.cache_file import CacheFile
from rabbitllm.generation.packed_batch import NotPackable, PackedForward, PackedSequence, can_be_packed, grouped
from rabbitllm.telemetry.passes import PassInput

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel


class RowKind(Enum):
    """The layout of rows in the tensors of a call; see the module's docstring."""

    FEATURES = 1
    IDS = 2
    EXPERTS = 3


def rowwise(module: nn.Module) -> RowKind | None:
    """The kind of a module; None if it may combine rows."""
    forward = type(module).forward  # subclasses with a forward of their own may combine rows
    if forward in (nn.Linear.forward, Conv1D.forward):
        return RowKind.FEATURES
    if forward is nn.Embedding.forward:
        return RowKind.IDS
    return RowKind.EXPERTS if is_routed(module) else None


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of several calls.

    Attributes:
        args: arguments for one call with all rows.
        parts: splits the result of that call into the result of each call.
    """

    args: tuple[torch.Tensor, ...]
    parts: Callable[[Any], list[Any]]


def joined(kind: RowKind, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> RowBatch | None:
    """One call with the rows of all calls; None if they cannot be joined.

    Args:
        kind: kind of the module.
        calls: positional and keyword arguments of each call.
    """
    expected = 3 if kind is RowKind.EXPERTS else 1  # rows with the indices and weights of their experts
    given = [args for args, kwargs in calls if not kwargs and len(args) == expected]
    if len(given) < len(calls) or any(not isinstance(one, torch.Tensor) for args in given for one in args):
        return None
    if len(given) == 1:
        return RowBatch(given[0], lambda result: [result])
    inner = 0 if kind is RowKind.IDS else 1
    shapes = [args[0].shape[: args[0].dim() - inner] for args in given]
    rows = [[one.reshape(-1, *one.shape[one.dim() - inner :]) for one in args] for args in given]
    lengths = [len(own[0]) for own in rows]
    forms = {tuple((one.dtype, one.device, one.shape[1:]) for one in own) for own in rows}
    if len(forms) > 1 or any(len(one) != length for own, length in zip(rows, lengths, strict=True) for one in own):
        return None

    def parts(result: torch.Tensor) -> list[torch.Tensor]:
        return [
            part.view(*shape, *result.shape[1:])
            for part, shape in zip(torch.split(result, lengths), shapes, strict=True)
        ]

    return RowBatch(tuple(map(torch.cat, zip(*rows, strict=True))), parts)


POSITIONS = "rope_deltas"
"""The attribute in which models of the Qwen2-VL kind remember positions from one call to the next; it belongs to a
sequence, not to the model."""


class Left(BaseException):
    """Thrown into a member to take it out; a `BaseException`, so that no error handler catches it."""


@dataclass(slots=True)
class MemberCall:
    """The call at which a member waits; `point` is None while it waits for the next pass.

    As an answer, the call that the member has to compute by itself.
    """

    point: MeetingPoint | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class MeetingPoint:
    """A module at which members meet."""

    def __init__(self, module: nn.Module, kind: RowKind | None, *, is_unit: bool) -> None:
        self.module = module
        self.forward = module.forward
        self.is_unit = is_unit
        self.rowwise = kind

    @contextlib.contextmanager
    def replaced(self, forward: Callable[..., None]) -> Iterator[None]:
        """Replace the module's forward, so that its hooks run around another one."""
        before = self.module.__dict__.get("forward")  # that of a linear layer may already be replaced
        self.module.forward = forward
        try:
            yield
        finally:
            if before is None:
                del self.module.forward
            else:
                self.module.forward = before


class Member(greenlet):  # type: ignore[misc]
    """One generation among those that share passes.

    Args:
        work: function that it runs; may call the model any number of times.
        behind_head: called with True before and with False after the member runs behind the model's output head,
            where tokens are sampled.
        meets_inside: whether it waits for others at every module that computes rows independently, not only where
            weights are loaded.

    Attributes:
        error: the error that ended it, if any.
        waits: the call at which it waits; None while it runs and after it has ended.
        is_in_pass: whether it computes a call of the model, and so meets others.
        inside: the modules whose calls it computes by itself; a unit may have another one in it, such as a table.
        positions: what its pictures add to the positions behind them, which modules with `POSITIONS` remember.
    """

    def __init__(
        self,
        work: Callable[[], None],
        behind_head: Callable[[bool], None] = lambda goes_on: None,
        *,
        meets_inside: bool = True,
    ) -> None:
        super().__init__(self._run)
        self._work = work
        self.behind_head = behind_head
        self.meets_inside = meets_inside
        self.waits: MemberCall | None = None
        self.error: BaseException | None = None
        self.is_in_pass = False
        self.inside: list[MeetingPoint] = []
        self.positions: list[Any] = []

    def _run(self, answer: Any = None) -> None:
        work = self._work
        del self._work  # it may refer to this member
        try:
            work()
        except Left:
            pass
        except BaseException as error:
            self.error = error

    @property
    def is_outside(self) -> bool:
        """Whether it waits for the next pass."""
        return self.waits is not None and self.waits.point is None

    def waits_inside(self, point: MeetingPoint) -> bool:
        """Whether it waits inside a module that it computes by itself."""
        return self.waits is not None and point in self.inside

    @property
    def tokens(self) -> int:
        """Number of tokens that it brings into the next pass, for which it waits."""
        entry, _ = self.brings
        return entry.batch * entry.length

    @property
    def brings(self) -> tuple[PassInput, Any]:
        """Its input of the next pass, for which it waits, and its KV cache; None without one."""
        assert self.waits is not None
        return entry_of(self.waits.args, self.waits.kwargs)


def call_of(member: Member) -> MemberCall:
    """The call at which a waiting member waits."""
    assert member.waits is not None
    return member.waits


def together(members: Sequence[Member]) -> tuple[MeetingPoint, list[Member]]:
    """The meeting point where most of them wait, and the members there."""
    by_point: dict[int, list[Member]] = {}
    for member in members:
        by_point.setdefault(id(call_of(member).point), []).append(member)
    most = max(by_point.values(), key=len)
    point = call_of(most[0]).point
    assert point is not None
    return point, most


logger = logging.getLogger(__name__)


class Carrier:
    """Takes the sequences of several members through the model, packed; runs as a member itself if a pass has others.

    Args:
        forward: computes the packed sequences.
        members: the members that are packed.
        sequences: the sequence of each member.

    Attributes:
        members: see above.
        sequences: see above.
        outputs: output of each sequence, once the forward has succeeded.
        error: the error that ended the forward, if any.
    """

    def __init__(self, forward: PackedForward, members: Sequence[Member], sequences: Sequence[PackedSequence]) -> None:
        self._forward = forward
        self.members = members
        self.sequences = sequences
        self.outputs: list[Any] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        """Go through the model."""
        try:
            self.outputs = self._forward(self.sequences)
        except BaseException as error:
            self.error = error


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
        model: StreamedModel,
        *,
        exact: bool = False,
        packing: bool = True,
        max_rows: int | None = None,
        file: CacheFile | None = None,
    ) -> None:
        if model.hosts is not None:
            raise OptionError(
                "Some of the model's layers are on other hosts, which support one call at a time.",
                "Call model.generate, with several prompts as one batch; or load the model without hosts.",
            )
        self._model = model
        self._exact = exact
        self._hub: greenlet | None = None
        self.members: list[Member] = []
        self._max_rows = max_rows
        self._packed = PackedForward(model, file) if packing and not exact and can_be_packed(model) else None
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
        self._placing = [module for module in model.modules() if hasattr(module, POSITIONS)]
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

    def add(
        self,
        work: Callable[[], None],
        behind_head: Callable[[bool], None] = lambda goes_on: None,
        *,
        reads_media: bool = False,
    ) -> Member:
        """Start a member; it stops before its first pass.

        Args:
            work, behind_head: see `Member`.
            reads_media: whether it may use weights before its first pass, to read pictures or sounds.
        """
        member = Member(work, behind_head)
        self.members.append(member)
        with self._model.streamer.passing() if reads_media else contextlib.nullcontext(), torch.no_grad():
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
        with self._model.joint_pass(PassInput(1, sum(member.tokens for member in inside))):
            carriers = self._carriers(inside)
            carried = {member for carrier in carriers for member in carrier.members}
            others = [member for member in inside if member not in carried]
            if self._file is not None:
                caches = [sequence.cache for carrier in carriers for sequence in carrier.sequences]
                self._file.begin(caches, [member.brings[1] for member in others])
            if len(carriers) == 1 and not others:
                carriers[0]()
            else:
                carrying = [Member(carrier, meets_inside=len(carriers) == 1) for carrier in carriers]
                for member in carrying:
                    member.is_in_pass = True
                others += carrying
            # forwards that take turns are left in any order
            with self._packed.attending() if self._packed and len(carriers) > 1 else contextlib.nullcontext():
                for member in others:
                    self._go_on(member, None)
                while here := [member for member in others if member.waits is not None and not member.is_outside]:
                    self._meet(here)
            for carrier in carriers:
                self._answer(carrier)

    def _carriers(self, members: Sequence[Member]) -> list[Carrier]:
        """Carriers of the members whose calls can be packed, in their order; the other members are in none."""
        forward = self._packed
        if forward is None:
            return []
        calls = [(member, call_of(member)) for member in members]
        read = [(member, forward.read(call.args, call.kwargs)) for member, call in calls]
        known = [(member, sequence) for member, sequence in read if sequence is not None]
        sound = forward.fitting([sequence for _, sequence in known]) if known else []
        packed = [one for one, good in zip(known, sound, strict=True) if good]
        groups = (packed[group] for group in grouped([one.ids.shape[1] for _, one in packed], self._max_rows))
        return [Carrier(forward, [one for one, _ in group], [one for _, one in group]) for group in groups]

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
        member = getcurrent()
        assert isinstance(member, Member)
        member.is_in_pass = False
        output = self._wait(MemberCall(None, args, kwargs))
        member.is_in_pass = output is None
        return output

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
            if not member.is_in_pass:  # `generate` of some models reads pictures before it calls the model
                return ordinary(*args, **kwargs)
            answer = self._wait(MemberCall(point, args, kwargs))
            if not isinstance(answer, MemberCall):
                return answer
            member.inside.append(point)
            try:
                return point.forward(*answer.args, **answer.kwargs)
            finally:
                member.inside.pop()

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
        for module, own in zip(self._placing, member.positions or [None] * len(self._placing), strict=True):
            setattr(module, POSITIONS, own)
        into()
        member.positions = [getattr(module, POSITIONS) for module in self._placing]
        torch.set_grad_enabled(gradients)

    def _answer(self, carrier: Carrier) -> None:
        """Pass the members of a carrier their outputs or its error."""
        if carrier.error is not None and not isinstance(carrier.error, Exception):
            raise carrier.error
        if isinstance(carrier.error, NotPackable):
            logger.warning("From now on each sequence is computed alone: %s.", carrier.error)
            self._packed = None
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
            self._go_on(member, call_of(member))

    def _through_a_unit(self, point: MeetingPoint, members: Sequence[Member]) -> None:
        """Run a unit's hooks once, and between them every member's call, until all have left it."""
        calls = [call_of(member) for member in members]

        def all_of_them(*brought: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
            for member, (args, kwargs) in zip(members, brought, strict=True):
                self._go_on(member, MemberCall(point, args, kwargs))
            while inside := [member for member in members if member.waits_inside(point)]:
                self._meet(inside)

        with point.replaced(all_of_them):
            called(point.module, *((call.args, call.kwargs) for call in calls))


def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's ordinary call, with its hooks."""
    call: Callable[..., Any] = module._call_impl
    return call(*args, **kwargs)


def _copy_of(error: Exception) -> Exception:
    """A copy of the error for each member, since every raise extends the traceback of an error."""
    try:
        copy = type(error)(*error.args)
    except Exception:
        copy = RuntimeError(str(error))
    copy.__cause__ = error
    return copy
