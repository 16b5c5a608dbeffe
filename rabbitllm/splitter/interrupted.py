"""Reports an interrupt by Ctrl-C, SIGTERM or SIGHUP in two lines on stderr: the progress, and how to resume.

It does not handle the interrupt itself, which propagates; if that ends the process, it ends within a second. Nothing
has to be saved at that moment: the journal always records what is durable, and is only read here.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import gc
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from rabbitllm.splitter import journal
from rabbitllm.store.manifest import JOURNAL_NAME, MANIFEST_NAME

_goes_on = contextvars.ContextVar("goes_on", default=True)


@contextlib.contextmanager
def starting_afresh() -> Iterator[None]:
    """Print nothing on an interrupt while the context is open: the same call would not resume, but start again."""
    before = _goes_on.set(False)
    try:
        yield
    finally:
        _goes_on.reset(before)


@contextlib.contextmanager
def telling_how_to_go_on(folder: Path) -> Iterator[None]:
    """On an interrupt while the context is open, print on stderr how far the split in `folder` came.

    Interrupts are KeyboardInterrupt and, in the main thread, SIGTERM and SIGHUP, unless these are handled or ignored
    already. SIGTERM and SIGHUP end the process.
    """
    try:
        with _telling_at_signals(folder):
            yield
    except KeyboardInterrupt:
        # The last garbage collection of a process walks through all of torch, which takes more than a second.
        atexit.register(gc.freeze)
        if not _goes_on.get():
            raise
        bar = "\n" if sys.stderr.isatty() else ""  # a progress bar may be on that line
        print(f"{bar}{_state(folder)}\n{_way_on()}", file=sys.stderr, flush=True)
        raise


@contextlib.contextmanager
def _telling_at_signals(folder: Path) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return

    def told(number: int, frame: object) -> None:
        if _goes_on.get():
            with contextlib.suppress(OSError):  # the terminal may be gone; no `print`, since one may be in progress
                os.write(2, f"\n{_state(folder)}\n{_way_on()}\n".encode())
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    names = ("SIGTERM", "SIGHUP")
    ours = [n for n in (getattr(signal, name, None) for name in names) if n and signal.getsignal(n) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, told)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is told:
                signal.signal(number, signal.SIG_DFL)


def _state(folder: Path) -> str:
    if (folder / MANIFEST_NAME).exists():
        return f"Interrupted: the layers in {folder} are whole; only clearing away was left to do."
    if not (folder / JOURNAL_NAME).exists():
        return f"Interrupted before the first shard was taken; nothing was split into {folder} yet."
    try:
        seen = journal.glance(folder)
    except OSError:
        seen = None
    if seen is None:  # an unreadable journal is not reported here
        return f"Interrupted: what was done is safe in {folder}."
    return f"Interrupted: {len(seen.used)} of {len(seen.shards)} shards are used up; the layers are in {folder}."


def _way_on() -> str:
    command = command_line()
    return "The same call goes on from there" + (f": {command}" if command else ".")


def command_line() -> str | None:
    """Return the command that started this process, as it can be typed again; None in a notebook or at a prompt."""
    program = sys.argv[0] if sys.argv else ""
    if not os.path.isfile(program) or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return None
    name = os.path.basename(program)
    if name != "__main__.py" and os.access(program, os.X_OK):
        return shlex.join([name if shutil.which(name) == program else program, *sys.argv[1:]])
    return shlex.join(sys.orig_argv)  # with the interpreter, and `-m` where it was given
