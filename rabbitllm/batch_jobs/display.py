"""Progress of a batch job: its display, and the final report of `rabbitllm batch`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rabbitllm.base.interrupts import handling, on_interrupt
from rabbitllm.base.terminal import LinePiece, Row, counted, duration, plain_line, progress_row, put_fact, shortened
from rabbitllm.generation.request import BatchStats


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a batch job.

    Attributes:
        lines: number of lines of the input.
        done: number of lines whose answer is on the disk.
        errors: number of these that are errors.
        resumed: number of lines answered by an earlier run.
        prompt_tokens: tokens of prompts that this run has computed.
        new_tokens: tokens that this run has generated.
        seconds: time that this run has spent answering.
        forced_tokens: new tokens that grammars forced, so that they took no pass; known at the end.
    """

    lines: int
    done: int
    errors: int
    resumed: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    forced_tokens: int = 0


class JobDisplay:
    """The progress of a batch job; see `display.region.Content`. Used from several threads, which see whole records."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._stats: Callable[[], BatchStats] | None = None

    def update(self, progress: Progress) -> None:
        """Update the durable progress."""
        self._progress = progress

    def watch(self, stats: Callable[[], BatchStats]) -> None:
        """Set the source of the batch's statistics."""
        self._stats = stats

    @property
    def forced_tokens(self) -> int:
        """See `Progress`, so far."""
        return self._stats().forced_tokens if self._stats is not None else 0

    def rows(self, width: int) -> Sequence[Row]:
        """One row with a bar."""
        if (progress := self._progress) is None:
            return [(("reading the input …", "dim"),)]
        return [progress_row("answering", progress.done / progress.lines, self._pieces(progress), width)]

    def line(self) -> str:
        """The same text without the bar."""
        progress = self._progress
        return "reading the input" if progress is None else plain_line("answering", self._pieces(progress))

    def _pieces(self, progress: Progress) -> list[LinePiece]:
        """The pieces of the row, the most important first."""
        stats = self._stats() if self._stats is not None else None
        remaining = running = passes = ""
        if progress.prompt_tokens and progress.seconds:  # errors alone give no estimate
            answered = progress.done - progress.resumed
            remaining = f"{duration((progress.lines - progress.done) * progress.seconds / answered)} left"
        if stats is not None and stats.passes:
            running = f"{stats.running:,} at a time"
            passes = f"{stats.pass_seconds / stats.passes:.1f} s a pass"
        errors = counted(progress.errors, "error") if progress.errors else ""
        lines = f"{progress.done:,} of {counted(progress.lines, 'line')}"
        texts = (lines, rate_of(progress, stats), remaining, errors, running, passes)
        return [LinePiece(text, rank) for rank, text in enumerate(texts)]


@contextlib.contextmanager
def reporting_interrupts(console: Console) -> Iterator[None]:
    """Report an interrupt at once: the current pass, which may take a minute, is finished first."""

    def report(sig: int, frame: object) -> None:
        signal.signal(signal.SIGINT, previous)
        console.print("stopping after this pass; press Ctrl-C again to stop now", style="yellow")
        raise KeyboardInterrupt

    previous = signal.getsignal(signal.SIGINT)
    if previous not in (signal.default_int_handler, on_interrupt):  # the program has its own handler
        yield
        return
    with handling(signal.SIGINT, report):
        yield


def rate_of(progress: Progress, stats: BatchStats | None) -> str:
    """Tokens per second: generated ones, or where there are none, prompt tokens."""
    generated = max(progress.new_tokens, stats.new_tokens if stats is not None else 0)
    seconds = stats.pass_seconds if stats is not None else progress.seconds
    tokens, unit = (generated, "tokens/s") if generated else (progress.prompt_tokens, "tokens/s read")
    if not tokens or not seconds:
        return ""
    rate = tokens / seconds
    return f"{rate:,.0f} {unit}" if rate >= 10 else f"{rate:#.2g} {unit}"


def put_end(console: Console, out: Path, progress: Progress) -> None:
    """Print the final report."""
    put_fact(console, "answers", f"{counted(progress.lines, 'line')} in {shortened(out)}")
    if progress.resumed == progress.lines:
        put_fact(console, "finished", "all lines were answered before")
    elif progress.resumed:
        put_fact(console, "resumed", f"{progress.resumed:,} were answered before")
    if progress.errors:
        put_fact(console, "errors", f"{counted(progress.errors, 'line')} failed; the output has the reason of each")
    if progress.resumed == progress.lines:
        return
    took = f"{duration(progress.seconds)}, {counted(progress.prompt_tokens, 'token')} read"
    generated = f", {progress.new_tokens:,} generated" if progress.new_tokens else ""
    generated += f" ({progress.forced_tokens:,} forced, without a pass)" if progress.forced_tokens else ""
    rate = rate_of(progress, None)
    put_fact(console, "took", f"{took}{generated}{f', {rate}' if rate else ''}")


def record(out: Path, model: str, progress: Progress) -> dict[str, Any]:
    """The record for `--json`."""
    counts = asdict(progress)
    del counts["done"]  # all of the lines
    return {"model": model, "output": str(out), **counts, "seconds": round(progress.seconds, 3)}
