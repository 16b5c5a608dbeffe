"""What compression touches, that it is bitsandbytes' own quantization bit for bit, and states that are refused."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import bitsandbytes.functional as functional
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from rabbitllm.errors import IncompleteSplitError, MissingPackageError, OptionError
from rabbitllm.formats.safetensors_file import TensorToWrite
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size, dtype_name
from rabbitllm.quant import gguf_blocks, quantize, schemes
from rabbitllm.quant.quantize import dequantize, quantize_blocks
from rabbitllm.quant.schemes import (
    INT8_BLOCK,
    NF4_BLOCK,
    NF4_STATE,
    SCHEMES,
    Quantized,
    check_compression,
    int8_code,
    is_compressible,
    nf4_map,
)
from rabbitllm.store.stored_form import constants, part_names, read_state, stored_form, stored_schemes
from tests.support.builders import read_tensors
from tests.support.draws import draws
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.one_thread import one_thread as one_thread

GOLDEN = Path(__file__).parent.parent / "golden"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def spec_of(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name, dtype, shape, "shard", 0, byte_size(dtype, shape))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


# What is compressed


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), "BF16"),
        ("model.layers.0.mlp.down_proj.weight", (4096, 1), "F16"),
        ("model.embed_tokens.weight", (160, 64), "F32"),
        ("lm_head.weight", (160, 64), "BF16"),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 160), "BF16"),
        ("model.layers.0.mlp.gate_proj.weight", (128, 64), "BF16"),
        ("model.layers.0.mlp.gate.weight", (2048, 64), "BF16"),  # a gated projection: no model has 2048 experts
        ("model.layers.0.mlp.shared_expert.gate_proj.weight", (64, 64), "BF16"),
        ("model.layers.0.self_attn.gated.weight", (64, 64), "BF16"),
        ("model.layers.0.self_attn.relative_attention_bias.weight", (64, 64), "BF16"),
    ],
)
def test_compressed(name: str, shape: tuple[int, ...], dtype: str) -> None:
    assert is_compressible(spec_of(name, shape, dtype))


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.norm.weight", (8192,), "BF16"),
        ("model.layers.0.self_attn.q_proj.bias", (8192,), "BF16"),
        ("model.layers.0.scale", (), "F32"),
        ("model.layers.0.self_attn.k_proj.weight", (64, 63), "BF16"),  # under 4,096 elements
        ("model.layers.0.mlp.gate.weight", (128, 2048), "BF16"),
        ("model.layers.0.block_sparse_moe.gate.weight", (8, 4096), "BF16"),
        ("model.layers.0.mlp.router.weight", (32, 2880), "BF16"),
        ("model.layers.0.mlp.router.layer.weight", (32, 2880), "BF16"),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 4096), "BF16"),
        ("model.layers.0.linear_attn.conv1d.weight", (4096, 1, 4), "BF16"),
        ("vision.patch_embed.weight", (64, 3, 14, 14), "BF16"),
        ("vision.Conv.weight", (64, 64), "BF16"),
        ("backbone.layers.0.mixer.A_log", (4096, 16), "F32"),
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), "F64"),
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), "F8_E4M3"),
        ("model.layers.0.self_attn.q_proj.weight", (64, 64), "U8"),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (128, 5760), "BF16"),
        ("model.layers.0.mlp.experts.down_proj.bias", (128, 2880), "BF16"),
        ("model.position_ids", (1, 8192), "I64"),
        ("empty", (0, 8192), "BF16"),
    ],
)
def test_tensors_left_uncompressed(name: str, shape: tuple[int, ...], dtype: str) -> None:
    spec = spec_of(name, shape, dtype)
    assert not is_compressible(spec)
    for choice in (None, "4bit", "8bit", "4bit-double"):
        form = stored_form(spec, choice)
        assert (form.scheme, form.parts) == (None, (TensorToWrite(name, dtype, shape),))
        assert constants(form) == {}


def test_compression_is_off_by_default() -> None:
    spec = spec_of("lm_head.weight", (160, 64))
    assert stored_form(spec, None).parts == (TensorToWrite("lm_head.weight", "BF16", (160, 64)),)


def test_values_of_4bit_are_those_of_bitsandbytes() -> None:
    assert nf4_map() == raw(functional.get_4bit_type("nf4", device="cpu"))


def test_unknown_compression() -> None:
    for wrong in ("3bit", "", "4", "int8"):
        with pytest.raises(OptionError) as refused:
            check_compression(wrong)
        assert f"compression={wrong!r} does not exist; expected 'auto', '4bit', '4bit-double'" in str(refused.value)
        assert "'q2_k', 'q5_k_m', 'q4_k_m' or None ('none' on the command line)." in str(refused.value)
    check_compression(None)
    for right in ("4bit", "8bit", "4bit-double", "q4_k", "q4_k_m"):
        check_compression(right)


def test_bitsandbytes_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes.bitsandbytes.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    try:
        check_compression(None)
        with pytest.raises(MissingPackageError, match="compression needs the package bitsandbytes") as missing:
            check_compression("4bit")
        assert "Run `pip install bitsandbytes`, or remove compression." in str(missing.value)
        assert isinstance(missing.value, ImportError)
    finally:
        schemes.bitsandbytes.cache_clear()


# Bit by bit


def whole(tensor: torch.Tensor, scheme: str) -> dict[str, bytes]:
    """What bitsandbytes makes of the tensor in one piece, under the keys of RabbitLLM."""
    if scheme == "4bit":
        codes, state = functional.quantize_4bit(tensor, blocksize=NF4_BLOCK, quant_type="nf4")
        packed = state.as_dict(packed=True)
        return {"w": raw(codes), **{f"w.4bit.{key}": raw(value) for key, value in packed.items()}}
    codes, state = functional.quantize_blockwise(tensor, blocksize=INT8_BLOCK)
    return {"w": raw(codes), "w.8bit.absmax": raw(state.absmax), "w.8bit.code": raw(state.code)}


def in_chunks(tensor: torch.Tensor, scheme: str, blocks: int) -> dict[str, bytes]:
    """What is stored of the tensor when it goes through so many blocks at a time."""
    spec = TensorSpec("w", dtype_name(tensor.dtype), tuple(tensor.shape), "f", 0, tensor.nbytes)
    form = stored_form(spec, scheme)
    assert form.scheme == scheme
    data, step = memoryview(bytearray(raw(tensor))), blocks * SCHEMES[scheme].block * tensor.element_size()
    pieces = [quantize_blocks(scheme, data[i : i + step], spec.dtype, "cpu") for i in range(0, len(data), step)]
    stored = {
        form.parts[0].name: b"".join(bytes(codes) for codes, _ in pieces),
        form.parts[1].name: b"".join(bytes(scales) for _, scales in pieces),
        **constants(form),
    }
    assert {part.name: part.nbytes for part in form.parts} == {name: len(content) for name, content in stored.items()}
    return stored


def weights(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    flat = values.view(-1)
    flat[64:192] = 0.0  # whole blocks of zeros at 4bit
    flat[2048:4096] = -0.0  # and one at 8bit
    flat[5::97] *= 100
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
@pytest.mark.parametrize("shape", [(64, 64), (65, 67), (4097, 1), (3, 5, 401), (64, 128)], ids=str)
@pytest.mark.parametrize("blocks", [1, 7, 1000])
def test_chunks_equal_the_whole(dtype: torch.dtype, scheme: str, shape: tuple[int, ...], blocks: int) -> None:
    tensor = weights(shape, dtype)
    assert in_chunks(tensor, scheme, blocks) == whole(tensor, scheme)


@settings(max_examples=draws(40), deadline=None)
@given(
    elements=st.integers(4096, 9000),
    scheme=st.sampled_from(["4bit", "8bit"]),
    dtype=st.sampled_from(DTYPES),
    blocks=st.integers(1, 70),
    seed=st.integers(0, 1000),
)
def test_chunks_of_any_size_equal_the_whole(
    elements: int, scheme: str, dtype: torch.dtype, blocks: int, seed: int
) -> None:
    tensor = weights((1, elements), dtype, seed)
    assert in_chunks(tensor, scheme, blocks) == whole(tensor, scheme)


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
def test_all_zeros(scheme: str) -> None:
    tensor = torch.zeros(70, 70, dtype=torch.bfloat16)
    assert in_chunks(tensor, scheme, 3) == whole(tensor, scheme)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
@pytest.mark.parametrize("shape", [(64, 64), (65, 67), (3, 5, 401), (64, 80), (66, 66)], ids=str)
@pytest.mark.parametrize("by_kernel", [False, True])
def test_dequantized_values_are_those_of_bitsandbytes(
    by_kernel: bool, dtype: torch.dtype, scheme: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_blocks, "WORTH_A_KERNEL", 0 if by_kernel else math.inf)
    tensor = weights(shape, dtype)
    stored = in_chunks(tensor, scheme, 5)
    parts, state = specs_of(stored, scheme, shape, dtype)
    form = read_state("w", scheme, parts, state)
    assert form == Quantized(scheme, shape, str(dtype).removeprefix("torch.") if scheme == "4bit" else None)
    payload = torch.frombuffer(bytearray(stored["w"]), dtype=torch.uint8).view(parts["w"].shape)
    absmax = torch.frombuffer(bytearray(stored[f"w.{scheme}.absmax"]), dtype=torch.float32)
    table = torch.frombuffer(bytearray(stored[part_names("w", scheme)[2]]), dtype=torch.float32)
    if scheme == "4bit":
        codes, quantized = functional.quantize_4bit(tensor, blocksize=NF4_BLOCK, quant_type="nf4")
        quantized.shape = torch.Size([tensor.numel()])  # its kernel for the CPU begins a block with each row
        expected = functional.dequantize_4bit(codes, quantized).view(shape)
    else:
        codes, quantized = functional.quantize_blockwise(tensor, blocksize=INT8_BLOCK)
        expected = functional.dequantize_blockwise(codes, quantized)
    result = dequantize(form, payload, absmax, table, dtype)
    assert (result.dtype, result.shape) == (dtype, shape)
    assert raw(result) == raw(expected.to(dtype))
    assert (result.float() - tensor.float()).abs().max() < 0.2 * tensor.float().abs().max()


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
@pytest.mark.parametrize("shape", [(100, 128), (3, 65, 67)], ids=str)
def test_large_tensors_are_dequantized_in_runs(
    scheme: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU: bitsandbytes' kernels take the number as an int of 32 bits, which wraps without an error."""
    tensor = weights(shape, torch.bfloat16)
    if scheme == "4bit":
        codes, state = functional.quantize_4bit(tensor, blocksize=NF4_BLOCK, quant_type="nf4")
    else:
        codes, state = functional.quantize_blockwise(tensor, blocksize=INT8_BLOCK)
    assert state.code is not None
    form, *parts = Quantized(scheme, shape, "bfloat16" if scheme == "4bit" else None), codes, state.absmax, state.code
    expected, counted = dequantize(form, *parts, torch.bfloat16), list[int]()
    monkeypatch.setattr(quantize, "RUN_ELEMENTS", INT8_BLOCK)
    monkeypatch.setattr(quantize, "MAX_ELEMENTS", 2 * INT8_BLOCK)
    name = "dequantize_4bit" if scheme == "4bit" else "dequantize_blockwise"
    ordinary = getattr(functional, name)

    def counts(codes: torch.Tensor, state: Any) -> torch.Tensor:
        values: torch.Tensor = ordinary(codes, state)
        counted.append(values.numel())
        return values

    monkeypatch.setattr(functional, name, counts)
    with watched():
        there = [part.to(FakeGpu(0, capacity=1 << 30).torch_device) for part in parts]
        result = dequantize(form, *there, torch.bfloat16).cpu()
    assert raw(result) == raw(expected)
    assert max(counted) <= 2 * INT8_BLOCK
    assert sum(counted) == tensor.numel()


