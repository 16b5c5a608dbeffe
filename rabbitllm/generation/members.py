"""Members of joint passes (`joint_pass.py`): the meeting point and the call at which each of them waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from greenlet import greenlet
from torch import nn

from rabbitllm.engine.pass_line import entry_of
from rabbitllm.generation.rows import RowKind
from rabbitllm.telemetry.passes import PassInput


class Left(BaseException):
    """Thrown into a member to take it out; a `BaseException`, so that no error handler catches it."""


@dataclass(slots=True)
class MemberCall:
    """The call at which a member waits; `point` is None while it waits for the next pass."""

    point: MeetingPoint | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Alone:
    """Answer to a member that has to compute its call by itself, with these arguments."""

    __slots__ = ("args", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs


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

    @property
    def is_inside_a_unit(self) -> bool:
        """Whether it waits inside a unit."""
        return self.waits is not None and self.waits.point is not None and not self.waits.point.is_unit

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
