"""The one region of stderr in this process that changes in place; code that shows progress claims it here.

Of several claims the last one is shown; when it is released, the previous one is shown again. A thread paints while
there is a claim. In the form of lines, each claim prints a line every few seconds, less often the longer it takes.
"""

from __future__ import annotations

import atexit
import contextlib
import html
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rabbitllm.base.forks import in_child
from rabbitllm.base.terminal import Row, text_of
from rabbitllm.display.terminal import DisplayForm, Terminal, form_of, size_of

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
        if self._handle is None:
            from IPython.display import display

            self._handle = display(_bundle(text), raw=True, display_id=True)
        else:
            self._handle.update(_bundle(text), raw=True)

    def close(self, last: str) -> None:
        """Replace the text by one line, or by nothing."""
        if self._handle is not None or last:
            self._put(last)


def _bundle(text: str) -> dict[str, str]:
    lines = html.escape(text)
    return {"text/plain": text, "text/html": f'<pre style="margin:0; line-height:1.3">{lines}</pre>'}


REFRESH_SECONDS = 0.2
NOTEBOOK_SECONDS = 0.5
LINE_SECONDS = 5.0
MAX_LINE_SECONDS = 30.0
SHARE_BETWEEN_LINES = 0.01
"""Interval between two lines as a share of the total time so far, so that hours do not fill the screen with them."""


class Content(Protocol):
    """The content of a claim; called from a thread, so it must be quick."""

    def rows(self, width: int) -> Sequence[Row]:
        """At most four rows of at most `width` columns."""
        ...

    def line(self) -> str:
        """The same facts as one plain line."""
        ...


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


class Claim:
    """A place on the screen, until `release`."""

    def __init__(self, region: Region, content: Content, pace: LinePace, form: DisplayForm) -> None:
        self.content = content
        self.pace = pace
        self.form = form
        self.output = NotebookOutput(NOTEBOOK_SECONDS) if form is DisplayForm.NOTEBOOK else None
        self._region = region
        self._over = False

    def release(self, last: str = "") -> None:
        """Remove the rows, and leave a line if one is given. Safe to call again."""
        if not self._over:
            self._over = True
            self._region.drop(self, last)


class Region:
    """Claims, and the thread that paints the last of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
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
        claim = Claim(self, content, pace or LinePace(self._clock()), form)
        with self._lock:
            self._claims.append(claim)
            if form is DisplayForm.TERMINAL:
                self._attach().begin()
            if form is not DisplayForm.LINES:
                self._show()
            if self._ticking is None:
                self._ticking = threading.Event()
                threading.Thread(target=self._tick_on, args=(self._ticking,), name="live", daemon=True).start()
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
                if not self._rows_wanted():
                    terminal.erase()
                if last:
                    terminal.above(last)
                self._show()
            elif last:
                _print(last)
        if terminal is not None and not self._rows_wanted():
            terminal.nested_bars.release()  # without our lock: tqdm takes its own first, then ours

    def _rows_wanted(self) -> bool:
        return any(claim.form is DisplayForm.TERMINAL for claim in self._claims)

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
            claim.output.show("\n".join(map(text_of, claim.content.rows(COLUMNS))), self._clock())
        elif claim.pace.is_due(self._clock()):
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
    with contextlib.suppress(ValueError, OSError):  # closed, or without a reader
        stream.write(line + "\n")
        stream.flush()


THE_REGION = Region()
"""The region of this process."""
atexit.register(THE_REGION._end)
in_child(THE_REGION._reset_in_child)
