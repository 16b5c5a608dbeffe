"""Generating on the CPU with less memory than the model, against the projects that claim to do that.

A Llama of 1.43 GB in bfloat16. The limit of this project's rows is the longer of reading alone (the same bytes by the
same reader in the same process, without computing) and computing alone (the row without a cap, in the same turn).

    sudo python -m benchmarks decode.capped [--turns 3] [--tokens 8] [--shares 25 50 75] [--only ROW ...] [--scale tiny]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import make_checkpoint, weight_bytes
from benchmarks.lib.generation import CappedCase, Runner, StepsRun, Workload, prompt_for, tokens_equal
from benchmarks.lib.measure import spread
from benchmarks.lib.peers import LLAMA_CPP, OLLM, THIS, TRANSFORMERS, room
from benchmarks.lib.runs import carry_out, failures, good, ratios, status, versions

RUNNERS: Mapping[str, Runner] = {
    "transformers": Runner(TRANSFORMERS, "transformers", "in memory"),
    "transformers-disk": Runner(TRANSFORMERS, "transformers", "offloaded"),
    "ollm-1.0.3": Runner(OLLM, "ollm", "ollm"),
    "llama.cpp-bf16": Runner(LLAMA_CPP, "llama_cpp", "BF16"),
    "llama.cpp-q4_0": Runner(LLAMA_CPP, "llama_cpp", "Q4_0"),
    "rabbitllm-2": Runner(THIS, "rabbitllm"),
    "rabbitllm-2-fast": Runner(THIS, "rabbitllm", options={"fast_bfloat16": None}),
    "rabbitllm-2-4bit": Runner(THIS, "rabbitllm", options={"compression": "4bit"}),
}
REFERENCE = "transformers"
OURS, OURS_FAST, OURS_4BIT = "rabbitllm-2", "rabbitllm-2-fast", "rabbitllm-2-4bit"
"""As `from_pretrained` does it, with torch's bits; as the commands do; and at 4bit."""
AT_4BIT = (OURS_4BIT, "llama.cpp-q4_0")
UNCAPPED = (REFERENCE, OURS, OURS_FAST, OURS_4BIT, "llama.cpp-bf16", "llama.cpp-q4_0")
"""These also run without a cap, for tokens to compare and seconds of computing alone."""
RUN_LIMIT_SECONDS = 90


def is_ours(case: CappedCase) -> bool:
    """Whether a row is this project's."""
    return case.runner in (OURS, OURS_FAST, OURS_4BIT)


def our_case(case: CappedCase) -> CappedCase:
    """The row of this project to compare with: as many bits, the same cap."""
    return CappedCase(OURS_4BIT if case.runner in AT_4BIT else OURS, case.share)


def of_the_limit(runs: Sequence[StepsRun], case: CappedCase) -> list[float]:
    """Seconds a token over the longer of reading alone and computing alone, for every turn with both."""
    computing = {run.turn: run.token_seconds for run in good(runs, CappedCase(case.runner, None).name)}
    return [
        run.token_seconds / max(run.read_seconds, computing[run.turn])
        for run in good(runs, case.name)
        if run.turn in computing and is_ours(case)
    ]


def tabulate(runs: Sequence[StepsRun], cases: Sequence[CappedCase], turns: int) -> report.Table:
    """A line a row."""
    free = CappedCase(REFERENCE, None).name
    columns: report.Columns[CappedCase, StepsRun] = {
        "first token s": report.each(lambda run: run.first_token_seconds),
        "s/token": report.each(lambda run: run.token_seconds, 3),
        "x ours": lambda case, _: report.shown(ratios(runs, case.name, our_case(case).name)),
        "MB/token from disk": report.each(lambda run: statistics.median(run.step_bytes), 0, 1e6),
        "of its limit": lambda case, _: report.shown(spread(of_the_limit(runs, case))),
        "anon MiB over idle": report.ADDED_MEMORY,
        "tokens equal": lambda case, _: (
            "" if case.runner in AT_4BIT else report.verdict(tokens_equal(runs, case.name, free))
        ),
    }
    return report.tabulated(runs, {case.name: case for case in cases}, turns, columns)


def notes_on(runs: Sequence[StepsRun], cases: Sequence[CappedCase]) -> list[str]:
    """The meaning of the columns, errors, and the goals."""
    notes = [
        "x ours: seconds a token beside this project's row under the same cap in the same turn, at 4bit for the rows "
        "at 4 bits.",
        "of its limit: seconds a token over the longer of reading alone and computing alone.",
        report.MEMORY_NOTE,
        *versions(runs),
        *failures(runs),
    ]
    for case in cases:
        if case.share is not None and is_ours(case):
            notes.append(report.of_its_limit(case.name, spread(of_the_limit(runs, case))))
        elif case.share is not None:
            notes.append(report.against_ours(case.name, ratios(runs, case.name, our_case(case).name)))
    return notes


def _for_ollm(checkpoint: Path) -> None:
    """Give the tokenizer's class the name that its transformers (before version 5) knows."""
    path = checkpoint / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row of this project failed."""
    parser = command_line.parser(__doc__, 3, list(RUNNERS))
    parser.add_argument("--tokens", type=int, default=8, help="to generate, at least 2 (default: %(default)s)")
    parser.add_argument("--shares", type=int, nargs="+", default=[25, 50, 75], help="of the weights, in percent")
    options = command_line.parsed(parser, arguments, only=[OURS], tokens=3, shares=[50])
    command_line.settle(options, "capped")
    command_line.check_tokens(options)
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale, "LlamaConfig")
    _for_ollm(checkpoint)
    weights = weight_bytes(checkpoint)
    workload = Workload(checkpoint, work / "capped-run", prompt_for(options.scale), options.tokens)
    cases = [CappedCase(row, None) for row in UNCAPPED if row in options.only]
    cases += [CappedCase(row, share) for share in options.shares for row in options.only]

    def measure(run: StepsRun, case: CappedCase) -> None:
        outcome = workload.decode(
            RUNNERS[case.runner],
            work,
            f"capped-{case.runner}-{case.share}-{run.turn}",
            cap_bytes=room(weights, case.share),
            limit_seconds=RUN_LIMIT_SECONDS,
        )
        run.take(outcome)

    environments = {row: RUNNERS[row].environment for row in options.only}
    runs = carry_out(
        options,
        cases,
        StepsRun,
        measure,
        environments,
        workload.folder,
        lambda row: workload.prepare(RUNNERS[row], work, f"capped-{row}-files"),
    )
    size, turns = f"{weights / 1e9:.2f} GB", command_line.turns(options)
    title = f"{options.tokens} tokens of a model of {size} with memory capped, on the CPU, {turns}"
    table = tabulate(runs, cases, options.turns)
    drawn = report.bars_by_cap(title, runs, {case.name: (case.share, case.runner, is_ours(case)) for case in cases})
    report.write(options.results, title, table, notes_on(runs, cases), runs, work=work, picture=drawn)
    return status(runs, lambda row: row.startswith(OURS))
