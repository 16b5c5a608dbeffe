"""What a check of layer files shows while it reads them: how much is read, how fast, and how long it will take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rabbitllm.base.words import LinePiece, Row, bar, duration, fitting, part, speed, text_of
from rabbitllm.display.region import THE_REGION

BAR = 24
"""Columns."""


class Reading:
    """So many bytes, of which more and more are read.

    Args:
        total: bytes.
        clock: seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._start = clock()
        self._done = 0

    def add(self, nbytes: int) -> None:
        """So many more are read."""
        self._done += nbytes

    def rows(self, width: int) -> Sequence[Row]:
        """One row, with a bar where there is room for it."""
        share = self._done / self._total if self._total else 1.0
        seconds = self._clock() - self._start
        rate = self._done / seconds if seconds else 0.0
        left = f"{duration((self._total - self._done) / rate)} left" if rate else ""
        pieces = (f"{share:.0%}".replace("%", " %"), part(self._done, self._total), speed(rate), left)
        drawn: Row = (("reading ", "bold"), *bar(share, BAR), (" ", ""))
        row = fitting([LinePiece(text, rank) for rank, text in enumerate(pieces)], width - len(text_of(drawn)))
        if not row:
            drawn = (("reading ", "bold"),)
            row = fitting([LinePiece(text, rank) for rank, text in enumerate(pieces)], width - len(text_of(drawn)))
        return [(*drawn, *row)]

    def line(self) -> str:
        """The same without the bar."""
        (row,) = self.rows(1_000)
        return "reading " + "".join(text for text, _ in row[4:]).replace(" · ", ", ")


@contextlib.contextmanager
def shown_reading(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show it while the context is open; what comes back is told the file and the bytes of it that were read."""
    reading = Reading(total)
    claim = THE_REGION.claim(reading)
    try:
        yield lambda name, nbytes: reading.add(nbytes)
    finally:
        claim.release()
