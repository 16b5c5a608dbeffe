"""The state of reading a pickle: bytes, stack and memo, each with its limit, and the table of known globals.

The opcodes are in `pickle_opcodes.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_MEMO = 500_000
"""Limit of memo entries. A tensor takes about 12."""
MAX_STACK = 200_000
MAX_MARKS = 1_000
"""Limit of open marks, which is the recursion limit of a pickler."""
MAX_NUMBER_BYTES = 32
MAX_NAME = 200
"""Limit of the characters of a global's module or name."""


class RefusedValueError(ValueError):
    """Raised by a table's function for an argument that it does not accept; the message does not name the file."""


class CutOffError(Exception):
    """The pickle is truncated: the bytes or the stack ran out."""


@dataclass(frozen=True, slots=True)
class Known:
    """A known global: its name, and the function that stands for calling it, if it may be called."""

    name: str
    call: Callable[[tuple[Any, ...]], object] | None = None


class Attributed(dict[Any, object]):
    """A dict with attributes (`collections.OrderedDict`), which are read and dropped."""


@dataclass(slots=True)
class PickleMachine:
    """The state of reading one pickle."""

    data: bytes
    known: Mapping[tuple[str, str], Known]
    persistent: Callable[[object], object]
    at: int = 0
    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def take(self, length: int) -> bytes:
        """The next `length` bytes."""
        taken = self.data[self.at : self.at + length]
        if len(taken) != length:
            raise CutOffError(f"wants {length:,} bytes, and {len(taken):,} are left")
        self.at += length
        return taken

    def number(self, layout: struct.Struct) -> int:
        begin = self.at
        self.at += layout.size
        if self.at > len(self.data):
            raise CutOffError(f"wants {layout.size} bytes, and {len(self.data) - begin} are left")
        value: int = layout.unpack_from(self.data, begin)[0]
        return value

    def line(self) -> str:
        """Text up to a newline."""
        end = self.data.find(b"\n", self.at, self.at + MAX_NAME + 1)
        if end < 0:
            if len(self.data) - self.at <= MAX_NAME:
                raise CutOffError("wants the rest of a name, and nothing is left")
            raise RefusedValueError(f"has a name that does not end within {MAX_NAME} bytes")
        text = self.take(end - self.at + 1)[:-1]
        return text.decode("utf-8")

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise CutOffError("finds nothing on the stack")
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            raise CutOffError("finds no mark on the stack")
        begin = self.marks.pop()
        items = self.stack[begin:]
        del self.stack[begin:]
        return items

    def top(self, kind: type, what: str) -> Any:
        value = self.pop()
        self.stack.append(value)
        if type(value) is not kind and not (kind is dict and type(value) is Attributed):
            raise RefusedValueError(f"works on {describe(value)}; expected {what}")
        return value


def describe(value: object) -> str:
    """A short description of any value; never traverses it."""
    if isinstance(value, Known):
        return f"the global {value.name}"
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        return f"the number {value}"  # of at most 32 bytes
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    if isinstance(value, tuple | list | dict | bytes):
        kind = "dict" if isinstance(value, dict) else type(value).__name__
        return f"a {kind} of {len(value):,}"
    return f"a {type(value).__name__}"
