"""What comparing checksums costs a first pass: with them and without, the files in the page cache and not.

Each turn loads a split model and passes a prompt through it once, with checksums and without in turns, in one process
that forgets what it compared before. The model is gone before the next one is loaded, so that its files can leave the
page cache.

    python -m benchmarks.first_pass [--scale medium] [--tokens 1 64] [--turns 15] [--threads 1] [--work-dir FOLDER]

One line a row: milliseconds of the load and the first pass together, of the pass alone, and of the processors for both,
without checksums -> with them, medians (lowest to highest), and the ratio of each turn.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import command_line, report
from benchmarks.checkpoint import SCALES, make_checkpoint
from benchmarks.lazy_load import warm
from benchmarks.measure import drop_cached, spread

COMPRESSIONS = (None, "4bit")
PLACES = {"resident": 1 << 40, "streamed": 0}
"""And bytes of memory for the weights."""


@dataclass(frozen=True)
class Row:
    """What is loaded and passed through."""

    compression: str | None
    place: str
    cached: bool
    tokens: int


class Seconds(NamedTuple):
    """Of the load and the first pass, of the pass, and processor time of both."""

    both: float
    one_pass: float
    processor: float


def run(folder: Path, row: Row, *, checked: bool) -> Seconds:
    """Load and pass once."""
    import torch

    from rabbitllm.base.options import RunOptions
    from rabbitllm.engine.load import load_model
    from rabbitllm.store import checksums

    gc.collect()
    checksums._STATES.clear()
    drop_cached(folder)
    if row.cached:
        for path in folder.glob("*.safetensors"):
            warm(path)
    limits = {"cpu": PLACES[row.place]}
    options = RunOptions(device="cpu", max_memory=limits, show_progress=False, verify_checksums=checked)
    ids = torch.arange(1, row.tokens + 1)[None]
    begun, used = time.perf_counter(), time.process_time()
    model = load_model(folder, options)
    loaded = time.perf_counter()
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    ended = time.perf_counter()
    return Seconds(ended - begun, ended - loaded, time.process_time() - used)


def line(row: Row, turns: Sequence[tuple[Seconds, Seconds]]) -> str:
    """Of turns without checksums and with them."""
    where = f"{row.compression or 'bfloat16'}, {row.place}, {'cached' if row.cached else 'from the disk'}, {row.tokens}"
    said = []
    for at, name in enumerate(("load and pass", "pass", "processor")):
        without, checked = (report.shown(spread(turn[one][at] for turn in turns), 0, 1e-3) for one in (0, 1))
        ratio = report.shown(spread(turn[1][at] / turn[0][at] for turn in turns), 3)
        said.append(f"{name} {without} -> {checked} ms, {ratio}")
    return f"{where:<40}{'; '.join(said)}"


def main() -> None:
    """Make, take turns, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=list(SCALES), default="medium")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of torch; all processors by default")
    parser.add_argument("--work-dir", type=Path, default=Path("benchmark-work"))
    arguments = command_line.parsed(parser, None, tokens=[1])
    if arguments.threads:
        import torch

        torch.set_num_threads(arguments.threads)
    checkpoint = make_checkpoint(arguments.work_dir.resolve(), arguments.scale)
    for compression in COMPRESSIONS:
        folder = split(checkpoint, compression)
        for place, cached, tokens in itertools.product(PLACES, (True, False), arguments.tokens):
            row = Row(compression, place, cached, tokens)
            run(folder, row, checked=False)  # what is compiled, and memory that is touched for the first time
            turns: list[Any] = []
            for turn in range(arguments.turns):
                order = (True, False) if turn % 2 else (False, True)
                taken = {checked: run(folder, row, checked=checked) for checked in order}
                turns.append((taken[False], taken[True]))
            print(line(row, turns), flush=True)


def split(checkpoint: Path, compression: str | None) -> Path:
    """The split directory in a checkpoint's folder, made unless it is there."""
    from rabbitllm import prepare
    from rabbitllm.base.options import SplitOptions

    source = prepare.find(prepare.ModelSpec(str(checkpoint), compression))
    prepare.ensure_split(source, SplitOptions(compression))
    return source.split_folder


if __name__ == "__main__":
    main()
