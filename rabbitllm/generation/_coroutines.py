"""Several calls of a model as coroutines of one thread, which wait for each other at the model's modules.

Each coroutine runs the model's own code with its own KV cache, in a greenlet. At a sync point it waits. There are sync
points at every unit, so that its weights are loaded once for all, and at modules that compute each row independently
(linear layers, embeddings, routed experts), so that the rows of all go through them as one matrix. Everything else,
above all attention, is computed for each coroutine alone: nothing is padded, and no data can get from one sequence into
another.

    a pass   coroutines wait for it ── unit ── wait ── linear: one product ── wait ── … ── unit ── … ── all are outside
    a coroutine brings the inputs of its forward, and is outside when it waits for the next pass or has ended

`ModelRunner` decides how the calls at a sync point are computed for generation, `MicroBatchRunner` for scoring.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn
from transformers import Conv1D

from rabbitllm.base.grouping import grouped
from rabbitllm.engine.expert_finding import is_routed
from rabbitllm.engine.forwards import RowProducts
from rabbitllm.engine.pass_line import pass_input_of
from rabbitllm.engine.turns import taking_turns
from rabbitllm.errors import OptionError
from rabbitllm.telemetry.passes import PassInput

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel
    from rabbitllm.generation._lookahead import Lookahead

# rows of several calls -----------------------------------------------------------------------------------------------


class RowKind(Enum):
    """The layout of rows in the tensors of a call of a module that computes each row independently."""

    FEATURES = 1
    IDS = 2
    EXPERTS = 3


def rowwise(module: nn.Module) -> RowKind | None:
    """The kind of a module; None if it may combine rows."""
    forward = type(module).forward  # subclasses that override it may combine rows
    # a published scheme may round all rows of two dimensions together
    if forward in (nn.Linear.forward, Conv1D.forward) and not hasattr(module, "quantization_scheme"):
        return RowKind.FEATURES
    if forward is nn.Embedding.forward:
        return RowKind.IDS
    return RowKind.EXPERTS if is_routed(module) else None


def joined(
    kind: RowKind, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> tuple[tuple[torch.Tensor, ...], Callable[[Any], list[Any]]] | None:
    """Arguments for one call with the rows of all calls, and what splits its result into that of each; None if they
    cannot be joined.

    Args:
        kind: kind of the module.
        calls: positional and keyword arguments of each call.
    """
    expected = 3 if kind is RowKind.EXPERTS else 1  # rows with the indices and weights of their experts
    inputs = [args for args, kwargs in calls if not kwargs and len(args) == expected]
    if len(inputs) < len(calls) or any(not isinstance(tensor, torch.Tensor) for args in inputs for tensor in args):
        return None
    if len(inputs) == 1:
        return inputs[0], lambda result: [result]
    inner = 0 if kind is RowKind.IDS else 1
    shapes = [args[0].shape[: args[0].dim() - inner] for args in inputs]
    rows = [[tensor.reshape(-1, *tensor.shape[tensor.dim() - inner :]) for tensor in args] for args in inputs]
    lengths = [len(tensors[0]) for tensors in rows]
    forms = {tuple((tensor.dtype, tensor.device, tensor.shape[1:]) for tensor in tensors) for tensors in rows}
    if len(forms) > 1 or any(len(t) != length for ts, length in zip(rows, lengths, strict=True) for t in ts):
        return None

    def parts(result: torch.Tensor) -> list[torch.Tensor]:
        return [
            part.view(*shape, *result.shape[1:])
            for part, shape in zip(torch.split(result, lengths), shapes, strict=True)
        ]

    return tuple(map(torch.cat, zip(*rows, strict=True))), parts


# coroutines and their sync points ------------------------------------------------------------------------------------

STATES = ("conv1d_state", "recurrent_states")
"""Attributes in which layers of RecurrentGemma keep their state from one call to the next."""
OF_A_SEQUENCE = ("rope_deltas", *STATES)
"""Attributes of modules that belong to a sequence, not to the model; models of the Qwen2-VL kind remember positions in
the first one."""


class SyncPoint:
    """A module at which coroutines wait for each other.

    Args:
        module: the module.
        kind: the layout of its rows if those of all coroutines may go through it as one matrix, else None.
        is_unit: whether it is a unit, whose hooks load weights.
    """

    def __init__(self, module: nn.Module, kind: RowKind | None, *, is_unit: bool) -> None:
        self.module = module
        self.forward = module.forward
        self.is_unit = is_unit
        self.kind = kind

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


def _sync_points(
    model: StreamedModel, kind_of: Callable[[nn.Module], RowKind | None], *, exact: bool
) -> list[SyncPoint]:
    """The sync points of a model: its units, and modules through which rows go as one matrix."""
    units = {id(model.get_submodule(placed.unit)) for placed in model.placement.units}
    points = []
    for module in model.modules():
        is_unit, kind = id(module) in units, kind_of(module)
        if exact and kind is not RowKind.IDS:  # a lookup of rows does not round
            kind = None
        if is_unit or (kind is not None and not exact):
            points.append(SyncPoint(module, kind, is_unit=is_unit))
    return points


@dataclass(slots=True)
class PendingCall:
    """The call at which a coroutine waits; `point` is None while it waits for the next pass.

    As an answer, the call that the coroutine computes by itself.
    """

    point: SyncPoint | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Cancelled(BaseException):
    """Raised in a coroutine to end it; a `BaseException`, so that no error handler catches it."""


class Coroutine(greenlet):  # type: ignore[misc]
    """A function that calls the model any number of times, and can be suspended in each call.

    Args:
        work: the function.
        around_sampling: called with True before and with False after the code that follows the model's output head,
            where tokens are sampled.
        syncs_rows: whether it waits at every module that computes rows independently, not only where weights are
            loaded.
        lookahead: its drafts, if it may have any.

    Attributes:
        error: the error that ended it, if any.
        call: the call at which it waits; None while it runs and after it has ended.
        rows: the most tokens of the call that the next pass computes if it is packed; None for all.
        is_in_pass: whether it computes a call of the model, and so waits at sync points.
        inside: the modules whose calls it computes by itself; a unit may have another one in it, such as a table.
        attributes: modules, their attributes of `OF_A_SEQUENCE`, and the values of these while it waits.
    """

    def __init__(
        self,
        work: Callable[[], None],
        around_sampling: Callable[[bool], None] = lambda begins: None,
        *,
        syncs_rows: bool = True,
        lookahead: Lookahead | None = None,
    ) -> None:
        super().__init__(self._run)
        self._work = work
        self.around_sampling = around_sampling
        self.syncs_rows = syncs_rows
        self.lookahead = lookahead
        self.call: PendingCall | None = None
        self.error: BaseException | None = None
        self.rows: int | None = None
        self.is_in_pass = False
        self.inside: list[SyncPoint] = []
        self.attributes: list[tuple[nn.Module, str, Any]] = []

    def _run(self, answer: Any = None) -> None:
        work = self._work
        del self._work  # it may refer to this coroutine
        try:
            work()
        except Cancelled:
            pass
        except BaseException as error:
            self.error = error

    @property
    def pending(self) -> PendingCall:
        """The call at which it waits."""
        assert self.call is not None
        return self.call

    @property
    def is_outside(self) -> bool:
        """Whether it waits for the next pass."""
        return self.call is not None and self.call.point is None

    @property
    def has_state(self) -> bool:
        """Whether modules keep a state for it, which its KV cache lacks."""
        return any(name in STATES and value is not None for _, name, value in self.attributes)

    @property
    def tokens(self) -> int:
        """Number of tokens that it brings into the next pass, for which it waits, without a draft."""
        entry, _ = self.inputs
        tokens = entry.batch * entry.length
        return tokens if self.rows is None else min(tokens, self.rows)

    def advance(self) -> bool:
        """Leave out the tokens of its call that a packed pass has computed; False if none are left."""
        kwargs, rows = self.pending.kwargs, self.rows
        if rows is None or rows >= kwargs["input_ids"].shape[1]:
            return False
        kwargs["input_ids"] = kwargs["input_ids"][:, rows:]
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"][..., rows:]
        return True

    @property
    def inputs(self) -> tuple[PassInput, Any]:
        """Its input of the next pass, for which it waits, and its KV cache; None without one."""
        return pass_input_of(self.pending.args, self.pending.kwargs)


class Coroutines:
    """Coroutines that call a model.

    Args:
        model: a streamed model; until `close`, its units and some of its modules are sync points.
        kind_of: the kind of a module, see `SyncPoint`.
        compute: computes the calls of coroutines that wait at a sync point, and resumes them. An error from it ends
            these coroutines.
        before: called with a coroutine and the answer to its call before it is resumed.
        after: called with a coroutine that waits again or has ended.
        exact: keep the rows of coroutines apart in all products.

    Attributes:
        active: the coroutines that have not ended.

    Raises:
        OptionError: some of the model's layers are on other hosts.
    """

    def __init__(
        self,
        model: StreamedModel,
        kind_of: Callable[[nn.Module], RowKind | None],
        compute: Callable[[SyncPoint, Sequence[Coroutine]], None],
        before: Callable[[Coroutine, Any], None] = lambda coroutine, answer: None,
        after: Callable[[Coroutine], None] = lambda coroutine: None,
        *,
        exact: bool = False,
    ) -> None:
        if model.hosts is not None:
            raise OptionError(
                "Some of the model's layers are on other hosts, which support one call at a time.",
                "Call model.generate, with several prompts as one batch; or load the model without hosts.",
            )
        self._model = model
        self._products = RowProducts(model) if not exact else None
        self._points = _sync_points(model, kind_of, exact=exact)
        self._compute = compute
        self._before = before
        self._after = after
        self.active: list[Coroutine] = []
        self._attributes = [
            (module, name, None) for module in model.modules() for name in OF_A_SEQUENCE if hasattr(module, name)
        ]
        head = model.get_output_embeddings()
        self._head = next((point for point in self._points if point.module is head), None)
        for point in self._points:
            point.module._compiled_call_impl = self._at(point)
        model.shared_passes = self

    def close(self) -> None:
        """End all coroutines, and restore the model."""
        for coroutine in list(self.active):
            self.cancel(coroutine)
        for point in self._points:
            point.module._compiled_call_impl = None
        if self._products is not None:
            self._products.close()
        self._model.shared_passes = None

    def add(
        self,
        work: Callable[[], None],
        around_sampling: Callable[[bool], None] = lambda begins: None,
        *,
        reads_media: bool = False,
        lookahead: Lookahead | None = None,
    ) -> Coroutine:
        """Start a coroutine; it stops before its first pass.

        Args:
            work, around_sampling, lookahead: see `Coroutine`.
            reads_media: whether it may use weights before its first pass, to read pictures or sounds.
        """
        coroutine = Coroutine(work, around_sampling, lookahead=lookahead)
        self.active.append(coroutine)
        with self._model.streamer.passing() if reads_media else contextlib.nullcontext(), torch.no_grad():
            self.resume(coroutine, None)
        return coroutine

    def cancel(self, coroutine: Coroutine) -> None:
        """End a coroutine between two passes."""
        self.throw(coroutine, Cancelled())

    def run(self, coroutines: Sequence[Coroutine]) -> None:
        """Run one pass; afterwards each of the coroutines has ended or waits for the next pass."""
        # exact ones join no rows, and compute what each does alone
        with taking_turns() if len(coroutines) > 1 and self._products is not None else contextlib.nullcontext():
            for coroutine in coroutines:
                self.resume(coroutine, None)
            while waiting := [c for c in coroutines if c.call is not None and not c.is_outside]:
                self.compute(waiting)

    def leave(self, point: SyncPoint, coroutines: Sequence[Coroutine]) -> None:
        """Compute until all of the coroutines have left a unit."""
        while inside := [c for c in coroutines if c.call is not None and point in c.inside]:
            self.compute(inside)

    def compute(self, waiting: Sequence[Coroutine]) -> None:
        """Compute the calls at the sync point where most of the coroutines wait."""
        by_point = grouped((id(coroutine.pending.point), coroutine) for coroutine in waiting)
        here = max(by_point.values(), key=len)
        point = here[0].pending.point
        assert point is not None
        try:
            self._compute(point, here)
        except Exception as error:  # from the weights, or from a product of all rows
            for coroutine in here:
                if not coroutine.dead:
                    self.throw(coroutine, copy_of(error))

    def compute_rows(self, point: SyncPoint, waiting: Sequence[Coroutine]) -> bool:
        """Compute the rows of all calls as one matrix; if they cannot be joined, each call by itself.

        False, with nothing computed, if they cannot be joined at a unit: its hooks run once for all.
        """
        calls = [(coroutine.pending.args, coroutine.pending.kwargs) for coroutine in waiting]
        joint = joined(point.kind, calls) if point.kind is not None else None
        if joint is None and point.is_unit:
            return False
        if joint is None:
            for coroutine in waiting:
                self.resume(coroutine, coroutine.pending)
            return True
        try:
            args, parts = joint
            answers = parts(called(point.module, *args))
        except Exception:
            if len(waiting) == 1:
                raise
            for coroutine in waiting:  # if the input of one cannot be computed, only that one ends
                self.compute([coroutine])
            return True
        for coroutine, answer in zip(waiting, answers, strict=True):
            self.resume(coroutine, answer)
        return True

    def resume(self, coroutine: Coroutine, answer: Any) -> None:
        """Run a coroutine until it waits again or ends.

        Args:
            coroutine: the coroutine.
            answer: the result of its call, or a `PendingCall` that it computes by itself.
        """
        self._before(coroutine, answer)
        point, was_outside = coroutine.call and coroutine.call.point, coroutine.is_outside
        samples = (was_outside and answer is not None) or (point is not None and point is self._head)
        if samples:
            coroutine.around_sampling(True)
        self._switch(coroutine, lambda: coroutine.switch(answer))
        if samples:
            coroutine.around_sampling(False)
        self._after(coroutine)

    def throw(self, coroutine: Coroutine, error: BaseException) -> None:
        """End a coroutine by an error."""
        throw: Callable[..., Any] = coroutine.throw
        self._switch(coroutine, lambda: throw(error))
        if not coroutine.dead:  # it caught the exception
            self.throw(coroutine, error)
            return
        self._after(coroutine)

    def _switch(self, coroutine: Coroutine, into: Callable[[], Any]) -> None:
        # not kept here: greenlet frees that of a thread with the thread, and a garbage collection that finds it crashes
        coroutine.parent = getcurrent()
        coroutine.call = None
        gradients = torch.is_grad_enabled()
        for module, name, value in coroutine.attributes or self._attributes:
            setattr(module, name, value)
        into()
        coroutine.attributes = [(module, name, getattr(module, name)) for module, name, _ in self._attributes]
        torch.set_grad_enabled(gradients)
        if coroutine.dead and coroutine in self.active:
            self.active.remove(coroutine)

    # called in coroutines --------------------------------------------------------------------------------------------

    def is_coroutine(self) -> bool:
        """Whether the caller is a coroutine."""
        return isinstance(getcurrent(), Coroutine)

    def wait_for_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait for the next pass; called by the model in a coroutine, with the inputs of its forward.

        Returns:
            The output of the forward if it was packed, or computed before as a draft; else None.
        """
        coroutine = getcurrent()
        assert isinstance(coroutine, Coroutine)
        lookahead = coroutine.lookahead
        if lookahead is not None and lookahead.is_computing:
            return None
        if lookahead is not None and (known := lookahead.known(kwargs)) is not None:
            return known
        coroutine.is_in_pass = False
        output = self._wait(coroutine, PendingCall(None, args, kwargs))
        coroutine.is_in_pass = output is None
        return output if lookahead is None else lookahead.first(output)

    def _wait(self, coroutine: Coroutine, call: PendingCall) -> Any:
        coroutine.call = call
        gradients = torch.is_grad_enabled()  # belongs to the thread, and `generate` changes it
        try:
            return coroutine.parent.switch()
        finally:
            torch.set_grad_enabled(gradients)

    def _at(self, point: SyncPoint) -> Callable[..., Any]:
        ordinary: Callable[..., Any] = point.module._call_impl
        # experts are loaded by the rows routed to them, and so for the rows of all coroutines
        loads = point.is_unit or point.kind is RowKind.EXPERTS

        def call(*args: Any, **kwargs: Any) -> Any:
            coroutine = getcurrent()
            if not isinstance(coroutine, Coroutine) or not (loads or coroutine.syncs_rows):
                return ordinary(*args, **kwargs)
            if not coroutine.is_in_pass:  # `generate` of some models reads pictures before it calls the model
                return ordinary(*args, **kwargs)
            answer = self._wait(coroutine, PendingCall(point, args, kwargs))
            if not isinstance(answer, PendingCall):
                return answer
            coroutine.inside.append(point)
            try:
                return point.forward(*answer.args, **answer.kwargs)
            finally:
                coroutine.inside.pop()

        return call


def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's ordinary call, with its hooks."""
    call: Callable[..., Any] = module._call_impl
    return call(*args, **kwargs)


def copy_of(error: Exception) -> Exception:
    """A copy of the error for each coroutine, since every raise extends the traceback of an error."""
    try:
        copy = type(error)(*error.args)
    except Exception:
        copy = RuntimeError(str(error))
    copy.__cause__ = error
    return copy
