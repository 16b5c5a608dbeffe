"""Scoring many continuations on the CPU with less memory than the model has, compared with plain transformers.

Questions as a test set asks them: some examples that all begin with, a question, and four choices of which each is
scored. A Llama of 1.43 GB in bfloat16. This project scores all of them in one pass over the weights; the goal is at
most 1.2 times (reading the weights once, nothing computing, plus the same scoring with all weights in memory, nothing
reading), in the same turn. Plain transformers computes each text whole, in batches filled up to one length, its layers
offloaded to the disk by accelerate; of its batches only some are run, and the whole reckoned from these. Every process
with a cap runs in a control group that is bounded, once everything is imported, to what it takes then and a share of
the size of the weights.

    sudo python -m benchmarks batch.score [--turns 3] [--questions 250] [--shared 200] [--share 50] [--batches 2]
                                    [--only ROW ...] [--scale tiny]
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import SCALES, make_checkpoint, weight_bytes
from benchmarks.lib.measure import Spread, drop_cached, fresh_folder, spread
from benchmarks.lib.peers import THIS, TRANSFORMERS, make_layer_files, over_this, prepare, room, run_worker
from benchmarks.lib.runs import Run, failures, good, ratios, run_all, status, versions

CHOICES = 4
GOAL = 1.2
OURS, RESIDENT = "rabbitllm-2", "rabbitllm-2, no cap"
PEERS = {f"transformers-disk, {size} a batch": size for size in (8, 32, 64)}
ROWS = (RESIDENT, OURS, *PEERS)
WEIGHTS_SHARE, WAITING_SHARE = 4, 4
"""One part in so many of what a capped process may take is for weights that stay, and for what waits; what is left is
for what streams and for what a micro-batch computes in between."""
CLOSE = 0.25
"""Sums of logarithms in bfloat16 that differ by no more than this are taken for the same, 0.05 a token."""


@dataclass
class ScoreRun(Run):
    """One row of one turn.

    Attributes:
        seconds: for all texts.
        read_seconds, read_bytes: of what this project streams, once, when nothing computes.
        disk_bytes: that the process read from the disk meanwhile.
        logprobs: of every choice, where it was computed.
        computed_tokens: that went through the layers.
    """

    load_seconds: float = 0.0
    seconds: float = 0.0
    read_seconds: float = 0.0
    read_bytes: int = 0
    disk_bytes: int = 0
    logprobs: Sequence[float | None] = ()
    computed_tokens: int = 0
    passes: int = 0
    micro_batches: int = 0
    threads: int = 0
    placed: str = ""

    @property
    def headline(self) -> float:
        """Seconds for all texts."""
        return self.seconds


@dataclass(frozen=True)
class Workload:
    """What every row does."""

    checkpoint: Path
    folder: Path
    questions: Path
    cap_bytes: int
    batches: int


def questions_for(vocabulary: int, count: int, shared: int) -> list[dict[str, Any]]:
    """Token ids: `shared` that all begin with, 20 to 60 of a question's own, and choices of 1 to 10."""
    draw = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(number)]

    beginning = tokens(shared)
    return [
        {
            "context": [*beginning, *tokens(draw.randint(20, 60))],
            "choices": [tokens(draw.randint(1, 10)) for _ in range(CHOICES)],
        }
        for _ in range(count)
    ]


