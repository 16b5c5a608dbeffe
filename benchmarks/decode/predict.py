"""What `rabbitllm plan` foretells of a token, and what generating then takes, by compression and memory.

Each row is foretold from the checkpoint alone, as if there were no layer files yet, and then run, in
two processes, one after the other. The prompt, the tokens and the state of the page cache are those of
`benchmarks decode`; seconds a token are the median of the steps after the first token.

    python -m benchmarks decode.predict [--turns 3] [--tokens 16] [--only ROW ...] [--scale tiny] [--work-dir FOLDER]
                                 [--experts]

`--experts` takes a mixture of experts that uses all of them alike, as a plan assumes (`lib/even_experts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import make_checkpoint
from benchmarks.lib.even_experts import even_prompt, make_even_checkpoint
from benchmarks.lib.measure import CACHE_STATE, spread
from benchmarks.lib.peers import THIS, run_worker
from benchmarks.lib.runners import Runner, ensure_layer_files
from benchmarks.lib.runs import failures, run_all, unprepared, versions
from benchmarks.lib.steps import PROMPT_TOKENS, StepsRun, prompt_for
from benchmarks.lib.work_folder import fresh_folder

CLOSE = 0.25
"""The goal: what was foretold differs from what is measured by at most so much of it."""
COMPRESSIONS = {"none": None, "8bit": "8bit", "4bit": "4bit"}
SHARES = {"all": None, "half": 0.5, "nothing": 0.0}
"""Of a model's layer files, what `max_memory` allows."""
ROWS = {f"{name} {share}": (COMPRESSIONS[name], SHARES[share]) for name in COMPRESSIONS for share in SHARES}


@dataclass
class PredictRun(StepsRun):
    """One row of one turn; seconds and bytes, and what `StepsRun` has.

    Attributes:
        plan_seconds: the whole plan, all compressions.
        predicted_token_seconds, predicted_first_token_seconds, predicted_streamed_bytes: what it says.
        speeds: what that rests on, bytes a second.
        placed: as in decode.
    """

    plan_seconds: float = 0.0
    predicted_token_seconds: float = 0.0
    predicted_first_token_seconds: float = 0.0
    predicted_streamed_bytes: int = 0
    speeds: Mapping[str, float] = field(default_factory=dict)
    placed: str = ""

    @property
    def headline(self) -> float:
        """What was estimated, divided by what was measured."""
        return self.predicted_token_seconds / self.token_seconds if self.token_seconds else 0.0

    @property
    def is_close(self) -> bool:
        """Whether the goal is reached."""
        return abs(self.predicted_token_seconds - self.token_seconds) <= CLOSE * self.token_seconds


@dataclass(frozen=True)
class Workload:
    """What every row does."""

    checkpoint: Path
    splits: Path
    prompt: Sequence[int]
    tokens: int

    def saving_path(self, compression: str | None) -> Path:
        """Where the layer files of a compression are."""
        return self.splits / f"{compression or 'none'}"

    def options(self, row: str) -> dict[str, Any]:
        """For `from_pretrained` and for `plan`."""
        compression, share = ROWS[row]
        options: dict[str, Any] = {"compression": compression} if compression else {}
        if share is not None:
            whole = sum(path.stat().st_size for path in self.saving_path(compression).rglob("*.safetensors"))
            options["max_memory"] = {"cpu": int(whole * share)}
        return options


def split_for(row: str, workload: Workload, work: Path) -> None:
    """Make the layer files of a row, unless they are there for another one.

    Raises:
        PeerError: it failed.
    """
    compression = ROWS[row][0]
    runner = Runner(THIS, "rabbitllm", options={"compression": compression} if compression else {})
    folder, label = workload.saving_path(compression), f"predict-{compression}-split"
    ensure_layer_files(runner, workload.checkpoint, folder, work, label)


