"""What `benchmarks decode.vram` makes of its figures: ceilings, a table, notes and bars."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lib import generation, pictures, report
from benchmarks.lib.generation import StepsRun
from benchmarks.lib.measure import spread
from benchmarks.lib.runs import failures, good, ratios, versions

OURS = ("rabbitllm-2", "rabbitllm-2-4bit")
REFERENCE, REFERENCE_HERE = "accelerate", "accelerate-here"
"""In an environment of its own, and in this interpreter, which needs nothing to be installed."""
GIB = 1 << 30


@dataclass(frozen=True)
class Case:
    """A row: a runner under a cap of the GPU's memory, and what the host's memory may hide.

    Attributes:
        runner: its name.
        vram: GiB.
        host: "disk", where what the GPU does not hold comes from the disk for each token; "RAM", where it need not.
    """

    runner: str
    vram: float
    host: str

    @property
    def name(self) -> str:
        return f"{self.runner}, {self.under}"

    @property
    def under(self) -> str:
        """The cap by itself, which rows of different runners share."""
        return f"{self.vram:g} GiB, {self.host}"


@dataclass
class VramRun(StepsRun):
    """One row of one turn; bytes and seconds, and what `StepsRun` has.

    Attributes:
        copied_bytes: to the GPU for a token, as the model tells; of a peer that does not, its decoder layers.
        copy_speed, disk_speed: bytes a second of pinned copies, and of reads past the page cache, nothing else
            going on, just before this row; 0 where it could not be measured.
        bring_seconds, compute_seconds: of this project's: a pass that only brings, one that only computes.
        planned_read_bytes: of this project's: what its placement reads from the disk for a token.
        vram_reserved, vram_allocated: what torch's allocator held at most, and tensors of it.
        vram_in_use: of the GPU, by all processes and contexts, after the last token.
    """

    copied_bytes: int | None = None
    copy_speed: float = 0.0
    disk_speed: float = 0.0
    bring_seconds: float | None = None
    compute_seconds: float | None = None
    planned_read_bytes: int | None = None
    vram_reserved: int = 0
    vram_allocated: int = 0
    vram_in_use: int = 0

    @property
    def disk_bytes(self) -> float:
        """From the disk for a token."""
        return statistics.median(self.step_bytes) if self.step_bytes else 0.0


def computing(runs: Sequence[VramRun], case: Case) -> float:
    """Seconds that a token takes to compute, as this project's rows of that compression measured it; 0 if none did.

    The least of all caps: the same weights are multiplied by the same GPU under each.
    """
    own = OURS[1] if case.runner.endswith("4bit") else OURS[0]
    found = [r.compute_seconds for r in runs if r.row.startswith(own + ", ") and r.compute_seconds is not None]
    return min(found, default=0.0)


def ceiling_seconds(run: VramRun, compute: float) -> float:
    """What this row's own bytes take at the rates measured with it, or its computation, whichever is longer."""
    disk = run.disk_bytes / run.disk_speed if run.disk_speed else 0.0
    link = (run.copied_bytes or 0) / run.copy_speed if run.copy_speed else 0.0
    return max(disk, link, compute)


def of_the_ceiling(runs: Sequence[VramRun], case: Case) -> list[float]:
    """The ceiling over what a token took, at most about 1."""
    compute = computing(runs, case)
    return [ceiling_seconds(run, compute) / run.token_seconds for run in good(runs, case.name)]


def of_its_limit(runs: Sequence[VramRun], case: Case) -> list[float]:
    """Seconds a token over the longer of bringing alone and computing alone, in the same process."""
    return [
        run.token_seconds / max(run.bring_seconds, run.compute_seconds)
        for run in good(runs, case.name)
        if run.bring_seconds is not None and run.compute_seconds is not None
    ]


def tokens_equal(runs: Sequence[VramRun], case: Case) -> list[bool]:
    """Whether a row made the tokens of the reference under the same cap in the same turn."""
    return generation.tokens_equal(runs, case.name, Case(REFERENCE, case.vram, case.host).name)


