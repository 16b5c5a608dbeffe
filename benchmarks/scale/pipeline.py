"""A model over several processes, each with too little memory for it, against one such process that streams.

A Llama of 1.43 GB in bfloat16. Every process has a cap. All are on one machine and use its loopback, so the figures
lack a network's share. Tokens are compared with those of one process without a cap.

    sudo python -m benchmarks scale.pipeline [--turns 3] [--tokens 24] [--shares 80 55] [--only ROW ...] [--scale tiny]
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import make_checkpoint, weight_bytes
from benchmarks.lib.generation import StepsRun, prompt_for, tokens_equal
from benchmarks.lib.measure import Sampler, fresh_folder
from benchmarks.lib.peers import THIS, Outcome, make_layer_files, room, variables
from benchmarks.lib.process import Cap, control_group, idle_process
from benchmarks.lib.runs import failures, good, ratios, run_all, status, versions

PROCESSES = {"1 process": 1, "2 processes": 2, "3 processes": 3}
ALONE, FREE = "1 process", "1 process, no cap"
CHILD = Path(__file__).resolve().with_name("pipeline_child.py")
RUN_LIMIT_SECONDS = 300
GOAL = 1.0
"""Tokens a second of several processes over those of one that streams: more than."""


@dataclass
class PipelineRun(StepsRun):
    """One row of one turn; the figures of a process are those of the first one, with the loading of all.

    Attributes:
        streamed: bytes that all processes read in each pass, by their placements.
        spans: layers of each process.
    """

    streamed: int = 0
    spans: Sequence[int] = ()


@dataclass(frozen=True)
class Workload:
    """The job of every row.

    Attributes:
        folder: the split directory.
        weights: bytes.
    """

    folder: Path
    weights: int
    prompt: Sequence[int]
    tokens: int


def row_name(processes: str, share: int) -> str:
    """Name of the row of processes with a share of the weights in percent."""
    return f"{processes}, {share} %"


def measure(run: PipelineRun, processes: int, share: int | None, workload: Workload, work: Path) -> None:
    """Run one row of one turn.

    Raises:
        PeerError: a process failed.
    """
    job: dict[str, Any] = {
        "folder": str(workload.folder),
        "prompt": list(workload.prompt),
        "tokens": workload.tokens,
        "processes": processes,
        "all": share is None,
    }
    with contextlib.ExitStack() as stack:
        idle = []
        for rank in range(processes):
            cap = None
            if (nbytes := room(workload.weights, share)) is not None:
                cap = Cap(stack.enter_context(control_group(f"rabbitllm-pipeline-{os.getpid()}-{rank}")), nbytes)
            command: list[str | Path] = [sys.executable, "-P", CHILD, json.dumps(job | {"rank": rank})]
            settings: dict[str, Any] = {"variables": variables(THIS, work), "stop_seconds": RUN_LIMIT_SECONDS}
            label = f"pipeline-{run.row.replace(' ', '-')}-{run.turn}-{rank}"
            idle.append(stack.enter_context(idle_process(command, work, label, [workload.folder], cap=cap, **settings)))
        with Sampler((), idle[0].process.pid) as sampler:
            for child in idle:
                child.go()
            address = idle[0].message()["address"] if processes > 1 else ""
            for child in idle[1:]:
                assert child.process.stdin is not None
                child.process.stdin.write(address + "\n")
                child.process.stdin.flush()
            answers = [child.message() for child in idle]
    run.take(Outcome(answers[0], sampler, idle[0].versions))
    run.streamed = sum(answer["streamed"] for answer in answers)


Rows = Mapping[str, tuple[int, int | None]]
"""Row -> number of processes, and the memory of each as a share of the weights in percent."""


def tabulate(runs: Sequence[PipelineRun], rows: Rows, turns: int) -> report.Table:
    """A line a row."""

    def alone(row: str) -> str:
        share = rows[row][1]
        return FREE if share is None else row_name(ALONE, share)

    columns: report.Columns[str, PipelineRun] = {
        "layers": lambda row, row_runs: "+".join(map(str, row_runs[0].spans)) if row_runs else "",
        "streamed MB": report.each(lambda run: run.streamed, 0, 1e6),
        "first token s": report.each(lambda run: run.first_token_seconds),
        "s/token": report.each(lambda run: run.token_seconds, 3),
        "tokens/s beside 1 process": lambda row, _: report.shown(ratios(runs, alone(row), row)),
        "tokens equal": lambda row, _: report.verdict(tokens_equal(runs, row, FREE)),
    }
    return report.tabulated(runs, {row: row for row in rows}, turns, columns)


def notes_on(runs: Sequence[PipelineRun], rows: Rows) -> list[str]:
    """The meaning of the columns, errors, and the goal."""
    notes = [
        "layers: of each process. streamed: bytes that all processes read from the disk for each token.",
        "tokens/s beside 1 process: with the same cap, in the same turn.",
        *versions(runs),
        *failures(runs),
    ]
    for row, (processes, share) in rows.items():
        resident = [run for run in good(runs, row) if not run.streamed]
        if processes > 1 and share is not None and resident:
            compared = report.median(ratios(runs, row_name(ALONE, share), row))
            notes.append(report.reach(f"{row}, tokens/s beside one that streams", compared, GOAL, at_most=False))
    return notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row failed."""
    parser = command_line.parser(__doc__, 3, list(PROCESSES))
    parser.add_argument("--tokens", type=int, default=24, help="to generate, at least 2 (default: %(default)s)")
    parser.add_argument("--shares", type=int, nargs="+", default=[80, 55], help="of the weights, in percent")
    options = command_line.parsed(parser, arguments, only=["2 processes"], tokens=3, shares=[80])
    command_line.settle(options, "pipeline")
    command_line.check_tokens(options)
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale, "LlamaConfig")
    weights = weight_bytes(checkpoint)
    place = work / "pipeline-run"
    rows: dict[str, tuple[int, int | None]] = {FREE: (1, None)}
    rows |= {row_name(name, share): (PROCESSES[name], share) for share in options.shares for name in options.only}
    with fresh_folder(place):
        split = place / "split"
        make_layer_files(THIS, "rabbitllm", checkpoint, split, None, work, "pipeline-split")
        workload = Workload(split / "splitted_model", weights, prompt_for(options.scale), options.tokens)
        runs = run_all(
            list(rows), options.turns, PipelineRun, lambda run: measure(run, *rows[run.row], workload, work), {}
        )
    model, turns = f"a model of {weights / 1e9:.2f} GB", command_line.turns(options)
    title = f"{options.tokens} tokens of {model} over processes with memory capped, on the CPU, {turns}"
    table, notes = tabulate(runs, rows, options.turns), notes_on(runs, rows)
    bars = {row: (share, row.partition(",")[0], processes > 1) for row, (processes, share) in rows.items()}
    drawn = report.bars_by_cap(title, runs, bars)
    report.write(options.results, title, table, notes, runs, work=work, picture=drawn)
    return status(runs)
