"""The compiled quantizers and bitsandbytes' own, on one core: MB of the source a second, and how many times as fast.

The two take turns on the same values, in runs as long as the splitter's, and must give the same bytes.

    python -m benchmarks split.quantizers [--turns 7] [--megabytes 32] [--results FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib import command_line, report
from benchmarks.lib.measure import spread
from rabbitllm.formats.tensor_spec import torch_dtype
from rabbitllm.quant import quantize, quantize_kernels
from rabbitllm.splitter.plan import CHUNK_BYTES

DTYPES = ("BF16", "F16", "F32")
SLOW_PART = 8
"""bitsandbytes gets one part in so many of the values, since it is slower."""
GOALS = {("4bit", "BF16"): 15.0, ("8bit", "BF16"): 6.0}
_RESULTS = command_line.RESULTS / "quantizers"

Quantize = Callable[[memoryview], tuple[memoryview, memoryview]]


@dataclass(frozen=True)
class Row:
    """One scheme and dtype: bytes of the source a second in each turn, and whether both gave the same bytes."""

    scheme: str
    dtype: str
    ours: list[float]
    theirs: list[float]
    same: bool

    @property
    def ratios(self) -> list[float]:
        """Ratios of the two rates of each turn."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]


def measure(scheme: str, dtype: str, nbytes: int, turns: int) -> Row:
    """Run both in turns; the first call of each, which compiles or loads, is not timed."""
    import torch

    values = torch.randn(nbytes // torch_dtype(dtype).itemsize, generator=torch.Generator().manual_seed(0)) * 0.02
    data = values.to(torch_dtype(dtype)).view(torch.uint8).numpy().data.cast("B")
    part = data[: max(nbytes // SLOW_PART, min(nbytes, CHUNK_BYTES))]

    def compiled(run: memoryview) -> tuple[memoryview, memoryview]:
        return quantize_kernels.quantize(scheme, run, dtype)

    def library(run: memoryview) -> tuple[memoryview, memoryview]:
        return quantize._quantize_with_bitsandbytes(scheme, run, dtype, "cpu")

    same = compiled(part) == library(part)
    ours, theirs = [], []
    for _ in range(turns):
        ours.append(_rate(compiled, data))
        theirs.append(_rate(library, part))
    return Row(scheme, dtype, ours, theirs, same)


def _rate(quantize: Quantize, data: memoryview) -> float:
    start = time.perf_counter()
    for offset in range(0, len(data), CHUNK_BYTES):
        quantize(data[offset : offset + CHUNK_BYTES])
    return len(data) / (time.perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if the bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="how often each is run (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=32, help="of values (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="file to write, without suffix")
    options = command_line.parsed(parser, arguments, megabytes=1)
    if sys.platform == "linux":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import torch

    torch.set_num_threads(1)
    nbytes = options.megabytes * 1000**2 // CHUNK_BYTES * CHUNK_BYTES or CHUNK_BYTES
    rows = [measure(scheme, dtype, nbytes, options.turns) for scheme in ("4bit", "8bit") for dtype in DTYPES]
    report.write(options.results, f"Quantizing on one core, {options.turns} turns", *_shown(rows), rows)
    return int(not all(row.same for row in rows))


def _shown(rows: Sequence[Row]) -> tuple[report.Table, list[str]]:
    headings = ("scheme, dtype", "compiled, MB/s", "bitsandbytes, MB/s", "times", "same bytes")
    lines = [
        (
            f"{row.scheme}, {row.dtype}",
            report.shown(spread(row.ours), 0, 1e6),
            report.shown(spread(row.theirs), 0, 1e6),
            report.shown(spread(row.ratios), 1),
            report.verdict([row.same]),
        )
        for row in rows
    ]
    medians = {(row.scheme, row.dtype): report.median(spread(row.ratios)) for row in rows}
    notes = ["MB are 10^6 bytes of the source; ratios are of the same turn."]
    for (scheme, dtype), goal in GOALS.items():
        notes.append(report.reach(f"{scheme} of {dtype}, times", medians[scheme, dtype], goal, at_most=False))
    return report.Table(headings, lines), notes
