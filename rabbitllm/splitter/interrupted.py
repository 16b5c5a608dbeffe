"""What is said when a split is interrupted: how far it came, by its journal, and how to go on."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import gc
import importlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from rabbitllm.base.contexts import assigned
from rabbitllm.base.interrupts import handling
from rabbitllm.splitter import journal
from rabbitllm.store.manifest import JOURNAL_NAME, MANIFEST_NAME

_is_resumable = contextvars.ContextVar("is_resumable", default=True)


def not_resumable() -> contextlib.AbstractContextManager[None]:
    """Print nothing on an interrupt while the context is open: the same call would start again."""
    return assigned(_is_resumable, False)


@contextlib.contextmanager
def reporting_interrupts(folder: Path) -> Iterator[None]:
    """On an interrupt while the context is open, print the progress of the split in `folder`, and how to resume it.

    Two lines on stderr. The interrupt propagates; if it ends the process, that ends within a second. Nothing has to be
    saved then: the journal records all durable data, and is only read here.

    Interrupts are KeyboardInterrupt and, in the main thread, SIGTERM and SIGHUP, unless these are handled or ignored
    already. SIGTERM and SIGHUP end the process.
    """
    try:
        with _reporting_signals(folder):
            yield
    except KeyboardInterrupt as interrupt:
        # the last garbage collection of a process traverses torch's objects, which takes more than a second
        atexit.register(gc.freeze)
        # torch imports tabulate at exit, if it is installed; that import evaluates a string, which makes Python forget
        # the unhandled interrupt: the exit status would be 1
        with contextlib.suppress(ImportError):
            importlib.import_module("tabulate")
        if not _is_resumable.get():
            raise
        bar = "\n" if sys.stderr.isatty() else ""  # a progress bar may be on that line
        print(f"{bar}{_describe_progress(folder)}\n{_resume_hint()}", file=sys.stderr, flush=True)
        interrupt.add_note("The progress of the split was reported.")
        raise


@contextlib.contextmanager
def _reporting_signals(folder: Path) -> Iterator[None]:
    def report(signal_number: int, frame: object) -> None:
        if _is_resumable.get():
            with contextlib.suppress(OSError):  # the terminal may be gone; no `print`, since one may be in progress
                os.write(2, f"\n{_describe_progress(folder)}\n{_resume_hint()}\n".encode())
        signal.signal(signal_number, signal.SIG_DFL)
        signal.raise_signal(signal_number)

    numbers = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]
    with contextlib.ExitStack() as stack:
        for number in numbers:
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                stack.enter_context(handling(number, report))
        yield


def _describe_progress(folder: Path) -> str:
    if (folder / MANIFEST_NAME).exists():
        return f"Interrupted: the layers in {folder} are complete; only the cleanup was left."
    if not (folder / JOURNAL_NAME).exists():
        return f"Interrupted before the first shard was taken; nothing was split into {folder} yet."
    try:
        seen = journal.glance(folder)
    except OSError:
        seen = None
    if seen is None:  # an unreadable journal is not reported here
        return f"Interrupted: the finished part is kept in {folder}."
    return f"Interrupted: {len(seen.used)} of {len(seen.shards)} shards are used; the layers are in {folder}."


def _resume_hint() -> str:
    command = command_line()
    return f"To resume: {command}" if command else "The same call resumes."


def command_line() -> str | None:
    """Return the command that started this process, as it can be typed again; None in a notebook or at a prompt."""
    program = sys.argv[0] if sys.argv else ""
    if not os.path.isfile(program) or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return None
    name = os.path.basename(program)
    if name != "__main__.py" and os.access(program, os.X_OK):
        return shlex.join([name if shutil.which(name) == program else program, *sys.argv[1:]])
    return shlex.join(sys.orig_argv)  # with the interpreter, and `-m` where it was given
