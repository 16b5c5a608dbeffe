"""Results: tables for people, JSON with the machine, versions, spread and every run, and pictures made of the JSON."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.lib import pictures
from benchmarks.lib.measure import Spread, spread
from benchmarks.lib.runs import AnyRun, good

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

    def figures(self) -> list[dict[str, Any]]:
        """For JSON: heading -> median, low and high where a cell has them, else its text."""
        return [
            {heading: getattr(cell, "figures", None) or cell for heading, cell in zip(self.headings, row, strict=True)}
            for row in self.rows
        ]

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


Columns = Mapping[str, Callable[[AnyCase, Sequence[AnyRun]], str]]
"""Heading -> the cell of a row and its runs that have figures."""


def tabulated(
    runs: Sequence[AnyRun], cases: Mapping[str, AnyCase], turns: int, columns: Columns[AnyCase, AnyRun]
) -> Table:
    """A line a row: its name, how many of its runs have figures, and the columns: medians, in brackets the extremes.

    Args:
        runs: of all rows.
        cases: name of a row -> what the columns know it by.
        turns: how often each was run.
        columns: those after the second.
    """
    lines = []
    for name, case in cases.items():
        found = good(runs, name)
        lines.append((name, f"{len(found)}/{turns}", *(cell(case, found) for cell in columns.values())))
    return Table(("row", "ok", *columns), lines)


def each(of: Callable[[Any], float], digits: int = 2, unit: float = 1.0) -> Callable[[Any, Sequence[Any]], str]:
    """A column of a figure of each run."""
    return lambda case, found: shown(spread(of(run) for run in found), digits, unit)


ADDED_MEMORY = each(lambda run: run.anonymous_added, 0, 2**20)
"""The column "anon MiB over idle"."""


class Shown(str):
    """A cell of a table that is made of figures.

    Attributes:
        figures: median, lowest and highest, in the unit of the column; None for nothing.
    """

    figures: dict[str, float] | None = None


def shown(figures: Spread | None, digits: int = 2, unit: float = 1.0) -> Shown:
    """ "median (lowest-highest)", or a dash for nothing."""
    if figures is None:
        return Shown("-")
    found = {name: value / unit for name, value in asdict(figures).items()}
    median, low, high = (f"{value:.{digits}f}" for value in found.values())
    made = Shown(f"{median} ({low}-{high})")
    made.figures = found
    return made


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


_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
"""Instruction sets, as Linux names them, that change how fast products are."""
_PACKAGES = ("torch", "transformers", "numpy", "numba", "bitsandbytes", "safetensors", "huggingface_hub")


def describe_machine(work: Path) -> dict[str, Any]:
    """Processor, cores, instruction sets, RAM, kernel, and the file system of the work folder."""
    flags = _field("/proc/cpuinfo", "flags").split()
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": " ".join(name for name in _SETS if name in flags) or "none of those that matter",
        "ram_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "file_system": said(["df", "--output=fstype", str(work)])[-1],
    }


def versions_here(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Of the interpreter that runs the benchmark, and of these packages if they are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _field(path: str, name: str) -> str:
    with open(path) as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "0 unknown")


def said(command: list[str]) -> list[str]:
    """The lines that a program prints."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines() or ["unknown"]


def write(
    base: Path,
    title: str,
    machine: Mapping[str, Any],
    table: Table,
    notes: Sequence[str],
    runs: Sequence[Any],
    picture: pictures.Picture | None = None,
    more: Mapping[str, Table] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Print the tables; write them to `base`.md, everything to `base`.json, and from that the picture to `base`.svg.

    Args:
        base: of the files.
        title: of the results.
        machine: from `describe_machine`.
        table: the main one.
        notes: below it.
        runs: dataclasses, one for each row and repeat, some with `versions` and `load_average`.
        picture: from `pictures`.
        more: further tables by their headings.
        facts: what else is in the JSON.
    """
    loads = spread(run.load_average for run in runs if hasattr(run, "load_average"))
    lines = ["Median (lowest-highest).", *notes]
    lines += [f"Load average at the start of the runs: {shown(loads)}."] if loads else []
    described = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in machine.items())
    print(f"\n{title}\n{described}\n\n{table.text()}\n")
    for heading, one in (more or {}).items():
        print(f"{heading}\n\n{one.text()}\n")
    print("\n".join(lines))
    base.parent.mkdir(parents=True, exist_ok=True)
    listed = "\n".join(f"* {line}" for line in lines)
    tables = [table.markdown(), *(f"## {heading}\n\n{one.markdown()}" for heading, one in (more or {}).items())]
    page = [f"# {title}", described, *tables, listed]
    base.with_name(base.name + ".md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    raw = [asdict(run) for run in runs]
    versions: dict[str, dict[str, str]] = {}
    for run in raw:
        if "versions" in run:
            versions[run["row"]] = run.pop("versions") or versions.get(run["row"], {})
    everything = {
        "title": title,
        "machine": machine,
        "versions_here": versions_here(),
        "versions": versions,
        "notes": lines,
        "rows": table.figures(),
        "more": {heading: one.figures() for heading, one in (more or {}).items()},
        "runs": raw,
        "picture": picture,
        **(facts or {}),
    }
    results = base.with_name(base.name + ".json")
    results.write_text(json.dumps(everything, indent=1, default=str) + "\n", encoding="utf-8")
    if picture is not None or "pictures" in everything:
        pictures.redraw(results)
    print(f"\nWritten: {base}.json and .md")
