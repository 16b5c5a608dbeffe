"""Products of rows with a matrix of bfloat16, where torch's are slow.

Without instructions for bfloat16, torch multiplies input by input: 16 rows took six times as long as one. With them it
reads a matrix for one row at two thirds of the memory's speed. Sums are in float32 and rounded once, as torch's are,
but in another order: last bits differ.
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Iterator

import torch

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.programs import Program
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.quant import _kernels
from rabbitllm.quant._kernel_interface import BFLOAT16, CODES, PANELS
from rabbitllm.quant.routed import RoutedProduct

FEW_ROWS = 4
"""Rows up to which values are widened in registers for each of them, and not once in a panel. On a processor with
AVX512-BF16 more rows are left to torch: in a pass of an EPYC one row took 0.6 to 0.8 of its time, 2 to 4 rows 0.95."""
MAX_INPUTS = 512
"""Rows whose inputs are multiplied together with a panel: more of them leave the cache."""
ALL_ROWS = sys.maxsize


def multiplies(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` is faster than torch for such inputs (…, K) and such a matrix (N, K).

    Both have to be bfloat16 and on the CPU, with K a multiple of the kernel's width, and the rows at most `max_rows`.
    """
    limit = max_rows()
    if not limit or x.dtype != torch.bfloat16:
        return False
    return bool(width_for(weight)) and x.device.type == "cpu" and x.shape[:-1].numel() <= limit


def width_for(weight: torch.Tensor) -> int:
    """The lanes of the kernel for few rows of a matrix (N, K); 0 if the result is wrong, or the matrix is another one
    than of plain values of bfloat16 without gaps in memory."""
    if weight.dtype != torch.bfloat16 or weight.dim() != 2 or type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return 0
    if weight.device.type != "cpu" or not weight.is_contiguous() or not weight.numel():
        return 0
    from rabbitllm.quant import _vectors

    width = _vectors.lanes()
    return width if width and not weight.shape[1] % (2 * width) and _agrees(width) else 0


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ W.T + bias`, for which `multiplies` holds: (..., K), (N, K) and (N,) -> (..., N), all bfloat16."""
    from rabbitllm.quant import _vectors

    flat, width = x.reshape(-1, x.shape[-1]), _vectors.lanes()
    if bias is None and 0 < (rows := len(flat)) <= FEW_ROWS and torchs_team() is not None:
        flat, out, matrix = flat.contiguous(), x.new_empty(*x.shape[:-1], len(weight)), _words(weight, width)
        words = array("q", [1, 0, 0, rows, 0, *matrix])  # see `joint_kernels.ROUTED_WORDS`
        begin = words.buffer_info()[0]
        words[1] = begin + 8 * (len(words) - len(matrix))
        _few(width, *weight.shape, rows, torch.get_num_threads())(flat.data_ptr(), begin, out.data_ptr())
        return out
    result = times(width, flat, weight)
    if bias is not None:
        result += bias
    return result.to(x.dtype).view(*x.shape[:-1], len(weight))


def _product(width: int, count: int, columns: int) -> RoutedProduct:
    return RoutedProduct(BFLOAT16, width, None, (count, columns), 2 * count * columns, FEW_ROWS)


def _words(weight: torch.Tensor, width: int) -> tuple[int, ...]:
    count, columns = weight.shape
    return weight.data_ptr(), 0, 0, 0, 0, 0, 2 * columns, columns // (2 * width), 0, 0, count


@functools.lru_cache(1024)
def _few(width: int, count: int, columns: int, rows: int, threads: int) -> Program:
    """The product of a few rows with a matrix, in one call: addresses of rows, of the chosen matrix, and of results."""
    program, product = Program(3), _product(width, count, columns)
    x, chosen, out = (program.address(index) for index in range(3))
    product.add_to(program, rows, x, chosen, out, 0, 0)
    return program


def times(width: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ W.T` by the kernels of `width` lanes: (T, K) and (N, K) -> (T, N), float32."""
    columns, rows = x.shape[1], len(weight)
    out = torch.empty(len(x), rows, dtype=torch.float32, device="cpu")
    for begin in range(0, len(x), MAX_INPUTS):
        inputs = widened(width, x[begin : begin + MAX_INPUTS])
        shape = 2 * columns, columns // (2 * width), 0, len(inputs), rows
        work = weight.data_ptr(), 0, inputs.data_ptr(), 0, 0, out[begin:].data_ptr(), *shape
        method = CODES if len(inputs) <= FEW_ROWS else PANELS
        _kernels.run(method, BFLOAT16, width, [work], 2 * weight.numel())
    return out


def widened(width: int, x: torch.Tensor) -> torch.Tensor:
    """Rows (T, K) of bfloat16 as kernels of `width` lanes take them: float32, of each step the even ones first."""
    pairs = x.view(len(x), -1, width, 2)
    return pairs.transpose(2, 3).to(torch.float32, memory_format=torch.contiguous_format)


@functools.cache
def max_rows() -> int:
    """Rows up to which the kernel is faster than torch here; 0 if none are, or if its result is wrong.

    With AMX nothing was measured, so torch's products are used.
    """
    from rabbitllm.quant import _vectors

    width = _vectors.lanes()
    if not width or "amx-bf16" in _vectors.features() or not _agrees(width):
        return 0
    return FEW_ROWS if _vectors.multiplies_pairs() else ALL_ROWS


@functools.cache
def torch_has_instructions() -> bool:
    """Whether torch multiplies bfloat16 by instructions for it."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has_instructions and torch.backends.cpu.get_cpu_capability().startswith("AVX512"))


def widens() -> bool:
    """Whether many rows of bfloat16 are multiplied faster here once they and the matrix are float32.

    Where torch has the instructions it says so itself, and numba, which takes a quarter of a second, is not imported.
    """
    return not torch_has_instructions() and max_rows() == ALL_ROWS


@functools.cache
def _agrees(width: int) -> bool:
    """Whether a kernel's result on a sample agrees with float32."""
    random = RandomTensors()

    def products() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for count, rows, columns in ((1, 70, 64), (4, 5, 2048), (7, 70, 4096)):  # the last by several threads
            x, weight = random.normal(count, columns), random.normal(rows, columns)
            yield times(width, x, weight), x.float() @ weight.float().T

    return _kernels.agrees("of bfloat16", products())
