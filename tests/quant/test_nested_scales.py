"""Scales that are quantized themselves: the bytes that bitsandbytes makes of the whole tensor, and its bits back."""

from __future__ import annotations

import json
import math

import bitsandbytes.functional as functional
import numpy as np
import pytest
import torch

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.tensor_spec import TensorSpec, dtype_name
from rabbitllm.quant import gguf_blocks
from rabbitllm.quant.quantize import dequantize, mean_of, operands, quantize_blocks
from rabbitllm.quant.schemes import DOUBLE, NESTED_BLOCK, NF4_BLOCK, NF4_STATE, Quantized
from rabbitllm.store.stored_form import (
    arriving,
    constants,
    form_in,
    nested_state,
    part_names,
    read_state,
    settled,
    settling,
    stored_form,
    stored_schemes,
)
from tests.support.one_thread import one_thread as one_thread

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(64, 64), (65, 67), (3, 5, 401), (1024, 2048), (257, 2049), (2300, 1024)]
"""Of one block of scales and of many, whole ones and short ones; the last has more than 32,768 scales."""


@pytest.fixture(autouse=True)
def summed_by_one_thread(one_thread: None) -> None:
    """With several, torch sums each one's share, and the last bit of a mean depends on how many there are. What is
    stored has the bits of one."""
    torch.set_num_threads(1)


