"""tqdm bars of other code: while a region is shown they are drawn as its rows, and write nothing themselves.

Depends on two parts of tqdm: its list of instances, and the stream of each. If tqdm has changed, its bars are not
touched.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from typing import Any

_MOVES = re.compile(r"(?:\n|\x1b\[A)+|\r.*", re.DOTALL)


class NestedBars:
    """The adopted bars.

    Args:
        left: called with the last state of a bar that should remain on the screen.
    """

    def __init__(self, left: Callable[[str], None]) -> None:
        self._left = left
        self._inside: dict[int, tuple[Any, Callable[[str], Any]]] = {}

    def adopt(self, stream: Any) -> bool:
        """Adopt new bars on this stream, or on stdout; return whether there were any."""
        new = [bar for bar in _bars() if id(bar) not in self._inside and _is_on(bar, stream)]
        for bar in new:
            self._take_in(bar)
        return bool(new)

    def is_theirs(self, text: str) -> bool:
        """Whether a text is a bar's drawing or cursor movement, rather than a line."""
        return _MOVES.fullmatch(text) is not None

    def rows(self) -> list[str]:
        """The bars in their current state, from top to bottom."""
        there = sorted((bar for bar, _ in self._inside.values()), key=lambda bar: abs(getattr(bar, "pos", 0)))
        found = []
        for bar in there:
            if not getattr(bar, "disable", True):
                with contextlib.suppress(Exception):  # another thread may be closing it
                    found.append(str(bar))
        return found

    def let_go(self) -> None:
        """Give the bars their stream back, so that they draw themselves. Call it without any lock: tqdm has its own."""
        inside, self._inside = list(self._inside.values()), {}
        for bar, write in inside:
            bar.fp.wrapper_setattr("write", write)
        for bar, _ in inside:
            if not getattr(bar, "disable", True):
                bar.refresh()

    def _take_in(self, bar: Any) -> None:
        state = {"text": ""}

        def write(text: str) -> None:
            closed = getattr(bar, "disable", True)
            if text.startswith("\r"):
                state["text"] = text[1:].rstrip()
            if closed and text == "\n" and _stays(bar):
                self._forget(bar)
                self._left(state["text"])
            elif closed and text.startswith("\r") and not _stays(bar):
                self._forget(bar)

        own = bar.fp.write
        bar.fp.wrapper_setattr("write", write)
        self._inside[id(bar)] = (bar, own)

    def _forget(self, bar: Any) -> None:
        self._inside.pop(id(bar), None)


def _bars() -> list[Any]:
    """The open bars of tqdm."""
    module = sys.modules.get("tqdm.std")
    instances = getattr(getattr(module, "tqdm", None), "_instances", ())
    for _ in range(3):
        try:
            return [bar for bar in instances if not getattr(bar, "disable", True)]
        except RuntimeError:  # another thread opened one meanwhile
            continue
    return []


def _stays(bar: Any) -> bool:
    """Whether a closed bar leaves its last state on the screen."""
    leave = getattr(bar, "leave", True)
    return bool(leave) if leave is not None else not getattr(bar, "pos", 0)


def _is_on(bar: Any, stream: Any) -> bool:
    file = getattr(bar, "fp", None)
    return hasattr(file, "wrapper_setattr") and any(file == other for other in (stream, sys.stdout))
