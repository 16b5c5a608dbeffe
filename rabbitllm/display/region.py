"""The one region of stderr in this process that changes in place; code that shows progress claims it here.

Of several claims the last one is shown; when it is released, the previous one is shown again. A thread paints while
there is a claim: rows at the end of a terminal's output, the output of a notebook's cell, or lines. Each claim prints a
line every few seconds, less often the longer it takes.

While rows are on a terminal, everything that Python writes to stdout or stderr goes through here: the rows are erased,
the text is written, and the rows are drawn again below it. Output that bypasses Python (a library in C, another
process) is not seen; it appears at the cursor, and the next painting is below it.

Invariant: between two writes the cursor is at the end of the others' text, never inside the rows.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import html
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rich.cells import cell_len

from rabbitllm.base.forks import DaemonThread, in_child
from rabbitllm.base.terminal import PLAIN_LETTERS, STYLES, Row, text_of


class DisplayForm(enum.Enum):
    """A form of progress display."""

    TERMINAL = "rows that change in place"
    NOTEBOOK = "an output that is replaced"
    LINES = "a line every few seconds"


def form_of(stream: Any, environment: Mapping[str, str] = os.environ) -> DisplayForm:
    """The form for a stream, in its current state.

    Lines if the output is not watched (files, pipes, CI, Kaggle's commit runs) and if rows cannot change: on terminals
    without escape sequences, in a notebook's `!command`, whose output only looks like a terminal's, and while rich
    draws something on this stream.
    """
    if in_notebook():
        return DisplayForm.LINES if environment.get("KAGGLE_KERNEL_RUN_TYPE") == "Batch" else DisplayForm.NOTEBOOK
    isatty = getattr(stream, "isatty", None)
    if isatty is None or not isatty():
        return DisplayForm.LINES
    if environment.get("TERM") == "dumb" or environment.get("JPY_PARENT_PID"):
        return DisplayForm.LINES
    if type(stream).__module__ == "rich.file_proxy":
        return DisplayForm.LINES
    if os.name == "nt" and not environment.get("WT_SESSION"):  # an older console may not support escape sequences
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


_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
TAB = 8
GONE = contextlib.suppress(ValueError, OSError)
"""For a closed stream or terminal: a failing display must not end the work that it displays."""


class Terminal:
    """The terminal behind stderr, and behind stdout if that is one too.

    Not thread-safe by itself: `exclusively` is held during everything caused by other code.

    Args:
        stream: stderr.
        exclusively: a reentrant lock.
    """

    def __init__(self, stream: Any, exclusively: contextlib.AbstractContextManager[Any]) -> None:
        self.stream = stream
        self._exclusively = exclusively
        self._raw: Callable[[str], int] = stream.write
        self._column = 0
        self._wrapped = False
        self._inside = False
        self._rows: Sequence[Row] = ()
        self._painted = ""
        has_letters = "utf" in (getattr(stream, "encoding", None) or "utf-8").lower()
        self._letters = {} if has_letters else PLAIN_LETTERS
        self._colours = not os.environ.get("NO_COLOR")
        self._watched: list[Any] = []
        self._watch(stream)
        self.watch_stdout()

    def watch_stdout(self) -> None:
        """Intercept writes to the current stdout, if it is a terminal: it may have been redirected before."""
        isatty = getattr(sys.stdout, "isatty", None)
        if isatty is not None and isatty() and not any(sys.stdout is other for other in self._watched):
            self._watch(sys.stdout)

    def paint(self, rows: Sequence[Row]) -> None:
        """Replace the shown rows by these."""
        width, height = size_of(self.stream)
        self._rows = rows
        lines = [self._draw_row(row, width - 1) for row in rows[: height - 1]]
        text = f"{width} " + "\r\n".join(lines)
        if text == self._painted or not lines:
            return
        for stream in self._watched:
            with GONE:
                stream.flush()
        out = ""
        if self._column >= width:  # the line is full: the next output would start another one
            out, self._column, self._wrapped = "\r\n", 0, True
        below = self._column > 0
        out += ("\x1b[K\r\n" if below else "\r") + "\x1b[K\r\n".join(lines) + "\x1b[J"
        up = len(lines) - 1 + below
        out += (f"\x1b[{up}A" if up else "") + "\r" + (f"\x1b[{self._column}C" if below else "")
        self._put(out)
        self._painted = text

    def erase(self) -> None:
        """Erase the rows; those of `paint` are dropped."""
        self._rows = ()
        self._wipe()

    def print_above(self, text: str) -> None:
        """Print a line above the rows."""
        begun = self._column > 0 and not self._wrapped
        with GONE:
            self._write_other(self._raw, self.stream, ("\n" if begun else "") + text + "\n")

    def detach(self) -> None:
        """Erase the rows for good."""
        self.erase()
        self.stop_watching()

    def stop_watching(self) -> None:
        """Stop intercepting the writes of other code."""
        for stream in self._watched:
            with contextlib.suppress(AttributeError):
                del stream.write
        self._watched = []

    def _watch(self, stream: Any) -> None:
        raw = stream.write

        def write(text: str) -> int:
            with self._exclusively:
                return self._write_other(raw, stream, text)

        with contextlib.suppress(AttributeError):  # a stream whose `write` cannot be replaced
            stream.write = write
            self._watched.append(stream)

    def _write_other(self, raw: Callable[[str], int], stream: Any, text: str) -> int:
        if self._inside or not isinstance(text, str):
            return raw(text)
        self._wipe()
        visible = text
        if self._wrapped and text:  # the cursor is already below the full line
            visible = text[1:] if text[0] == "\n" else "\x1b[A" + text if text[0] == "\r" else text
            self._wrapped = False
        self._inside = True
        try:
            raw(visible)
            if self._rows:
                with GONE:
                    stream.flush()
        finally:
            self._inside = False
        self._column = column_after(self._column, visible, size_of(self.stream)[0])
        # after a token the next tick is soon enough, but not after a bar of other code, which would hide the rows
        if self._rows and (self._column == 0 or text.startswith("\r")):
            self.paint(self._rows)
        return len(text)

    def _wipe(self) -> None:
        if self._painted:
            self._painted = ""
            self._put("\x1b[J")

    def _put(self, text: str) -> None:
        self._inside = True
        try:
            with GONE:
                self._raw(text)
                self.stream.flush()
        finally:
            self._inside = False

    def _draw_row(self, row: Row, width: int) -> str:
        """A row cut to a width, with its styles."""
        out, room = "", width
        for text, style in row:
            cut = text[:room].translate(self._letters)
            while cell_len(cut) > room:
                cut = cut[:-1]
            room -= cell_len(cut)
            out += f"\x1b[{STYLES[style]}m{cut}\x1b[0m" if cut and style and self._colours else cut
        return out


def column_after(column: int, text: str, width: int) -> int:
    """The cursor's column after a text that begins in `column`: 0 at the start of a line, `width` where it is full."""
    line = _ESCAPES.sub("", text)
    cut = max(line.rfind("\n"), line.rfind("\r"))
    if cut >= 0:
        line, column = line[cut + 1 :], 0
    for index, stretch in enumerate(line.split("\t")):
        if index:
            column = min((column // TAB + 1) * TAB, width - 1)
        column += cell_len(stretch)
    return column if column <= width else (column - 1) % width + 1


# An output of a notebook's cell that is updated in place.

COLUMNS = 100


class NotebookOutput:
    """One output, which appears in the running cell when something is first shown.

    Args:
        interval: minimum of seconds between two texts; the last one is always shown.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._handle: Any = None
        self._shown = ""
        self._next = 0.0

    def show(self, text: str, now: float) -> None:
        """Replace the shown text, unless the last update was too recent."""
        if now >= self._next:
            self._next = now + self._interval
            self._put(text)

    def _put(self, text: str) -> None:
        if text == self._shown:
            return
        self._shown = text
        content = {"text/plain": text, "text/html": f'<pre style="margin:0; line-height:1.3">{html.escape(text)}</pre>'}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def close(self, last: str) -> None:
        """Replace the text by one line, or by nothing."""
        if self._handle is not None or last:
            self._put(last)


REFRESH_SECONDS = 0.2
NOTEBOOK_SECONDS = 0.5
LINE_SECONDS = 5.0
MAX_LINE_SECONDS = 30.0
SHARE_BETWEEN_LINES = 0.01
"""Interval between two lines as a share of the total time so far, so that the lines of hours do not fill the screen."""


class Content(Protocol):
    """The content of a claim; called from a thread, so it must be quick."""

    def rows(self, width: int) -> Sequence[Row]:
        """At most four rows of at most `width` columns."""

    def line(self) -> str:
        """The same content as one plain line."""


class LinePace:
    """The schedule of lines. Seconds are those of any one clock."""

    def __init__(self, start: float) -> None:
        self._start = self._last = start

    def is_due(self, now: float) -> bool:
        """Whether a line is due; if so, it counts as printed."""
        wait = min(max(LINE_SECONDS, SHARE_BETWEEN_LINES * (now - self._start)), MAX_LINE_SECONDS)
        if now - self._last < wait:
            return False
        self._last = now
        return True


class Claim(contextlib.AbstractContextManager[None]):
    """A place on the screen, until `release` or the end of its context."""

    def __init__(self, region: Region, content: Content, pace: LinePace, form: DisplayForm) -> None:
        self.content = content
        self.pace = pace
        self.form = form
        self.output = NotebookOutput(NOTEBOOK_SECONDS) if form is DisplayForm.NOTEBOOK else None
        self._region = region
        self._over = False

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self, last: str = "") -> None:
        """Remove the rows, and leave a line if one is given. Safe to call again."""
        if not self._over:
            self._over = True
            self._region.drop(self, last)


class Region:
    """Claims, and the thread that paints the last of them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._claims: list[Claim] = []
        self._terminal: Terminal | None = None
        self._ticking: threading.Event | None = None

    def claim(self, content: Content, pace: LinePace | None = None) -> Claim:
        """Show something from now on.

        Args:
            content: the content.
            pace: schedule of its lines, for repeated claims.
        """
        form = form_of(sys.stderr)
        claim = Claim(self, content, pace or LinePace(time.monotonic()), form)
        with self._lock:
            self._claims.append(claim)
            if form is DisplayForm.TERMINAL:
                self._attach()
            if form is not DisplayForm.LINES:
                self._show()
            if self._ticking is None:
                self._ticking = threading.Event()
                DaemonThread(self._tick_on, "live", self._ticking).start()
        return claim

    def observe(self) -> None:
        """Start to track where the output of other code ends on a terminal, for later rows."""
        if form_of(sys.stderr) is DisplayForm.TERMINAL:
            with self._lock:
                self._attach()

    def drop(self, claim: Claim, last: str) -> None:
        """Remove a claim; called by `Claim.release`."""
        with self._lock:
            if claim not in self._claims:  # it belonged to the parent, before a fork
                return
            self._claims.remove(claim)
            if not self._claims and self._ticking is not None:
                self._ticking.set()
                self._ticking = None
            terminal = self._terminal if claim.form is DisplayForm.TERMINAL else None
            if claim.output is not None:
                claim.output.close(last)
            elif terminal is not None:
                if not any(claim.form is DisplayForm.TERMINAL for claim in self._claims):
                    terminal.erase()
                if last:
                    terminal.print_above(last)
                self._show()
            elif last:
                _print(last)

    def _attach(self) -> Terminal:
        if self._terminal is None or self._terminal.stream is not sys.stderr:
            if self._terminal is not None:
                self._terminal.detach()
            self._terminal = Terminal(sys.stderr, self._lock)
        self._terminal.watch_stdout()
        return self._terminal

    def _tick_on(self, over: threading.Event) -> None:
        while not over.wait(REFRESH_SECONDS):
            with self._lock:
                if not over.is_set():
                    self._show()

    def _show(self) -> None:
        """Paint the last claim, or print its line if that is due."""
        if not self._claims:
            return
        claim = self._claims[-1]
        if claim.form is DisplayForm.TERMINAL and self._terminal is not None:
            self._terminal.paint(claim.content.rows(size_of(self._terminal.stream)[0] - 1))
        elif claim.output is not None:
            claim.output.show("\n".join(map(text_of, claim.content.rows(COLUMNS))), time.monotonic())
        elif claim.pace.is_due(time.monotonic()):
            _print(claim.content.line())

    def _end(self) -> None:
        with self._lock:
            if self._terminal is not None:
                self._terminal.detach()

    def _reset_in_child(self) -> None:
        """Reset in a forked child, where no thread paints and another one may have held the lock."""
        self._lock = threading.RLock()
        self._claims, self._ticking = [], None
        if self._terminal is not None:
            self._terminal.stop_watching()
            self._terminal = None


def _print(line: str) -> None:
    stream: Any = sys.stderr
    with GONE:
        stream.write(line + "\n")
        stream.flush()


THE_REGION = Region()
"""The region of this process."""
atexit.register(THE_REGION._end)
in_child(THE_REGION._reset_in_child)
