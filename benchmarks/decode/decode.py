"""Generating on the CPU: load time, time to the first token, seconds a token, peak anonymous memory, equal tokens.

In bfloat16. The layered rows load layer files that were made before, outside the timing; the checkpoint still exists.
Files that a run reads repeatedly may come from the page cache, which helps all rows except those that read past it.
Tokens are compared with those of plain transformers in the same turn.

    python -m benchmarks decode [--turns 3] [--tokens 8] [--only ROW ...] [--scale tiny] [--work-dir FOLDER]
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import make_checkpoint
from benchmarks.lib.generation import PROMPT_TOKENS, Runner, StepsRun, Workload, prompt_for, tokens_equal
from benchmarks.lib.measure import CACHE_STATE
from benchmarks.lib.peers import AIRLLM, RABBITLLM_1, THIS, TRANSFORMERS
from benchmarks.lib.runs import carry_out, failures, ratios, status, versions

STREAMED = {"max_memory": {"cpu": 0}}
ROOM = {"max_memory": {"cpu": "700MB"}}
"""Less than the dequantized model: each layer is dequantized for each use."""
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
    ("rabbitllm-2", REFERENCE, 0.97),
    *((row, "rabbitllm-1.1.0", 10.0) for row in ("rabbitllm-2", "rabbitllm-2-streamed")),
    *((row, "airllm-4.0.0", 10.0) for row in ("rabbitllm-2", "rabbitllm-2-streamed")),
)
"""Row, another row, and the goal for their ratio of tokens a second."""


def tabulate(runs: Sequence[StepsRun], rows: Sequence[str], turns: int) -> report.Table:
    """A line a row."""
    columns: report.Columns[str, StepsRun] = {
        "load s": report.each(lambda run: run.load_seconds),
        "first token s": report.each(lambda run: run.first_token_seconds),
        "s/token": report.each(lambda run: run.token_seconds, 3),
        "x transformers": lambda row, _: report.shown(ratios(runs, REFERENCE, row), 3),
        "anon MiB over idle": report.ADDED_MEMORY,
        "mapped MiB": report.each(lambda run: run.file_peak, 0, 2**20),
        "tokens equal": lambda row, _: (
            "" if RUNNERS[row].is_compressed else report.verdict(tokens_equal(runs, row, REFERENCE))
        ),
    }
    return report.tabulated(runs, {row: row for row in rows}, turns, columns)


def notes_on(runs: Sequence[StepsRun], rows: Sequence[str]) -> list[str]:
    """The meaning of the columns, errors, and the goals."""
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
    work, rows = options.work_dir, options.only
    prompt = prompt_for(options.scale, options.prompt_tokens)
    workload = Workload(make_checkpoint(work, options.scale), work / "decode-run", prompt, options.tokens)
    runs = carry_out(
        options,
        rows,
        StepsRun,
        lambda run, row: run.take(workload.decode(RUNNERS[row], work, f"decode-{row}-{run.turn}")),
        {row: RUNNERS[row].environment for row in rows},
        workload.folder,
        lambda row: workload.prepare(RUNNERS[row], work, f"decode-{row}-split"),
    )
    title = f"{options.tokens} tokens after a prompt of {options.prompt_tokens}, on the CPU, "
    title += command_line.turns(options)
    report.write(options.results, title, tabulate(runs, rows, options.turns), notes_on(runs, rows), runs, work=work)
    return status(runs, lambda row: RUNNERS[row].environment == THIS)
