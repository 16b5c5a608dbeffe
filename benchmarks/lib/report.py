"""Results: tables, JSON with the machine, versions, spread and every run, and pictures drawn from the JSON."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.lib import pictures
from benchmarks.lib.machine import describe_machine, versions_here
from benchmarks.lib.measure import Spread, spread
from benchmarks.lib.runs import AnyRun, good

MEMORY_NOTE = (
    "Anonymous memory on top of that of the same process with its libraries imported; mapped: peak of pages of mapped "
    "files, with libraries, which the system may take back."
)
LIMIT_GOAL = 1.10
"""Of a token's seconds over the longer of reading alone and computing alone."""


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

    def figures(self) -> list[dict[str, Any]]:
        """For JSON: heading -> text, median, low and high of a cell of figures, else its text."""
        return [{heading: _held(cell) for heading, cell in zip(self.headings, row, strict=True)} for row in self.rows]

    def markdown(self) -> str:
        """For a page."""
        rule = ["---", *["---:"] * (len(self.headings) - 1)]
        lines = [self.headings, rule, *[[cell.replace("|", "\\|") for cell in row] for row in self.rows]]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _held(cell: str) -> Any:
    figures = getattr(cell, "figures", None)
    return cell if figures is None else {"text": str(cell), **figures}


def _padded(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]


AnyCase = TypeVar("AnyCase")


Columns = Mapping[str, Callable[[AnyCase, Sequence[AnyRun]], str]]
"""Heading -> the cell of a row and its runs that have figures."""


def tabulated(
    runs: Sequence[AnyRun], cases: Mapping[str, AnyCase], turns: int, columns: Columns[AnyCase, AnyRun]
) -> Table:
    """A line for each row: its name, the number of its runs with figures, and the columns: medians (extremes).

    Args:
        runs: of all rows.
        cases: name of a row -> the case that columns take.
        turns: runs of each row.
        columns: those after the second.
    """
    lines = []
    for name, case in cases.items():
        row_runs = good(runs, name)
        lines.append((name, f"{len(row_runs)}/{turns}", *(cell(case, row_runs) for cell in columns.values())))
    return Table(("row", "ok", *columns), lines)


def each(of: Callable[[Any], float], digits: int = 2, unit: float = 1.0) -> Callable[[Any, Sequence[Any]], str]:
    """A column of a figure of each run."""
    return lambda case, row_runs: shown(spread(of(run) for run in row_runs), digits, unit)


ADDED_MEMORY = each(lambda run: run.anonymous_added, 0, 2**20)
"""The column "anon MiB over idle"."""


class Shown(str):
    """A cell with figures.

    Attributes:
        figures: median, low and high, in the unit of the column; None without figures.
    """

    figures: dict[str, float] | None = None


def shown(figures: Spread | None, digits: int = 2, unit: float = 1.0) -> Shown:
    """ "median (lowest-highest)", or a dash for nothing."""
    if figures is None:
        return Shown("-")
    values = {name: value / unit for name, value in asdict(figures).items()}
    median, low, high = (f"{value:.{digits}f}" for value in values.values())
    text = Shown(f"{median} ({low}-{high})")
    text.figures = values
    return text


def bars_by_cap(
    title: str, runs: Sequence[AnyRun], rows: Mapping[str, tuple[int | None, str, bool]]
) -> pictures.Picture:
    """A group of bars for each cap: medians of the headline.

    Args:
        title: of the picture.
        runs: of all rows.
        rows: row -> share of the weights in percent, name of the bar, whether it is this project's.
    """
    drawn = [
        (
            "no cap" if share is None else f"idle process + {share} % of the weights",
            name,
            spread(run.headline for run in good(runs, row)),
            is_ours,
        )
        for row, (share, name, is_ours) in rows.items()
    ]
    return pictures.bars(title, "seconds a token", drawn)


def median(figures: Spread | None) -> float | None:
    """None for nothing."""
    return figures.median if figures else None


def verdict(checks: Sequence[bool]) -> str:
    """ "yes" if all hold, "NO" if one does not, a dash for none."""
    return "-" if not checks else "yes" if all(checks) else "NO"


