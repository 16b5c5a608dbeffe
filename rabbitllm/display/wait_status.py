"""A spinner with words, which also says that kernels are compiled, once that takes long; and a line where none is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.status import Status
from rich.text import Text

from rabbitllm.base import progress


class WaitStatus:
    """What a spinner says.

    Args:
        console: where it is shown; nowhere if that is no terminal.
        text: the words.

    Attributes:
        spinner: the spinner.
        compilation: what it says of kernels.
    """

    def __init__(self, console: Console, text: str) -> None:
        self._text = text
        self.spinner = Status(self, console=console)
        self.compilation = progress.Compilation()

    def say(self, text: str) -> None:
        """Show what is done now instead."""
        self._text = f"{text} …"

    def __rich__(self) -> Text:
        """The words at this moment."""
        return Text(f"{self._text} {progress.COMPILING}" if self.compilation.is_long else self._text)


@contextlib.contextmanager
def waiting(console: Console, text: str) -> Iterator[WaitStatus]:
    """Show a spinner while the context is open."""
    status = WaitStatus(console, text)
    with status.spinner, progress.listening(status.compilation.hear, shows=False):
        yield status


@contextlib.contextmanager
def compilation_told(say: Callable[[str], None]) -> Iterator[None]:
    """Say once that kernels are compiled, when that takes long while the context is open and no display shows it."""
    compilation = progress.Compilation()

    def hear(event: progress.Event) -> None:
        compilation.hear(event)
        if compilation.is_long and not progress.is_shown() and not said:
            said.append(True)
            say(f"{progress.COMPILING} …")

    said = list[bool]()
    with progress.listening(hear, shows=False):
        yield
