"""The progress of a split, and of a check of layer files: rows or an output that change in place, or lines.

Draws statistics; `base/progress.py` computes them, and `display/region.py` places the rows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rabbitllm.base import progress
from rabbitllm.base.progress import SplitProgress, SplitStats
from rabbitllm.base.terminal import LinePiece, Row, amount, duration, fitting, part, plain_line, progress_row, speed
from rabbitllm.display.region import THE_REGION, Claim

MIN_SHARED_WIDTH = 90
"""Minimum of columns for the disk and the rates to share a row."""


class SplitDisplay:
    """Shows the events of a split on stderr.

    Args:
        converts: whether the split is a step of a conversion, which has other words for it.
    """

    def __init__(self, *, converts: bool = False) -> None:
        self._converts = converts
        self._ledger = SplitProgress()
        self._lock = threading.Lock()
        self._claim: Claim | None = None

    def __call__(self, event: progress.Event) -> None:
        with self._lock:
            self._ledger.hear(event)
        match event:  # without the lock, which the region's thread takes too
            case progress.DownloadStarted():
                self._show()
            case progress.SplitStarted():
                if event.shards:
                    self._show()
            case progress.SplitDone():
                self.close(done_line(event, converts=self._converts) if self._claim is not None else "")

    def stats(self) -> SplitStats:
        """The current statistics."""
        with self._lock:
            stats = self._ledger.stats()
        return replace(stats, doing="converting") if self._converts and stats.doing == "splitting" else stats

    def rows(self, width: int) -> Sequence[Row]:
        """The rows for the region."""
        return rows_of(self.stats(), width)

    def line(self) -> str:
        """The line for the region."""
        return line_of(self.stats())

    def _show(self) -> None:
        if self._claim is None:
            self._claim = THE_REGION.claim(self)

    def close(self, last: str = "") -> None:
        """Remove the rows; leave a line if one is given."""
        if self._claim is not None:
            self._claim.release(last)
            self._claim = None


def rows_of(stats: SplitStats, width: int) -> list[Row]:
    """Three rows, or four on a narrow terminal.

    Args:
        stats: the statistics.
        width: columns.
    """
    first = progress_row(stats.doing, stats.share, _share_pieces(stats), width)
    disk, rates = _disk_pieces(stats), _rate_pieces(stats)
    if width >= MIN_SHARED_WIDTH:
        lower = [fitting([*disk, *rates], width)]
    else:
        lower = [fitting(disk, width), fitting(rates, width)]
    rows = [first, fitting(_position_pieces(stats), width), *lower]
    return [row for row in rows if row]


def line_of(stats: SplitStats) -> str:
    """All statistics in one plain line."""
    lower = (*_position_pieces(stats), *_disk_pieces(stats), *_rate_pieces(stats))
    return plain_line(stats.doing, (*_share_pieces(stats), *lower))


def done_line(event: progress.SplitDone, *, converts: bool = False) -> str:
    """The final line of a finished split, or of one that is a step of a conversion."""
    took = f"{event.seconds:.1f} s" if event.seconds < 10 else duration(event.seconds)
    files = f"converted, {event.layers} files" if converts else f"split into {event.layers} layer files"
    return f"{files}, {amount(event.output_bytes)}, in {took}; peak disk {amount(event.peak_disk_bytes)}"


def _share_pieces(stats: SplitStats) -> list[LinePiece]:
    time_left = "" if stats.rates.done is None else "waiting"
    if stats.doing == progress.COMPILING:
        time_left = ""
    elif stats.seconds_left is not None:
        time_left = f"{duration(stats.seconds_left)} left"
    return [
        LinePiece(f"{100 * stats.share:.0f} %", 0, "bold"),
        LinePiece(speed(stats.rates.done) if stats.rates.done else "", 2),
        LinePiece(time_left, 1, "bold"),
    ]


def _position_pieces(stats: SplitStats) -> list[LinePiece]:
    pieces = [
        LinePiece(part(stats.done_bytes, stats.total_bytes) if stats.done_bytes else amount(stats.total_bytes), 0)
    ]
    if stats.shards:
        pieces.append(LinePiece(f"shard {max(stats.shard, 1)} of {stats.shards}", 1))
    if stats.shard_here < 1:
        pieces.append(LinePiece(f"{100 * stats.shard_here:.0f} % downloaded", 3))
    if stats.layer:
        pieces.append(LinePiece(stats.layer, 2))
    if stats.layers_done:
        pieces.append(LinePiece(f"{stats.layers_done} of {stats.layers} layers", 4))
    return pieces


def _disk_pieces(stats: SplitStats) -> list[LinePiece]:
    if stats.disk_bytes is None or stats.limit_bytes is None:
        return []
    used = part(stats.disk_bytes, stats.limit_bytes)
    pieces = [LinePiece("" if used.startswith(("0.0 ", "0.00 ")) else f"disk in use {used}", 0)]
    if stats.source_left_bytes:
        pieces.append(LinePiece(f"source {amount(stats.source_left_bytes)}", 5))
    return pieces


def _rate_pieces(stats: SplitStats) -> list[LinePiece]:
    rates = stats.rates
    named = [("fetch", rates.fetch, 1), ("quantize", rates.quantize, 2), ("write", rates.write, 3)]
    return [LinePiece(f"{name} {speed(rate)}", rank) for name, rate, rank in named if rate]


@contextlib.contextmanager
def shown(enabled: bool = True, *, converts: bool = False) -> Iterator[None]:
    """Show splits, or a conversion, while the context is open, unless other code does."""
    if not enabled or progress.is_shown():
        yield
        return
    with contextlib.closing(SplitDisplay(converts=converts)) as display, progress.listening(display):
        yield


# The check of layer files


class ReadingDisplay:
    """Progress of reading a number of bytes."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._start = clock()
        self._done = 0

    def add(self, nbytes: int) -> None:
        """Count bytes read."""
        self._done += nbytes

    def rows(self, width: int) -> Sequence[Row]:
        """One row with a bar."""
        return [progress_row("reading", self._share, self._pieces(), width)]

    def line(self) -> str:
        """The same without the bar."""
        return plain_line("reading", self._pieces())

    @property
    def _share(self) -> float:
        return self._done / self._total if self._total else 1.0

    def _pieces(self) -> list[LinePiece]:
        seconds = self._clock() - self._start
        rate = self._done / seconds if seconds else 0.0
        time_left = f"{duration((self._total - self._done) / rate)} left" if rate else ""
        texts = (f"{100 * self._share:.0f} %", part(self._done, self._total), speed(rate), time_left)
        return [LinePiece(text, rank) for rank, text in enumerate(texts)]


@contextlib.contextmanager
def shown_reading(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show progress while the context is open; yields a function to call with each file and its bytes read."""
    reading = ReadingDisplay(total)
    with THE_REGION.claim(reading):
        yield lambda name, nbytes: reading.add(nbytes)
