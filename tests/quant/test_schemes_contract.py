"""The contract of every scheme of quantization: each entry of the registry, and blocks of ggml, pass these tests."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rabbitllm.base.rounding import round_up
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size, dtype_name
from rabbitllm.quant import products
from rabbitllm.quant._kernel_interface import BYTES, CODES
from rabbitllm.quant.quantize import dequantize, operands, quantize_blocks
from rabbitllm.quant.schemes import (
    BLOCKS,
    COMPRESSIONS,
    SCHEMES,
    STORED,
    PartRole,
    Quantized,
    check_compression,
    code_values,
    scheme_of,
)
from rabbitllm.store.stored_form import (
    arriving,
    constants,
    form_in,
    part_names,
    read_state,
    settled,
    settling,
    state_key,
    stored_schemes,
)
from tests.support.integer_products import is_of_bytes

FEW = ("Q8_0", "Q4_K")
pytestmark = pytest.mark.parametrize(
    "scheme", [*SCHEMES, *(pytest.param(one, marks=() if one in FEW else pytest.mark.long) for one in BLOCKS.values())]
)
SHAPES = [(64, 64), (257, 256), (3, 65, 67), (1, 4097)]
KINDS = {"U8": torch.uint8, "F32": torch.float32}


def spec_of(shape: tuple[int, ...], dtype: str = "BF16") -> TensorSpec:
    return TensorSpec("w", dtype, shape, "shard", 0, byte_size(dtype, shape))


def shape_for(scheme: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape like it, with rows that are whole blocks of ggml."""
    return (*shape[:-1], round_up(shape[-1], 256)) if STORED[scheme].block_bytes else shape


def weights(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02).to(dtype)


def stored(tensor: torch.Tensor, scheme: str, blocks: int = 1000) -> dict[str, bytes]:
    """The parts of a tensor that goes through so many blocks at a time."""
    spec = spec_of(tuple(tensor.shape), dtype_name(tensor.dtype))
    form = form_in(spec, scheme)
    data = memoryview(bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()))
    step = blocks * STORED[scheme].block * tensor.element_size()
    runs = [quantize_blocks(scheme, data[i : i + step], spec.dtype, "cpu") for i in range(0, len(data), step)]
    payload, waiting = (b"".join(bytes(run[part]) for run in runs) for part in (0, 1))
    parts = {"w": payload, **constants(form)}
    if STORED[scheme].block_bytes:
        assert not waiting
        return parts
    if arriving(form) == form:
        return {form.parts[1].name: waiting, **parts}
    scales, later = np.frombuffer(waiting, np.float32), settling(form, "scratch", 0)
    buffers = {part.name: bytearray(part.nbytes) for part in later.parts}
    for part, begin, content in settled(later, lambda first, count: scales[first : first + count]):
        buffers[later.parts[part].name][begin : begin + len(content)] = content
    return {name: bytes(content) for name, content in buffers.items()} | parts


def specs_of(spec: TensorSpec, scheme: str) -> dict[str, TensorSpec]:
    return {part.name: TensorSpec(part.name, part.dtype, part.shape, "f", 0, 0) for part in form_in(spec, scheme).parts}


def read_back(parts: dict[str, bytes], scheme: str, spec: TensorSpec) -> tuple[Quantized, list[torch.Tensor]]:
    """The operands of kernels, as an engine gets them from a file."""
    specs = {
        part.name: TensorSpec(part.name, part.dtype, part.shape, "f", 0, 0) for part in form_in(spec, scheme).parts
    }
    key = state_key("w", scheme)
    form = read_state("w", scheme, specs, parts[key] if key is not None else b"")

    def tensor(s: TensorSpec) -> torch.Tensor:
        return torch.frombuffer(bytearray(parts[s.name]), dtype=KINDS[s.dtype]).view(s.shape)

    result, *tensors = operands(form, [specs[name] for name in part_names("w", scheme)], tensor)
    return result, tensors


