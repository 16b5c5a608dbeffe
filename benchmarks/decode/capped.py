"""Generating on the CPU with less memory than the model has, compared with the projects that claim to do that.

Every process runs in a control group of its own, which is bounded, once everything is imported, to what it takes then
and a share of the size of the weights. A Llama of 1.43 GB in bfloat16, a prompt of 16 tokens, then greedy tokens,
batch 1, in turns; files are not in the page cache at the start. Seconds a token are the median of the steps after the
first token; bytes a token are what the process read from the disk in those steps, as the system counts it. The limit
of this project's rows is the longer of reading alone (the same bytes by the same reader, nothing computing, in the same
process) and computing alone (the row without a cap, in the same turn).

    sudo python -m benchmarks decode.capped [--turns 3] [--tokens 8] [--shares 25 50 75] [--only ROW ...] [--scale tiny]
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.decode.decode import DecodeRun
from benchmarks.lib import bars, command_line, report
from benchmarks.lib.checkpoint import make_checkpoint, weight_bytes
from benchmarks.lib.control_group import control_group
from benchmarks.lib.measure import drop_cached, spread
from benchmarks.lib.peers import AIRLLM, LLAMA_CPP, OLLM, RABBITLLM_1, THIS, TRANSFORMERS, Cap, prepare, run_worker
from benchmarks.lib.runners import Runner, ensure_layer_files
from benchmarks.lib.runs import failures, good, ratios, run_cases, unprepared, versions
from benchmarks.lib.steps import prompt_for, tokens_equal
from benchmarks.lib.work_folder import fresh_folder

RUNNERS: Mapping[str, Runner] = {
    "transformers": Runner(TRANSFORMERS, "transformers", "in memory"),
    "transformers-disk": Runner(TRANSFORMERS, "transformers", "offloaded"),
    "ollm-1.0.3": Runner(OLLM, "ollm", "ollm"),
    "rabbitllm-1.1.0": Runner(RABBITLLM_1, "rabbitllm"),
    "airllm-4.0.0": Runner(AIRLLM, "airllm"),
    "llama.cpp-bf16": Runner(LLAMA_CPP, "llama_cpp", "BF16"),
    "llama.cpp-q4_0": Runner(LLAMA_CPP, "llama_cpp", "Q4_0"),
    "rabbitllm-2": Runner(THIS, "rabbitllm"),
    "rabbitllm-2-4bit": Runner(THIS, "rabbitllm", options={"compression": "4bit"}),
}
LLAMA, QWEN2 = "LlamaConfig", "Qwen2Config"
TWINS = {"rabbitllm-1.1.0": QWEN2}
"""oLLM reads a Llama and no Qwen2; RabbitLLM 1.1.0 fails on a Llama, and gets a Qwen2 of the same shape."""
REFERENCE = "transformers"
OURS = ("rabbitllm-2", "rabbitllm-2-4bit")
UNCAPPED = ("transformers", *OURS, "llama.cpp-bf16", "llama.cpp-q4_0")
"""Run without a cap too: whose tokens are compared, and what computing alone takes."""
RUN_LIMIT_SECONDS = 90
LEAST_ROOM_BYTES = 128 << 20
"""More than the idle process, whatever the share: with less, a model that is only tried out with cannot compute."""


@dataclass(frozen=True)
class Case:
    """A row: a runner under a cap, as a share of the weights in percent, or without one."""

    runner: str
    share: int | None

    @property
    def name(self) -> str:
        return f"{self.runner}, {'no cap' if self.share is None else f'{self.share} %'}"


@dataclass(frozen=True)
class Workload:
    """What every row does."""

    checkpoints: Mapping[str, Path]
    weights: int
    folder: Path
    prompt: Sequence[int]
    tokens: int

    def checkpoint(self, runner: str) -> Path:
        """The one that a runner can read."""
        return self.checkpoints[TWINS.get(runner, LLAMA)]

    def prepared(self, runner: str) -> Path:
        """Where a runner's own files are: layer files, or its one file."""
        chosen = RUNNERS[runner]
        if chosen.environment == LLAMA_CPP:
            return self.folder / f"{chosen.loader}.gguf"
        return self.folder / chosen.layers_name


