"""Generating on the CPU: load time, time to the first token, seconds a token, peak anonymous memory, equal tokens.

A prompt of 16 tokens (or `--prompt-tokens`), then greedy tokens, in bfloat16, batch 1, each run in a process of its
own, in turns. The layered rows load layer files that they made before, outside the timing, from a checkpoint that is
still there. At the start of each run neither the checkpoint nor the layer files are in the page cache; what a run reads
more than once may come from there, which helps all rows but those that read past it. Seconds a token are the median of
the steps after the first token; tokens are compared with those of plain transformers in the same turn.

    python -m benchmarks decode [--turns 3] [--tokens 8] [--only ROW ...] [--scale tiny] [--work-dir FOLDER]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import make_checkpoint
from benchmarks.lib.measure import CACHE_STATE, spread
from benchmarks.lib.peers import AIRLLM, RABBITLLM_1, THIS, TRANSFORMERS, prepare, run_worker
from benchmarks.lib.runners import Runner, ensure_layer_files
from benchmarks.lib.runs import failures, ratios, run_all, unprepared, versions
from benchmarks.lib.steps import PROMPT_TOKENS, StepsRun, prompt_for, tokens_equal
from benchmarks.lib.work_folder import fresh_folder

PEERS_GOAL = 10.0
TRANSFORMERS_GOAL = 0.97


STREAMED = {"max_memory": {"cpu": 0}}
ROOM = {"max_memory": {"cpu": "700MB"}}
"""Less than the dequantized model, so that each layer is dequantized for each use."""
REFERENCE = "transformers"
RUNNERS = {
    REFERENCE: Runner(TRANSFORMERS, "transformers", "in memory"),
    "transformers-disk": Runner(TRANSFORMERS, "transformers", "offloaded"),
    "rabbitllm-1.1.0": Runner(RABBITLLM_1, "rabbitllm"),
    "airllm-4.0.0": Runner(AIRLLM, "airllm"),
    "rabbitllm-2": Runner(THIS, "rabbitllm"),
    "rabbitllm-2-fast": Runner(THIS, "rabbitllm", options={"fast_bfloat16": True}),
    "rabbitllm-2-streamed": Runner(THIS, "rabbitllm", options=STREAMED),
    "rabbitllm-2-fast-streamed": Runner(THIS, "rabbitllm", options={"fast_bfloat16": True} | STREAMED),
    "rabbitllm-2-4bit": Runner(THIS, "rabbitllm", options={"compression": "4bit"}),
    "rabbitllm-2-4bit-exact": Runner(THIS, "rabbitllm", options={"compression": "4bit", "exact": True} | ROOM),
    "rabbitllm-2-4bit-streamed": Runner(THIS, "rabbitllm", options={"compression": "4bit"} | STREAMED),
    "rabbitllm-2-8bit": Runner(THIS, "rabbitllm", options={"compression": "8bit"}),
    "rabbitllm-2-8bit-streamed": Runner(THIS, "rabbitllm", options={"compression": "8bit"} | STREAMED),
}
GOALS = (
    ("rabbitllm-2-4bit", REFERENCE, 4.0),
    ("rabbitllm-2-8bit", REFERENCE, 1.2),
    ("rabbitllm-2", REFERENCE, TRANSFORMERS_GOAL),
    ("rabbitllm-2", "rabbitllm-1.1.0", PEERS_GOAL),
    ("rabbitllm-2", "airllm-4.0.0", PEERS_GOAL),
    ("rabbitllm-2-streamed", "rabbitllm-1.1.0", PEERS_GOAL),
    ("rabbitllm-2-streamed", "airllm-4.0.0", PEERS_GOAL),
)
"""Row, which other, and how many times as many tokens a second it should make."""


@dataclass
class DecodeRun(StepsRun):
    """One row of one turn; seconds.

    Attributes:
        read_bytes, read_seconds: what this project's pass reads, and how long that takes when nothing computes.
        placed: where the weights were, as far as the model tells.
    """

    read_bytes: int = 0
    read_seconds: float = 0.0
    placed: str = ""


@dataclass(frozen=True)
class Workload:
    """What every row does."""

    checkpoint: Path
    splits: Path
    prompt: Sequence[int]
    tokens: int

    def saving_path(self, row: str) -> Path:
        """Where a row's layer files are."""
        return self.splits / RUNNERS[row].layers_name