def reach(name: str, value: float | None, limit: float, *, at_most: bool) -> str:
    """A line on a goal: reached, not reached, or not measured."""
    goal = f"{'at most' if at_most else 'at least'} {limit:.4g}"
    if value is None:
        return f"{name}: not measured ({goal})"
    met = value <= limit if at_most else value >= limit
    return f"{name}: {value:.4g} ({goal}): {'reached' if met else 'NOT reached'}"


def of_its_limit(name: str, figures: Spread | None) -> str:
    """A line on the goal `LIMIT_GOAL` of a row of this project."""
    return reach(f"{name}, of its limit", median(figures), LIMIT_GOAL, at_most=True)


def against_ours(name: str, figures: Spread | None, goal: float = 1.0) -> str:
    """A line on the goal of a peer's row: its seconds over those of this project under the same cap."""
    return reach(f"{name}, seconds beside ours", median(figures), goal, at_most=False)


def write(
    base: Path,
    title: str,
    table: Table,
    notes: Sequence[str],
    runs: Sequence[Any] = (),
    *,
    work: Path | None = None,
    picture: pictures.Picture | None = None,
    more: Mapping[str, Table] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Print the tables; write them to `base`.md, all results to `base`.json, and its pictures to .svg.

    Args:
        base: path of the files, without suffix.
        title: of the results.
        table: the main one.
        notes: below it.
        runs: dataclasses, one for each row and turn, some with `versions` and `load_average`.
        work: the work folder, whose file system is named.
        picture: from `pictures`.
        more: heading -> further table.
        facts: further keys of the JSON; `machine` has further facts of the machine.
    """
    facts = dict(facts or {})
    machine = {**describe_machine(work or Path.cwd()), **facts.pop("machine", {})}
    loads = spread(run.load_average for run in runs if hasattr(run, "load_average"))
    raw = [asdict(run) for run in runs]
    versions: dict[str, dict[str, str]] = {}
    for run in raw:
        if "versions" in run:
            versions[run["row"]] = run.pop("versions") or versions.get(run["row"], {})
    everything = {
        "title": title,
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "versions_here": versions_here(),
        "versions": versions,
        "notes": [*notes, *([f"Load average at the start of the runs: {shown(loads)}."] if loads else [])],
        "rows": table.figures(),
        "more": {heading: further.figures() for heading, further in (more or {}).items()},
        "runs": raw,
        "picture": picture,
        **facts,
    }
    for heading, content in {title: table, **(more or {})}.items():
        print(f"\n{heading}\n\n{content.text()}")
    print("", *everything["notes"], sep="\n")
    base.parent.mkdir(parents=True, exist_ok=True)
    base.with_name(base.name + ".md").write_text(page(everything), encoding="utf-8")
    results = base.with_name(base.name + ".json")
    results.write_text(dumped(everything), encoding="utf-8")
    if picture is not None or "pictures" in everything:
        pictures.redraw(results)
    print(f"\nWritten: {base}.json and .md")


_NUMBER = r"-?\d[\d.e+-]*"
_NUMBERS = re.compile(rf"\[\s+({_NUMBER}(?:,\s+{_NUMBER})*)\s+\]")


def dumped(results: Mapping[str, Any]) -> str:
    """JSON with a list of numbers in one line."""
    text = json.dumps(results, indent=1, default=str)
    return _NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"


def page(results: Mapping[str, Any]) -> str:
    """The page of a results file."""
    facts = {"date": results["date"], **results["machine"]}
    parts = [f"# {results['title']}", "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items())]
    for heading, rows in {"": results["rows"], **results["more"]}.items():
        table = Table(list(rows[0]) if rows else [], [[_cell(value) for value in row.values()] for row in rows])
        parts += [*([f"## {heading}"] if heading else []), table.markdown()]
    parts.append("\n".join(f"* {line}" for line in ["Median (lowest-highest).", *results["notes"]]))
    return "\n\n".join(parts) + "\n"


def _cell(held: Any) -> str:
    """A figure with its spread is held with the text of its cell."""
    return str(held["text"] if isinstance(held, Mapping) else held)