@pytest.mark.parametrize("columns", [64, 80, 66, 65])
def test_each_element_has_the_scale_of_its_block(columns: int) -> None:
    """By the format's own rule, whatever the rows are."""
    tensor = weights((64, columns), torch.float32) * torch.arange(1.0, 65.0)[:, None]
    codes, state = functional.quantize_4bit(tensor, blocksize=NF4_BLOCK, quant_type="nf4")
    assert state.code is not None
    pairs = torch.stack([codes.view(-1) >> 4, codes.view(-1) & 15], dim=1).view(-1).long()
    expected = (state.code[pairs] * state.absmax.repeat_interleave(NF4_BLOCK)[: len(pairs)]).view(tensor.shape)
    form = Quantized("4bit", (64, columns), "float32")
    assert torch.equal(dequantize(form, codes, state.absmax, state.code, torch.float32), expected)


def specs_of(
    stored: dict[str, bytes], scheme: str, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[dict[str, TensorSpec], bytes]:
    name = dtype_name(dtype)
    form = stored_form(TensorSpec("w", name, shape, "f", 0, byte_size(name, shape)), scheme)
    parts = {part.name: TensorSpec(part.name, part.dtype, part.shape, "f", 0, part.nbytes) for part in form.parts}
    return parts, stored.get("w" + NF4_STATE, b"")


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
def test_bytes_are_those_of_rabbitllm_1(scheme: str) -> None:
    tensors = read_tensors(GOLDEN / "model-2-shards")
    theirs: dict[str, torch.Tensor] = {}
    for file in (GOLDEN / f"rabbitllm-1.1.0-{scheme}" / f"splitted_model.{scheme}").glob("*.safetensors"):
        theirs |= load_file(file)
    compared = 0
    for name, tensor in tensors.items():
        spec = TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape), "f", 0, tensor.nbytes)
        if not is_compressible(spec):
            continue
        ours = in_chunks(tensor, scheme, 3)
        form = stored_form(spec, scheme)
        for part in form.parts:
            stored = theirs[part.name]
            assert (dtype_name(stored.dtype), tuple(stored.shape)) == (part.dtype, part.shape)
            assert raw(stored) == ours["w" + part.name.removeprefix(name)]
        compared += 1
    assert compared == 12  # embeddings, head, and five matrices of each of the two layers


