"""Quantization of runs of blocks, of scales, and the way back.

Runs of whole blocks are quantized by our own kernels, whose results equal those of bitsandbytes, or by bitsandbytes.

**Nested scales** (bitsandbytes' `compress_statistics`): all scales of a tensor less their mean are quantized in blocks
of 256 by the 256 values of 8bit. The mean is summed in the order in which torch (2.13, 2.14) sums as many float32 on
x86-64 in one thread, since a layer file must not depend on their number: 32 parallel sums, of rows, of groups of rows,
of groups of groups and of groups of those.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.formats.tensor_spec import TensorSpec, torch_dtype
from rabbitllm.quant import gguf_blocks
from rabbitllm.quant._block_formats import FORMATS
from rabbitllm.quant.schemes import (
    INT8_BLOCK,
    NESTED_BLOCK,
    NF4_BLOCK,
    SCALE_BYTES,
    SCHEMES,
    STORED,
    Quantized,
    bitsandbytes,
    code_values,
)

logger = logging.getLogger(__name__)

Floats: TypeAlias = npt.NDArray[np.float32]
ReadScales: TypeAlias = Callable[[int, int], Floats]
"""Index of the first scale, number of scales -> the scales, float32."""


def quantize_blocks(
    scheme: str, data: memoryview, dtype: str, device: str, *, fitted: bool = False
) -> tuple[memoryview, memoryview]:
    """Quantize a run of blocks.

    Args:
        scheme: one of `STORED` that has an encoder.
        data: the elements' bytes; a whole number of blocks, unless it is the tensor's end.
        dtype: F32, F16 or BF16.
        device: the device that computes, "cpu" or "cuda:N".
        fitted: fit 4bit scales to their block, always on the CPU.

    Returns:
        The codes and the scales (float32, one per block), as bytes; at 4bit-double scales are quantized later
        (`quantized_scales`). Blocks of ggml, which have their scales in them, and no bytes.
    """
    if STORED[scheme].block_bytes:
        return _encoded(scheme, data, dtype), memoryview(b"")
    from rabbitllm.quant import quantize_kernels

    is_fitted = fitted and SCHEMES[scheme].fits
    if is_fitted or (device == "cpu" and _compiled_kernels_agree(scheme)):
        return quantize_kernels.quantize(scheme, data, dtype, fitted=is_fitted)
    return _quantize_with_bitsandbytes(scheme, data, dtype, device)


def _encoded(scheme: str, data: memoryview, dtype: str) -> memoryview:
    """Blocks of ggml. Those with values that their float16 scales cannot hold stand for no numbers: a split goes on."""
    from rabbitllm.quant import block_encoders

    values = torch.frombuffer(data, dtype=torch_dtype(dtype)).view(-1, BLOCK_TYPES[scheme].elements)
    try:
        blocks = block_encoders.encode(scheme, values, threads=1)
    except UnreadableFormatError as error:
        logger.warning("%s These weights become not-a-number.", error.problem)
        refused = ~(values.float().abs().amax(1) <= block_encoders.LARGEST)
        blocks = block_encoders.encode(scheme, values.masked_fill(refused[:, None], 0), threads=1)
        blocks[refused] = 0
        blocks[refused, FORMATS[scheme].halves[0] + 1] = 0x7E  # of a scale, float16, that is not a number
    return _bytes_of(blocks)


def _quantize_with_bitsandbytes(
    scheme: str, data: memoryview, dtype: str, device: str
) -> tuple[memoryview, memoryview]:
    values = torch.frombuffer(data, dtype=torch_dtype(dtype)).to(device)
    if SCHEMES[scheme].codes == "4bit":
        codes, state = bitsandbytes().functional.quantize_4bit(values, blocksize=NF4_BLOCK, quant_type="nf4")
    else:
        levels = code_values(scheme).to(values.device)
        codes, state = bitsandbytes().functional.quantize_blockwise(values, levels, blocksize=INT8_BLOCK)
    return _bytes_of(codes), _bytes_of(state.absmax)


@functools.cache
def _compiled_kernels_agree(scheme: str) -> bool:
    """Whether our kernels agree with the installed bitsandbytes: another version, or on ARM, may round differently."""
    from rabbitllm.quant import quantize_kernels

    sample = RandomTensors().normal(8 * INT8_BLOCK + 33, dtype=torch.float32) * 0.02
    sample[:NF4_BLOCK] = 0
    for dtype in ("BF16", "F16", "F32"):
        data = _bytes_of(sample.to(torch_dtype(dtype)).view(torch.uint8))
        if quantize_kernels.quantize(scheme, data, dtype) != _quantize_with_bitsandbytes(scheme, data, dtype, "cpu"):
            logger.warning(
                "This bitsandbytes quantizes to %s differently from RabbitLLM's kernels; bitsandbytes is used instead.",
                scheme,
            )
            return False
    return True


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().contiguous().view(-1).numpy().data.cast("B")


# Scales that are quantized themselves.

LANES = 8
"""Lanes of a vector of AVX2, with which torch sums also on processors with AVX-512."""
SUMS = 4 * LANES
"""Parallel sums: four vectors."""
LEVELS = 4
"""Levels of sums: rows, groups of rows, groups of groups, and groups of those."""
LEAST_GROUP = 16


def quantized_scales(read: ReadScales, count: int, mean: np.float32) -> Iterator[tuple[int, int, memoryview]]:
    """Quantize a tensor's scales, one to four megabytes at a time.

    Yields:
        0 and the bytes of some codes, or 1 and those of their scales; between them the offset of the first byte.
    """
    for first, length in _runs(count):
        with np.errstate(invalid="ignore"):  # for infinite weights
            values = torch.from_numpy(read(first, length) - mean)
        codes, state = bitsandbytes().functional.quantize_blockwise(values, code_values("8bit"), blocksize=NESTED_BLOCK)
        yield 0, first, codes.numpy().data.cast("B")
        yield 1, first // NESTED_BLOCK * SCALE_BYTES, state.absmax.numpy().data.cast("B")


def mean_of(read: ReadScales, count: int) -> np.float32:
    """The mean of `count` scales, at least 8, equal to torch's bit for bit."""
    group, above = _group(count), np.zeros(SUMS, np.float32)
    for first, length in _runs(count):
        run = read(first, length)
        rows = length // SUMS
        items = run[: rows * SUMS].reshape(rows, SUMS)
        total = np.zeros(SUMS, np.float32)
        for _ in range(LEVELS - 1):
            whole = len(items) // group * group
            total = total + np.add.reduce(items[whole:], axis=0)
            items = np.add.reduce(items[:whole].reshape(-1, group, SUMS), axis=1)
        above = functools.reduce(np.add, items, above)
    total = total + above  # the levels below are those of the last run: all others are whole groups
    vectors = length // LANES * LANES
    items = np.concatenate([run[rows * SUMS : vectors], total[LANES:]]).reshape(-1, LANES)
    lanes = functools.reduce(np.add, items, total[:LANES])
    added = functools.reduce(np.add, [*run[vectors:], *lanes], np.zeros((), np.float32))
    return np.float32(added / np.float32(count))


