"""Ctrl-C in the `rabbitllm` command: while modules are imported, and when it is done, the process ends at once; else as
in any program.

Importing torch and transformers takes seconds, some of their modules catch whatever is raised meanwhile, and Python
takes seconds more to take them down again. Nothing is lost: a command that was killed is finished by the same command.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from rabbitllm.base.contexts import assigned

INTERRUPTED = 130
"""The exit code after Ctrl-C, by the convention of shells."""
_line = contextvars.ContextVar("line", default="interrupted")


def resumable() -> AbstractContextManager[None]:
    """Say after Ctrl-C that the same command resumes, while the context is open."""
    return assigned(_line, "interrupted; run the same command to resume")


def answer_interrupts() -> None:
    """Answer Ctrl-C as above from now on, unless the caller of the command has its own handler."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, on_interrupt)


@contextlib.contextmanager
def handling(number: int, handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Answer a signal by a handler inside the context; has no effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


def on_interrupt(sig: int, frame: Any) -> None:
    """The handler: raises KeyboardInterrupt with the line to print, unless the interrupted code is being imported, or
    Python ends: then no module's code is below it, and it would print a traceback.
    """
    is_ending = True
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            # a terminal has shown ^C, and a status line may have hidden its cursor
            shown = "\x1b[?25h\n" if os.isatty(2) else ""
            os.write(2, f"{shown}{_line.get()}\n".encode())
            os._exit(INTERRUPTED)
        is_ending &= frame.f_code.co_name != "<module>"
        frame = frame.f_back
    if is_ending:
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt(_line.get())