# Keys


def test_keys_name_the_scheme_of_a_tensor() -> None:
    keys = [
        *part_names("a.weight", "4bit"),
        *part_names("b.weight", "8bit"),
        "c.weight",
        "d.4bit.absmax",
        "e.8bit.absmax",
    ]
    assert stored_schemes(reversed(keys)) == {
        "a.weight": "4bit",
        "b.weight": "8bit",
        "c.weight": None,
        "d.4bit.absmax": None,  # of no tensor that is there
        "e.8bit.absmax": None,
    }
    assert stored_schemes([]) == {}


@pytest.mark.parametrize("scheme", ["4bit", "8bit", None])
def test_part_names_are_the_stored_keys(scheme: str | None) -> None:
    form = stored_form(spec_of("m.weight", (64, 64)), scheme)
    assert tuple(part.name for part in form.parts) == part_names("m.weight", scheme)


@pytest.mark.parametrize(("scheme", "least", "most"), [("4bit", 4.5, 4.7), ("8bit", 8.0, 8.2)])
def test_bits_of_a_weight(scheme: str, least: float, most: float) -> None:
    form = stored_form(spec_of("m.weight", (1024, 1024)), scheme)
    assert least <= 8 * sum(part.nbytes for part in form.parts) / 1024**2 <= most