def our_case_for(case: Case) -> Case:
    """The row of this project that a row is compared with."""
    return Case(OURS[1] if case.runner.endswith("4bit") else OURS[0], case.vram, case.host)


def tabulate(runs: Sequence[VramRun], cases: Sequence[Case], turns: int) -> report.Table:
    """A line a row."""

    def equal(case: Case, found: Sequence[VramRun]) -> str:
        is_alike = not case.runner.endswith("4bit") and case.runner != REFERENCE
        return report.verdict(tokens_equal(runs, case)) if is_alike else ""

    columns: report.Columns[Case, VramRun] = {
        "load s": report.each(lambda run: run.load_seconds, 1),
        "first token s": report.each(lambda run: run.first_token_seconds),
        "s/token": report.each(lambda run: run.token_seconds, 3),
        "x ours": lambda case, found: report.shown(ratios(runs, case.name, our_case_for(case).name)),
        "GB/token from disk": report.each(lambda run: run.disk_bytes, 2, 1e9),
        "GB/token to GPU": lambda case, found: report.shown(
            spread(run.copied_bytes for run in found if run.copied_bytes is not None), 2, 1e9
        ),
        "% of ceiling": lambda case, found: report.shown(spread(of_the_ceiling(runs, case)), 0, 0.01),
        "of its limit": lambda case, found: report.shown(spread(of_its_limit(runs, case))),
        "VRAM GiB": report.each(lambda run: run.vram_reserved, 2, GIB),
        "anon MiB over idle": report.ADDED_MEMORY,
        "tokens equal": equal,
    }
    return report.tabulated(runs, {case.name: case for case in cases}, turns, columns)


def notes_on(runs: Sequence[VramRun], cases: Sequence[Case], host: Sequence[str]) -> list[str]:
    """What the columns mean, the rates, errors, and the goals.

    Args:
        runs: all.
        cases: the rows.
        host: how the host's memory was kept from hiding the disk, a line each.
    """
    copies, disks = (
        spread(run.copy_speed for run in runs if run.copy_speed),
        spread(run.disk_speed for run in runs if run.disk_speed),
    )
    dtypes = sorted({run.dtype for run in runs if run.dtype})
    notes = [
        "x ours: seconds a token beside this project's row under the same cap in the same turn, at 4bit for 4bit.",
        "% of ceiling: the longest of this row's bytes from the disk at the disk's rate, its bytes to the GPU at the "
        "link's rate, and computing alone, over the seconds a token took.",
        "of its limit: seconds a token over the longer of bringing alone and computing alone, in the same process.",
        "VRAM: what torch's allocator held at most, which is what is capped; a context and libraries come on top.",
        "GB/token to GPU: as the model tells; of airllm and rabbitllm-1.1.0, which tell nothing, their decoder layers.",
        f"Page-locked copies: {report.shown(copies, 2, 1e9)} GB/s; disk past the page cache: "
        f"{report.shown(disks, 2, 1e9)} GB/s; each measured before every runner.",
        f"Computed in {', '.join(dtypes) or 'nothing'}; weights are stored in bfloat16.",
        *host,
        report.MEMORY_NOTE,
        *versions(runs),
        *failures(runs),
    ]
    for case in cases:
        if case.runner in OURS:
            notes.append(report.of_its_limit(case.name, spread(of_its_limit(runs, case))))
        else:
            notes.append(report.against_ours(case.name, ratios(runs, case.name, our_case_for(case).name)))
    return notes


def picture(title: str, runs: Sequence[VramRun], cases: Sequence[Case]) -> pictures.Picture:
    """A group a cap."""
    rows = []
    for case in cases:
        group = f"{case.vram:g} GiB of VRAM, the rest from {'the disk' if case.host == 'disk' else 'RAM'}"
        figures = spread(run.token_seconds for run in good(runs, case.name))
        rows.append((group, case.runner, figures, case.runner in OURS))
    return pictures.bars(title, "seconds a token", rows)
