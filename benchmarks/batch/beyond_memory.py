"""Prompts for whose keys and values memory has no room: in a file, or waiting for memory, or with room for all.

One process, one thread, no cap: memory is bounded by what the model and the batch are told. So the file's pages stay in
the page cache where the machine has room; how much was read of it is in the table, to be reckoned with a disk's speed.
A Llama in bfloat16 with random weights and no end token; greedy tokens. "the same texts": as those of the first row.

    python -m benchmarks batch.beyond_memory [--scale medium] [--sequences 16] [--prompt-tokens 128] [--tokens 32]
                                       [--cache-memory 8MB] [--weights-memory 80MB] [--work-dir DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import command_line, report
from benchmarks.lib.checkpoint import SCALES, make_checkpoint
from benchmarks.lib.worker_batch import prompt
from rabbitllm import AutoModel
from rabbitllm.base.options import parse_size
from rabbitllm.batch_jobs.answers import answered
from rabbitllm.batch_jobs.items import Generate, Item, JobLimits

ROOM_FOR_ALL = 1 << 30


@dataclass(frozen=True)
class Row:
    """What keys and values may take: in memory, and in a file (None for what is worth it)."""

    name: str
    cache_bytes: int
    cache_disk: int | None


@dataclass(frozen=True)
class Outcome:
    """What came of a row."""

    seconds: float
    facts: Any
    texts: tuple[str, ...]


def run(model: Any, row: Row, prompts: Sequence[Sequence[int]], tokens: int) -> Outcome:
    """Answer all prompts."""
    items = [Item(number, number, Generate(tuple(ids), tokens)) for number, ids in enumerate(prompts)]
    limits = JobLimits(len(prompts), row.cache_bytes, cache_disk=row.cache_disk)
    facts: list[Any] = []
    begun = time.perf_counter()
    found = {one.index: one.line for group in answered(model, "m", iter(items), limits, facts.append) for one in group}
    seconds = time.perf_counter() - begun
    return Outcome(seconds, facts[0](), tuple(found[number]["text"] for number in range(len(prompts))))


HEADINGS = ("keys and values", "tokens/s", "s", "passes", "GB of weights", "GB of keys and values", "the same texts")


def tabulate(outcomes: Sequence[tuple[Row, Outcome]]) -> report.Table:
    """A line a row."""
    first = outcomes[0][1].texts
    return report.Table(
        HEADINGS,
        [
            (
                row.name,
                f"{one.facts.new_tokens / one.seconds:.2f}",
                f"{one.seconds:.1f}",
                f"{one.facts.passes:,}",
                f"{one.facts.streamed_bytes / 1e9:.2f}",
                f"{one.facts.file_read_bytes / 1e9:.2f}",
                f"{sum(a == b for a, b in zip(one.texts, first, strict=True))} of {len(first)}",
            )
            for row, one in outcomes
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; not 0 if the file and memory for all do not make the same texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="medium")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--cache-memory", default="8MB")
    parser.add_argument("--weights-memory", default="80MB")
    parser.add_argument("--work-dir", type=Path, default=command_line.WORK)
    smallest = {"sequences": 4, "prompt_tokens": 160, "tokens": 3, "cache_memory": "400kB", "weights_memory": "0"}
    options = command_line.parsed(parser, arguments, **smallest)
    options.work_dir.mkdir(parents=True, exist_ok=True)
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
        load = os.getloadavg()[0]
        outcomes = [(row, run(model, row, prompts, options.tokens)) for row in rows]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(tabulate(outcomes).markdown())
    print(f"{model.placement.streamed_bytes / 1e6:,.0f} MB of weights are read in a pass; load {load:.1f} at the start")
    return int(outcomes[0][1].texts != outcomes[1][1].texts)
