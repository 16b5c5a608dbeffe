"""A value of a context variable for the time of a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def assigned(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Give a variable a value inside the context; afterwards it has the one before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