def test_a_scheme_is_offered_and_uses_its_codes(scheme: str) -> None:
    entry = STORED[scheme]
    if entry.block_bytes:
        check_compression(scheme.lower())
        assert scheme_of(spec_of((16, 512)), scheme.lower()) == scheme == entry.codes
        assert scheme_of(spec_of((64, 96)), scheme.lower()) is None
        smaller = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0"}.get(scheme, "IQ4_NL")  # as in llama.cpp
        assert scheme_of(spec_of((64, 192)), scheme.lower()) == (smaller if entry.block == 256 else scheme)
        return
    check_compression(scheme)
    assert scheme in COMPRESSIONS
    codes = SCHEMES[entry.codes]
    assert (codes.codes, codes.block, codes.codes_a_byte) == (entry.codes, entry.block, entry.codes_a_byte)
    assert entry.smaller is None or SCHEMES[entry.smaller].min_elements == 0
    for elements in (4096, 1 << 20):
        assert scheme_of(spec_of((elements // 64, 64)), scheme) in (scheme, entry.smaller)
    values = code_values(scheme)
    assert len(values) == 256 if entry.codes_a_byte == 1 else 16
    assert bool((values.diff() > 0).all())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_names_and_sizes_of_parts(scheme: str, shape: tuple[int, ...], dtype: str) -> None:
    shape = shape_for(scheme, shape)
    form = form_in(spec_of(shape, dtype), scheme)
    names = part_names("w", scheme)
    assert tuple(part.name for part in form.parts) == names
    assert len(set(names)) == len(names)
    assert names[0] == "w"
    second = PartRole.KIND if STORED[scheme].block_bytes else PartRole.SCALES
    assert [role for _, _, role in STORED[scheme].parts][:2] == [PartRole.CODES, second]
    assert form.nbytes == sum(part.nbytes for part in form.parts)
    assert form.nbytes < form.source.nbytes or math.prod(shape) < 1 << 15
    plain = "of another tensor"
    assert stored_schemes([*reversed(names), plain]) == {plain: None, "w": scheme}
    content = stored(
        weights(shape, {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[dtype]), scheme
    )
    assert {part.name: part.nbytes for part in form.parts} == {name: len(raw) for name, raw in content.items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_runs_of_blocks_give_the_bytes_of_the_whole(scheme: str, shape: tuple[int, ...]) -> None:
    tensor = weights(shape_for(scheme, shape))
    whole = stored(tensor, scheme)
    for blocks in (1, 7):
        assert stored(tensor, scheme, blocks) == whole


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dequantized_values_are_within_one_code(scheme: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    shape = shape_for(scheme, shape)
    tensor = weights(shape, dtype)
    form, (payload, scales, table) = read_back(stored(tensor, scheme), scheme, spec_of(shape, dtype_name(dtype)))
    assert form.shape == shape
    assert form.scheme == STORED[scheme].codes
    result = dequantize(form, payload, scales, table, dtype)
    assert (result.dtype, tuple(result.shape)) == (dtype, shape)
    if STORED[scheme].block_bytes:
        bits = 8 * STORED[scheme].block_bytes / STORED[scheme].block
        assert float((result.float() - tensor.float()).norm() / tensor.float().norm()) < 2 ** (1.5 - bits)
        return
    widest = float(table.sort().values.diff().max())
    of_each = scales.repeat_interleave(SCHEMES[scheme].block)[: tensor.numel()].view(shape)
    # half of the widest step, and what scales and results are rounded by
    assert bool(((result.float() - tensor.float()).abs() <= of_each * (widest / 2 + 0.05)).all())


def test_missing_and_wrong_parts_are_refused(scheme: str) -> None:
    shape = shape_for(scheme, (65, 67))
    content, spec = stored(weights(shape), scheme), spec_of(shape)
    specs, key = specs_of(spec, scheme), state_key("w", scheme)
    state = content[key] if key is not None else b""
    assert read_state("w", scheme, specs, state).shape == shape
    for name, (_, _, role) in zip(part_names("w", scheme), STORED[scheme].parts, strict=True):
        if name != "w":
            with pytest.raises(IncompleteSplitError, match="without its part"):
                read_state("w", scheme, {part: s for part, s in specs.items() if part != name}, state)
        changed = [specs[name]._replace(shape=(specs[name].elements + 1,)), specs[name]._replace(dtype="I8")]
        is_block = STORED[scheme].block_bytes > 0
        is_checked = name == "w" if is_block else role is not PartRole.STATE and (name != "w" or key is not None)
        for wrong in changed if is_checked else []:
            expected = "is stored as" if is_block else f"a {scheme} tensor of shape"
            with pytest.raises(IncompleteSplitError, match=expected):
                read_state("w", scheme, specs | {name: wrong}, state)


@pytest.mark.parametrize("count", [1, 5, 8, 40, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_those_of_the_matrix(scheme: str, count: int, dtype: torch.dtype) -> None:
    """By every method: by codes, as bytes, by panels, and dequantized."""
    form, parts = read_back(stored(weights((130, 1024)), scheme), scheme, spec_of((130, 1024)))
    if not products.multiplies(form):
        pytest.skip("no vectors of a kind that is used here")
    matrix = products.Matrix(form, *parts)
    x = torch.randn(count, 1024, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = x.double() @ matrix.dequantized(torch.float32).double().T
    result = matrix.linear(x, None)
    assert result.dtype == dtype
    method = matrix.method_for(count, dtype)[0]
    is_coarse = dtype == torch.bfloat16 or method == BYTES or (method == CODES and is_of_bytes(form.scheme))
    assert float((result.double() - expected).norm() / expected.norm()) < (1e-2 if is_coarse else 3e-3)
    alone = matrix.linear(x[:1], None)
    grouped = matrix.grouped(x)
    if grouped is not None:
        grouped.multiply([matrix], [(0, 1)])
        assert torch.equal(grouped.result()[:1], alone)
