"""Many prompts at once with less memory than the model has: tokens a second over how many, with others; and scoring.

Every process runs in a control group of its own, which is bounded, once everything is imported, to what it takes then
and a share of the size of the weights. A Llama of 1.43 GB in bfloat16, random weights, no end token; so many prompts of
so many tokens, no two alike, and so many greedy tokens for each: FlexGen's shape is 512 in and 32 out. Tokens a second
are those that were generated over all the time from the first prompt to the last token, loading not counted. "of
linear": over as many times those of one prompt.

This project runs as `rabbitllm.batch`; AirLLM and transformers (every decoder layer offloaded to disk by accelerate)
get all prompts as one batch of their `generate`. A row that is killed for memory or takes too long has no figure.

"rabbitllm-2-no-file" keeps keys and values of all that run in memory; `--cache-memory` says how much of it they get in
this project's rows.

Scoring: `--score` texts of `--prompt-tokens` tokens, of which the last 8 are scored, and the goal: 1.2 times (one
pass of the weights, which is one text under the same cap, and computing, which is all texts without a cap).

    sudo python -m benchmarks batch [--share 50] [--sequences 1 4 16 64 256] [--prompt-tokens 512] [--tokens 32]
                                    [--score 1000] [--turns 3] [--cache-memory 100MB] [--only ROW ...]
                                    [--limit 1800] [--scale tiny]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, pictures, report
from benchmarks.lib.checkpoint import SCALES, make_checkpoint, weight_bytes
from benchmarks.lib.generation import Runner, prepare_files
from benchmarks.lib.measure import drop_cached, fresh_folder, spread
from benchmarks.lib.peers import AIRLLM, THIS, TRANSFORMERS, prepare, room, run_worker
from benchmarks.lib.runs import Run, failures, good, run_cases, status, unprepared, versions

RUNNERS: Mapping[str, Runner] = {
    "transformers-disk": Runner(TRANSFORMERS, "transformers", "offloaded"),
    "airllm-4.0.0": Runner(AIRLLM, "airllm"),
    "rabbitllm-2": Runner(THIS, "rabbitllm"),
    "rabbitllm-2-no-file": Runner(THIS, "rabbitllm", options={"cache_disk": 0}),
    "rabbitllm-2-4bit": Runner(THIS, "rabbitllm", options={"compression": "4bit"}),
}
OURS = ("rabbitllm-2", "rabbitllm-2-no-file", "rabbitllm-2-4bit")
SCORED_TOKENS = 8
SEQUENCES_SCORED = 256
LINEAR_GOAL = 0.9
SCORE_GOAL = 1.2


@dataclass(frozen=True)
class Case:
    """A row: a runner with so many prompts at once, or (0) scoring; capped or not."""

    runner: str
    sequences: int
    is_capped: bool = True

    @property
    def name(self) -> str:
        what = f"{self.sequences} at once" if self.sequences else "scoring"
        return f"{self.runner}, {what}{'' if self.is_capped else ', no cap'}"


@dataclass
class BatchRun(Run):
    """One row of one turn.

    Attributes:
        seconds: from the first prompt to the last token.
        new_tokens: that were generated.
        disk_bytes: read meanwhile, loading included.
        one_seconds: of scoring a single text.
        read_tokens: that were scored or stood before those.
    """

    seconds: float = 0.0
    new_tokens: int = 0
    disk_bytes: int = 0
    one_seconds: float = 0.0
    read_tokens: int = 0

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
    """What every row does."""

    checkpoint: Path
    weights: int
    vocabulary: int
    folder: Path
    length: int
    tokens: int
    count: int
    share: int
    limit_seconds: float
    cache_memory: str | None = None

    def files(self, runner: str) -> Path:
        """Where a runner's layer files are."""
        return self.folder / RUNNERS[runner].files_name


