"""The first seconds of a command: torch and transformers are imported, with a line on the terminal."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from rabbitllm.base.collection import uncollected
from rabbitllm.display.region import GONE, DisplayForm, form_of

_HEAVIEST = "rabbitllm.engine.load"


def import_torch() -> None:
    """Import torch, transformers and the engine, which garbage collections skip from then on.

    Collections during the imports took a fifth of the time until the first token, and no garbage was there.
    """
    if _HEAVIEST not in sys.modules:
        with uncollected():
            importlib.import_module(_HEAVIEST)
        gc.freeze()


@contextlib.contextmanager
def shown(text: str) -> Iterator[None]:
    """Show a line until the command writes something else to the terminal, or ends. Elsewhere show nothing."""
    if form_of(sys.stderr) is not DisplayForm.TERMINAL:
        yield
        return
    terminal: Any = sys.stderr
    streams: list[Any] = [stream for stream in (terminal, sys.stdout) if stream.isatty()]
    writes = {stream: stream.write for stream in streams}
    is_shown = True

    def erase() -> None:
        nonlocal is_shown
        if is_shown:
            is_shown = False
            with GONE:
                writes[terminal]("\r\x1b[K")
                terminal.flush()

    def erasing(stream: Any) -> Any:
        def write(more: str) -> Any:
            erase()
            return writes[stream](more)

        return write

    with GONE:
        terminal.write(text)
        terminal.flush()
    replaced = {stream: erasing(stream) for stream in writes}
    for stream, write in replaced.items():
        stream.write = write
    try:
        yield
    finally:
        erase()
        for stream, write in replaced.items():
            if stream.write is write:  # else the progress of a split has put its own in this place
                del stream.write


def kernels_told() -> contextlib.AbstractContextManager[None]:
    """Say in one line that kernels are compiled for long; a terminal has spinners for that."""
    if form_of(sys.stderr) is DisplayForm.TERMINAL:
        return contextlib.nullcontext()
    from rabbitllm.display.wait_status import compilation_told

    return compilation_told(functools.partial(print, file=sys.stderr, flush=True))
