"""Many prompts at once with less memory than the model: tokens a second by the number of prompts, against peers.

A Llama of 1.43 GB in bfloat16 without an end token; different prompts, 512 tokens in and 32 out, which is FlexGen's
shape. Tokens a second are the generated ones over the time from the first prompt to the last token, without loading.

This project runs as `rabbitllm.batch`; AirLLM and transformers (accelerate offloads every decoder layer to disk) get
all prompts as one batch of their `generate`. A row that is killed for memory or takes too long has no figure.
"rabbitllm-2-no-file" keeps its KV cache in memory; `--cache-memory` limits that memory in this project's rows.

    sudo python -m benchmarks batch [--share 50] [--sequences 1 4 16 64 256] [--prompt-tokens 512] [--tokens 32]
                                    [--turns 3] [--cache-memory 100MB] [--only ROW ...] [--limit 1800] [--scale tiny]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, pictures, report
from benchmarks.lib.checkpoint import SCALES, make_checkpoint, weight_bytes
from benchmarks.lib.generation import Runner, prepare_files
from benchmarks.lib.measure import spread
from benchmarks.lib.peers import AIRLLM, THIS, TRANSFORMERS, room, run_worker
from benchmarks.lib.runs import Run, carry_out, failures, good, status, versions

RUNNERS: Mapping[str, Runner] = {
    "transformers-disk": Runner(TRANSFORMERS, "transformers", "offloaded"),
    "airllm-4.0.0": Runner(AIRLLM, "airllm"),
    "rabbitllm-2": Runner(THIS, "rabbitllm"),
    "rabbitllm-2-no-file": Runner(THIS, "rabbitllm", options={"cache_disk": 0}),
    "rabbitllm-2-4bit": Runner(THIS, "rabbitllm", options={"compression": "4bit"}),
}
OURS = ("rabbitllm-2", "rabbitllm-2-no-file", "rabbitllm-2-4bit")
LINEAR_GOAL = 0.9


@dataclass(frozen=True)
class Case:
    """A row: a runner and its number of prompts at once."""

    runner: str
    sequences: int

    @property
    def name(self) -> str:
        return f"{self.runner}, {self.sequences} at once"


@dataclass
class BatchRun(Run):
    """One row of one turn.

    Attributes:
        seconds: from the first prompt to the last token.
        new_tokens: generated.
        disk_bytes: read, with loading.
    """

    seconds: float = 0.0
    new_tokens: int = 0
    disk_bytes: int = 0

    @property
    def headline(self) -> float:
        """Seconds."""
        return self.seconds

    @property
    def rate(self) -> float:
        """Generated tokens a second."""
        return self.new_tokens / self.seconds


@dataclass(frozen=True)
class Workload:
    """The job of every row, with the options of the command line."""

    checkpoint: Path
    weights: int
    folder: Path
    options: argparse.Namespace

    def files(self, runner: str) -> Path:
        """The folder of a runner's layer files."""
        return self.folder / RUNNERS[runner].files_name


def measure(run: BatchRun, case: Case, workload: Workload, work: Path) -> None:
    """Run one row of one turn."""
    chosen, is_ours, place = RUNNERS[case.runner], case.runner in OURS, str(workload.files(case.runner))
    settings, options = workload.options, {"layer_shards_saving_path": place, **chosen.options}
    if is_ours:  # `rabbitllm.batch` reads the compression from the layer files
        options = {name: value for name, value in chosen.options.items() if name != "compression"}
        options |= {} if settings.cache_memory is None else {"cache_memory": settings.cache_memory}
    job: dict[str, Any] = {
        "task": "bulk",
        "package": chosen.package,
        "is_ours": is_ours,
        "loader": chosen.loader,
        "path": place,
        "checkpoint": str(workload.checkpoint),
        "options": options,
        "offload_folder": str(workload.folder / "offload"),
        "out": str(workload.folder / "out.jsonl"),
        "vocabulary": SCALES[settings.scale].vocab_size,
        "length": settings.prompt_tokens,
        "tokens": settings.tokens,
        "sequences": case.sequences,
    }
    cold, label = [workload.checkpoint, workload.folder], f"batch-{case.runner}-{case.sequences}"
    cap_bytes, limit = room(workload.weights, settings.share), settings.limit
    run.take(run_worker(chosen.environment, job, work, label, cold, cap_bytes=cap_bytes, limit_seconds=limit))


