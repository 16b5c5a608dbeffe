"""The choice of rows to show: by name, offset and number. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rabbitllm.models.inspection.records import Opcode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowChoice:
    """A choice of rows.

    Attributes:
        name: a substring of names, or a pattern with `*`, `?` or `[]` for whole names; None for all.
        skip: number of rows to skip.
        limit: limit of rows to show; None for all.
    """

    name: str | None = None
    skip: int = 0
    limit: int | None = None

    def matches(self, text: str) -> bool:
        """Whether a name is chosen."""
        if self.name is None:
            return True
        if any(sign in self.name for sign in "*?["):
            return fnmatch.fnmatchcase(text, self.name)
        return self.name in text

    def of(self, rows: Sequence[T], name_of: Callable[[T], str]) -> tuple[Sequence[T], int, int]:
        """The rows to show, the number of rows whose name matches, and the number of these after the last row shown."""
        wanted = rows if self.name is None else [row for row in rows if self.matches(name_of(row))]
        end = len(wanted) if self.limit is None else self.skip + self.limit
        shown = wanted[self.skip : end]
        return shown, len(wanted), max(len(wanted) - self.skip - len(shown), 0)


def searched(opcode: Opcode) -> str:
    """The text of an opcode that names are matched against."""
    return f"{opcode.name} {opcode.argument}"
