"""Runs of rows in turns, and comparisons within a turn."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.lib.measure import Spread, drop_cached, fresh_folder, spread
from benchmarks.lib.peers import Environment, Outcome, prepare
from benchmarks.lib.process import PeerError


@dataclass
class Run:
    """One row of one turn; memory in bytes.

    Attributes:
        error: why there are no figures; None for a run with figures.
        anonymous_idle: of the process with its libraries imported, before the job.
        anonymous_peak, file_peak: during the job.
        load_average: of the last minute, at the start.
        versions: of its packages.
    """

    row: str
    turn: int
    error: str | None = None
    anonymous_idle: int = 0
    anonymous_peak: int = 0
    file_peak: int = 0
    load_average: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def anonymous_added(self) -> int:
        """By the job, at its peak."""
        return self.anonymous_peak - self.anonymous_idle

    @property
    def headline(self) -> float:
        """The most important seconds."""
        raise NotImplementedError

    def take(self, outcome: Outcome) -> None:
        """Take the figures of a worker's answer, by their names, and those of its sampler."""
        for name, value in outcome.answer.items():
            setattr(self, name, value)
        sampler = outcome.sampler
        self.anonymous_idle, self.anonymous_peak = sampler.anonymous_idle, sampler.anonymous_peak
        self.file_peak, self.versions = sampler.file_peak, outcome.versions


AnyRun = TypeVar("AnyRun", bound=Run)


def in_turns(rows: Sequence[str], turns: int) -> Iterator[tuple[int, str]]:
    """Every row once in each turn; each turn begins one row later."""
    for turn in range(turns):
        first = turn % max(len(rows), 1)
        for row in (*rows[first:], *rows[:first]):
            yield turn, row


class Case(Protocol):
    """A row; several rows may have the same runner."""

    @property
    def name(self) -> str:
        """Of the row."""

    @property
    def runner(self) -> str:
        """Name of the runner."""


AnyCase = TypeVar("AnyCase", bound=Case)


def carry_out(
    options: argparse.Namespace,
    cases: Sequence[AnyCase] | Sequence[str],
    make: Callable[[str, int], AnyRun],
    measure: Callable[[AnyRun, Any], None],
    environments: Mapping[str, Environment],
    folder: Path,
    files: Callable[[str], None],
    *,
    keep: bool = False,
) -> list[AnyRun]:
    """Prepare runners, and run their rows in turns; a row that fails has an error.

    Args:
        options: `turns` and `work_dir`.
        cases: rows, or names of runners that are rows.
        make: row and turn -> a run without figures.
        measure: fills in the run of a case.
        environments: runner -> its environment.
        folder: of the runners' files, empty at the start and removed at the end.
        files: makes the files of a runner.
        keep: keep the folder for the next run, and use its files.
    """
    named: dict[str, Any] = {case if isinstance(case, str) else case.name: case for case in cases}
    runner_of = {name: case if isinstance(case, str) else case.runner for name, case in named.items()}
    unusable = prepare(environments, options.work_dir)
    with fresh_folder(folder, keep=keep):
        for runner in environments:
            if runner not in unusable:
                try:
                    files(runner)
                except PeerError as error:
                    unusable[runner] = f"its files: {error}"
        drop_cached(folder)
        without = {name: unusable[runner] for name, runner in runner_of.items() if runner in unusable}
        return run_all(list(named), options.turns, make, lambda run: measure(run, named[run.row]), without)


def run_all(
    rows: Sequence[str],
    turns: int,
    make: Callable[[str, int], AnyRun],
    measure: Callable[[AnyRun], None],
    unusable: Mapping[str, str],
) -> list[AnyRun]:
    """Run every row in every turn, and print the progress.

    Args:
        rows: their names.
        turns: their number.
        make: row and turn -> a run without figures.
        measure: fills it in; a `PeerError` becomes its error.
        unusable: row -> the reason not to run it.
    """
    runs = []
    for turn, row in in_turns(rows, turns):
        run = make(row, turn)
        run.load_average, run.error = round(os.getloadavg()[0], 2), unusable.get(row)
        if run.error is None:
            try:
                measure(run)
            except PeerError as error:
                run.error = str(error)
        print(f"turn {turn + 1}/{turns} {row}: {run.error or f'{run.headline:.3f} s'}", file=sys.stderr, flush=True)
        runs.append(run)
    return runs


def good(runs: Sequence[AnyRun], row: str) -> list[AnyRun]:
    """The runs of a row that have figures."""
    return [run for run in runs if run.row == row and run.error is None]


def ratios(
    runs: Sequence[AnyRun], row: str, to: str, of: Callable[[AnyRun], float] = lambda run: run.headline
) -> Spread | None:
    """A figure of a row, by default its headline, divided by that of another in the same turn."""
    others = {run.turn: of(run) for run in good(runs, to)}
    return spread(of(run) / others[run.turn] for run in good(runs, row) if run.turn in others)


def equal_in_turn(runs: Sequence[AnyRun], row: str, to: str, of: Callable[[AnyRun], object]) -> list[bool]:
    """Whether a row's result equals another's, for every turn in which both ran."""
    expected = {run.turn: of(run) for run in good(runs, to)}
    return [of(run) == expected[run.turn] for run in good(runs, row) if run.turn in expected]


def failures(runs: Sequence[Run]) -> list[str]:
    """A line for every error of every row."""
    return sorted({f"{run.row} failed: {run.error}" for run in runs if run.error is not None})


def versions(runs: Sequence[Run]) -> list[str]:
    """A line for each set of versions that rows ran with."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        if run.versions:
            line = ", ".join(f"{name} {version}" for name, version in run.versions.items())
            rows.setdefault(line, []).append(run.row)
    return [f"{', '.join(dict.fromkeys(names))}: {line}" for line, names in rows.items()]


def status(runs: Sequence[Run], ours: Callable[[str], bool] = lambda row: True) -> int:
    """The exit status: 1 if a row of this project failed."""
    return int(any(run.error is not None and ours(run.row) for run in runs))