def of_linear(runs: Sequence[BatchRun], case: Case) -> list[float]:
    """Tokens a second over the number of prompts times those of one prompt, for every turn with both."""
    alone = {run.turn: run.rate for run in good(runs, Case(case.runner, 1).name)}
    return [run.rate / alone[run.turn] / case.sequences for run in good(runs, case.name) if run.turn in alone]


def against_ours(runs: Sequence[BatchRun], case: Case, numbers: Sequence[int]) -> list[float]:
    """Tokens a second over this project's best with any number of prompts, for every turn."""
    best: dict[int, float] = {}
    for number in numbers:
        for run in good(runs, Case("rabbitllm-2", number).name):
            best[run.turn] = max(best.get(run.turn, 0.0), run.rate)
    return [run.rate / best[run.turn] for run in good(runs, case.name) if run.turn in best]


def tabulate(runs: Sequence[BatchRun], cases: Sequence[Case], turns: int) -> report.Table:
    """A line a row."""
    numbers = [case.sequences for case in cases]
    columns: report.Columns[Case, BatchRun] = {
        "tokens/s": report.each(lambda run: run.rate),
        "of linear": lambda case, _: report.shown(spread(of_linear(runs, case))),
        "x our best": lambda case, _: report.shown(spread(against_ours(runs, case, numbers))),
        "s": report.each(lambda run: run.seconds),
        "GB from disk": report.each(lambda run: run.disk_bytes, 2, 1e9),
        "anon MiB over idle": report.ADDED_MEMORY,
    }
    return report.tabulated(runs, {case.name: case for case in cases}, turns, columns)


def notes_on(runs: Sequence[BatchRun], cases: Sequence[Case]) -> list[str]:
    """The meaning of the columns, errors, and the goals."""
    notes = [
        "of linear: tokens/s over the number of prompts times those of one prompt, in the same row and turn.",
        "x our best: tokens/s over those of rabbitllm-2 with its best number of prompts.",
        report.MEMORY_NOTE,
        *versions(runs),
        *failures(runs),
    ]
    for case in cases:
        if case.runner in OURS and case.sequences > 1:
            reached = report.median(spread(of_linear(runs, case)))
            notes.append(report.reach(f"{case.name}, of linear", reached, LINEAR_GOAL, at_most=False))
    return notes


def picture(title: str, runs: Sequence[BatchRun], cases: Sequence[Case]) -> pictures.Picture | None:
    """Medians of tokens a second over prompts at once, a line for each runner."""
    points: dict[str, tuple[dict[int, float], bool]] = {}
    for case in cases:
        middle = report.median(spread(run.rate for run in good(runs, case.name)))
        if middle is not None:
            points.setdefault(case.runner, ({}, case.runner in OURS))[0][case.sequences] = middle
    return pictures.lines(title, "prompts at once", "tokens a second", points) if points else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 3, list(RUNNERS))
    parser.add_argument("--share", type=int, default=50, help="of the weights, in percent (default: %(default)s)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="prompts at once")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    parser.add_argument("--cache-memory", help="for the KV cache of this project's rows (default: it decides)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a row (default: %(default)s)")
    smallest = {"sequences": [4], "prompt_tokens": 16, "tokens": 3}
    options = command_line.parsed(parser, arguments, only=["rabbitllm-2"], **smallest)
    command_line.settle(options, "batch")
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale, "LlamaConfig")
    workload = Workload(checkpoint, weight_bytes(checkpoint), work / "batch-run", options)
    cases = [Case(row, number) for number in options.sequences for row in options.only]
    runs = carry_out(
        options,
        cases,
        BatchRun,
        lambda run, case: measure(run, case, workload, work),
        {row: RUNNERS[row].environment for row in options.only},
        workload.folder,
        lambda row: prepare_files(RUNNERS[row], checkpoint, workload.files(row), work, f"batch-{row}-files"),
    )
    title = (
        f"{options.prompt_tokens} tokens in, {options.tokens} out, of a model of {workload.weights / 1e9:.2f} GB with "
        f"memory capped at {options.share} % of that, on the CPU, {command_line.turns(options)}"
    )
    table, drawn = tabulate(runs, cases, options.turns), picture(title, runs, cases)
    report.write(options.results, title, table, notes_on(runs, cases), runs, work=work, picture=drawn)
    return status(runs, lambda row: row.partition(",")[0] in OURS)