def measure(run: PredictRun, workload: Workload, work: Path) -> None:
    """Foretell, then carry out, one row of one turn."""
    options = workload.options(run.row)
    common = {"package": "rabbitllm", "checkpoint": str(workload.checkpoint)}
    nowhere = {"layer_shards_saving_path": str(workload.splits / "not there yet")}
    label = f"predict-{run.row.replace(' ', '-')}-{run.turn}"
    job = {"task": "predict", **common, "options": {**nowhere, **options}}
    read = [workload.checkpoint, workload.splits]
    predicted = run_worker(THIS, job, work, f"{label}-plan", read)
    place = {"layer_shards_saving_path": str(workload.saving_path(ROWS[run.row][0]))}
    job = {
        "task": "decode",
        "loader": "layered",
        **common,
        "options": {**place, **options},
        "prompt": list(workload.prompt),
        "tokens": workload.tokens,
    }
    outcome = run_worker(THIS, job, work, label, read)
    run.take_answer(predicted.answer | outcome.answer)
    run.take_from(outcome)


HEADINGS = (
    "row",
    "ok",
    "foretold s/token",
    "measured s/token",
    "foretold / measured",
    "within 25 %",
    "first token foretold s",
    "first token measured s",
    "read a token, MB",
    "plan s",
)


def tabulate(runs: Sequence[PredictRun], rows: Sequence[str], turns: int) -> report.Table:
    """A line a row: medians, and in brackets the extremes."""

    def cells(row: str, found: Sequence[PredictRun]) -> Sequence[str]:
        return (
            report.shown(spread(run.predicted_token_seconds for run in found), 3),
            report.shown(spread(run.token_seconds for run in found), 3),
            report.shown(spread(run.headline for run in found)),
            f"{sum(run.is_close for run in found)} of {len(found)}",
            report.shown(spread(run.predicted_first_token_seconds for run in found)),
            report.shown(spread(run.first_token_seconds for run in found)),
            report.shown(spread(run.predicted_streamed_bytes for run in found), 0, 1e6),
            report.shown(spread(run.plan_seconds for run in found), 1),
        )

    return report.tabulated(HEADINGS, runs, {row: row for row in rows}, turns, cells)


def notes_on(runs: Sequence[PredictRun]) -> list[str]:
    """What the columns mean, errors, and the goal."""
    done = [run for run in runs if run.error is None]
    close = sum(run.is_close for run in done)
    return [
        "all, half, nothing: of the layer files, what max_memory allows to stay in memory (all: no limit).",
        "Foretold before there are layer files, each time by a plan in a process of its own.",
        f"Page cache {CACHE_STATE}.",
        *versions(runs),
        *failures(runs),
        report.reach("share of runs within 25 %", close / len(done) if done else None, 1.0, at_most=False),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row failed."""
    parser = command_line.parser(__doc__, 3, list(ROWS))
    parser.add_argument("--tokens", type=int, default=16, help="to generate, at least 2 (default: %(default)s)")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts, all used alike")
    options = command_line.parsed(parser, arguments, only=["none half"], tokens=3)
    command_line.settle(options, "predict-experts" if options.experts else "predict")
    command_line.check_tokens(options)
    work = options.work_dir
    if options.experts:
        checkpoint, prompt = make_even_checkpoint(work, options.scale), even_prompt(options.scale, PROMPT_TOKENS)
    else:
        checkpoint, prompt = make_checkpoint(work, options.scale), prompt_for(options.scale)
    workload = Workload(checkpoint, work / "predict-run", prompt, options.tokens)
    with fresh_folder(workload.splits):
        unusable = unprepared(options.only, {}, "split", lambda row: split_for(row, workload, work))
        machine = report.describe_machine(work)
        runs = run_all(options.only, options.turns, PredictRun, lambda run: measure(run, workload, work), unusable)
    what = " of a mixture of experts" if options.experts else ""
    title = (
        f"Seconds a token{what}, foretold and measured, {options.tokens} tokens, on the CPU, "
        f"{command_line.turns(options)}"
    )
    report.write(options.results, title, machine, tabulate(runs, options.only, options.turns), notes_on(runs), runs)
    return int(any(run.error for run in runs))
