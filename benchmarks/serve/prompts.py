"""Seconds to the first token of a server that was started again: with the prompt cache on disk, and without.

A Qwen2 with memory for a share of its weights, so that layers are streamed. Each row is a model that is loaded again,
and a request with one system prompt and another question. "filled" is the run that writes the cache.

    python -m benchmarks serve.prompts [--share 50] [--prompt-tokens 4000] [--only ROW ...] [--scale tiny]
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import SCALES, make_checkpoint, weight_bytes
from benchmarks.lib.peers import THIS, make_layer_files
from benchmarks.lib.runs import Run, carry_out, failures, ratios, status

COMPUTED, FILLED, READ = "computed", "filled", "from disk"
QUESTION_TOKENS = 20
GOAL = 0.1


@dataclass
class PromptRun(Run):
    """One row of one turn.

    Attributes:
        first_seconds: from the request to its first token.
        saved_tokens: tokens that were not computed.
        disk_bytes: bytes of the prompt cache.
    """

    first_seconds: float = 0.0
    saved_tokens: int = 0
    disk_bytes: int = 0

    @property
    def headline(self) -> float:
        """Seconds to the first token."""
        return self.first_seconds


def measure(run: PromptRun, layers: Path, budget: int, prompt: Sequence[int], folder: Path) -> None:
    """Load the model, ask once, and end."""
    from rabbitllm import AutoModel
    from rabbitllm.generation.batch import Batch, Limits
    from rabbitllm.generation.request import Delta, Event, Request

    model = AutoModel.from_pretrained(str(layers), device="cpu", max_memory={"cpu": budget}, show_layer_progress=False)
    limits = Limits(prompt_bytes=0 if run.row == COMPUTED else 1 << 34, prompt_folder=folder)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with Batch(model, limits) as batch:
        start = time.perf_counter()
        batch.submit(Request(tuple(prompt), 2), events.put)
        run.first_seconds, event = 0.0, events.get()
        while isinstance(event, Delta):
            run.first_seconds = run.first_seconds or time.perf_counter() - start
            event = events.get()
    run.saved_tokens, run.disk_bytes = batch.stats.prompt_saved_tokens, batch.stats.prompt_bytes


def tabulate(runs: Sequence[PromptRun], rows: Sequence[str], turns: int) -> report.Table:
    """A line a row."""
    columns: report.Columns[str, PromptRun] = {
        "first token s": report.each(lambda run: run.first_seconds, 2),
        "of computed": lambda row, _: report.shown(ratios(runs, row, COMPUTED), 3),
        "tokens saved": report.each(lambda run: run.saved_tokens, 0),
        "cache MB": report.each(lambda run: run.disk_bytes / 1e6, 0),
    }
    return report.tabulated(runs, {row: row for row in rows}, turns, columns)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a row failed."""
    parser = command_line.parser(__doc__, 3, [COMPUTED, FILLED, READ])
    parser.add_argument("--share", type=int, default=50, help="of the weights, in percent (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of the system prompt (default: %(default)s)")
    options = command_line.parsed(parser, arguments, prompt_tokens=600)
    command_line.settle(options, "prompts")
    work = options.work_dir
    checkpoint = make_checkpoint(work, options.scale)
    folder = work / "prompts-run"
    budget = weight_bytes(checkpoint) * options.share // 100
    chance = random.Random(0)
    vocabulary = SCALES[options.scale].vocab_size
    system = [chance.randrange(1, vocabulary) for _ in range(options.prompt_tokens)]

    def files(row: str) -> None:
        if not (folder / "layers").exists():
            make_layer_files(THIS, "rabbitllm", checkpoint, folder / "layers", None, work, "prompts-files")

    def asked(run: PromptRun, row: str) -> None:
        question = [chance.randrange(1, vocabulary) for _ in range(QUESTION_TOKENS)]
        place = next((folder / "layers").glob("splitted_model*"))
        measure(run, place, budget, [*system, *question], folder / "prompts")

    runs = carry_out(options, options.only, PromptRun, asked, dict.fromkeys(options.only, THIS), folder, files)
    notes = [
        f"Memory for {options.share} % of {weight_bytes(checkpoint) / 1e9:.2f} GB; a system prompt of "
        f"{options.prompt_tokens:,} tokens. filled: in the first turn it writes the cache, then it reads it too.",
        *failures(runs),
        report.reach(f"{READ}, of computed", report.median(ratios(runs, READ, COMPUTED)), GOAL, at_most=True),
    ]
    title = f"The first token after a restart, on the CPU, {command_line.turns(options)}"
    report.write(options.results, title, tabulate(runs, options.only, options.turns), notes, runs, work=work)
    return status(runs, lambda row: True)
