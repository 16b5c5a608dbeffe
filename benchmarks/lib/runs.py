"""Rows run in turns, and what is compared within a turn."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.lib.idle_process import PeerError
from benchmarks.lib.measure import Spread, drop_cached, fresh_folder, spread
from benchmarks.lib.peers import Environment, Outcome, prepare


@dataclass
class Run:
    """One row of one turn, as measured; memory in bytes.

    Attributes:
        error: why there are no figures.
        anonymous_idle: of the process with everything imported, before the job.
        anonymous_peak, file_peak: during the job.
        load_average: of the last minute, at the start.
        versions: of the packages it ran with.
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
        """The seconds that matter most."""
        raise NotImplementedError

    def take(self, outcome: Outcome) -> None:
        """Take what a process said of itself, by the names of figures here, and what was sampled from outside."""
        for name, value in outcome.answer.items():
            setattr(self, name, value)
        sampler = outcome.sampler
        self.anonymous_idle, self.anonymous_peak = sampler.anonymous_idle, sampler.anonymous_peak
        self.file_peak, self.versions = sampler.file_peak, outcome.versions


AnyRun = TypeVar("AnyRun", bound=Run)


def in_turns(rows: Sequence[str], turns: int) -> Iterator[tuple[int, str]]:
    """Every row once a turn; each turn begins one row later, so that no row always has the same place."""
    for turn in range(turns):
        first = turn % len(rows)
        for row in (*rows[first:], *rows[:first]):
            yield turn, row


class Case(Protocol):
    """A row that is more than a name: one of several of the same runner."""

    @property
    def name(self) -> str:
        """Of the row."""

    @property
    def runner(self) -> str:
        """Its name."""


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
    """Prepare runners, and run their rows in turns. A row that fails has an error.

    Args:
        options: `turns` and `work_dir`.
        cases: rows, or names of runners that are rows.
        make: a run without figures, of a row and a turn.
        measure: fills in the run of a case.
        environments: of the runners.
        folder: of their files, empty at first, and gone at the end.
        files: makes those of a runner.
        keep: leave the folder for the next run, and take what is in it.
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
    """Run every row in every turn, saying how far it is.

    Args:
        rows: their names.
        turns: how many.
        make: a run without figures, of a row and a turn.
        measure: fills it in; a `PeerError` becomes its error.
        unusable: rows that are not tried, and why.
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


def ratios(runs: Sequence[AnyRun], row: str, to: str) -> Spread | None:
    """The headline of a row divided by that of another in the same turn."""
    others = {run.turn: run.headline for run in good(runs, to)}
    return spread(run.headline / others[run.turn] for run in good(runs, row) if run.turn in others)


def equal_in_turn(runs: Sequence[AnyRun], row: str, to: str, of: Callable[[AnyRun], object]) -> list[bool]:
    """Whether a row made the same as another, for every turn in which both ran."""
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