def measure(run: ScoreRun, workload: Workload, work: Path) -> None:
    """Carry out one row of one turn."""
    is_plain, is_capped = run.row in PEERS, run.row != RESIDENT
    options: dict[str, Any] = {"layer_shards_saving_path": str(workload.folder / "split")}
    if is_capped and not is_plain:
        options["max_memory"] = {"cpu": workload.cap_bytes // WEIGHTS_SHARE}
    job = {
        "task": "score-plain" if is_plain else "score",
        "package": "transformers" if is_plain else "rabbitllm",
        "loader": "offloaded" if is_plain else "layered",
        "checkpoint": str(workload.checkpoint),
        "options": options,
        "offload_folder": str(workload.folder / "offload"),
        "questions": str(workload.questions),
        "memory_bytes": workload.cap_bytes // WAITING_SHARE if is_capped else None,
        "batch": PEERS.get(run.row),
        "batches": workload.batches,
    }
    environment = over_this(TRANSFORMERS) if is_plain else THIS
    label, cap_bytes = f"score-{ROWS.index(run.row)}-{run.turn}", workload.cap_bytes if is_capped else None
    run.take(run_worker(environment, job, work, label, [workload.checkpoint, workload.folder], cap_bytes=cap_bytes))


def of_the_sum(runs: Sequence[ScoreRun], row: str) -> Spread | None:
    """Seconds over those of reading alone and computing alone, one after the other, in every turn that has both."""
    alone = {run.turn: run.seconds for run in good(runs, RESIDENT)}
    return spread(run.seconds / (run.read_seconds + alone[run.turn]) for run in good(runs, row) if run.turn in alone)


def alike(runs: Sequence[ScoreRun], row: str) -> list[bool]:
    """Whether a row's sums of logarithms are those of the row without a cap, but for rounding."""
    expected = {run.turn: run.logprobs for run in good(runs, RESIDENT)}
    return [
        all(
            a is None or b is None or abs(a - b) <= CLOSE for a, b in zip(run.logprobs, expected[run.turn], strict=True)
        )
        for run in good(runs, row)
        if run.turn in expected
    ]


def tabulate(runs: Sequence[ScoreRun], rows: Sequence[str], turns: int) -> report.Table:
    """A line a row."""
    columns: report.Columns[str, ScoreRun] = {
        "s in all": report.each(lambda run: run.seconds),
        "x ours": lambda row, found: report.shown(ratios(runs, row, OURS)),
        "of reading + computing": lambda row, found: report.shown(of_the_sum(runs, row)) if row == OURS else "",
        "passes": report.each(lambda run: run.passes, 0),
        "tokens computed": report.each(lambda run: run.computed_tokens, 0),
        "GB from disk": report.each(lambda run: run.disk_bytes, 2, 1e9),
        "anon MiB over idle": report.ADDED_MEMORY,
        "the same sums": lambda row, found: report.verdict(alike(runs, row)),
    }
    return report.tabulated(runs, {row: row for row in rows}, turns, columns)


def notes_on(runs: Sequence[ScoreRun], rows: Sequence[str]) -> list[str]:
    """What the columns mean, errors, and the goals."""
    best = min((run.seconds for row in PEERS for run in good(runs, row)), default=None)
    ours = report.median(spread(run.seconds for run in good(runs, OURS)))
    notes = [
        "of reading + computing: seconds over (the weights that stream read once, nothing computing, plus the row "
        "without a cap), in the same turn.",
        "Rows of transformers: reckoned from some of their batches.",
        report.MEMORY_NOTE,
        *versions(runs),
        *failures(runs),
    ]
    if OURS in rows:
        ratio = report.median(of_the_sum(runs, OURS))
        notes.append(report.reach(f"{OURS}, of reading + computing", ratio, GOAL, at_most=True))
    if best is not None and ours is not None:
        notes.append(f"transformers at its best batch takes {best / ours:.1f} times as long.")
    return notes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 3, list(ROWS))
    parser.add_argument(
        "--questions", type=int, default=250, help=f"each with {CHOICES} choices (default: %(default)s)"
    )
    parser.add_argument("--shared", type=int, default=200, help="tokens that all begin with (default: %(default)s)")
    parser.add_argument("--share", type=int, default=50, help="of the weights, in percent (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=2, help="of transformers, at each size (default: %(default)s)")
    options = command_line.parsed(parser, arguments, only=[OURS], questions=5, shared=40)
    command_line.settle(options, "score")
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale, "LlamaConfig")
    weights = weight_bytes(checkpoint)
    questions = questions_for(SCALES[options.scale].vocab_size, options.questions, options.shared)
    cap_bytes, folder = room(weights, options.share), work / "score-run"
    assert cap_bytes is not None
    workload = Workload(checkpoint, folder, folder / "questions.json", cap_bytes, options.batches)
    unusable = prepare({row: over_this(TRANSFORMERS) if row in PEERS else THIS for row in options.only}, work)
    with fresh_folder(folder):
        workload.questions.write_text(json.dumps(questions))  # too long for a command line
        make_layer_files(THIS, "rabbitllm", checkpoint, folder / "split", None, work, "score-files")
        drop_cached(folder)
        machine = report.describe_machine(work)
        runs = run_all(list(options.only), options.turns, ScoreRun, lambda run: measure(run, workload, work), unusable)
    title = (
        f"{options.questions * CHOICES:,} choices of {options.questions:,} questions scored by a model of "
        f"{weights / 1e9:.2f} GB, memory capped at the idle process and {options.share} % of it, on the CPU, "
        f"{command_line.turns(options)}"
    )
    table = tabulate(runs, options.only, options.turns)
    for run in runs:
        run.logprobs = ()  # a thousand numbers a row
    report.write(options.results, title, machine, table, notes_on(runs, options.only), runs)
    return status(runs, lambda row: row not in PEERS)
