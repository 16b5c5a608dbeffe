"""Blocks of GGUF files against the `gguf` package, which llama.cpp publishes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from rabbitllm.errors import UnreadableFormatError
from rabbitllm.formats.gguf_types import BLOCK_TYPES, TENSOR_TYPES
from rabbitllm.quant import _vectors, gguf_blocks
from rabbitllm.quant._block_formats import FORMATS
from rabbitllm.quant.gguf_blocks import WORTH_A_KERNEL, dequantize, work_bytes
from tests.support.fake_gpu import FakeGpu, watched

EXTREME = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE00)
"""float16: zeros, denormals, the least and largest normal ones, infinities, not a number."""

COMPILED_FAST = ("Q4_K", "Q6_K")
COMPILED = [name if name in COMPILED_FAST else pytest.param(name, marks=pytest.mark.long) for name in FORMATS]


def random_blocks(name: str, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Any bytes: uint8 (rows, bytes of a row)."""
    generator = torch.Generator().manual_seed(seed)
    size = (rows, BLOCK_TYPES[name].row_bytes(columns))
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)


def by_gguf(name: str, blocks: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name]))


def assert_same_bits(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits; any one that is not a number equals any other."""
    assert result.dtype == expected.dtype == torch.float32
    assert torch.equal(result.isnan(), expected.isnan())
    finite = ~result.isnan()
    assert torch.equal(result[finite].view(torch.int32), expected[finite].view(torch.int32))


def test_numbers_and_sizes_are_those_of_gguf() -> None:
    expected = {block.name: (int(block), *size) for block, size in gguf.GGML_QUANT_SIZES.items()}
    ours = {name: (block.number, block.elements, block.nbytes) for name, block in TENSOR_TYPES.items()}
    assert {name: expected[name] for name in ours} == ours
    # of inputs, and in no file; without a decoder in the package
    assert set(expected) - set(ours) <= {"Q8_1", "Q8_K", "Q1_0"}


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_any_bytes_are_dequantized_as_by_gguf(name: str) -> None:
    blocks = random_blocks(name, 37, 1024)
    assert_any_bytes(name, blocks)


@pytest.mark.parametrize("name", COMPILED)
def test_any_bytes_are_dequantized_by_a_kernel_as_by_gguf(name: str) -> None:
    assert WORTH_A_KERNEL < 2057 * 256
    assert not _vectors.lanes() or gguf_blocks._kernel_agrees(name)
    assert_any_bytes(name, random_blocks(name, 2057, 256))


def assert_any_bytes(name: str, blocks: torch.Tensor) -> None:
    expected = by_gguf(name, blocks)
    shape = tuple(expected.shape)
    assert_same_bits(dequantize(name, blocks, shape, torch.float32), expected)
    for dtype in (torch.bfloat16, torch.float16):
        result = dequantize(name, blocks, shape, dtype)
        assert torch.equal(result.nan_to_num(7.0), expected.to(dtype).nan_to_num(7.0))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_extreme_scales_are_dequantized_as_by_gguf(name: str) -> None:
    """Each float16 of `EXTREME` at every offset of a block, where it meets a scale or codes."""
    block = BLOCK_TYPES[name]
    blocks = random_blocks(name, len(EXTREME) * (block.nbytes - 1), block.elements, seed=1)
    rows = blocks.numpy()
    for index, (offset, bits) in enumerate((o, b) for o in range(block.nbytes - 1) for b in EXTREME):
        rows[index, offset : offset + 2] = bits & 255, bits >> 8
    expected = by_gguf(name, blocks)
    assert_same_bits(dequantize(name, blocks, tuple(expected.shape), torch.float32), expected)
    if name in COMPILED_FAST and _vectors.lanes():
        result = torch.empty_like(expected)
        gguf_blocks._by_kernel(name, blocks, result)
        assert_same_bits(result, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_needs_few_operations_and_little_memory_and_no_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks are dequantized at a time; the bits are the same."""
    block, gpu = BLOCK_TYPES[name], FakeGpu(0, capacity=1 << 40)
    blocks = random_blocks(name, 64, 1024)
    expected, count = by_gguf(name, blocks), 64 * 1024 // block.elements
    with watched() as operations:
        there = blocks.to(gpu.torch_device)
        dequantize(name, there, (64, 1024), torch.float32)  # tables are kept from here on
        for limit in (gguf_blocks._WORK_BYTES, count * gguf_blocks._BLOCK_WORK // 3):
            monkeypatch.setattr(gguf_blocks, "_WORK_BYTES", limit)
            gpu.waits, operations.count, before = 0, 0, gpu.used
            gpu.peak = before
            result = dequantize(name, there, (64, 1024), torch.float32)
            assert gpu.waits == 0
            assert gpu.peak - before - result.nbytes <= work_bytes(name, 64 * 1024) <= limit
            assert operations.count <= 210 * (1 if limit > count * gguf_blocks._BLOCK_WORK else 4)
            assert_same_bits(result.cpu(), expected)
            rounded = dequantize(name, there, (64, 1024), torch.bfloat16).cpu()
            assert torch.equal(rounded.nan_to_num(7.0), expected.bfloat16().nan_to_num(7.0))


def test_slices_equal_the_whole_tensor() -> None:
    blocks = random_blocks("Q5_K", 12, 512)
    whole = dequantize("Q5_K", blocks, (3, 4, 512), torch.float32)
    assert torch.equal(dequantize("Q5_K", blocks[4:8], (4, 512), torch.float32).nan_to_num(), whole[1].nan_to_num())
    assert dequantize("Q5_K", blocks[:0], (0, 512), torch.float32).shape == (0, 512)


@pytest.mark.parametrize(("name", "nbytes"), [("Q8_K", 292), ("F32", 4), ("Q4_K", 143), ("Q4_K", 288)])
def test_unknown_types_and_wrong_sizes_are_refused(name: str, nbytes: int) -> None:
    with pytest.raises(UnreadableFormatError, match=r"blocks of type|bytes are not those of"):
        dequantize(name, torch.zeros(nbytes, dtype=torch.uint8), (1, 256), torch.float32)