def measure(run: BatchRun, case: Case, workload: Workload, work: Path) -> None:
    """Carry out one row of one turn."""
    chosen, is_ours, place = RUNNERS[case.runner], case.runner in OURS, str(workload.files(case.runner))
    job = {
        "task": "bulk" if case.sequences else "scores",
        "package": chosen.package,
        "is_ours": is_ours,
        "loader": chosen.loader,
        "path": place,
        "checkpoint": str(workload.checkpoint),
        "options": _ours(chosen, workload) if is_ours else {"layer_shards_saving_path": place, **chosen.options},
        "offload_folder": str(workload.folder / "offload"),
        "out": str(workload.folder / "out.jsonl"),
        "vocabulary": workload.vocabulary,
        "length": workload.length,
        "tokens": workload.tokens if case.sequences else SCORED_TOKENS,
        "sequences": case.sequences or SEQUENCES_SCORED,
        "count": workload.count,
    }
    cold, label = [workload.checkpoint, workload.folder], case.name.replace(", ", "-").replace(" ", "-")
    cap_bytes = room(workload.weights, workload.share if case.is_capped else None)
    limit = workload.limit_seconds
    run.take(
        run_worker(chosen.environment, job, work, f"batch-{label}", cold, cap_bytes=cap_bytes, limit_seconds=limit)
    )


def _ours(chosen: Runner, workload: Workload) -> dict[str, Any]:
    """For `rabbitllm.batch`, which finds by itself how layer files are compressed."""
    given = {name: value for name, value in chosen.options.items() if name != "compression"}
    return given if workload.cache_memory is None else {**given, "cache_memory": workload.cache_memory}


def of_linear(runs: Sequence[BatchRun], case: Case) -> list[float]:
    """Tokens a second over as many times those of one prompt, for every turn that has both."""
    alone = {run.turn: run.rate for run in good(runs, Case(case.runner, 1).name)}
    return [run.rate / alone[run.turn] / case.sequences for run in good(runs, case.name) if run.turn in alone]


def against_ours(runs: Sequence[BatchRun], case: Case, numbers: Sequence[int]) -> list[float]:
    """Tokens a second over the best of this project's, whatever its number, for every turn."""
    best: dict[int, float] = {}
    for number in numbers:
        for run in good(runs, Case("rabbitllm-2", number).name):
            best[run.turn] = max(best.get(run.turn, 0.0), run.rate)
    return [run.rate / best[run.turn] for run in good(runs, case.name) if run.turn in best]


def of_the_goal(runs: Sequence[BatchRun], runner: str) -> list[float]:
    """Seconds of scoring all over those of one pass and of computing, for every turn that has both."""
    computing = {run.turn: run.seconds for run in good(runs, Case(runner, 0, False).name)}
    return [
        run.seconds / (run.one_seconds + computing[run.turn])
        for run in good(runs, Case(runner, 0).name)
        if run.turn in computing
    ]


def tabulate(runs: Sequence[BatchRun], cases: Sequence[Case], turns: int) -> report.Table:
    """A line a row."""
    numbers = [case.sequences for case in cases if case.sequences]

    def generated(make: Any) -> Any:
        return lambda case, found: make(case, found) if case.sequences else "-"

    columns: report.Columns[Case, BatchRun] = {
        "tokens/s": generated(report.each(lambda run: run.rate)),
        "of linear": generated(lambda case, found: report.shown(spread(of_linear(runs, case)))),
        "x our best": generated(lambda case, found: report.shown(spread(against_ours(runs, case, numbers)))),
        "s": report.each(lambda run: run.seconds),
        "GB from disk": generated(report.each(lambda run: run.disk_bytes, 2, 1e9)),
        "anon MiB over idle": report.ADDED_MEMORY,
    }
    return report.tabulated(runs, {case.name: case for case in cases}, turns, columns)


