"""The form of progress for a stream: in place (terminal, notebook), or in lines."""

from __future__ import annotations

import enum
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any


class DisplayForm(enum.Enum):
    """A form of progress display."""

    TERMINAL = "rows that change in place"
    NOTEBOOK = "an output that is replaced"
    LINES = "a line every few seconds"


def form_of(stream: Any, environment: Mapping[str, str] = os.environ) -> DisplayForm:
    """The form for a stream, in its current state.

    Lines if nobody watches the output (files, pipes, CI, Kaggle's commit runs) and if rows cannot change: on terminals
    without escape sequences, in a notebook's `!command`, whose output only looks like a terminal's, and while rich
    draws something on this stream.
    """
    if in_notebook():
        return DisplayForm.LINES if environment.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch" else DisplayForm.NOTEBOOK
    isatty = getattr(stream, "isatty", None)
    if isatty is None or not isatty():
        return DisplayForm.LINES
    if environment.get("TERM") == "dumb" or "JPY_PARENT_PID" in environment:
        return DisplayForm.LINES
    if type(stream).__module__ == "rich.file_proxy":
        return DisplayForm.LINES
    if os.name == "nt" and "WT_SESSION" not in environment:  # an older console may not support escape sequences
        return DisplayForm.LINES
    return DisplayForm.TERMINAL


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return hasattr(get_ipython(), "kernel")


def size_of(stream: Any) -> tuple[int, int]:
    """Columns and rows of the terminal behind a stream; if it reports none, those of the environment."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):
        size = shutil.get_terminal_size()
    return (size.columns or 80, size.lines or 24)