def prepare_files(runner: str, workload: Workload, work: Path) -> None:
    """What a runner needs before it can load the model, unless it is there.

    Raises:
        PeerError: it failed.
    """
    chosen, place = RUNNERS[runner], workload.prepared(runner)
    checkpoint, label = workload.checkpoint(runner), f"capped-{runner}-files"
    if chosen.environment != LLAMA_CPP:
        ensure_layer_files(chosen, checkpoint, place, work, label)
    elif not place.exists():
        job = {"task": "gguf", "package": chosen.package, "kind": chosen.loader, "path": str(place)}
        run_worker(LLAMA_CPP, job | {"checkpoint": str(checkpoint)}, work, label, [checkpoint])


def measure(run: DecodeRun, case: Case, workload: Workload, work: Path) -> None:
    """Carry out one row of one turn."""
    chosen = RUNNERS[case.runner]
    job = {
        "task": "decode",
        "package": chosen.package,
        "loader": chosen.loader,
        "kind": chosen.loader,
        "path": str(workload.prepared(case.runner)),
        "checkpoint": str(workload.checkpoint(case.runner)),
        "options": {"layer_shards_saving_path": str(workload.prepared(case.runner)), **chosen.options},
        "offload_folder": str(workload.folder / "offload"),
        "prompt": list(workload.prompt),
        "tokens": workload.tokens,
    }
    cold = [workload.checkpoint(case.runner), workload.folder]
    label = f"capped-{case.runner}-{case.share}-{run.turn}"
    if case.share is None:
        outcome = run_worker(chosen.environment, job, work, label, cold, limit_seconds=RUN_LIMIT_SECONDS)
    else:
        with control_group(f"rabbitllm-benchmark-{os.getpid()}") as group:
            cap = Cap(group, max(workload.weights * case.share // 100, LEAST_ROOM_BYTES))
            outcome = run_worker(chosen.environment, job, work, label, cold, cap=cap, limit_seconds=RUN_LIMIT_SECONDS)
    run.take_answer(outcome.answer)
    run.take_from(outcome)


def of_the_limit(runs: Sequence[DecodeRun], case: Case) -> list[float]:
    """Seconds a token over the longer of reading alone and computing alone, for every turn that has them."""
    computing = {run.turn: run.token_seconds for run in good(runs, Case(case.runner, None).name)}
    return [
        run.token_seconds / max(run.read_seconds, computing[run.turn])
        for run in good(runs, case.name)
        if run.turn in computing and case.runner in OURS
    ]


HEADINGS = (
    "row",
    "ok",
    "first token s",
    "s/token",
    "x ours",
    "MB/token from disk",
    "of its limit",
    "anon MiB over idle",
    "tokens equal",
)


def our_case_for(case: Case) -> Case:
    """The row of this project that a row is compared with: at 4bit where it is, under the same cap."""
    own = "rabbitllm-2-4bit" if case.runner in ("rabbitllm-2-4bit", "llama.cpp-q4_0") else "rabbitllm-2"
    return Case(own, case.share)


def tabulate(runs: Sequence[DecodeRun], cases: Sequence[Case], turns: int) -> report.Table:
    """A line a row: medians, and in brackets the extremes."""

    def cells(case: Case, found: Sequence[DecodeRun]) -> Sequence[str]:
        is_4bit = case.runner in ("rabbitllm-2-4bit", "llama.cpp-q4_0")
        return (
            report.shown(spread(run.first_token_seconds for run in found)),
            report.shown(spread(run.token_seconds for run in found), 3),
            report.shown(ratios(runs, case.name, our_case_for(case).name)),
            report.shown(spread(statistics.median(run.step_bytes) for run in found), 0, 1e6),
            report.shown(spread(of_the_limit(runs, case))),
            report.shown(spread(run.anonymous_added for run in found), 0, 2**20),
            ""
            if is_4bit or case.runner in TWINS
            else report.verdict(tokens_equal(runs, case.name, Case(REFERENCE, None).name)),
        )

    return report.tabulated(HEADINGS, runs, {case.name: case for case in cases}, turns, cells)


def notes_on(runs: Sequence[DecodeRun], cases: Sequence[Case]) -> list[str]:
    """What the columns mean, errors, and the goals."""
    notes = [
        "rabbitllm-1.1.0 fails on a Llama (TypeError in its first pass) and ran a Qwen2 of the same shape.",
        "x ours: seconds a token beside this project's row under the same cap in the same turn, at 4bit for the rows "
        "at 4 bits.",
        "of its limit: seconds a token over the longer of reading alone and computing alone.",
        report.MEMORY_NOTE,
        *versions(runs),
        *failures(runs),
    ]
    for case in cases:
        if case.share is None:
            continue
        if case.runner in OURS:
            notes.append(report.of_its_limit(case.name, spread(of_the_limit(runs, case))))
        else:
            notes.append(report.against_ours(case.name, ratios(runs, case.name, our_case_for(case).name)))
    return notes


def _bars(runs: Sequence[DecodeRun], cases: Sequence[Case]) -> dict[str, list[bars.Bar]]:
    """A group a cap, the quickest row first."""

    def row(case: Case) -> tuple[str, bars.Bar]:
        heading = bars.under_cap(case.share)
        figures = spread(run.token_seconds for run in good(runs, case.name))
        return heading, bars.Bar(case.runner, figures, case.runner in OURS)

    return bars.grouped(row(case) for case in cases)


def _for_ollm(checkpoint: Path) -> None:
    """Its transformers is of before version 5 and knows the tokenizer's class by its earlier name."""
    path = checkpoint / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 3, list(RUNNERS))
    parser.add_argument("--tokens", type=int, default=8, help="to generate, at least 2 (default: %(default)s)")
    parser.add_argument("--shares", type=int, nargs="+", default=[25, 50, 75], help="of the weights, in percent")
    options = command_line.parsed(parser, arguments, only=["rabbitllm-2"], tokens=3, shares=[50])
    command_line.settle(options, "capped")
    command_line.check_tokens(options)
    work = options.work_dir
    kinds = dict.fromkeys((LLAMA, *(TWINS.get(row, LLAMA) for row in options.only)))
    checkpoints = {kind: make_checkpoint(work, options.scale, kind) for kind in kinds}
    _for_ollm(checkpoints[LLAMA])
    weights = weight_bytes(checkpoints[LLAMA])
    workload = Workload(checkpoints, weights, work / "capped-run", prompt_for(options.scale), options.tokens)
    cases = [Case(row, None) for row in UNCAPPED if row in options.only]
    cases += [Case(row, share) for share in options.shares for row in options.only]
    unusable = prepare({row: RUNNERS[row].environment for row in options.only}, work)
    with fresh_folder(workload.folder):
        unusable = unprepared(options.only, unusable, "its files", lambda row: prepare_files(row, workload, work))
        drop_cached(workload.folder)
        machine = report.describe_machine(work)
        runs = run_cases(
            cases, options.turns, DecodeRun, lambda run, case: measure(run, case, workload, work), unusable
        )
    size = f"{weights / 1e9:.2f} GB"
    title = (
        f"{options.tokens} tokens of a model of {size} with memory capped, on the CPU, {command_line.turns(options)}"
    )
    table = tabulate(runs, cases, options.turns)
    report.write(options.results, title, machine, table, notes_on(runs, cases), runs)
    bars.draw(report.picture(options.results), title, "seconds a token", _bars(runs, cases))
    ours = {case.name for case in cases if case.runner in OURS}
    return int(any(run.error for run in runs if run.row in ours))
