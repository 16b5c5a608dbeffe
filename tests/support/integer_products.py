"""What the kernels by codes multiply, reckoned by torch: inputs and code values as integers of 16 bits, or of 8."""

from __future__ import annotations

import math

import torch

from rabbitllm.quant import _byte_kernels, _vectors, products
from rabbitllm.quant._integers import LARGEST_CODE, LARGEST_INPUT, ByteLayout, steps_of_bytes
from rabbitllm.quant._kernel_interface import BYTE_WIDTH, BYTES, CODES, INTEGERS, WORD_WIDTH
from rabbitllm.quant.products import Matrix
from rabbitllm.quant.schemes import SCHEMES


def rounded_inputs(scheme: str, x: torch.Tensor) -> torch.Tensor:
    """Rows (T, K) as integers times the scale of their step, float64."""
    step = products._layout(scheme).step
    return in_steps(step // 2, x, 127) if is_of_bytes(scheme) else in_steps(step, x)


def is_of_bytes(scheme: str) -> bool:
    """Whether a few inputs are rounded to 8 bits by codes, on this processor."""
    return isinstance(products._layout(scheme), ByteLayout)


def in_steps(step: int, x: torch.Tensor, largest_integer: int = LARGEST_INPUT) -> torch.Tensor:
    """The same, with the inputs that have one scale."""
    steps = x.float().view(len(x), -1, step)
    largest = steps.abs().amax(-1, keepdim=True)
    most = torch.tensor(float(largest_integer))  # torch multiplies by the inverse of a number
    factor = torch.where(largest > 1e-30, most / largest, torch.zeros(()))
    integers = (steps * factor).round().double()
    return (integers * (largest / most).double()).view(x.shape)


def tolerated(scheme: str) -> float:
    """How far a model's numbers may be off, relative to their norm, since inputs of its products are rounded."""
    return 3e-2 if is_of_bytes(scheme) else 1e-3


def integer_values(scheme: str, table: torch.Tensor, method: str = CODES) -> torch.Tensor:
    """What the codes of our own schemes stand for by codes or by bytes, float64."""
    most = float(table.abs().max())
    if method == BYTES:
        if scheme == "8bit":
            return (table.double() * 4095).round() / 4095
        width = width_of(BYTES, scheme)
        stored = _byte_kernels.table_of(scheme, table.numpy().tobytes(), width)
        assert stored is not None
        low, *high = torch.from_numpy(stored[:-4]).view(-1, 16)
        integers = high[0].view(torch.int8).double() * 256 + low.double() if high else low.double() - 128
        return integers * float(stored[-4:].view("<f4")[0])
    if scheme == "4bit":
        largest = steps_of_bytes((table.double() / most).numpy()) if is_of_bytes(scheme) else LARGEST_CODE
        return (table.double() / most * largest).round() * (most / largest)
    unit = most / 16000
    ahead = table[127:].double() / unit
    starts = ahead[:128:8].round()
    slopes = ((ahead[7:128:8] - ahead[:128:8]) / 7).round()
    distance = torch.arange(129)
    line = (distance // 8).clamp(max=15)
    half = (starts[line] + slopes[line] * (distance - 8 * line)).clamp(max=16000) * unit
    return torch.cat([-half[1:128].flip(0), half])


def meant(of: Matrix, method: str = CODES) -> torch.Tensor:
    """Code value times scale of a matrix of ours by indexing, with a method's integers; (N, K), float64."""
    scheme, codes = of.form.scheme, of.payload.view(-1)
    if scheme == "4bit":
        codes = torch.stack([codes >> 4, codes & 15], 1).view(-1)
    scales = of.absmax.double().repeat_interleave(SCHEMES[scheme].block)[: math.prod(of.form.shape)]
    return (integer_values(scheme, of.table, method)[codes.long()] * scales).view(of.form.shape)


def as_multiplied(of: Matrix, x: torch.Tensor) -> torch.Tensor:
    """Rows (T, K) as blocks are multiplied with them: rounded to 16 or to 8 bits, or as they are."""
    if is_by_codes(of, x):
        return rounded_inputs(of.form.scheme, x)
    return rounded_to_bytes(of.form.scheme, x) if of.method_for(len(x), x.dtype)[0] == BYTES else x


def rounded_to_bytes(scheme: str, x: torch.Tensor) -> torch.Tensor:
    """The same by bytes: to as many as the scheme has on this processor."""
    return in_steps(32, x, {BYTE_WIDTH: 127, WORD_WIDTH: 16383}[width_of(BYTES, scheme)])


def is_by_codes(of: Matrix, x: torch.Tensor) -> bool:
    """Whether so many rows are multiplied as integers."""
    return of.method_for(x.shape[:-1].numel(), x.dtype) == (CODES, INTEGERS)


def width_of(method: str, scheme: str = "Q4_K") -> int:
    """The width of the kernel of a method and a scheme on this processor."""
    return _byte_kernels.width_of(scheme) if method == BYTES else INTEGERS if method == CODES else _vectors.lanes()
