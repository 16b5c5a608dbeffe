"""Prompts whose KV caches do not fit in memory: in a file, or waiting for memory, or with memory for all.

One process, one thread, no cap: options limit the memory. The pages of the file may stay in the page cache; the table
has the bytes read from it, to be divided by a disk's speed. A Llama in bfloat16 without an end token. "the same texts":
as those of the first row.

    python -m benchmarks batch.beyond_memory [--scale medium] [--sequences 16] [--prompt-tokens 128] [--tokens 32]
                                       [--cache-memory 8MB] [--weights-memory 80MB] [--turns 1] [--work-dir DIR]
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import SCALES, make_checkpoint
from benchmarks.lib.measure import spread
from benchmarks.lib.worker import prompt
from rabbitllm import AutoModel
from rabbitllm.base.options import parse_size
from rabbitllm.batch_jobs.answers import answered
from rabbitllm.batch_jobs.items import Generate, Item, JobLimits

ROOM_FOR_ALL = 1 << 30


@dataclass(frozen=True)
class Row:
    """Bytes for KV caches in memory and in a file (None: as many as pay)."""

    name: str
    cache_bytes: int
    cache_disk: int | None


@dataclass
class BeyondRun:
    """One row of one turn.

    Attributes:
        row: its name.
        seconds: for all prompts.
        new_tokens, passes: their numbers.
        streamed_bytes, file_bytes: read of weights, and of the file of KV caches.
        texts: the answers.
    """

    row: str
    seconds: float
    new_tokens: int
    passes: int
    streamed_bytes: int
    file_bytes: int
    texts: tuple[str, ...]
    load_average: float


def run(model: Any, row: Row, prompts: Sequence[Sequence[int]], tokens: int) -> BeyondRun:
    """Answer all prompts."""
    items = [Item(number, number, Generate(tuple(ids), tokens)) for number, ids in enumerate(prompts)]
    limits = JobLimits(len(prompts), row.cache_bytes, cache_disk=row.cache_disk)
    stats_of: list[Any] = []
    load, begun = os.getloadavg()[0], time.perf_counter()
    lines: dict[int, Any] = {}
    for group in answered(model, "m", iter(items), limits, stats_of.append):
        lines |= {answer.index: answer.line for answer in group}
    seconds, stats = time.perf_counter() - begun, stats_of[0]()
    texts = tuple(lines[number]["text"] for number in range(len(prompts)))
    counts = (stats.new_tokens, stats.passes, stats.streamed_bytes, stats.file_read_bytes)
    return BeyondRun(row.name, seconds, *counts, texts, load)


def tabulate(runs: Sequence[BeyondRun]) -> report.Table:
    """A line a row."""
    headings = (
        "keys and values",
        "tokens/s",
        "s",
        "passes",
        "GB of weights",
        "GB from the file",
        "the same texts",
    )
    first = {run.row: run for run in reversed(runs)}
    expected, lines = runs[0].texts, []
    for row in dict.fromkeys(run.row for run in runs):
        row_runs = [run for run in runs if run.row == row]
        same = sum(a == b for a, b in zip(first[row].texts, expected, strict=True))
        lines.append(
            (
                row,
                report.shown(spread(run.new_tokens / run.seconds for run in row_runs)),
                report.shown(spread(run.seconds for run in row_runs), 1),
                f"{first[row].passes:,}",
                f"{first[row].streamed_bytes / 1e9:.2f}",
                f"{first[row].file_bytes / 1e9:.2f}",
                f"{same} of {len(expected)}",
            )
        )
    return report.Table(headings, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; not 0 if the texts with the file and with memory for all differ."""
    parser = command_line.parser(__doc__, 1, [])
    parser.set_defaults(scale="medium")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--cache-memory", default="8MB")
    parser.add_argument("--weights-memory", default="80MB")
    smallest = {"sequences": 4, "prompt_tokens": 160, "tokens": 3, "cache_memory": "400kB", "weights_memory": "0"}
    options = command_line.parsed(parser, arguments, **smallest)
    command_line.settle(options, "beyond-memory")
    torch.set_num_threads(1)
    checkpoint = make_checkpoint(options.work_dir, options.scale, "LlamaConfig")
    place = options.work_dir / "beyond-memory-run"
    memory = parse_size(options.cache_memory, "--cache-memory")
    rows = (
        Row("in memory, all of them", ROOM_FOR_ALL, 0),
        Row(f"{options.cache_memory}, others in a file", memory, None),
        Row(f"{options.cache_memory}, others wait", memory, 0),
    )
    vocabulary = SCALES[options.scale].vocab_size
    prompts = [prompt(number, options.prompt_tokens, vocabulary) for number in range(options.sequences)]
    try:
        model = AutoModel.from_pretrained(
            str(checkpoint),
            device="cpu",
            max_memory={"cpu": options.weights_memory},
            layer_shards_saving_path=str(place),
            show_layer_progress=False,
        )
        runs = [run(model, row, prompts, options.tokens) for _ in range(options.turns) for row in rows]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    shape = f"{options.sequences} prompts of {options.prompt_tokens} tokens, {options.tokens} out"
    title = f"{shape}, {command_line.turns(options)}"
    notes = [f"{model.placement.streamed_bytes / 1e6:,.0f} MB of weights are read in a pass, by one thread."]
    report.write(options.results, title, tabulate(runs), notes, runs, work=options.work_dir)
    return int(runs[0].texts != runs[1].texts)
