"""What many tokens for each reading of the weights gain: prompt lookup and batches; and what a prompt in chunks costs.

Every layer is streamed, past the page cache, as of a model that does not fit. The weights are random, so what is
generated means nothing; greedy, it soon repeats itself, as code, tables and quotations do, and that is what prompt
lookup feeds on. (Of an assistant nothing can be said with random weights: two models agree on nothing.) In turns, in
one process:

    python -m benchmarks.around_weights [--scale medium] [--tokens 48] [--turns 3] [--work-dir FOLDER]

One line each: seconds a token of all sequences together (medians, lowest to highest), tokens a pass, GB read a token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import command_line
from benchmarks.checkpoint import SCALES, make_checkpoint

PROMPT_TOKENS = 256
LOOKUP = 8
BATCH = 32


def load(folder: Path, **options: Any) -> Any:
    """A model on the CPU."""
    from rabbitllm import AutoModel

    return AutoModel.from_pretrained(folder, device="cpu", show_layer_progress=False, **options)


def read_past_the_cache(model: Any) -> None:
    """As where it does not fit with what is kept."""
    from rabbitllm.engine.span_reader import ReadMode

    for lane in model.streamer.lanes.values():
        lane.loader._disk.way = ReadMode(direct=True)


def run(model: Any, tokens: int, batch: int, options: Mapping[str, Any]) -> dict[str, float]:
    """One generation."""
    import torch

    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    model.profiler.clear()
    start = time.perf_counter()
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, pad_token_id=0, **options)
    seconds = time.perf_counter() - start
    made = (found.shape[1] - PROMPT_TOKENS) * batch
    sums = model.profiler.sums
    passes = sum(total.passes for total in sums.values())
    read = sum(total.disk_bytes for total in sums.values())
    return {"seconds": seconds / made, "tokens": made / passes, "gigabytes": read / made / 1e9, "passes": passes}


def main() -> None:
    """Make, load, take turns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=list(SCALES), default="medium")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, default=Path("benchmark-work"))
    arguments = command_line.parsed(parser, None, tokens=2)
    checkpoint = make_checkpoint(arguments.work_dir.resolve(), arguments.scale)
    model = load(checkpoint, max_memory={"cpu": 0}, profiling_mode=True)
    read_past_the_cache(model)
    ways: dict[str, tuple[int, dict[str, Any]]] = {
        "one token a pass": (1, {}),
        f"prompt lookup of {LOOKUP}": (1, {"prompt_lookup_num_tokens": LOOKUP}),
        f"batch of {BATCH}": (BATCH, {}),
        "prompt in chunks of 64": (1, {"prefill_chunk_size": 64}),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(arguments.turns):
        for name, (batch, options) in ways.items():
            found[name].append(run(model, arguments.tokens, batch, options))
    for name, runs in found.items():
        seconds = [one["seconds"] for one in runs]
        spread = f"{statistics.median(seconds):.4f} ({min(seconds):.4f} to {max(seconds):.4f}) s a token"
        last = runs[-1]
        print(f"{name:<28}{spread}, {last['tokens']:.2f} tokens a pass, {last['gigabytes']:.3f} GB a token", flush=True)


if __name__ == "__main__":
    main()