def weights(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    values.view(-1)[64:192] = 0.0
    values.view(-1)[5::977] *= 100
    return values.to(dtype)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def theirs(tensor: torch.Tensor) -> tuple[dict[str, bytes], functional.QuantState]:
    """What bitsandbytes makes of the tensor in one piece, under the keys of RabbitLLM."""
    codes, state = functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4", compress_statistics=True)
    packed = state.as_dict(packed=True)
    return {"w": raw(codes), **{f"w.4bit.{key}": raw(value) for key, value in packed.items()}}, state


def ours(tensor: torch.Tensor, blocks: int = 1000) -> dict[str, bytes]:
    """What is stored of the tensor when it goes through so many blocks at a time."""
    spec = TensorSpec("w", dtype_name(tensor.dtype), tuple(tensor.shape), "f", 0, tensor.nbytes)
    form = form_in(spec, DOUBLE)
    data, step = memoryview(bytearray(raw(tensor))), blocks * NF4_BLOCK * tensor.element_size()
    pieces = [quantize_blocks(DOUBLE, data[i : i + step], spec.dtype, "cpu") for i in range(0, len(data), step)]
    scales = np.frombuffer(b"".join(bytes(part) for _, part in pieces), np.float32)
    stored = {"w": bytearray(b"".join(bytes(codes) for codes, _ in pieces))}
    stored |= {name: bytearray(content) for name, content in constants(form).items()}
    waiting = settling(form, "scratch", 0)
    for part, begin, content in settled(waiting, lambda first, count: scales[first : first + count]):
        stored.setdefault(waiting.parts[part].name, bytearray())[begin:] = content
    assert {part.name: part.nbytes for part in form.parts} == {name: len(content) for name, content in stored.items()}
    return {name: bytes(content) for name, content in stored.items()}


def tensors_of(stored: dict[str, bytes], shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    form = form_in(TensorSpec("w", dtype_name(dtype), shape, "f", 0, 0), DOUBLE)
    kinds = {"U8": torch.uint8, "F32": torch.float32}
    return {
        part.name: torch.frombuffer(bytearray(stored[part.name]), dtype=kinds[part.dtype]).view(part.shape)
        for part in form.parts
    }


def specs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> dict[str, TensorSpec]:
    form = form_in(TensorSpec("w", dtype_name(dtype), shape, "f", 0, 0), DOUBLE)
    return {part.name: TensorSpec(part.name, part.dtype, part.shape, "f", 0, part.nbytes) for part in form.parts}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_are_those_of_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = weights(shape, dtype)
    expected, _ = theirs(tensor)
    stored = ours(tensor)
    stored["w" + NF4_STATE] = stored["w" + NF4_STATE].rstrip(b" ")  # its length does not depend on the weights
    assert stored == expected


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_change_no_byte(threads: int) -> None:
    tensor = weights((2300, 1024), torch.bfloat16)
    expected = ours(tensor)
    torch.set_num_threads(threads)
    assert ours(tensor) == expected


@pytest.mark.parametrize("blocks", [1, 7, 5000])
def test_chunks_of_any_size_give_the_same(blocks: int) -> None:
    tensor = weights((300, 301), torch.bfloat16)
    assert ours(tensor, blocks) == ours(tensor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quant_state_reads_the_stored_state(shape: tuple[int, ...]) -> None:
    tensor = weights(shape, torch.bfloat16)
    _, expected = theirs(tensor)
    stored = tensors_of(ours(tensor), shape, torch.bfloat16)
    codes = stored.pop("w")
    restored = functional.QuantState.from_dict(stored, device=torch.device("cpu"))
    assert restored.nested
    assert (restored.shape, restored.dtype, restored.blocksize) == (torch.Size(shape), torch.bfloat16, NF4_BLOCK)
    assert (restored.state2.blocksize, restored.state2.dtype) == (NESTED_BLOCK, torch.float32)
    assert torch.equal(restored.offset, expected.offset)
    for mine, their in ((restored.absmax, expected.absmax), (restored.state2.absmax, expected.state2.absmax)):
        assert torch.equal(mine, their)
    if shape[-1] % NF4_BLOCK == 0:  # its kernel for the CPU begins a block with each row
        assert torch.equal(functional.dequantize_4bit(codes, restored), functional.dequantize_4bit(codes, expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("by_kernel", [False, True])
def test_dequantized_values_are_those_of_bitsandbytes(
    by_kernel: bool, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_blocks, "WORTH_A_KERNEL", 0 if by_kernel else math.inf)
    tensor = weights(shape, dtype)
    stored = ours(tensor)
    parts = tensors_of(stored, shape, dtype)
    form = read_state("w", DOUBLE, specs_of(shape, dtype), stored["w" + NF4_STATE])
    codes, state = functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4", compress_statistics=True)
    assert (form.scheme, form.shape, form.dtype) == (DOUBLE, shape, str(dtype).removeprefix("torch."))
    assert form.offset == state.offset.item()
    inputs = operands(form, [specs_of(shape, dtype)[name] for name in part_names("w", DOUBLE)], lambda s: parts[s.name])
    assert inputs[0] == Quantized("4bit", shape, form.dtype)
    state.shape = torch.Size([tensor.numel()])
    expected = functional.dequantize_4bit(codes, state).view(shape)
    assert raw(dequantize(*inputs, dtype)) == raw(expected)


@pytest.mark.parametrize(
    "count", [8, 9, 31, 32, 33, 255, 1000, 4096, 32767, 32768, 33333, 131072, 131073, 1 << 20, 3_000_001]
)
def test_the_mean_is_that_of_torch(count: int) -> None:
    scales = np.random.default_rng(count).gamma(2.0, 0.02, count).astype(np.float32)
    lengths = []

    def read(first: int, length: int) -> np.ndarray:
        lengths.append(length)
        return scales[first : first + length]

    assert mean_of(read, count) == torch.from_numpy(scales).mean().item()
    assert max(lengths) <= 1 << 20


@pytest.mark.long
def test_the_mean_of_an_embedding_of_four_billion_elements() -> None:
    """Whose rows are summed in larger groups."""
    count = (1 << 26) + 12_345
    scales = np.random.default_rng(0).random(count, np.float32)
    assert mean_of(lambda first, length: scales[first : first + length], count) == torch.from_numpy(scales).mean()


@pytest.mark.parametrize("value", [0.0, 1.0, torch.inf, torch.nan])
def test_constant_tensors(value: float) -> None:
    tensor = torch.full((64, 64), value, dtype=torch.bfloat16)
    expected, _ = theirs(tensor)
    stored = ours(tensor)
    stored["w" + NF4_STATE] = stored["w" + NF4_STATE].rstrip(b" ")
    assert stored == expected


# Places


def test_the_length_of_a_state_does_not_depend_on_the_weights() -> None:
    means = (0.0, 1e-38, float(np.float32(1.7345678e-05)), 65504.0, 3.4028234663852886e38, float("inf"), float("nan"))
    states = [nested_state("BF16", (64, 64), mean) for mean in means]
    assert {len(state) for state in states} == {form_in(spec((64, 64)), DOUBLE).parts[-1].nbytes}
    assert [json.loads(state)["nested_offset"] for state in states[:-1]] == list(means[:-1])


def spec(shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec("w", "BF16", shape, "f", 0, 2 * int(np.prod(shape)))


def test_bits_of_a_weight() -> None:
    assert 4.126 <= 8 * form_in(spec((4096, 4096)), DOUBLE).nbytes / 4096**2 <= 4.13


@pytest.mark.parametrize(("shape", "scheme"), [((64, 256), "4bit"), ((128, 256), DOUBLE), ((64, 63), None)])
def test_small_tensors_are_not_nested(shape: tuple[int, ...], scheme: str | None) -> None:
    form = stored_form(spec(shape), DOUBLE)
    assert form.scheme == scheme
    assert form.nbytes <= min(form_in(spec(shape), other).nbytes for other in ("4bit", None)) or scheme is None


def test_unquantized_scales_have_a_separate_name() -> None:
    form = form_in(spec((256, 256)), DOUBLE)
    came = arriving(form)
    assert [part.name for part in came.parts] == ["w", "w.4bit.absmax.float32", *constants(form)]
    assert (came.parts[1].dtype, came.parts[1].shape) == ("F32", (1024,))
    assert arriving(form_in(spec((256, 256)), "4bit")) == form_in(spec((256, 256)), "4bit")


def test_keys_differ_from_4bit() -> None:
    keys = [*part_names("a", DOUBLE), *part_names("b", "4bit"), *part_names("c", "8bit"), "d"]
    assert stored_schemes(keys) == {"a": DOUBLE, "b": "4bit", "c": "8bit", "d": None}
    assert tuple(part.name for part in form_in(spec((64, 64)), DOUBLE).parts) == part_names("w", DOUBLE)


# States that are refused


@pytest.mark.parametrize("number", range(1, 6))
def test_missing_part(number: int) -> None:
    parts = specs_of((65, 67))
    missing = part_names("w", DOUBLE)[number]
    del parts[missing]
    with pytest.raises(IncompleteSplitError, match=f"stored at 4bit-double without its part '{missing}'"):
        read_state("w", DOUBLE, parts, nested_state("BF16", (65, 67), 0.5))


@pytest.mark.parametrize("number", range(5))
def test_part_of_another_size(number: int) -> None:
    parts = specs_of((65, 67))
    name = part_names("w", DOUBLE)[number]
    parts[name] = parts[name]._replace(shape=(parts[name].elements + 1,))
    with pytest.raises(IncompleteSplitError, match="a 4bit-double tensor of shape"):
        read_state("w", DOUBLE, parts, nested_state("BF16", (65, 67), 0.5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"nested_blocksize": 128},
        {"nested_dtype": "float16"},
        {"nested_offset": "0.5"},
        {"nested_offset": None},
        {"nested_offset": 1},
        {"blocksize": 128},
        {"quant_type": "fp4"},
        {"shape": [-65, -67]},
        {"dtype": "int8"},
    ],
    ids=str,
)
def test_state_of_another_form(wrong: dict[str, object]) -> None:
    state = json.loads(nested_state("BF16", (65, 67), 0.5)) | wrong
    with pytest.raises(IncompleteSplitError, match=r"expected the JSON of a nested nf4 state of blocks of 64 with"):
        read_state("w", DOUBLE, specs_of((65, 67)), json.dumps(state).encode())


@pytest.mark.parametrize("raw_state", [b"", b"[]", b"{}", b"{" * 3000, b"\xff", b"0" * 5000], ids=str)
def test_invalid_state(raw_state: bytes) -> None:
    with pytest.raises(IncompleteSplitError, match="the quantization state of 'w' is"):
        read_state("w", DOUBLE, specs_of((65, 67)), raw_state)
