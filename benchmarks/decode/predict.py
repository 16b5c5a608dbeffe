"""Seconds a token as `rabbitllm plan` predicts them and as measured, by compression and memory.

A plan predicts each row from the checkpoint alone, as if there were no layer files; then the row runs in another
process.

    python -m benchmarks decode.predict [--turns 3] [--tokens 16] [--only ROW ...] [--scale tiny] [--work-dir FOLDER]
                                        [--experts]

`--experts` takes a mixture that uses all its experts evenly, as a plan assumes (`lib/checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import even_prompt, make_checkpoint, make_even_checkpoint
from benchmarks.lib.generation import PROMPT_TOKENS, Runner, StepsRun, Workload, prompt_for
from benchmarks.lib.measure import CACHE_STATE
from benchmarks.lib.peers import THIS, run_worker
from benchmarks.lib.runs import carry_out, failures, status, versions

CLOSE = 0.25
"""The goal: the difference from the measured seconds, as a share of them, at most."""
COMPRESSIONS = {
    "none": Runner(THIS, "rabbitllm"),
    "8bit": Runner(THIS, "rabbitllm", options={"compression": "8bit"}),
    "4bit": Runner(THIS, "rabbitllm", options={"compression": "4bit"}),
}
SHARES = {"all": None, "half": 0.5, "nothing": 0.0}
"""Of a model's layer files, the share that `max_memory` allows."""
ROWS = {f"{name} {share}": (runner, SHARES[share]) for name, runner in COMPRESSIONS.items() for share in SHARES}


@dataclass
class PredictRun(StepsRun):
    """One row of one turn; seconds and bytes.

    Attributes:
        plan_seconds: of the plan, for all compressions.
        predicted_token_seconds, predicted_first_token_seconds, predicted_streamed_bytes: in the plan.
        speeds: their basis, bytes a second.
    """

    plan_seconds: float = 0.0
    predicted_token_seconds: float = 0.0
    predicted_first_token_seconds: float = 0.0
    predicted_streamed_bytes: int = 0
    speeds: Mapping[str, float] = field(default_factory=dict)

    @property
    def headline(self) -> float:
        """Predicted seconds over measured ones."""
        return self.predicted_token_seconds / self.token_seconds if self.token_seconds else 0.0

    @property
    def is_close(self) -> bool:
        """Whether the run reaches the goal."""
        return abs(self.predicted_token_seconds - self.token_seconds) <= CLOSE * self.token_seconds


def measure(run: PredictRun, workload: Workload, work: Path) -> None:
    """Predict and run one row of one turn."""
    runner, share = ROWS[run.row]
    options: dict[str, Any] = {}
    if share is not None:
        files = (workload.folder / runner.files_name).rglob("*.safetensors")
        options["max_memory"] = {"cpu": int(sum(path.stat().st_size for path in files) * share)}
    label = f"predict-{run.row.replace(' ', '-')}-{run.turn}"
    nowhere = {"layer_shards_saving_path": str(workload.folder / "not there yet"), **runner.options, **options}
    job = {"task": "predict", "package": "rabbitllm", "checkpoint": str(workload.checkpoint), "options": nowhere}
    run.take(run_worker(THIS, job, work, f"{label}-plan", [workload.checkpoint, workload.folder]))
    run.take(workload.decode(runner, work, label, options=options))


COLUMNS: report.Columns[str, PredictRun] = {
    "predicted s/token": report.each(lambda run: run.predicted_token_seconds, 3),
    "measured s/token": report.each(lambda run: run.token_seconds, 3),
    "predicted / measured": report.each(lambda run: run.headline),
    "within 25 %": lambda row, row_runs: f"{sum(run.is_close for run in row_runs)} of {len(row_runs)}",
    "first token predicted s": report.each(lambda run: run.predicted_first_token_seconds),
    "first token measured s": report.each(lambda run: run.first_token_seconds),
    "read a token, MB": report.each(lambda run: run.predicted_streamed_bytes, 0, 1e6),
    "plan s": report.each(lambda run: run.plan_seconds, 1),
}


def tabulate(runs: Sequence[PredictRun], rows: Sequence[str], turns: int) -> report.Table:
    """A line a row."""
    return report.tabulated(runs, {row: row for row in rows}, turns, COLUMNS)


def notes_on(runs: Sequence[PredictRun]) -> list[str]:
    """The meaning of the columns, errors, and the goal."""
    done = [run for run in runs if run.error is None]
    close = sum(run.is_close for run in done)
    return [
        "all, half, nothing: the share of the layer files that max_memory allows in memory (all: no limit).",
        "Predicted without layer files, by a plan in a process of its own in each turn.",
        f"Page cache {CACHE_STATE}.",
        *versions(runs),
        *failures(runs),
        report.reach("share of runs within 25 %", close / len(done) if done else None, 1.0, at_most=False),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row failed."""
    parser = command_line.parser(__doc__, 3, list(ROWS))
    parser.add_argument("--tokens", type=int, default=16, help="to generate, at least 2 (default: %(default)s)")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts, all used evenly")
    options = command_line.parsed(parser, arguments, only=["none half"], tokens=3)
    command_line.settle(options, "predict-experts" if options.experts else "predict")
    command_line.check_tokens(options)
    work, rows = options.work_dir, options.only
    if options.experts:
        checkpoint, prompt = make_even_checkpoint(work, options.scale), even_prompt(options.scale, PROMPT_TOKENS)
    else:
        checkpoint, prompt = make_checkpoint(work, options.scale), prompt_for(options.scale)
    workload = Workload(checkpoint, work / "predict-run", prompt, options.tokens)
    runs = carry_out(
        options,
        rows,
        PredictRun,
        lambda run, row: measure(run, workload, work),
        dict.fromkeys(rows, THIS),
        workload.folder,
        lambda row: workload.prepare(ROWS[row][0], work, f"predict-{ROWS[row][0].files_name}"),
    )
    subject, turns = " of a mixture of experts" if options.experts else "", command_line.turns(options)
    title = f"Seconds a token{subject}, predicted and measured, {options.tokens} tokens, on the CPU, {turns}"
    report.write(options.results, title, tabulate(runs, rows, options.turns), notes_on(runs), runs, work=work)
    return status(runs)
