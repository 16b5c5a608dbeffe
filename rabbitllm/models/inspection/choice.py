"""Which of many rows to show: those whose name matches, from where on, and how many. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rabbitllm.models.inspection.records import Opcode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowChoice:
    """Which rows to show.

    Attributes:
        name: a part of a name, or a pattern with `*`, `?` or `[]` for the whole of it; None for all.
        skip: rows to leave out first.
        limit: rows to show at most; None for all.
    """

    name: str | None = None
    skip: int = 0
    limit: int | None = None

    def matches(self, text: str) -> bool:
        """Whether a name is among those that are wanted."""
        if self.name is None:
            return True
        if any(sign in self.name for sign in "*?["):
            return fnmatch.fnmatchcase(text, self.name)
        return self.name in text

    def of(self, rows: Sequence[T], name_of: Callable[[T], str]) -> tuple[Sequence[T], int, int]:
        """The rows to show, how many match the name, and how many of these come after the last that is shown."""
        wanted = rows if self.name is None else [row for row in rows if self.matches(name_of(row))]
        end = len(wanted) if self.limit is None else self.skip + self.limit
        shown = wanted[self.skip : end]
        return shown, len(wanted), max(len(wanted) - self.skip - len(shown), 0)


def searched(opcode: Opcode) -> str:
    """What stands for the name of an opcode."""
    return f"{opcode.name} {opcode.argument}"
