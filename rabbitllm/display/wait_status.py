"""A spinner with words, which also says that kernels are compiled, once that takes long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status
from rich.text import Text

from rabbitllm.base import progress

LONG_SECONDS = 2.0
"""A shorter compilation is not mentioned."""
PAUSE_SECONDS = 5.0
"""Seconds without an event after which it has ended: a step of it takes less."""


class WaitStatus:
    """What a spinner says.

    Args:
        console: where it is shown; nowhere if that is no terminal.
        text: the words.

    Attributes:
        spinner: the spinner.
    """

    def __init__(self, console: Console, text: str) -> None:
        self._text = text
        self.spinner = Status(self, console=console)
        self._first = self._last = -PAUSE_SECONDS

    def say(self, text: str) -> None:
        """Show what is done now instead."""
        self._text = f"{text} …"

    def hear(self, event: progress.Event) -> None:
        """Process an event of `progress`."""
        if isinstance(event, progress.KernelsCompiling):
            now = time.monotonic()
            self._first = now if now - self._last >= PAUSE_SECONDS else self._first
            self._last = now

    def __rich__(self) -> Text:
        """The words at this moment."""
        compiles = self._last - self._first >= LONG_SECONDS and time.monotonic() - self._last < PAUSE_SECONDS
        return Text(f"{self._text} {progress.COMPILING}" if compiles else self._text)


@contextlib.contextmanager
def waiting(console: Console, text: str) -> Iterator[WaitStatus]:
    """Show a spinner while the context is open."""
    status = WaitStatus(console, text)
    with status.spinner, progress.listening(status.hear, shows=False):
        yield status
