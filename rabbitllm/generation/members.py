"""Generations that share passes: where each waits, and with what. How they are taken on is joint_pass.py's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from greenlet import greenlet
from torch import nn

from rabbitllm.engine.pass_entry import entry_of
from rabbitllm.generation.rows import RowKind
from rabbitllm.telemetry.passes import PassInput


class Left(BaseException):
    """Thrown into a member that is taken out; no handler for errors is meant to catch it."""


@dataclass(slots=True)
class MemberCall:
    """Where a member waits, and with what; at no point it waits for the next pass."""

    point: MeetingPoint | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Alone:
    """The answer to a member that shall compute its call by itself."""

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
        """Have the module's hooks run around another forward than its own."""
        before = self.module.__dict__.get("forward")  # a linear layer's may be replaced already
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
        work: what it does; calls the model as often as it likes.
        behind_head: called as it goes on (True) and has stopped again (False), around what it does behind the model's
            last linear layer: there, tokens are drawn.
        meets_inside: whether it waits for others at every module that treats rows by themselves, and not only where
            weights are brought.

    Attributes:
        error: what ended it, if it did not end by itself.
        waits: where it is; None while it runs, and when it has ended.
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
        del self._work  # it may refer to this
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
        """Whether it waits in the middle of one."""
        return self.waits is not None and self.waits.point is not None and not self.waits.point.is_unit

    @property
    def tokens(self) -> int:
        """That it brings into the next pass, for which it waits."""
        entry, _ = self.brings
        return entry.batch * entry.length

    @property
    def brings(self) -> tuple[PassInput, Any]:
        """What goes into the next pass, for which it waits, and its KV cache; None without one."""
        assert self.waits is not None
        return entry_of(self.waits.args, self.waits.kwargs)


def call_of(member: Member) -> MemberCall:
    """Where one that waits does so."""
    assert member.waits is not None
    return member.waits


def together(members: Sequence[Member]) -> tuple[MeetingPoint, list[Member]]:
    """The point where most of them are, and who is there."""
    by_point: dict[int, list[Member]] = {}
    for member in members:
        by_point.setdefault(id(call_of(member).point), []).append(member)
    most = max(by_point.values(), key=len)
    point = call_of(most[0]).point
    assert point is not None
    return point, most
