"""Our products from codes compared with torch's own for quantized weights: GB of codes a second, and results.

torch's (which torchao calls on a CPU too): `aten._weight_int4pack_mm_for_cpu`, codes of 4 bits with a scale and a zero
for each 64 of a row, packed beforehand, and `aten._weight_int8pack_mm`, int8 with a scale for each row; and bfloat16
itself. All take turns, over as many matrices as do not fit a cache.

Blocks of GGUF files are multiplied from their codes too, and the usual way: dequantized by the package `gguf` for each
product.

    python -m benchmarks decode.products [--turns 7] [--megabytes 256] [--results FILE]
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lib import command_line, report
from benchmarks.lib.measure import spread

if TYPE_CHECKING:
    import torch

ROWS, COLUMNS, GROUP = 5632, 2048, 64
"""A feed-forward matrix of TinyLlama, and elements that share a scale."""
INPUTS = (1, 4, 16, 64)
BLOCKS = ("Q4_K", "Q4_0", "Q8_0", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_XS")
"""Types of blocks; the smallest run has the first alone."""
TOLERANCE = 0.02
"""Of the norm, from the product with the matrix that the codes mean: inputs and scales are bfloat16."""
_RESULTS = command_line.RESULTS / "torch-products"

Multiply = Callable[["torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class Timing:
    """One way to multiply at a number of inputs: seconds for each matrix, one a turn, and whether results are right."""

    way: str
    inputs: int
    code_bytes: int
    seconds: list[float]
    is_right: bool


def ways(rows: int, columns: int, seed: int, blocks: Sequence[str]) -> dict[str, tuple[int, Multiply, torch.Tensor]]:
    """Way -> bytes of its codes, the product, and the matrix that they mean, float32."""
    import torch

    from rabbitllm.quant.products import Matrix, multiplies
    from rabbitllm.quant.quantize import quantize_blocks
    from rabbitllm.quant.schemes import Quantized, code_values

    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    plain = matrix.bfloat16()
    found: dict[str, tuple[int, Multiply, torch.Tensor]] = {
        "bfloat16": (2 * matrix.numel(), lambda x: torch.nn.functional.linear(x, plain), plain.float())
    }
    for scheme in ("4bit", "8bit"):
        form = Quantized(scheme, (rows, columns), "bfloat16")
        if multiplies(form):
            data = plain.view(torch.uint8).numpy().data.cast("B")
            codes, scales = (bytearray(part) for part in quantize_blocks(scheme, data, "BF16", "cpu"))
            payload = torch.frombuffer(codes, dtype=torch.uint8)
            ours = Matrix(form, payload, torch.frombuffer(scales, dtype=torch.float32), code_values(scheme))
            found[f"ours, {scheme}"] = (
                len(codes),
                functools.partial(ours.linear, bias=None),
                ours.dequantized(torch.float32),
            )
    for scheme in blocks:
        found |= _blocks(scheme, rows, columns, seed)
    found["torch, int4"] = (matrix.numel() // 2, *_int4(matrix))
    found["torch, int8"] = (matrix.numel(), *_int8(matrix))
    return found


def _blocks(scheme: str, rows: int, columns: int, seed: int) -> dict[str, tuple[int, Multiply, torch.Tensor]]:
    """Of blocks with random codes: from the codes, and dequantized by the `gguf` package."""
    import gguf
    import torch

    from rabbitllm.quant.gguf_blocks import sample
    from rabbitllm.quant.products import Matrix, multiplies
    from rabbitllm.quant.schemes import Quantized

    form, nothing = Quantized(scheme, (rows, columns), None), torch.empty(0)
    codes = sample(scheme, rows * columns, torch.Generator().manual_seed(seed))
    kind, raw = gguf.GGMLQuantizationType[scheme], codes.view(rows, -1).numpy()

    def by_gguf(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, torch.from_numpy(gguf.dequantize(raw, kind)).to(x.dtype))

    ours = Matrix(form, codes, nothing, nothing)
    meant = ours.dequantized(torch.float32)
    found: dict[str, tuple[int, Multiply, torch.Tensor]] = {f"gguf, {scheme}": (len(codes), by_gguf, meant)}
    if multiplies(form):
        found[f"ours, {scheme}"] = len(codes), functools.partial(ours.linear, bias=None), meant
    return found


def _int4(matrix: torch.Tensor) -> tuple[Multiply, torch.Tensor]:
    import torch

    aten = torch.ops.aten
    groups = matrix.view(len(matrix), -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = ((high - low) / 15).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    codes = ((groups - zeros.float()) / scales.float() + 8).round().clamp(0, 15)
    meant = ((codes - 8) * scales.float() + zeros.float()).view_as(matrix)
    packed = aten._convert_weight_to_int4pack_for_cpu(codes.view_as(matrix).int(), 1)
    both = torch.cat([scales, zeros], -1).transpose(0, 1).contiguous()
    return lambda x: aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, both), meant


def _int8(matrix: torch.Tensor) -> tuple[Multiply, torch.Tensor]:
    import torch

    scales = (matrix.abs().amax(-1) / 127).bfloat16()
    codes = (matrix / scales.float()[:, None]).round().clamp(-127, 127).char()
    meant = codes.float() * scales.float()[:, None]
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, codes, scales), meant


def measure(rows: int, columns: int, nbytes: int, turns: int, blocks: Sequence[str] = BLOCKS) -> list[Timing]:
    """Take turns; each way has as many matrices as `nbytes` of bfloat16 are."""
    import torch

    made = [ways(rows, columns, seed, blocks) for seed in range(max(nbytes // (2 * rows * columns), 1))]
    found = []
    for count in INPUTS:
        x = torch.randn(count, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
        right = {}
        for way, (_, multiply, meant) in made[0].items():
            wanted = x.float() @ meant.T
            right[way] = bool((multiply(x).float() - wanted).norm() < TOLERANCE * wanted.norm())
        seconds: dict[str, list[float]] = {way: [] for way in made[0]}
        for _ in range(turns):
            for way, times in seconds.items():
                begun = time.perf_counter()
                for matrices in made:
                    matrices[way][1](x)
                times.append((time.perf_counter() - begun) / len(made))
        found += [Timing(way, count, made[0][way][0], times, right[way]) for way, times in seconds.items()]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; not 0 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="how often each is run (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=256, help="of matrices in bfloat16 (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="file to write, without suffix")
    options = command_line.parsed(parser, arguments, megabytes=0)
    rows, columns = (ROWS, COLUMNS) if options.megabytes else (64, 256)
    blocks = BLOCKS if options.megabytes else BLOCKS[:1]
    timings = measure(rows, columns, options.megabytes * 1000**2, options.turns, blocks)
    headings = ("inputs", "way", "milliseconds", "GB/s of codes", "right")
    lines = [
        (
            str(timing.inputs),
            timing.way,
            report.shown(spread(timing.seconds), 3, 1e-3),
            report.shown(spread([timing.code_bytes / seconds for seconds in timing.seconds]), 1, 1e9),
            report.verdict([timing.is_right]),
        )
        for timing in timings
    ]
    title = f"Products with {rows} x {columns}, {options.turns} turns"
    machine = report.describe_machine(Path.cwd()) | {"threads": threads()}
    notes = ["Inputs are bfloat16."]
    report.write(options.results, title, machine, report.Table(headings, lines), notes, timings)
    return int(not all(timing.is_right for timing in timings))


def threads() -> int:
    """Of torch."""
    import torch

    return torch.get_num_threads()
