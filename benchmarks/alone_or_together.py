"""How many greedy answers differ from what the same request gets alone, when many share their passes.

The rows of all requests go through a linear layer as one matrix, and a product of another size rounds otherwise in its
last bits. Where two tokens are nearly as likely, that decides between them, and from there on the text is another one.
In float32 nothing should ever differ. A generated model of random weights, whose logits lie close together, and the
trained one that comes with the package; 16 and 64 requests at once, none in step with another: prompts are 8 to 40
tokens long. In one process, on the CPU.

    python -m benchmarks.alone_or_together [--scale medium] [--at-once 16 64] [--tokens 32] [--work-dir FOLDER]
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import command_line, report
from benchmarks.checkpoint import make_checkpoint
from benchmarks.runs import Run, run_all

GENERATED, TRAINED = "generated", "trained"
DTYPES = ("bfloat16", "float32")
_REPOSITORY = Path(__file__).resolve().parent.parent
DEMO, README = _REPOSITORY / "rabbitllm" / "demo" / "model", _REPOSITORY / "README.md"
SHORTEST, LONGEST = 8, 40


@dataclass
class TogetherRun(Run):
    """One row.

    Attributes:
        requests: that were asked at once.
        differing: of these, how many had another answer than alone.
        first_difference: median place of the first token that differs, among those; None for none.
        seconds: for all of them together.
    """

    requests: int = 0
    differing: int = 0
    first_difference: float | None = None
    seconds: float = 0.0

    @property
    def headline(self) -> float:
        """Seconds for all of them."""
        return self.seconds


def prompts(count: int, ids: Sequence[int]) -> list[tuple[int, ...]]:
    """Stretches of these token ids, of different lengths, the same each time."""
    chance = random.Random(0)
    found = []
    for _ in range(count):
        length = chance.randrange(SHORTEST, LONGEST)
        begin = chance.randrange(len(ids) - length)
        found.append(tuple(ids[begin : begin + length]))
    return found


def ids_for(name: str, model: Any) -> list[int]:
    """What prompts are cut from: any tokens for random weights, the text of the README for the trained model."""
    if name == TRAINED:
        return list(model.tokenizer(README.read_text(encoding="utf-8"))["input_ids"])
    chance = random.Random(1)
    return [chance.randrange(3, model.config.vocab_size) for _ in range(20_000)]


def alone(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """What one request gets that has all passes to itself."""
    import torch

    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in made[0, len(prompt) :]]


def together(model: Any, given: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """What they get when all are there at once."""
    from rabbitllm.generation.batch import Batch, Limits
    from rabbitllm.generation.request import Delta, Request, Sampling

    found: list[list[int]] = [[] for _ in given]
    over = threading.Semaphore(0)

    def taker(number: int) -> Any:
        def take(event: Any) -> None:
            if isinstance(event, Delta):
                found[number] += [one.token for one in event.tokens]
            else:
                over.release()

        return take

    with Batch(model, Limits(running=len(given), waiting=len(given))) as batch:
        for number, prompt in enumerate(given):
            batch.submit(Request(tuple(prompt), tokens, Sampling(temperature=0.0)), taker(number))
        for _ in given:
            over.acquire()
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first token that is another one, counted from 1; None if there is none."""
    if list(one) == list(other):
        return None
    same = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(same, 1) if a != b), min(len(one), len(other)) + 1)


def fill_in(run: TogetherRun, model: Any, expected: Sequence[Sequence[int]], given: Any, tokens: int) -> None:
    """Carry out one row."""
    import statistics

    begun = time.perf_counter()
    made = together(model, given, tokens)
    run.seconds, run.requests = time.perf_counter() - begun, len(given)
    places = [first_difference(one, other) for one, other in zip(expected, made, strict=True)]
    differing = [place for place in places if place is not None]
    run.differing = len(differing)
    run.first_difference = statistics.median(differing) if differing else None


def tabulate(runs: Sequence[TogetherRun], tokens: int) -> report.Table:
    """A line a row."""
    made = [
        (
            run.row,
            str(run.requests),
            str(run.differing),
            f"{run.differing / run.requests:.1%}" if run.requests else "-",
            "-" if run.first_difference is None else f"{run.first_difference:g}",
            f"{run.requests * tokens / run.seconds:.1f}" if run.seconds else "-",
        )
        for run in runs
    ]
    headings = ("row", "at once", "differ from alone", "share", "first other token, median place", "tokens/s")
    return report.Table(headings, made)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if an answer in float32 differs."""
    parser = command_line.parser(__doc__, 1, [])
    parser.set_defaults(scale="medium")
    parser.add_argument("--at-once", type=int, nargs="+", default=[16, 64], help="requests")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer (default: %(default)s)")
    options = command_line.parsed(parser, arguments, at_once=[3], tokens=4)
    command_line.settle(options, "alone-or-together")
    runs: list[TogetherRun] = []
    work = options.work_dir / "alone-or-together-run"
    shutil.rmtree(work, ignore_errors=True)
    folders = {GENERATED: make_checkpoint(options.work_dir, options.scale, "LlamaConfig"), TRAINED: DEMO}
    machine = report.describe_machine(options.work_dir)
    from rabbitllm import AutoModel

    try:
        for name, folder in folders.items():
            for dtype in DTYPES:
                model = AutoModel.from_pretrained(
                    folder, device="cpu", dtype=dtype, layer_shards_saving_path=work / name, show_layer_progress=False
                )
                given = prompts(max(options.at_once), ids_for(name, model))
                expected = [alone(model, prompt, options.tokens) for prompt in given]
                rows = {f"{name}, {dtype}, {number}": number for number in options.at_once}
                runs += run_all(
                    list(rows),
                    1,
                    TogetherRun,
                    lambda run, rows=rows, model=model, expected=expected, given=given: fill_in(
                        run, model, expected[: rows[run.row]], given[: rows[run.row]], options.tokens
                    ),
                    {},
                )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    title = f"Greedy answers of {options.tokens} tokens that differ from those that the same requests get alone"
    notes = ["In float32 none may differ.", "tokens/s: nothing capped, everything in memory; prompts are in the time."]
    report.write(options.results, title, machine, tabulate(runs, options.tokens), notes, runs)
    return int(any(run.differing for run in runs if "float32" in run.row))


if __name__ == "__main__":
    raise SystemExit(main())
