"""Products of rows with a matrix of bfloat16 or float16, where torch's are slow.

Without instructions for bfloat16, torch multiplies input by input: 16 rows took six times as long as one. With them it
reads a matrix for one row at two thirds of the memory's speed. Sums are in float32 and rounded once, as torch's are,
but in another order: last bits differ.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import torch

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.quant import _kernels
from rabbitllm.quant._kernel_interface import CODES, NUMBERS, PANELS, PLAIN

FEW_ROWS = 4
"""Rows up to which values are widened in registers for each of them, and not once in a panel. On a processor with
AVX512-BF16 more rows are left to torch: in a pass of an EPYC one row took 0.6 to 0.8 of its time, 2 to 4 rows 0.95."""
AMX_ROWS = 2
"""The same with AMX: from memory one row takes 0.58 to 0.84 of torch's time, two 0.86 to 1.17, four 1.3."""
MAX_INPUTS = 512
"""Rows whose inputs are multiplied together with a panel: more of them leave the cache."""
ALL_ROWS = sys.maxsize


def multiplies(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` is faster than torch for such inputs (…, K) and such a matrix (N, K).

    Both have to be bfloat16, or float16, and on the CPU, with K a multiple of the kernel's width, and the rows at most
    `max_rows_of` that.
    """
    limit = max_rows_of(x.dtype)
    if not limit or x.dtype != weight.dtype:
        return False
    if not width_for(weight) or x.shape[-1:] != weight.shape[-1:]:  # torch says which widths there are
        return False
    return x.device.type == "cpu" and x.shape[:-1].numel() <= limit


def width_for(weight: torch.Tensor) -> int:
    """The lanes of the kernel for few rows of a matrix (N, K); 0 if the result is wrong, or the matrix is another one
    than of plain values of 16 bits without gaps in memory."""
    if weight.dtype not in PLAIN or weight.dim() != 2 or type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return 0
    if weight.device.type != "cpu" or not weight.is_contiguous() or not weight.numel():
        return 0
    from rabbitllm.quant import _vectors

    width = _vectors.lanes()
    return width if width and not weight.shape[1] % (2 * width) and _agrees(width, weight.dtype) else 0


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ W.T + bias`, for which `multiplies` holds: (..., K), (N, K) and (N,) -> (..., N), of one dtype."""
    from rabbitllm.quant import _vectors

    flat, out = x.reshape(-1, x.shape[-1]), x.new_empty(*x.shape[:-1], len(weight))
    is_rounded = bias is None and len(flat) > FEW_ROWS and x.dtype == torch.bfloat16
    result = times(_vectors.lanes(), flat, weight, out.view(-1, len(weight)) if is_rounded else None)
    if bias is not None:
        result += bias
    return out if is_rounded else result.to(x.dtype).view(out.shape)


def times(width: int, x: torch.Tensor, weight: torch.Tensor, rounded: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ W.T` by the kernels of `width` lanes: (T, K) and (N, K) -> (T, N), float32.

    More rows than `FEW_ROWS` are also rounded to bfloat16, if there is a tensor for that.
    """
    columns, rows = x.shape[1], len(weight)
    out = torch.empty(len(x), rows, dtype=torch.float32, device="cpu")
    method = CODES if len(x) <= FEW_ROWS else PANELS
    for begin in range(0, len(x), MAX_INPUTS):
        inputs = widened(width, x[begin : begin + MAX_INPUTS])
        others = 0 if rounded is None else rounded[begin:].data_ptr()
        shape = 2 * columns, columns // (2 * width), 0, len(inputs), rows
        work = weight.data_ptr(), 0, inputs.data_ptr(), others, 0, out[begin:].data_ptr(), *shape
        _kernels.run(method, PLAIN[weight.dtype], width, [work], 2 * weight.numel())
    return out


def widened(width: int, x: torch.Tensor) -> torch.Tensor:
    """Rows (T, K) as kernels of `width` lanes take them: float32, of bfloat16 in each step the even ones first."""
    scheme, x, out = PLAIN[x.dtype], x.contiguous(), torch.empty(x.shape, dtype=torch.float32, device="cpu")
    work = x.data_ptr(), 0, 0, 0, 0, out.data_ptr(), 2 * x.shape[1], x.shape[1] // (2 * width), 0, 1, len(x)
    _kernels.run(NUMBERS, scheme, width, [work], x.nbytes)
    return out


def max_rows_of(dtype: torch.dtype) -> int:
    """Rows of a dtype up to which the kernel is faster than torch here; 0 without one.

    Without instructions for float16 torch takes three times as long for many rows of it.
    """
    from rabbitllm.quant import _vectors

    limit = max_rows() if dtype in PLAIN else 0
    return ALL_ROWS if limit and dtype == torch.float16 and "avx512fp16" not in _vectors.features() else limit


@functools.cache
def max_rows() -> int:
    """Rows of bfloat16 up to which the kernel is faster than torch here; 0 if its result is wrong."""
    from rabbitllm.quant import _vectors

    width = _vectors.lanes()
    return _most_rows() if width and _agrees(width) else 0


def _most_rows() -> int:
    """`max_rows`, if the result is right."""
    from rabbitllm.quant import _vectors

    if "amx-bf16" in _vectors.features():
        return AMX_ROWS
    return FEW_ROWS if _vectors.multiplies_pairs() else ALL_ROWS


@functools.cache
def torch_has_instructions() -> bool:
    """Whether torch multiplies bfloat16 by instructions for it."""
    has_instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return bool(has_instructions and torch.backends.cpu.get_cpu_capability().startswith("AVX512"))


def torch_has_tiles() -> bool:
    """Whether torch multiplies bfloat16 with AMX."""
    return torch_has_instructions() and bool(torch.cpu._is_amx_tile_supported())


def widens() -> bool:
    """Whether many rows of bfloat16 are multiplied faster here once they and the matrix are float32.

    Where torch has the instructions it says so itself, and numba, which takes a quarter of a second, is not imported.
    """
    return not torch_has_instructions() and max_rows() == ALL_ROWS


@functools.cache
def _agrees(width: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether a kernel's result on a sample agrees with float32."""
    random = RandomTensors()

    def products() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # the last by several threads, and by the kernel for more rows where that is used
        for count, rows, columns in ((1, 70, 64), (4, 5, 2048), (7 if _most_rows() == ALL_ROWS else 3, 70, 4096)):
            x, weight = random.normal(count, columns, dtype=dtype), random.normal(rows, columns, dtype=dtype)
            yield times(width, x, weight), x.float() @ weight.float().T

    return _kernels.agrees(f"of {PLAIN[dtype]}", products())
