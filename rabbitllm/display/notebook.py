"""An output of a notebook's cell that is replaced as things go on."""

from __future__ import annotations

import html
from typing import Any

COLUMNS = 100


class NotebookOutput:
    """One output, which appears in the cell that runs when something is first shown.

    Args:
        interval: seconds between two texts, at least; the last one is always shown.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._handle: Any = None
        self._shown = ""
        self._next = 0.0

    def show(self, text: str, now: float) -> None:
        """Put a text in place of what is there, unless that was a moment ago."""
        if now >= self._next:
            self._next = now + self._interval
            self._put(text)

    def _put(self, text: str) -> None:
        if text == self._shown:
            return
        self._shown = text
        if self._handle is None:
            from IPython.display import display

            self._handle = display(_bundle(text), raw=True, display_id=True)
        else:
            self._handle.update(_bundle(text), raw=True)

    def close(self, last: str) -> None:
        """Leave one line, or nothing."""
        if self._handle is not None or last:
            self._put(last)


def _bundle(text: str) -> dict[str, str]:
    lines = html.escape(text)
    return {"text/plain": text, "text/html": f'<pre style="margin:0; line-height:1.3">{lines}</pre>'}