def measure(run: DecodeRun, workload: Workload, work: Path) -> None:
    """Carry out one row of one turn."""
    runner = RUNNERS[run.row]
    job = {
        "task": "decode",
        "package": runner.package,
        "loader": runner.loader,
        "checkpoint": str(workload.checkpoint),
        "options": {"layer_shards_saving_path": str(workload.saving_path(run.row)), **runner.options},
        "offload_folder": str(workload.splits / "offload"),
        "prompt": list(workload.prompt),
        "tokens": workload.tokens,
    }
    read = [workload.checkpoint, workload.splits]
    outcome = run_worker(runner.environment, job, work, f"decode-{run.row}-{run.turn}", read)
    run.take_answer(outcome.answer)
    run.take_from(outcome)


HEADINGS = (
    "row",
    "ok",
    "load s",
    "first token s",
    "s/token",
    "x transformers",
    "anon MiB over idle",
    "mapped MiB",
    "tokens equal",
)


def tabulate(runs: Sequence[DecodeRun], rows: Sequence[str], turns: int) -> report.Table:
    """A line a row: medians, and in brackets the extremes."""

    def cells(row: str, found: Sequence[DecodeRun]) -> Sequence[str]:
        return (
            report.shown(spread(run.load_seconds for run in found)),
            report.shown(spread(run.first_token_seconds for run in found)),
            report.shown(spread(run.token_seconds for run in found), 3),
            report.shown(ratios(runs, REFERENCE, row), 3),
            report.shown(spread(run.anonymous_added for run in found), 1, 2**20),
            report.shown(spread(run.file_peak for run in found), 0, 2**20),
            "" if RUNNERS[row].is_compressed else report.verdict(tokens_equal(runs, row, REFERENCE)),
        )

    return report.tabulated(HEADINGS, runs, {row: row for row in rows}, turns, cells)


def notes_on(runs: Sequence[DecodeRun], rows: Sequence[str]) -> list[str]:
    """What the columns mean, errors, and the goals."""
    notes = [
        "x transformers: how many times as many tokens a second as plain transformers in the same turn.",
        report.MEMORY_NOTE,
        f"Page cache {CACHE_STATE}.",
        *versions(runs),
        *failures(runs),
    ]
    for row, other, goal in GOALS:
        if row in rows:
            speed = report.median(ratios(runs, other, row))
            notes.append(report.reach(f"{row}, tokens/s beside {other}", speed, goal, at_most=False))
    return notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 3, list(RUNNERS))
    parser.add_argument("--tokens", type=int, default=8, help="to generate, at least 2 (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS, help="of the prompt (default: %(default)s)")
    smallest = {"tokens": 3, "prompt_tokens": PROMPT_TOKENS}
    options = command_line.parsed(parser, arguments, only=["rabbitllm-2-streamed"], **smallest)
    command_line.settle(options, "decode")
    command_line.check_tokens(options)
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale)
    workload = Workload(
        checkpoint, work / "decode-run", prompt_for(options.scale, options.prompt_tokens), options.tokens
    )
    unusable = prepare({row: RUNNERS[row].environment for row in options.only}, work)
    with fresh_folder(workload.splits):

        def split(row: str) -> None:
            folder, label = workload.saving_path(row), f"decode-{row}-split"
            ensure_layer_files(RUNNERS[row], checkpoint, folder, work, label)

        unusable = unprepared(options.only, unusable, "split", split)
        machine = report.describe_machine(work)
        runs = run_all(options.only, options.turns, DecodeRun, lambda run: measure(run, workload, work), unusable)
    title = (
        f"{options.tokens} tokens after a prompt of {options.prompt_tokens}, on the CPU, {command_line.turns(options)}"
    )
    table = tabulate(runs, options.only, options.turns)
    report.write(options.results, title, machine, table, notes_on(runs, options.only), runs)
    return int(any(run.error for run in runs if RUNNERS[run.row].environment == THIS))
