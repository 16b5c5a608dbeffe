"""The table, the notes and the picture of servers with more and more clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib import pictures, report
from benchmarks.lib.measure import percentile, spread
from benchmarks.lib.runs import Run, failures, good, versions
from benchmarks.lib.server_process import Level
from benchmarks.serve.rows import SERVERS

LINEAR_GOAL, LINEAR_TO = 0.8, 16


@dataclass
class ServeRun(Run):
    """One server, asked by more and more clients at once.

    Attributes:
        share: of the weights, in percent: its memory on top of its idle use.
        limit_bytes: of its control group.
        load_seconds: until it answered.
        levels: `figures` for each number of clients, in order; those after one that failed are missing.
    """

    share: int = 0
    limit_bytes: int = 0
    load_seconds: float = 0.0
    levels: list[dict[str, Any]] = field(default_factory=list)

    @property
    def headline(self) -> float:
        """Seconds a token, with the most clients."""
        rate = self.levels[-1]["tokens_a_second"] if self.levels else 0.0
        return 1 / rate if rate else float("inf")

    def level(self, at_once: int) -> Mapping[str, Any] | None:
        """The figures with so many clients; None without any."""
        return next((level for level in self.levels if level["at_once"] == at_once), None)


def figures(level: Level, disk_bytes: int, core_seconds: float) -> dict[str, Any]:
    """The figures of a level; None for events that did not happen, such as a first token."""
    tokens = sum(answer.tokens for answer in level.answers)

    def waits(values: Sequence[float], percent: float) -> float | None:
        wait = percentile(values, percent)
        return None if wait is None or wait == float("inf") else wait

    return {
        "at_once": level.at_once,
        "sent": len(level.answers),
        "whole": level.whole,
        "tokens": tokens,
        "seconds": level.seconds,
        "tokens_a_second": level.tokens_a_second,
        "first_p50": waits(level.firsts, 50),
        "first_p95": waits(level.firsts, 95),
        "between_p50": waits(level.betweens, 50),
        "between_p95": waits(level.betweens, 95),
        "disk_bytes": disk_bytes,
        "core_seconds": core_seconds,
        "errors": sorted({answer.error for answer in level.answers if answer.error not in (None, "cut short")}),
    }


def of_linear(run: ServeRun, at_once: int) -> float | None:
    """Tokens a second over the number of clients times those of one client; None where one of them is missing."""
    alone, together = run.level(1), run.level(at_once)
    if alone is None or together is None or not alone["tokens_a_second"]:
        return None
    return float(together["tokens_a_second"] / alone["tokens_a_second"] / at_once)


def against_ours(runs: Sequence[ServeRun], run: ServeRun, at_once: int) -> float | None:
    """Tokens a second over those of this project with as many bits, in the same turn."""
    own = next((name for name, server in SERVERS.items() if server.is_ours and server.bits == SERVERS[run.row].bits))
    level = run.level(at_once)
    other = next((our_run.level(at_once) for our_run in good(runs, own) if our_run.turn == run.turn), None)
    if level is None or other is None or not other["tokens_a_second"]:
        return None
    return float(level["tokens_a_second"] / other["tokens_a_second"])


HEADINGS = (
    "row",
    "at once",
    "answered",
    "tokens/s",
    "of linear",
    "x ours",
    "first token s, p50",
    "first token s, p95",
    "between s, p50",
    "between s, p95",
    "MB/token from disk",
    "core-s/token",
    "anon MiB over idle",
)


def tabulate(runs: Sequence[ServeRun], rows: Sequence[str], at_once: Sequence[int]) -> report.Table:
    """A line for each row and number of clients: medians, with extremes for several turns."""
    lines = []
    for row in rows:
        for number in at_once:
            levels = [(run, level) for run in good(runs, row) if (level := run.level(number)) is not None]
            lines.append((row, str(number), *_cells(runs, levels, number)))
    return report.Table(HEADINGS, lines)


def _cells(runs: Sequence[ServeRun], levels: Sequence[tuple[ServeRun, Mapping[str, Any]]], at_once: int) -> list[str]:
    def shown(values: Sequence[float | None], digits: int = 2) -> str:
        known = _known(values)
        if len(known) < len(values) or not known:  # a median of the others would be too good
            return "-"
        return report.shown(spread(known), digits) if len(known) > 1 else f"{known[0]:.{digits}f}"

    def of(name: str) -> list[float | None]:
        return [level[name] for _, level in levels]

    answered = f"{sum(level['whole'] for _, level in levels)}/{sum(level['sent'] for _, level in levels)}"
    return [
        answered if levels else "-",
        shown(of("tokens_a_second")),
        shown([of_linear(run, at_once) for run, _ in levels]),
        shown([against_ours(runs, run, at_once) for run, _ in levels]),
        *(shown(of(name)) for name in ("first_p50", "first_p95", "between_p50", "between_p95")),
        shown([level["disk_bytes"] / 1e6 / level["tokens"] if level["tokens"] else None for _, level in levels], 0),
        shown([level["core_seconds"] / level["tokens"] if level["tokens"] else None for _, level in levels]),
        shown([run.anonymous_added / 2**20 for run, _ in levels], 0),
    ]


def notes_on(runs: Sequence[ServeRun], rows: Sequence[str], at_once: Sequence[int], seconds: float) -> list[str]:
    """The meaning of the columns, errors, and the goals."""
    limits = {run.row: run for run in runs if run.limit_bytes}
    errors = {(run.row, level["at_once"], error) for run in runs for level in run.levels for error in level["errors"]}
    notes = [
        f"answered: requests with a whole answer, of those sent within {seconds:g} s; the tokens of all count in "
        "tokens/s.",
        "of linear: tokens/s over the number of clients times those of one client.",
        "x ours: tokens/s over those of this project with as many bits, in the same turn.",
        "first token: from sending a request to its first text; a dash where that percentile of requests got none.",
        "between: from one piece of a text to the next.",
        report.MEMORY_NOTE,
        *(
            f"{row}: limit of its group {run.limit_bytes / 2**20:.0f} MiB, {run.share} % of the weights over idle."
            for row, run in limits.items()
        ),
        *versions(runs),
        *failures(runs),
        *(f"{row}, {number} at once: {error}" for row, number, error in sorted(errors)),
    ]
    for row in rows:
        for number in at_once:
            name = f"{row}, {number} at once"
            if not SERVERS[row].is_ours:
                compared = report.median(spread(_known(against_ours(runs, run, number) for run in good(runs, row))))
                notes.append(report.reach(f"{name}, tokens/s beside ours", compared, 1.0, at_most=True))
            elif 1 < number <= LINEAR_TO:
                linear = report.median(spread(_known(of_linear(run, number) for run in good(runs, row))))
                notes.append(report.reach(f"{name}, of linear", linear, LINEAR_GOAL, at_most=False))
    return notes


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def picture(title: str, runs: Sequence[ServeRun], rows: Sequence[str]) -> pictures.Picture:
    """A line for each row: medians of tokens a second over clients."""
    drawn = {}
    for row in rows:
        points = {}
        for number in sorted({level["at_once"] for run in good(runs, row) for level in run.levels}):
            rates = [level["tokens_a_second"] for run in good(runs, row) if (level := run.level(number)) is not None]
            if (middle := report.median(spread(rates))) is not None:
                points[number] = middle
        if points:
            drawn[row] = (points, SERVERS[row].is_ours)
    return pictures.lines(title, "requests at once", "tokens a second", drawn)