def notes_on(runs: Sequence[BatchRun], cases: Sequence[Case]) -> list[str]:
    """What the columns mean, errors, and the goals."""
    notes = [
        "of linear: tokens/s over those of as many times one prompt, of the same row and turn.",
        "x our best: tokens/s over those of rabbitllm-2 with the number of prompts at which it made most.",
        report.MEMORY_NOTE,
        *versions(runs),
        *failures(runs),
    ]
    for case in cases:
        if case.runner in OURS and case.sequences > 1:
            reached = report.median(spread(of_linear(runs, case)))
            notes.append(report.reach(f"{case.name}, of linear", reached, LINEAR_GOAL, at_most=False))
        elif case.runner in OURS and not case.sequences and case.is_capped:
            found = good(runs, case.name)
            one = report.shown(spread(run.one_seconds for run in found))
            notes.append(f"{case.name}: one text alone {one} s.")
            reached = report.median(spread(of_the_goal(runs, case.runner)))
            notes.append(report.reach(f"{case.name}, over one pass and computing", reached, SCORE_GOAL, at_most=True))
    return notes


def picture(title: str, runs: Sequence[BatchRun], cases: Sequence[Case]) -> pictures.Picture | None:
    """Medians of tokens a second over prompts at once, a line a row."""
    points: dict[str, tuple[dict[int, float], bool]] = {}
    for case in cases:
        middle = report.median(spread(run.rate for run in good(runs, case.name))) if case.sequences else None
        if middle is not None:
            points.setdefault(case.runner, ({}, case.runner in OURS))[0][case.sequences] = middle
    return pictures.lines(title, "prompts at once", "tokens a second", points) if points else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 3, list(RUNNERS))
    parser.add_argument("--share", type=int, default=50, help="of the weights, in percent (default: %(default)s)")
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 4, 16, 64, 256], help="prompts at once")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    parser.add_argument("--cache-memory", help="for keys and values of this project's rows; by default it decides")
    parser.add_argument("--score", type=int, default=1000, help="texts that are scored, 0 for none")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a row (default: %(default)s)")
    smallest = {"sequences": [4], "prompt_tokens": 16, "tokens": 3, "score": 0}
    options = command_line.parsed(parser, arguments, only=["rabbitllm-2"], **smallest)
    command_line.settle(options, "batch")
    if options.prompt_tokens <= SCORED_TOKENS:
        raise SystemExit(f"--prompt-tokens must be more than {SCORED_TOKENS}: so many are scored.")
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale, "LlamaConfig")
    workload = Workload(
        checkpoint,
        weight_bytes(checkpoint),
        SCALES[options.scale].vocab_size,
        work / "batch-run",
        options.prompt_tokens,
        options.tokens,
        options.score,
        options.share,
        options.limit,
        options.cache_memory,
    )
    cases = [Case(row, number) for number in options.sequences for row in options.only]
    if options.score:
        cases += [Case(row, 0, capped) for row in options.only if row in OURS for capped in (True, False)]
    unusable = prepare({row: RUNNERS[row].environment for row in options.only}, work)
    with fresh_folder(workload.folder):

        def split(row: str) -> None:
            prepare_files(RUNNERS[row], checkpoint, workload.files(row), work, f"batch-{row}-files")

        unusable = unprepared(options.only, unusable, "its files", split)
        drop_cached(workload.folder)
        machine = report.describe_machine(work)
        runs = run_cases(cases, options.turns, BatchRun, lambda run, case: measure(run, case, workload, work), unusable)
    title = (
        f"{options.prompt_tokens} tokens in, {options.tokens} out, of a model of {workload.weights / 1e9:.2f} GB with "
        f"memory capped at {options.share} % of that, on the CPU, {command_line.turns(options)}"
    )
    table, notes = tabulate(runs, cases, options.turns), notes_on(runs, cases)
    report.write(options.results, title, machine, table, notes, runs, picture(title, runs, cases))
    return status(runs, lambda row: row.partition(",")[0] in OURS)
