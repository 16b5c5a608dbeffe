"""Splitting a checkpoint into layer files: time against `cp` of the same bytes, peak disk, peak anonymous memory.

In each turn every row splits a fresh copy of the checkpoint, synced and out of the page cache, into a folder inside
that copy. The time ends when the layer files are on the disk: the call, then fsync of every file and folder. `cp -r
--reflink=never` and fsync are timed once in each turn, and ratios are to it. Process start and imports are not timed.
Uncompressed layer files are compared with the checkpoint, tensor by tensor.

    python -m benchmarks split [--turns 5] [--only ROW ...] [--scale tiny] [--work-dir FOLDER]
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import SCALES, make_checkpoint, same_tensors, shards
from benchmarks.lib.machine import said
from benchmarks.lib.measure import CACHE_STATE, Sampler, copy_files, fresh_copy, sync_tree
from benchmarks.lib.peers import AIRLLM, RABBITLLM_1, THIS, Environment, prepare, run_worker
from benchmarks.lib.runs import Run, failures, good, ratios, run_all, status, versions

RATIO_GOAL = 1.3
BYTES_A_LAYER_FILE = 64 << 10
"""That each layer file may add to the peak beyond the largest shard."""


@dataclass(frozen=True)
class Splitter:
    """A row: a package with RabbitLLM's `split_and_save_layers`, and its options."""

    environment: Environment
    package: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compressed(self) -> bool:
        return "compression" in self.options

    @property
    def sequential(self) -> bool:
        return "sequential_shard_processing" in self.options


COPY = "cp"
_SEQUENTIAL = {"sequential_shard_processing": True}
_4BIT = {"compression": "4bit"}
SPLITTERS = {
    "rabbitllm-2": Splitter(THIS, "rabbitllm"),
    "rabbitllm-2-sequential": Splitter(THIS, "rabbitllm", _SEQUENTIAL),
    "rabbitllm-1.1.0": Splitter(RABBITLLM_1, "rabbitllm"),
    "airllm-4.0.0": Splitter(AIRLLM, "airllm"),
    "rabbitllm-2-4bit": Splitter(THIS, "rabbitllm", _4BIT),
    "rabbitllm-2-sequential-4bit": Splitter(THIS, "rabbitllm", _SEQUENTIAL | _4BIT),
    "rabbitllm-1.1.0-4bit": Splitter(RABBITLLM_1, "rabbitllm", _4BIT),
    "airllm-4.0.0-4bit": Splitter(AIRLLM, "airllm", _4BIT),
}


@dataclass
class SplitRun(Run):
    """One row of one turn; bytes and seconds.

    Attributes:
        seconds: of the call (or `cp`).
        sync_seconds: of fsync after it.
        disk_added_peak, disk_added_end: on top of the checkpoint.
        longest_gap: between two samples of the disk, seconds.
        shards_left: of the checkpoint.
        layer_files: their number.
        same_tensors: whether the layer files hold the checkpoint's tensors; None for compressed ones.
        core_seconds: of the call, all cores.
        folder: name of the folder of the layer files.
    """

    seconds: float = 0.0
    sync_seconds: float = 0.0
    disk_added_peak: int = 0
    disk_added_end: int = 0
    longest_gap: float = 0.0
    shards_left: int = 0
    layer_files: int = 0
    same_tensors: bool | None = None
    core_seconds: float = 0.0
    folder: str = ""

    @property
    def headline(self) -> float:
        """Seconds until all is on the disk."""
        return self.seconds + self.sync_seconds


def measure(run: SplitRun, checkpoint: Path, work: Path) -> None:
    """Run one row of one turn."""
    folder = work / "split-run"
    copy = folder / "checkpoint"
    fresh_copy(checkpoint, copy)
    try:
        sampler = _copy(run, copy) if run.row == COPY else _split(run, checkpoint, copy, work)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    run.disk_added_peak = sampler.disk_peak - sampler.disk_start
    run.disk_added_end = sampler.disk_end - sampler.disk_start
    run.longest_gap = round(sampler.longest_gap, 4)


def _copy(run: SplitRun, copy: Path) -> Sampler:
    with Sampler([copy.parent]) as sampler:
        start = time.perf_counter()
        copy_files(copy, copy.parent / "copied")
        run.seconds = time.perf_counter() - start
        run.sync_seconds = _seconds_to_sync(copy.parent)
    return sampler