# States that are refused


def sound(scheme: str) -> tuple[dict[str, TensorSpec], dict[str, Any]]:
    form = stored_form(spec_of("w", (65, 67)), scheme)
    parts = {part.name: TensorSpec(part.name, part.dtype, part.shape, "f", 0, part.nbytes) for part in form.parts}
    return parts, {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [65, 67]}


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
def test_valid_state(scheme: str) -> None:
    parts, state = sound(scheme)
    assert read_state("w", scheme, parts, json.dumps(state).encode()).shape == (65, 67)


@pytest.mark.parametrize(("scheme", "number"), [("4bit", 1), ("4bit", 2), ("4bit", 3), ("8bit", 1), ("8bit", 2)])
def test_missing_part(scheme: str, number: int) -> None:
    parts, state = sound(scheme)
    missing = part_names("w", scheme)[number]
    del parts[missing]
    with pytest.raises(IncompleteSplitError, match=f"'w' is stored at {scheme} without its part '{missing}'"):
        read_state("w", scheme, parts, json.dumps(state).encode())


@pytest.mark.parametrize(("scheme", "number"), [("4bit", 0), ("4bit", 1), ("4bit", 2), ("8bit", 1), ("8bit", 2)])
@pytest.mark.parametrize("change", [-1, 1])
def test_part_of_another_size(scheme: str, number: int, change: int) -> None:
    """Too few scales would be read past their end by the kernels."""
    parts, state = sound(scheme)
    name = part_names("w", scheme)[number]
    spec = parts[name]
    parts[name] = TensorSpec(name, spec.dtype, (spec.elements + change,), "f", 0, 0)
    with pytest.raises(
        IncompleteSplitError, match=rf"the part '{name}' has .* elements of .*; a {scheme} tensor of shape"
    ):
        read_state("w", scheme, parts, json.dumps(state).encode())


@pytest.mark.parametrize(("scheme", "number"), [("4bit", 0), ("4bit", 1), ("4bit", 2), ("8bit", 0), ("8bit", 1)])
def test_part_of_another_dtype(scheme: str, number: int) -> None:
    parts, state = sound(scheme)
    name = part_names("w", scheme)[number]
    parts[name] = TensorSpec(name, "I8" if number == 0 else "F16", parts[name].shape, "f", 0, 0)
    with pytest.raises(IncompleteSplitError, match=r"elements of (I8|F16)"):
        read_state("w", scheme, parts, json.dumps(state).encode())


