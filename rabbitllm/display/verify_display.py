"""The progress of a check of layer files: bytes read, speed, and time left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from rabbitllm.base.terminal import LinePiece, Row, bar, duration, fitting, part, speed, text_of
from rabbitllm.display.region import THE_REGION

BAR = 24
"""Width in columns."""


class Reading:
    """Progress of reading a number of bytes.

    Args:
        total: bytes to read.
        clock: returns seconds.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._start = clock()
        self._done = 0

    def add(self, nbytes: int) -> None:
        """Count bytes read."""
        self._done += nbytes

    def rows(self, width: int) -> Sequence[Row]:
        """One row, with a bar if it fits."""
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
    """Show progress while the context is open; yields a function to call with each file and its bytes read."""
    reading = Reading(total)
    claim = THE_REGION.claim(reading)
    try:
        yield lambda name, nbytes: reading.add(nbytes)
    finally:
        claim.release()
