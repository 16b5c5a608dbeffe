"""Tables for people, JSON for checks of them, and the machine that the figures are from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.lib.measure import Spread, spread
from benchmarks.lib.runs import AnyRun, Run, good

MEMORY_NOTE = (
    "Anonymous memory above that of the same process with everything imported; mapped: peak of pages of mapped files, "
    "libraries included, which the system may take back."
)
LIMIT_GOAL = 1.10
"""A token's seconds over the longer of reading and computing alone."""


@dataclass(frozen=True)
class Table:
    """A heading for each column, and rows of text; all but the first column are aligned right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """For a terminal."""
        widths = [max(len(cell) for cell in column) for column in zip(self.headings, *self.rows, strict=True)]
        lines = [_padded(self.headings, widths), ["-" * width for width in widths]]
        lines += [_padded(row, widths) for row in self.rows]
        return "\n".join("  ".join(line).rstrip() for line in lines)

    def markdown(self) -> str:
        """For a page."""
        rule = ["---", *["---:"] * (len(self.headings) - 1)]
        lines = [self.headings, rule, *[[cell.replace("|", "\\|") for cell in row] for row in self.rows]]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


AnyCase = TypeVar("AnyCase")


def tabulated(
    headings: Sequence[str],
    runs: Sequence[AnyRun],
    cases: Mapping[str, AnyCase],
    turns: int,
    cells: Callable[[AnyCase, Sequence[AnyRun]], Sequence[str]],
) -> Table:
    """A line a row: its name, how many of its runs have figures, and what `cells` makes of those.

    Args:
        headings: of all columns.
        runs: of all rows.
        cases: name of a row -> what `cells` knows it by.
        turns: how often each was run.
        cells: of a row and its good runs, those of the columns after the second.
    """
    lines = []
    for name, case in cases.items():
        found = good(runs, name)
        lines.append((name, f"{len(found)}/{turns}", *cells(case, found)))
    return Table(headings, lines)


def shown(figures: Spread | None, digits: int = 2, unit: float = 1.0) -> str:
    """ "median (lowest-highest)", or a dash for nothing."""
    if figures is None:
        return "-"
    median, low, high = (f"{value / unit:.{digits}f}" for value in (figures.median, figures.low, figures.high))
    return f"{median} ({low}-{high})"


def median(figures: Spread | None) -> float | None:
    """None for nothing."""
    return figures.median if figures else None


def verdict(checks: Sequence[bool]) -> str:
    """ "yes" if all hold, "NO" if one does not, a dash for none."""
    return "-" if not checks else "yes" if all(checks) else "NO"


def reach(name: str, value: float | None, limit: float, *, at_most: bool) -> str:
    """A line that says whether a goal was reached; "not measured" without a value."""
    goal = f"{'at most' if at_most else 'at least'} {limit:.4g}"
    if value is None:
        return f"{name}: not measured ({goal})"
    met = value <= limit if at_most else value >= limit
    return f"{name}: {value:.4g} ({goal}): {'reached' if met else 'NOT reached'}"


def of_its_limit(name: str, figures: Spread | None) -> str:
    """Whether a row of this project is as near as it should be to what reading and computing alone allow.

    Args:
        name: of the row.
        figures: seconds a token over the longer of the two.
    """
    return reach(f"{name}, of its limit", median(figures), LIMIT_GOAL, at_most=True)


def against_ours(name: str, figures: Spread | None, goal: float = 1.0) -> str:
    """Whether another's row takes as much longer as it should than this project's under the same cap."""
    return reach(f"{name}, seconds beside ours", median(figures), goal, at_most=False)


def describe_machine(work: Path) -> dict[str, Any]:
    """CPU, cores, RAM, kernel, and the file system of the work folder."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "ram_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": _said(["df", "--output=fstype", str(work)])[-1],
        "copied_with": _said(["cp", "--version"])[0],
    }


def _field(path: str, name: str) -> str:
    with open(path) as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "0 unknown")


def _said(command: list[str]) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines() or ["unknown"]


def picture(results: Path) -> Path:
    """The file for the picture of a results file."""
    return results.with_name(results.name + ".svg")


def write(
    base: Path, title: str, machine: Mapping[str, Any], table: Table, notes: Sequence[str], runs: Sequence[Run]
) -> None:
    """Print the table; write `base`.md with it, and `base`.json with every run (versions once a row)."""
    loads = spread(run.load_average for run in runs)
    lines = ["Median (lowest-highest).", *notes, f"Load average at the start of the runs: {shown(loads)}."]
    described = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in machine.items())
    print(f"\n{title}\n{described}\n\n{table.text()}\n")
    print("\n".join(lines))
    base.parent.mkdir(parents=True, exist_ok=True)
    listed = "\n".join(f"* {line}" for line in lines)
    base.with_name(base.name + ".md").write_text(f"# {title}\n\n{described}\n\n{table.markdown()}\n\n{listed}\n")
    raw = [asdict(run) for run in runs]
    versions: dict[str, dict[str, str]] = {}
    for run in raw:
        versions[run["row"]] = run.pop("versions") or versions.get(run["row"], {})
    everything = {"title": title, "machine": machine, "notes": lines, "versions": versions, "runs": raw}
    base.with_name(base.name + ".json").write_text(json.dumps(everything, indent=1) + "\n")
    print(f"\nWritten: {base}.json and .md")