HOSTILE_STATES: dict[str, Any] = {
    "nothing": b"",
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe{}",
    "a list": [],
    "a number": 5,
    "nested without end": b"[" * 200_000,
    "no shape": {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16"},
    "another type": {"quant_type": "fp4"},
    "another block": {"blocksize": 128},
    "a block of text": {"blocksize": "64"},
    "another dtype": {"dtype": "float64"},
    "dtype that is an attribute of torch": {"dtype": "load"},
    "dtype a list": {"dtype": ["bfloat16"]},
    "nested scales": {"nested_absmax": 1},
    "shape a number": {"shape": 5},
    "shape of text": {"shape": "ab"},
    "shape negative": {"shape": [-65, -67]},
    "shape of floats": {"shape": [65.0, 67]},
    "shape of true": {"shape": [True, 4355]},
    "shape null": {"shape": None},
}


@pytest.mark.parametrize("case", HOSTILE_STATES)
def test_hostile_state(case: str) -> None:
    parts, state = sound("4bit")
    change = HOSTILE_STATES[case]
    if isinstance(change, dict) and case != "no shape":
        change = state | change
    with pytest.raises(IncompleteSplitError) as refused:
        read_state("w", "4bit", parts, change if isinstance(change, bytes) else json.dumps(change).encode())
    assert "the quantization state of 'w' is" in str(refused.value)
    assert "expected the JSON of an unnested nf4 state of blocks of 64" in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_state_of_another_shape() -> None:
    parts, state = sound("4bit")
    for shape in ([65, 68], [2**40, 2**40], [], [0]):
        with pytest.raises(IncompleteSplitError, match="the part 'w' has 2,178 elements of U8"):
            read_state("w", "4bit", parts, json.dumps(state | {"shape": shape}).encode())
    assert read_state("w", "4bit", parts, json.dumps(state | {"shape": [67, 65]}).encode()).shape == (67, 65)
    assert math.prod((67, 65)) == 4355


def test_the_8bit_table_is_that_of_bitsandbytes_with_fused_multiply_add() -> None:
    digest = "e732639a65f4"  # of create_dynamic_map on AVX2; dad4c269c324 without fused multiply-add
    assert hashlib.sha256(int8_code()).hexdigest().startswith(digest)
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert bytes(functional.create_dynamic_map().numpy()) == int8_code()


@pytest.mark.parametrize("scheme", ["4bit", "8bit"])
@pytest.mark.parametrize("shape", [(64, 80), (53, 80), (7, 3, 200), (2, 2112)])
def test_blocks_span_rows(scheme: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a row is no whole number of blocks. On a GPU: some kernels of bitsandbytes would begin a block with
    each row, so they get rows of whole blocks, or a single one."""
    shapes, state = list[tuple[int, ...]](), quantize._nf4_quant_state
    monkeypatch.setattr(
        quantize, "_nf4_quant_state", lambda form, *parts: (shapes.append(form.shape), state(form, *parts))[1]
    )
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    payload, scales = quantize_blocks(scheme, memoryview(raw(values)), "F32", "cpu")
    form = stored_form(spec_of("w", shape, "F32"), scheme)
    codes = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    absmax = torch.frombuffer(bytearray(scales), dtype=torch.float32)
    block = SCHEMES[scheme].block
    table = torch.frombuffer(bytearray(SCHEMES[scheme].values()), dtype=torch.float32)
    stored = Quantized(scheme, shape, "float32")
    result = dequantize(stored, codes, absmax, table, torch.float32)
    with watched():
        there = [part.to(FakeGpu(0, capacity=1 << 30).torch_device) for part in (codes, absmax, table)]
        assert torch.equal(dequantize(stored, *there, torch.float32).cpu(), result)
    assert form.scheme == scheme
    assert all(len(rows) == 1 or rows[-1] % NF4_BLOCK == 0 for rows in shapes)
    assert len(shapes) == (scheme == "4bit")
    indices = torch.stack([codes >> 4, codes & 15], 1).view(-1) if scheme == "4bit" else codes
    indices = indices[: math.prod(shape)].long()
    expected = table[indices] * absmax.repeat_interleave(block)[: len(indices)]
    assert torch.equal(result.view(-1), expected)
