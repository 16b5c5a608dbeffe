"""Passes of a batch in a process of its own, and the memory that each added at its height; prints JSON.

    python -m tests.generation.pass_peak_child SPLIT-FOLDER TOKENS:PART:TEXTS:MODE …

MODE is `apart` or `as-usual`: whether large blocks are kept apart; it stays so for the rest of the process.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rabbitllm.engine.free_memory import keep_large_apart
from rabbitllm.generation._model_runner import ModelRunner
from rabbitllm.generation.batch import Batch, Limits
from rabbitllm.generation.memory import PassCost, cost_of_a_pass
from rabbitllm.generation.request import Request
from tests.support.tiny_models import load

WITH_ALL = 1 << 30


def resident(name: str) -> int:
    """Bytes, as /proc has them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise LookupError(name)


@contextlib.contextmanager
def height(heights: list[int]) -> Iterator[None]:
    """What memory was more than at the beginning, at most: counted by the kernel, since a thread that looks comes late
    on a busy machine."""
    Path("/proc/self/clear_refs").write_text("5")  # its peak begins here
    before = resident("VmRSS:")
    yield
    heights.append(resident("VmHWM:") - before)


def main() -> None:
    """See above."""
    torch.set_num_threads(1)
    model: Any = load(Path(sys.argv[1]), WITH_ALL, exact=False)
    vocabulary = model.config.vocab_size
    heights: list[int] = []
    ordinary = ModelRunner.run

    def run(self: ModelRunner, coroutines: Any) -> None:
        with height(heights):
            ordinary(self, coroutines)

    ModelRunner.run = run  # type: ignore[method-assign]
    answers = []
    for case in sys.argv[2:]:
        *sizes, mode = case.split(":")
        tokens, part, texts = map(int, sizes)
        if mode == "apart":
            keep_large_apart()
        PassCost.parts_in = lambda self, nbytes, texts, part=part: (1 << 30, part)  # type: ignore[method-assign,misc]
        prompts = [
            tuple((text * 7919 + place * 37 + 11) % vocabulary for place in range(tokens // texts))
            for text in range(texts)
        ]
        heights.clear()
        with Batch(model, Limits(texts, cache_bytes=WITH_ALL, chunk=1 << 30, throughput=True)) as batch, batch.paused():
            submitted = [batch.submit(Request(ids, 1), lambda event: None) for ids in prompts]
        assert len(heights) == 1, heights
        assert len(submitted) == texts
        config = model.config
        keys = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * tokens
        reckoned = cost_of_a_pass(config, model.dtype.itemsize).of(tokens, part, texts)
        answers.append({"case": case, "measured": heights[0] - keys, "reckoned": reckoned, "keys": keys})
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
