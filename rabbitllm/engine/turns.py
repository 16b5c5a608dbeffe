"""Whether several calls of a model wait for each other at its modules, through which the rows of all go together.

A token's layer may be one call of compiled code, which calls none of the modules whose products it computes. It is not
used where calls take turns: each would read the same weights, and the same experts, by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Turns(threading.local):
    are_taken = False


_turns = _Turns()


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """Calls of a model in this thread take turns within it."""
    before, _turns.are_taken = _turns.are_taken, True
    try:
        yield
    finally:
        _turns.are_taken = before


def takes_turns() -> bool:
    """Whether they do now."""
    return _turns.are_taken
