"""AWQ and GPTQ, bit for bit the model of their matrices; FP8 and MXFP4, bit for bit transformers' operations."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import Mxfp4Dequantize

from rabbitllm.engine import _published_conversions
from rabbitllm.engine._published_conversions import AWQ_ORDER, QuickFp8, QuickMxfp4, awq_weight, gptq_weight, scaled
from rabbitllm.errors import IncompleteSplitError, UnknownArchitectureError
from rabbitllm.quant import dequantize_kernels
from rabbitllm.quant.coded import INT4, UINT8, WITH_ZEROS, CodedForm, CodedMatrix, zeroed
from tests.engine.test_published import take_out
from tests.support import quantized
from tests.support.builders import build_checkpoint, reference_logits
from tests.support.tiny_models import ALL, INPUT, assert_same, load, run, split

pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21), reason="its quantizers are others"
)

Build = Callable[..., Path]

MODELS: dict[str, tuple[Build, str, dict[str, Any]]] = {
    "awq-llama": (quantized.build_awq, "llama", {}),
    "awq-qwen3_moe": (quantized.build_awq, "qwen3_moe", {}),
    "gptq-qwen2": (quantized.build_gptq, "qwen2", {}),
    "gptq-mixtral-8bit": (quantized.build_gptq, "mixtral", {"bits": 8}),
    "gptq_v2-llama-2bit": (quantized.build_gptq, "llama", {"bits": 2, "form": "gptq_v2"}),
}
SHORT = ("awq-qwen3_moe", "gptq-qwen2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in MODELS]
)
def test_results_equal_transformers_with_the_matrices(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, family, options = MODELS[name]
    folder = build(tmp_path / "model", family, tmp_path / "plain", shards=3, **options)
    expected = reference_logits(tmp_path / "plain", INPUT, torch.float16)
    directory = split(folder)
    for room in (ALL, 0):
        with caplog.at_level(logging.WARNING, "rabbitllm"):
            model = load(directory, room)
        assert f"are {name.split('_')[0].split('-')[0]}. On cpu each layer is dequantized to float16" in caplog.text
        assert_same(run(model), expected)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("auto_round:auto_gptq", "qwen3_moe"),
        pytest.param("auto_round:gptqmodel", "llama", marks=pytest.mark.long),
        ("auto_round:auto_awq", "llama"),
    ],
)
def test_integers_of_auto_round(tmp_path: Path, layout: str, family: str) -> None:
    """In the layouts of GPTQ and AWQ; a matrix that is left out is plain."""
    folder = quantized.build_auto_round(tmp_path / "model", family, tmp_path / "plain", layout, shards=3)
    expected = reference_logits(tmp_path / "plain", INPUT, torch.float16)
    directory = split(folder)
    for room in (ALL, 0):
        assert_same(run(load(directory, room)), expected)


@pytest.mark.parametrize("older", [{"backend": "auto_round:gptq:exllamav2", "quant_method": "intel/auto-round"}, {}])
def test_settings_of_older_auto_round(tmp_path: Path, older: dict[str, str]) -> None:
    folder = quantized.build_auto_round(tmp_path / "model", "llama", tmp_path / "plain", "auto_round:auto_gptq")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]["packing_format"]
    config["quantization_config"] |= older
    (folder / "config.json").write_text(json.dumps(config))
    assert_same(run(load(split(folder), 0)), reference_logits(tmp_path / "plain", INPUT, torch.float16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "int in the layout auto_round:llm_compressor"),
        ({"packing_format": "auto_round:auto_gptq", "data_type": "mx_fp"}, "mx_fp in the layout auto_round:auto_gptq"),
        ({"backend": "auto_round:exllamav2"}, "int in the layout auto_round:exllamav2"),
        ({"act_bits": 8}, "activations of 8 bits"),
        ({"extra_config": {"lm_head": {"bits": 8}}}, "4 bits, but 8 bits for lm_head"),
        ({"bits": 3}, "by gptq, in the form gptq at 3 bits"),
    ],
)
def test_unknown_forms_of_auto_round(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    path = folder / "config.json"
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": True, **changes}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    with pytest.raises(UnknownArchitectureError, match=message) as refused:
        load(split(folder))
    assert "unquantized" in refused.value.remedy


def test_awq_matrix() -> None:
    tensor = torch.randn(24, 48, generator=torch.Generator().manual_seed(0))
    integers = quantized.integers_of(tensor, 4)
    parts = quantized._awq(integers)
    assert torch.equal(awq_weight(**parts, dtype=torch.float16), integers.matrix)
    assert (integers.matrix - tensor).abs().max() < 0.3


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("disordered", [True, False])
def test_gptq_matrix(bits: int, offset: int, disordered: bool) -> None:
    tensor = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    integers = quantized.integers_of(tensor, bits, disordered=disordered)
    parts = quantized._gptq(integers, bits, offset)
    assert torch.equal(gptq_weight(**parts, bits=bits, offset=offset, dtype=torch.float16), integers.matrix)
    if not disordered:
        del parts["g_idx"]
        matrix = gptq_weight(**parts, g_idx=None, bits=bits, offset=offset, dtype=torch.float16)
        assert torch.equal(matrix, integers.matrix)


@pytest.mark.parametrize(
    ("layout", "bits"),
    [("awq", 4), *((layout, bits) for layout in ("gptq", "gptq_v2", "gptq in any order") for bits in (4, 8))],
)
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(24, 64, 16), (136, 192, 64), (512, 128, 128)])
def test_integers_by_rows(layout: str, bits: int, outputs: int, inputs: int, group: int) -> None:
    """All zeros, 0 in AWQ and 16 of GPTQ too; lines of several outputs at the end are shorter."""
    offset, is_ordered = int(layout.startswith("gptq") and layout != "gptq_v2"), "any" not in layout
    integers = quantized.integers_of(torch.randn(outputs, inputs), bits, group, disordered=not is_ordered)
    integers.zeros[:] = torch.randint(offset, 2**bits + offset, integers.zeros.shape)
    parts = quantized._awq(integers) if layout == "awq" else quantized._gptq(integers, bits, offset)
    codes = torch.empty(outputs, inputs * bits // 32, dtype=torch.int32)
    words = torch.empty(outputs, inputs // group, 2, dtype=torch.int16)
    given = (parts[name].numpy() for name in ("qweight", "qzeros")), parts["scales"].view(torch.int16).numpy()
    order = AWQ_ORDER if layout == "awq" else None
    columns = None if is_ordered else integers.group.argsort(stable=True)
    of_columns = None if columns is None else columns.numpy()
    dequantize_kernels.by_rows(*given[0], given[1], bits, order, offset, codes.numpy(), words.numpy(), of_columns)
    form = CodedForm({4: INT4, 8: UINT8}[bits], WITH_ZEROS[torch.float16], (1, group), (outputs, inputs))
    matrix = CodedMatrix(form, *(part.view(torch.uint8).flatten() for part in (codes, words)), order=columns)
    centred = integers.codes - integers.zeros[:, integers.group]
    assert torch.equal(matrix.dequantized(torch.float32), centred.float() * integers.scales[:, integers.group].float())


@pytest.mark.parametrize("bits", [4, 8, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scales_and_zeros_in_words(bits: int | None, dtype: torch.dtype) -> None:
    """Zeros of several rows are in an int32, of which the last are fewer, or in a byte each."""
    scales, half = torch.rand(30, 5).to(dtype), 2 ** ((bits or 8) - 1)
    zeros = torch.randint(-half, half, scales.shape)
    stored, count = zeros.to(torch.int8), 32 // (bits or 8)
    if bits is not None:
        several = nn.functional.pad(zeros + half, (0, 0, 0, -len(zeros) % count)).view(-1, count, zeros.shape[1])
        stored = quantized._int32(sum(several[:, place] << bits * place for place in range(count)))
    words = torch.empty(30, 5, 2, dtype=torch.int16)
    given = scales.view(torch.int16).numpy(), stored.numpy(), bits or 8, int(dtype == torch.float16)
    dequantize_kernels.with_zeros(*given, words.numpy())
    assert torch.equal(words.view(torch.uint8).flatten(), zeroed(scales.flatten(), zeros.flatten().short()))


def test_another_dtype_than_the_scales(tmp_path: Path) -> None:
    """In float32 the product is exact; it is rounded to the model's dtype, and to none between."""
    integers = quantized.integers_of(torch.randn(24, 48, generator=torch.Generator().manual_seed(0)), 4)
    exact = (integers.codes - integers.zeros[:, integers.group]).float() * integers.scales.float()[:, integers.group]
    parts = quantized._awq(integers)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(awq_weight(**parts, dtype=dtype), exact.to(dtype))
    folder = quantized.build_awq(tmp_path / "model", "llama", tmp_path / "plain")
    model = load(split(folder), 0, dtype="bfloat16")
    assert model(INPUT).logits.dtype == torch.bfloat16
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_missing_part(tmp_path: Path) -> None:
    folder = quantized.build_awq(tmp_path / "model", "llama", tmp_path / "plain")
    take_out(folder, "layers.1.mlp.up_proj.qzeros")
    with pytest.raises(IncompleteSplitError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(split(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, "by gptq, in the form gptq at 3 bits; expected gptq or gptq_v2 at 2 or"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the form marlin at 4 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "by awq, in the form gemv at 4 bits; expected gemm"),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemx"},
            r"already quantized \(awq\), in a form that transformers",
        ),
    ],
)
def test_unknown_forms(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    with pytest.raises(UnknownArchitectureError, match=message) as refused:
        load(split(folder))
    assert "unquantized" in refused.value.remedy


def test_awq_with_scaled_activations(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "bloom")
    path = folder / "config.json"
    settings = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    with pytest.raises(UnknownArchitectureError, match="AWQ also scales the activations of bloom models"):
        load(split(folder))


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels were used."""
    used: list[str] = []
    for name in ("blocks", "nibbles"):
        kernel = getattr(dequantize_kernels, name)
        monkeypatch.setattr(
            dequantize_kernels, name, lambda *args, name=name, kernel=kernel: (used.append(name), kernel(*args))[1]
        )
    return used


def everything(dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    """Every byte that is a number, again and again."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite()]
    picked = torch.randint(len(codes), (rows, columns), generator=torch.Generator().manual_seed(0))
    return codes.view(torch.uint8)[picked].view(dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("result_dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "grid"), [(96, 320, (6, 5)), (64, 64, (64, 2)), (7, 33, (1, 1))])
def test_fp8(
    dtype: torch.dtype, result_dtype: torch.dtype, rows: int, columns: int, grid: tuple[int, int], counted: list[str]
) -> None:
    codes = everything(dtype, rows, columns)
    scales = torch.rand(grid, generator=torch.Generator().manual_seed(1)) * 3e-3
    exponents = torch.randint(90, 140, grid, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for factors in (scales, scales.bfloat16(), exponents):
        actual = QuickFp8(None)._dequantize_one(codes, factors, result_dtype)
        expected = Fp8Dequantize(None)._dequantize_one(codes, factors, result_dtype)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    assert counted == ["blocks"] * 3


def test_fp8_in_several_threads(counted: list[str]) -> None:
    codes, scales = everything(torch.float8_e4m3fn, 515, 1024), torch.rand(1, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        actual = QuickFp8(None)._dequantize_one(codes, scales, torch.bfloat16)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(actual, Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16))
    assert counted == ["blocks"]


@pytest.mark.parametrize(
    ("codes", "scales", "dtype"),
    [
        (torch.ones(4, 4, dtype=torch.float8_e4m3fn), torch.tensor(2.0), None),
        (torch.ones(4, 4, dtype=torch.float8_e4m3fn).t(), torch.ones(2, 2), None),
        (torch.ones(3, 4, 4, dtype=torch.float8_e4m3fn), torch.ones(3, 2, 2), torch.bfloat16),
        (torch.ones(4, 4, dtype=torch.int8), torch.ones(2, 2), torch.bfloat16),
        (torch.ones(4, 4, dtype=torch.int8), torch.ones(4, 2), None),
        (torch.ones(4, 4, dtype=torch.float8_e4m3fn, device="meta"), torch.ones(2, 2, device="meta"), torch.bfloat16),
    ],
)
def test_unknown_inputs_of_the_kernel_use_transformers(
    codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None, counted: list[str]
) -> None:
    actual = QuickFp8(None)._dequantize_one(codes, scales, dtype)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
    assert (actual.dtype, actual.shape, actual.device) == (expected.dtype, expected.shape, expected.device)
    assert actual.is_meta or torch.equal(actual, expected)
    assert counted == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_one_scale_for_all(dtype: torch.dtype, counted: list[str]) -> None:
    codes, scale = everything(torch.float8_e4m3fn, 515, 1024), torch.tensor(0.37, dtype=torch.bfloat16)
    actual = QuickFp8(None)._dequantize_one(codes, scale, dtype)
    assert torch.equal(actual, Fp8Dequantize(None)._dequantize_one(codes, scale, dtype))
    assert counted == ["blocks"]


@pytest.mark.parametrize("zeros", [None, torch.tensor([[3, -4], [5, 0]], dtype=torch.int8)])
def test_torch_makes_some_rows_at_a_time(zeros: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-128, 128, (70, 30), dtype=torch.int8, generator=generator)
    scales, rows = torch.rand(2, 2, generator=generator).bfloat16(), torch.arange(70) // 35
    columns = torch.arange(30) // 15
    expected = codes.float() if zeros is None else codes.float() - zeros[rows][:, columns].float()
    expected = (expected * scales[rows][:, columns].float()).half()
    for at_once in (1, 100, 1 << 22):
        monkeypatch.setattr(_published_conversions, "AT_ONCE", at_once)
        assert torch.equal(scaled(codes, scales, zeros, (35, 15), torch.float16), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "runs", "threads"), [(7, 64, 2, 1), (5, 96, 6, 1), (300, 512, 16, 2)])
def test_fp4(rows: int, columns: int, runs: int, threads: int, dtype: torch.dtype, counted: list[str]) -> None:
    """Of DeepSeek-V4's experts: every code and every exponent, infinite and undefined results among them."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8, generator=generator)
    scales = torch.randint(0, 256, (rows, runs), dtype=torch.uint8, generator=generator).view(torch.float8_e8m0fnu)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        actual = QuickFp8(None)._dequantize_one(codes, scales, dtype)
    finally:
        torch.set_num_threads(before)
    assert counted == ["blocks"]
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(0), expected.nan_to_num(0))
    with pytest.raises(ValueError, match="codes of shape"):
        QuickFp8(None)._dequantize_one(codes, scales[:, :1].repeat(1, 5), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(72, 48), (24, 40), (64, 24), (8, 8)])
def test_smaller_blocks_at_the_ends(rows: int, columns: int, dtype: torch.dtype) -> None:
    """As transformers' own FP8 products cut them; of blocks of 16, (24, 40) has as many as two by four equal ones."""
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(16, 16)))
    codes = everything(torch.float8_e4m3fn, rows, columns)
    scales = torch.rand(-(-rows // 16), -(-columns // 16), generator=torch.Generator().manual_seed(1)) * 1e-2
    actual = QuickFp8(quantizer)._dequantize_one(codes, scales, dtype)
    exact = _dequantize_fp8_weight(codes, scales, [16, 16], torch.float32)
    assert torch.equal(actual, exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("outputs", "groups", "threads"), [(40, 3, 1), (160, 64, 2)])
def test_mxfp4(dtype: torch.dtype, outputs: int, groups: int, threads: int, counted: list[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, outputs, groups, 16), dtype=torch.uint8, generator=generator)
    low, high = (1, 254) if dtype != torch.float16 else (110, 140)
    scales = torch.randint(low, high, (3, outputs, groups), dtype=torch.uint8, generator=generator)
    model: Any = nn.Module()
    model.experts = nn.Module()
    model.experts.down_proj = nn.Parameter(torch.zeros(3, 32 * groups, outputs, dtype=dtype))
    model.get_parameter_or_buffer = lambda name: model.experts.down_proj
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts = {"down_proj_blocks": [blocks], "down_proj_scales": [scales]}
        actual = QuickMxfp4(None).convert(dict(parts), model=model, full_layer_name="experts.down_proj")
    finally:
        torch.set_num_threads(before)
    expected = Mxfp4Dequantize(None).convert(dict(parts), model=model, full_layer_name="experts.down_proj")
    assert actual.keys() == expected.keys() == {"experts.down_proj"}
    assert torch.equal(actual["experts.down_proj"], expected["experts.down_proj"])
    assert counted == ["nibbles"] * 3