def _group(count: int) -> int:
    rows = count // SUMS
    ceil_log2 = (rows - 1).bit_length() if rows > 2 else 1
    return max(LEAST_GROUP, 1 << ceil_log2 // LEVELS)


def _runs(count: int) -> Iterator[tuple[int, int]]:
    """First index and length of runs; all but the last are whole groups of groups of groups of rows."""
    step = _group(count) ** (LEVELS - 1) * SUMS
    for first in range(0, count, step):
        yield first, min(step, count - first)


@dataclass(frozen=True, slots=True)
class NestedScales:
    """The scales of quantized scales, of a tensor or of a run that begins with a block of 256; on any device.

    Attributes:
        scales: float32, one per 256 codes.
        table: float32 (256,), the value of each code.
        offset: float32 (), the mean of all the tensor's scales.
    """

    scales: torch.Tensor
    table: torch.Tensor
    offset: torch.Tensor

    def expanded(self, codes: torch.Tensor) -> torch.Tensor:
        """The dequantized scales of codes, uint8 (blocks,): float32, equal to bitsandbytes' bit for bit."""
        scales = _times_scales(codes, self.scales, self.table, NESTED_BLOCK, codes.numel(), torch.float32)
        return scales.view(codes.shape).add_(self.offset)

    def of_blocks(self, begin: int, end: int) -> NestedScales:
        """Those of a run of codes, which begins at a multiple of 256."""
        return replace(self, scales=self.scales[begin // NESTED_BLOCK : math.ceil(end / NESTED_BLOCK)])

    def clone(self) -> NestedScales:
        """A copy in other memory."""
        return NestedScales(self.scales.clone(), self.table.clone(), self.offset.clone())


# Dequantization, on GPUs by bitsandbytes, and its products.

NO_SCALES = torch.empty(0, dtype=torch.float32, device="cpu")
"""In place of the scales and the table of blocks of ggml, which have their scales in them."""

RUN_ELEMENTS = 1 << 24
"""Elements of a run: a multiple of the block."""
MAX_ELEMENTS = 1 << 30
"""Maximum elements of a matrix for bitsandbytes' kernels, which count them in 32 bits; some heads have more."""


def operands(
    form: Quantized, parts: Sequence[TensorSpec], read: Callable[[TensorSpec], torch.Tensor]
) -> tuple[Quantized, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of kernels for a stored tensor: its form, codes, float32 scales and code table.

    Quantized scales are dequantized on the device of the parts.

    Args:
        form: from `read_state`.
        parts: in the order of `part_names`.
        read: a part -> its tensor.
    """
    codes, payload, absmax, table, nested = nested_operands(form, parts, read)
    return codes, payload, absmax if nested is None else nested.expanded(absmax), table


def nested_operands(
    form: Quantized, parts: Sequence[TensorSpec], read: Callable[[TensorSpec], torch.Tensor]
) -> tuple[Quantized, torch.Tensor, torch.Tensor, torch.Tensor, NestedScales | None]:
    """As `operands`, but quantized scales stay codes, uint8, and their scales follow."""
    if STORED[form.scheme].block_bytes:
        return form, read(parts[0]), NO_SCALES, NO_SCALES, None
    payload, absmax, table = map(read, parts[:3])
    nested = None
    if form.offset is not None:  # filled on the device: a copy of a number would wait for the queued work
        offset = absmax.new_full((), form.offset, dtype=torch.float32)
        nested = NestedScales(read(parts[3]), read(parts[4]), offset)
    return form.codes, payload, absmax, table, nested


def dequantize(
    form: Quantized, payload: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The dequantized tensor, on the device of its parts.

    Args:
        form: from `read_state`; at 4bit-double from `operands`.
        payload: uint8 codes.
        absmax: float32, one per block.
        table: float32, the value of each code.
        dtype: of the result, a new tensor. At 4bit the values are rounded to the dtype stored with the tensor and then
            cast, as bitsandbytes does; at 8bit, which stores none, to `dtype` directly; so are blocks.
    """
    assert form.offset is None
    if form.scheme in BLOCK_TYPES:
        return gguf_blocks.dequantize(form.scheme, payload, form.shape, dtype)
    elements, is_cast = math.prod(form.shape), form.dtype not in (None, str(dtype).removeprefix("torch."))
    if elements > (RUN_ELEMENTS if is_cast else MAX_ELEMENTS):
        return _in_runs(form, payload, absmax, table, dtype)
    if form.scheme == "4bit" and payload.device != torch.device("cpu"):
        state = _nf4_quant_state(replace(form, shape=_in_whole_blocks(form.shape)), absmax, table)
        result: torch.Tensor = bitsandbytes().functional.dequantize_4bit(payload, state)
    else:
        rounded = dtype if form.dtype is None else getattr(torch, form.dtype)
        result = _times_scales(payload, absmax, table, SCHEMES[form.scheme].block, elements, rounded)
    return result.to(dtype).view(form.shape)


def dequantizing_bytes(form: Quantized, dtype: torch.dtype | None) -> int:
    """Bytes of a GPU that `dequantize` takes at most, with `operands`, besides the parts and the numbers."""
    elements = math.prod(form.shape)
    if form.scheme in BLOCK_TYPES:
        return gguf_blocks.work_bytes(form.scheme, elements)
    is_cast = dtype is not None and form.dtype not in (None, str(dtype).removeprefix("torch."))
    itemsize = getattr(torch, form.dtype).itemsize if is_cast and form.dtype is not None else 0
    return form.expanded_bytes + itemsize * min(elements, RUN_ELEMENTS)


def _times_scales(
    codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, block: int, elements: int, dtype: torch.dtype
) -> torch.Tensor:
    """Value times scale in float32, rounded once: (elements,); on the CPU blocks of 4bit have two codes per byte."""
    if codes.device != torch.device("cpu"):
        state = bitsandbytes().functional.QuantState(absmax=scales, code=table, blocksize=block, dtype=dtype)
        result: torch.Tensor = bitsandbytes().functional.dequantize_blockwise(codes, state)
        return result
    codes, scales, is_halved = codes.view(-1), scales.view(-1), block == NF4_BLOCK
    if elements < gguf_blocks.WORTH_A_KERNEL:
        if is_halved:
            codes = torch.stack([codes >> 4, codes & 15], 1).view(-1)[:elements]
        return (table[codes.int()] * scales.repeat_interleave(block)[:elements]).to(dtype)
    from rabbitllm.quant import dequantize_kernels

    if missing := -len(codes) % (block // (1 + is_halved)):
        codes = torch.cat([codes, codes.new_zeros(missing)])
    rows, first = codes.view(len(scales), -1), 4 if is_halved else None
    return dequantize_kernels.blocks(rows, table, scales[:, None], (1, block), dtype, first).view(-1)[:elements]


def _in_runs(
    form: Quantized, payload: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same by runs: a tensor that is cast would be in memory in both dtypes."""
    elements, entry = math.prod(form.shape), SCHEMES[form.scheme]
    result, codes, scales = absmax.new_empty(elements, dtype=dtype), payload.view(-1), absmax.view(-1)
    for begin in range(0, elements, RUN_ELEMENTS):
        end = min(begin + RUN_ELEMENTS, elements)
        run, some = (slice(begin // of, math.ceil(end / of)) for of in (entry.codes_a_byte, entry.block))
        few = replace(form, shape=(end - begin,))
        result[begin:end] = dequantize(few, codes[run], scales[some], table, dtype)
    return result.view(form.shape)


def _in_whole_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of as many elements whose rows are whole blocks, if possible: in bitsandbytes each row begins a block."""
    if shape and shape[-1] % NF4_BLOCK == 0:
        return shape
    elements = math.prod(shape)
    return (elements // NF4_BLOCK, NF4_BLOCK) if elements % NF4_BLOCK == 0 else (elements,)


def multiply_4bit(
    form: Quantized,
    payload: torch.Tensor,
    absmax: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    nested: NestedScales | None = None,
) -> torch.Tensor:
    """`x @ W.T + bias` by bitsandbytes, from the codes if it has a kernel for device and shape; else it dequantizes.

    Its operation is called directly, without the checks and the state that `matmul_4bit` makes for each call.

    Args:
        form: (N, K) at 4bit, K a multiple of 64.
        payload, absmax: as for `dequantize`; with `nested`, `absmax` is uint8 codes.
        x: (T, K), contiguous, of a floating dtype, which that of `bias` (N,) and of the result (T, N) is too; it needs
            no gradient.
        nested: the scales of quantized scales.
    """
    if not len(x):
        return x.new_empty(0, form.shape[0])
    bitsandbytes()  # the import makes its operations known
    scales, of_scales = absmax, dict[str, torch.Tensor]()
    if nested is not None:
        scales = nested.scales
        of_scales = {"absmax_8bit": absmax, "absmax_code": nested.table, "absmax_offset": nested.offset}
    operation = torch.ops.bitsandbytes.gemm_4bit.default
    product: torch.Tensor = operation(x, payload.view(-1, 1), form.shape, scales, NF4_BLOCK, "nf4", bias, **of_scales)
    return product


def _nf4_quant_state(form: Quantized, absmax: torch.Tensor, table: torch.Tensor) -> Any:
    assert form.dtype is not None
    dtype, shape = getattr(torch, form.dtype), torch.Size(form.shape)
    return bitsandbytes().functional.QuantState(
        absmax=absmax, shape=shape, dtype=dtype, blocksize=NF4_BLOCK, code=table, quant_type="nf4"
    )