def _split(run: SplitRun, checkpoint: Path, copy: Path, work: Path) -> Sampler:
    splitter = SPLITTERS[run.row]
    job = {"task": "split", "package": splitter.package, "checkpoint": str(copy), "options": dict(splitter.options)}
    outcome = run_worker(splitter.environment, job, work, f"split-{run.row}-{run.turn}", [copy.parent], [copy.parent])
    run.sync_seconds = _seconds_to_sync(copy.parent)
    run.take(outcome)
    output = Path(outcome.answer["folder"])
    run.shards_left, run.layer_files = len(shards(copy)), len(shards(output))
    run.folder = output.name
    if not splitter.compressed:
        run.same_tensors = same_tensors(checkpoint, output)
    return outcome.sampler


def _seconds_to_sync(folder: Path) -> float:
    start = time.perf_counter()
    sync_tree(folder)
    return time.perf_counter() - start


def tabulate(runs: Sequence[SplitRun], rows: Sequence[str], turns: int) -> report.Table:
    """A line a row."""

    def splits(cell: Callable[[str, Sequence[SplitRun]], str]) -> Callable[[str, Sequence[SplitRun]], str]:
        return lambda row, row_runs: cell(row, row_runs) if row_runs and row != COPY else "-"

    columns: report.Columns[str, SplitRun] = {
        "s to disk": report.each(lambda run: run.headline),
        "x cp": lambda row, _: report.shown(ratios(runs, row, COPY)),
        "peak disk MB": report.each(lambda run: run.disk_added_peak, 1, 1e6),
        "end disk MB": report.each(lambda run: run.disk_added_end, 1, 1e6),
        "anon MiB over idle": splits(report.ADDED_MEMORY),
        "mapped MiB": splits(report.each(lambda run: run.file_peak, 0, 2**20)),
        "shards left": splits(lambda row, row_runs: str(max(run.shards_left for run in row_runs))),
        "same": lambda row, row_runs: report.verdict(
            [run.same_tensors for run in row_runs if run.same_tensors is not None]
        ),
    }
    return report.tabulated(runs, {row: row for row in rows}, turns, columns)


def notes_on(runs: Sequence[SplitRun], rows: Sequence[str], checkpoint: Path, layer_files: int) -> list[str]:
    """The meaning of the columns, errors, and the goals."""
    bound = max(shard.stat().st_size for shard in shards(checkpoint)) + BYTES_A_LAYER_FILE * layer_files
    notes = [
        "Disk in MB (10^6), above the start, when only the checkpoint is there; a negative end: less than before.",
        report.MEMORY_NOTE,
        "same: the layer files hold the checkpoint's tensors, bit for bit.",
        f"Page cache {CACHE_STATE}.",
        f"Longest time between two samples of disk and memory: {max(run.longest_gap for run in runs):.3f} s.",
        *versions(runs),
        *failures(runs),
    ]
    for row in rows:
        if row == COPY or SPLITTERS[row].environment != THIS:
            continue
        if not SPLITTERS[row].compressed:
            notes.append(report.reach(f"{row}, x cp", report.median(ratios(runs, row, COPY)), RATIO_GOAL, at_most=True))
        if SPLITTERS[row].sequential:
            peak = max((run.disk_added_peak / 1e6 for run in good(runs, row)), default=None)
            name = f"{row}, highest peak disk in MB, beside largest shard + 64 KiB a layer file"
            notes.append(report.reach(name, peak, bound / 1e6, at_most=True))
    return notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if `cp` or a row of this project failed."""
    parser = command_line.parser(__doc__, 5, list(SPLITTERS))
    options = command_line.parsed(parser, arguments, only=["rabbitllm-2-sequential-4bit"])
    command_line.settle(options, "split")
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale)
    rows = [COPY, *options.only]
    unusable = prepare({row: SPLITTERS[row].environment for row in options.only}, work)
    runs = run_all(rows, options.turns, SplitRun, lambda run: measure(run, checkpoint, work), unusable)
    sizes = [shard.stat().st_size for shard in shards(checkpoint)]
    title = f"Split of {sum(sizes) / 1e6:.0f} MB in {len(sizes)} shards, {command_line.turns(options)}"
    notes = notes_on(runs, rows, checkpoint, SCALES[options.scale].layer_files)
    facts = {"machine": {"copied_with": said(["cp", "--version"])[0]}}
    report.write(options.results, title, tabulate(runs, rows, options.turns), notes, runs, work=work, facts=facts)
    return status(runs, lambda row: row == COPY or SPLITTERS[row].environment == THIS)
