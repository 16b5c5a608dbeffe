"""What Ctrl-C leaves behind, in two lines on stderr: how far the split came, and how to go on.

Stops nothing itself: the interrupt goes on its way, and the process, if that ends it, is gone within a second. Nothing
has to be saved at that moment, since the journal always says what is durable; it is only read here.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import gc
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rabbitllm.layers.layer_store import JOURNAL_NAME, MANIFEST_NAME
from rabbitllm.splitter import journal

_goes_on = contextvars.ContextVar("goes_on", default=True)


@contextlib.contextmanager
def starting_afresh() -> Iterator[None]:
    """Say nothing on an interrupt while the context is open: the same call would not go on, but start anew."""
    before = _goes_on.set(False)
    try:
        yield
    finally:
        _goes_on.reset(before)


@contextlib.contextmanager
def telling_how_to_go_on(folder: Path) -> Iterator[None]:
    """On a KeyboardInterrupt while the context is open, say on stderr how far the split in `folder` came."""
    try:
        yield
    except KeyboardInterrupt:
        # The last garbage collection of a process walks through all of torch, which takes more than a second.
        atexit.register(gc.freeze)
        if not _goes_on.get():
            raise
        bar = "\n" if sys.stderr.isatty() else ""  # one may be standing in that line
        print(f"{bar}{_state(folder)}\n{_way_on()}", file=sys.stderr, flush=True)
        raise


def _state(folder: Path) -> str:
    if (folder / MANIFEST_NAME).exists():
        return f"Interrupted: the layers in {folder} are whole; only clearing away was left to do."
    if not (folder / JOURNAL_NAME).exists():
        return f"Interrupted before the first shard was taken; nothing was split into {folder} yet."
    try:
        seen = journal.glance(folder)
    except OSError:
        seen = None
    if seen is None:  # no moment to complain about a journal
        return f"Interrupted: what was done is safe in {folder}."
    return f"Interrupted: {len(seen.used)} of {len(seen.shards)} shards are used up; the layers are in {folder}."


def _way_on() -> str:
    command = command_line()
    return "The same call goes on from there" + (f": {command}" if command else ".")


def command_line() -> str | None:
    """The command that started this process, as it can be typed again; None in a notebook or at a prompt."""
    program = sys.argv[0] if sys.argv else ""
    if not os.path.isfile(program) or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return None
    name = os.path.basename(program)
    if name != "__main__.py" and os.access(program, os.X_OK):
        return shlex.join([name if shutil.which(name) == program else program, *sys.argv[1:]])
    return shlex.join(sys.orig_argv)  # with the interpreter, and with `-m` if it was that
