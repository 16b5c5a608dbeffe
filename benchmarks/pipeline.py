"""A model over several processes, each too small for it, beside one process as small that streams.

Every process runs in a control group of its own, which is bounded, once everything is imported, to what it takes then
and a share of the size of the weights. A Llama of 1.43 GB in bfloat16, a prompt of 16 tokens, then greedy tokens,
batch 1, in turns; files are not in the page cache at the start. Seconds a token are the median of the steps after the
first token. All processes are on one machine, and talk over its loopback: what a network adds is not in here. Tokens
are compared with those of one process without a cap.

    sudo python -m benchmarks.pipeline [--turns 3] [--tokens 24] [--shares 65 45] [--only ROW ...] [--scale tiny]
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import bars, command_line, report
from benchmarks.capped import LEAST_ROOM_BYTES, LLAMA
from benchmarks.checkpoint import make_checkpoint, shards
from benchmarks.control_group import control_group
from benchmarks.decode import prompt_for
from benchmarks.measure import Sampler, drop_cached, spread
from benchmarks.peers import THIS, Outcome, make_layer_files, read_message, variables
from benchmarks.runs import Run, failures, good, ratios, run_all, versions

PROCESSES = {"1 process": 1, "2 processes": 2, "3 processes": 3}
ALONE, FREE = "1 process", "1 process, no cap"
RUN_LIMIT_SECONDS = 300
GOAL = 1.0
"""Tokens a second of several processes over those of one that streams: more than."""


@dataclass
class PipelineRun(Run):
    """One row of one turn; seconds and bytes.

    Attributes:
        load_seconds: of the first process, the others' included.
        first_token_seconds: from the call of `generate`.
        token_seconds: median of `step_seconds`, which leave out the first token.
        step_bytes: that the first process read from the disk in those steps.
        streamed: bytes that all processes read from their disks in each pass, by their placements.
        spans: layers of each process.
    """

    load_seconds: float = 0.0
    first_token_seconds: float = 0.0
    token_seconds: float = 0.0
    step_seconds: Sequence[float] = ()
    step_bytes: Sequence[int] = ()
    streamed: int = 0
    spans: Sequence[int] = ()
    tokens: Sequence[int] = ()
    dtype: str = ""
    threads: int = 0

    @property
    def headline(self) -> float:
        """Seconds a token."""
        return self.token_seconds


@dataclass(frozen=True)
class Workload:
    """What every row does.

    Attributes:
        folder: the split directory.
        weights: bytes.
    """

    folder: Path
    weights: int
    prompt: Sequence[int]
    tokens: int


def row_name(processes: str, share: int) -> str:
    """A row: so many processes, each with a share of the weights in percent."""
    return f"{processes}, {share} %"


def measure(run: PipelineRun, processes: int, share: int | None, workload: Workload, work: Path) -> None:
    """Carry out one row of one turn.

    Raises:
        PeerError: a process failed.
    """
    log = work / "logs" / f"pipeline-{run.row.replace(' ', '-')}-{run.turn}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    job = {
        "folder": str(workload.folder),
        "prompt": list(workload.prompt),
        "tokens": workload.tokens,
        "processes": processes,
        "all": share is None,
    }
    with contextlib.ExitStack() as stack:
        stderr = stack.enter_context(log.open("w"))
        groups = [stack.enter_context(control_group(f"rabbitllm-pipeline-{os.getpid()}-{n}")) for n in range(processes)]
        started = []
        for rank, group in enumerate(groups):
            entering = [] if share is None else group.entering()
            child = [sys.executable, "-P", "-m", "benchmarks.pipeline_child", json.dumps(job | {"rank": rank})]
            started.append(
                subprocess.Popen(
                    [*entering, *child],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    cwd=work,
                    env=variables(THIS, work),
                )
            )
        stack.callback(_end, started)
        limit = threading.Timer(RUN_LIMIT_SECONDS, _end, [started])
        limit.start()
        stack.callback(limit.cancel)

        def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
            return read_message(process, log, work, RUN_LIMIT_SECONDS)

        ready = [heard(process)["ready"] for process in started]
        drop_cached(workload.folder)
        for group in groups if share is not None else ():
            group.limit_to_idle_and(max(workload.weights * share // 100, LEAST_ROOM_BYTES))
        with Sampler((), started[0].pid) as sampler:
            _say(started[0], "go")
            if processes > 1:
                address = heard(started[0])["address"]
                for process in started[1:]:
                    _say(process, f"go\n{address}")
            answers = [heard(process) for process in started]
    run.take_from(Outcome(answers[0], sampler, ready[0]))
    for name, value in answers[0].items():
        setattr(run, name, value)
    run.streamed = sum(answer["streamed"] for answer in answers)


def _say(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def tokens_equal(runs: Sequence[PipelineRun], row: str) -> list[bool]:
    """Whether a row made the tokens of one process without a cap, for every turn in which both ran."""
    expected = {run.turn: run.tokens for run in good(runs, FREE)}
    return [run.tokens == expected[run.turn] for run in good(runs, row) if run.turn in expected]


HEADINGS = (
    "row",
    "ok",
    "layers",
    "streamed MB",
    "first token s",
    "s/token",
    "tokens/s beside 1 process",
    "tokens equal",
)


def tabulate(runs: Sequence[PipelineRun], rows: Mapping[str, tuple[int, int | None]], turns: int) -> report.Table:
    """A line a row: medians, and in brackets the extremes."""
    lines = []
    for row, (_, share) in rows.items():
        found = good(runs, row)
        beside = ratios(runs, FREE if share is None else row_name(ALONE, share), row)
        lines.append(
            (
                row,
                f"{len(found)}/{turns}",
                "+".join(map(str, found[0].spans)) if found else "",
                report.shown(spread(run.streamed for run in found), 0, 1e6),
                report.shown(spread(run.first_token_seconds for run in found)),
                report.shown(spread(run.token_seconds for run in found), 3),
                report.shown(beside),
                report.verdict(tokens_equal(runs, row)),
            )
        )
    return report.Table(HEADINGS, lines)


def notes_on(runs: Sequence[PipelineRun], rows: Mapping[str, tuple[int, int | None]]) -> list[str]:
    """What the columns mean, errors, and the goal."""
    notes = [
        "layers: of each process. streamed: what all processes together read from the disk for each token.",
        "tokens/s beside 1 process: with the same cap, in the same turn.",
        *versions(runs),
        *failures(runs),
    ]
    for row, (processes, share) in rows.items():
        resident = [run for run in good(runs, row) if not run.streamed]
        if processes > 1 and share is not None and resident:
            beside = report.median(ratios(runs, row_name(ALONE, share), row))
            notes.append(report.reach(f"{row}, tokens/s beside one that streams", beside, GOAL, at_most=False))
    return notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row failed."""
    parser = command_line.parser(__doc__, 3, list(PROCESSES))
    parser.add_argument("--tokens", type=int, default=24, help="to generate, at least 2 (default: %(default)s)")
    parser.add_argument("--shares", type=int, nargs="+", default=[65, 45], help="of the weights, in percent")
    options = parser.parse_args(arguments)
    command_line.settle(options, "pipeline")
    command_line.check_tokens(options)
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale, LLAMA)
    weights = sum(path.stat().st_size for path in shards(checkpoint))
    place = work / "pipeline-run"
    shutil.rmtree(place, ignore_errors=True)
    rows: dict[str, tuple[int, int | None]] = {FREE: (1, None)}
    rows |= {row_name(name, share): (PROCESSES[name], share) for share in options.shares for name in options.only}
    try:
        make_layer_files(THIS, "rabbitllm", checkpoint, place, None, work, "pipeline-split")
        workload = Workload(place / "splitted_model", weights, prompt_for(options.scale), options.tokens)
        machine = report.describe_machine(work)
        runs = run_all(
            list(rows), options.turns, PipelineRun, lambda run: measure(run, *rows[run.row], workload, work), {}
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
    size = f"{weights / 1e9:.2f} GB"
    title = f"{options.tokens} tokens of a model of {size} over processes with memory capped, on the CPU, "
    title += command_line.turns(options)
    report.write(options.results, title, machine, tabulate(runs, rows, options.turns), notes_on(runs, rows), runs)
    bars.draw(options.results.with_name(options.results.name + ".svg"), title, "seconds a token", _bars(runs, rows))
    return int(any(run.error for run in runs))


def _bars(runs: Sequence[PipelineRun], rows: Mapping[str, tuple[int, int | None]]) -> dict[str, list[bars.Bar]]:
    """A group a cap."""
    groups: dict[str, list[bars.Bar]] = {}
    for row, (processes, share) in rows.items():
        heading = "no cap" if share is None else f"each: idle process + {share} % of the weights"
        figures = spread(run.token_seconds for run in good(runs, row))
        groups.setdefault(heading, []).append(bars.Bar(row.partition(",")[0], figures, processes > 1))
    return groups


if __name__ == "__main__":
    raise SystemExit(main())
