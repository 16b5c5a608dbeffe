"""Inputs that a published scheme rounds: one call of compiled code has the bits of compressed-tensors."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.engine import _activations
from rabbitllm.engine._activations import Rounding, fuse_activations
from rabbitllm.engine._fusing import MAX_ELEMENTS
from rabbitllm.engine._gates import call_of, every_half
from tests.engine.test_recurrences import Operations
from tests.support import quantized
from tests.support.tiny_models import ALL, INPUT, load, split

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.bits
FP4 = "strategy", "group_size", "scale_dtype"
SETTINGS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


def settings_of(kind: str, **others: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(**{**SETTINGS, "type": kind, **others})


def of_fp4() -> Any:
    return settings_of("float", num_bits=4, dynamic="local", **{n: quantized.NVFP4[n] for n in FP4})


def expected_of(x: torch.Tensor, args: Any, factor: float = 0.0) -> torch.Tensor:
    return forward_quantize_of(_module(args, factor), x, args)


def forward_quantize_of(module: Any, x: torch.Tensor, args: Any) -> torch.Tensor:
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    return forward_quantize(module, x, "input", args)


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("group", [0, 16])
@torch.no_grad()
def test_bits_of_compressed_tensors(kind: str, group: int) -> None:
    """Of a token's own scale or of a group's; of one for all, of rows without a batch; of many rows by several
    threads."""
    args = settings_of(kind, **({"strategy": "group", "group_size": group} if group else {}))
    rounding = Rounding.of(args)
    assert rounding is not None
    assert rounding.group == group
    assert _activations._has_bits(rounding, copy.copy(_module(args)))
    for shape in ((1, 1, 112), (2, 3, 64), (5, 64), (64,), (2, 3, 4, 16), (1, 2 * MAX_ELEMENTS // 64, 64)):
        for scale in (1e-39, 1e-30, 1, 1e5):
            x = (torch.randn(shape) * scale).bfloat16()
            if not group or len(shape) > 1:
                assert torch.equal(rounding.rounded(x), expected_of(x, args))
    x = torch.randn(1, 6, 64).bfloat16()
    x[0, :, 3] = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, 0, -0.0]).bfloat16()
    result, expected = rounding.rounded(x), expected_of(x, args)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 448 * 6 / 0.37, 3e5])
@torch.no_grad()
def test_bits_of_nvfp4(dtype: torch.dtype, factor: float) -> None:
    """Every number of a dtype as the largest of its group, and midway between two codes; groups of zeros, and what is
    infinite or no number."""
    args = of_fp4()
    rounding = Rounding.of(args, dtype, factor)
    assert rounding is not None
    assert rounding == replace(Rounding.of(args, dtype, 2.0), factor=factor)  # type: ignore[type-var]
    assert _activations._has_bits(rounding, _module(args, 2.0))
    every = every_half(dtype).view(1, -1, 1)
    codes = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -0.0])
    for x in (every * (codes / 6).to(dtype), torch.zeros(1, 2, 64, dtype=dtype), torch.randn(2, 64).to(dtype)):
        result, expected = rounding.rounded(x), expected_of(x, args, factor)
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
        signs = [each.signbit()[~each.isnan()] for each in (result, expected)]
        assert torch.equal(*signs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_bits_of_mx(dtype: torch.dtype, bits: int) -> None:
    """Every number of a dtype, infinite ones too, as the largest of its group. A group with what is no number has
    that: there torch's other results depend on which bits it has."""
    args = settings_of("float", num_bits=bits, strategy="group", group_size=32, scale_dtype="torch.uint8")
    rounding = Rounding.of(args, dtype)
    assert rounding is not None
    assert _activations._has_bits(rounding, _module(args))
    every = every_half(dtype).view(1, -1, 1)
    sizes = torch.cat([torch.tensor([1.0]), torch.rand(15) + 1e-3, -torch.logspace(-3, 0, 16)])
    halves = torch.tensor([5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 0.2]) / 4
    for x in (every * sizes.to(dtype), every * torch.cat([halves, -halves]).repeat(2).to(dtype), torch.zeros(3, 64)):
        result, expected = rounding.rounded(x.to(dtype)), expected_of(x.to(dtype), args)
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(*(each.signbit()[~each.isnan()] for each in (result, expected)))
    x[:, 40] = torch.nan
    assert rounding.rounded(x.to(dtype))[:, 40].isnan().all()
    others = settings_of("float", num_bits=bits, strategy="group", group_size=16, scale_dtype="torch.uint8")
    assert Rounding.of(others, dtype) is None  # whose scales are no powers


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_bits_of_published_scales(kind: str, dtype: torch.dtype) -> None:
    """Of every number; a zero keeps its sign."""
    args = settings_of(kind, strategy="tensor", dynamic=False)
    every = every_half(dtype).view(1, -1, 64)
    for scale in (0.02, 1.0, 5e-5):
        value = torch.tensor([scale], dtype=dtype)
        rounding, module = Rounding.of(args, dtype, float(value)), _module(args)
        module.weight = nn.Parameter(module.weight.to(dtype))
        module.input_scale = nn.Parameter(value)
        assert rounding is not None
        assert rounding.now(module) == rounding
        assert _activations._has_bits(rounding, module)
        result, expected = rounding.rounded(every), forward_quantize_of(module, every, args)
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(*(each.signbit()[~each.isnan()] for each in (result, expected)))
        module.input_zero_point = nn.Parameter(torch.zeros(1, dtype=dtype))
        assert rounding.now(module) is None


@pytest.mark.parametrize("data", [torch.empty(0), torch.empty(1, device="meta")], ids=["empty", "meta"])
def test_a_factor_that_has_left_memory_is_another_one(data: torch.Tensor) -> None:
    module, rounding = _module(of_fp4(), 2.0), Rounding.of(of_fp4(), factor=2.0)
    assert rounding is not None
    (is_same,) = rounding.watches(module)
    assert is_same()
    module.input_global_scale = nn.Parameter(data)
    assert not is_same()
    assert _activations._bytes_of(module.input_global_scale) == b""  # not what memory without an address holds


@pytest.mark.parametrize("factor", [0.0, -1.0, torch.inf, torch.nan])
def test_factors_by_which_nothing_is_divided_are_left_to_compressed_tensors(factor: float) -> None:
    static = settings_of("float", strategy="tensor", dynamic=False)
    for args, name in ((of_fp4(), "input_global_scale"), (static, "input_scale")):
        dtype = torch.float32 if args is not static else torch.bfloat16
        module = _module(args)
        setattr(module, name, nn.Parameter(torch.tensor([factor], dtype=dtype)))
        rounding = Rounding.of(args)
        assert rounding is not None
        assert rounding.now(module) is None


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("group", [0, 16])
@torch.no_grad()
def test_bits_in_float16(kind: str, group: int) -> None:
    args = settings_of(kind, **({"strategy": "group", "group_size": group} if group else {}))
    rounding = Rounding.of(args, torch.float16)
    assert rounding is not None
    assert rounding != Rounding.of(args)
    assert _activations._has_bits(rounding, _module(args))
    for scale in (1e-7, 1e-3, 1, 6e4):
        x = (torch.randn(2, 3, 64) * scale).half()
        result, expected = rounding.rounded(x), expected_of(x, args)
        assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))


def _module(args: Any, factor: float = 0.0) -> Any:
    from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus

    module: Any = nn.Linear(1, 1)
    module.quantization_status = QuantizationStatus.DECOMPRESSED
    module.quantization_scheme = QuantizationScheme(targets=["Linear"], input_activations=args)
    if factor:
        module.input_global_scale = nn.Parameter(torch.tensor([factor]))
    return module


@pytest.mark.parametrize(
    "others",
    [
        {"num_bits": 4},
        {"symmetric": False},
        {"strategy": "tensor"},
        {"num_bits": 4, "strategy": "tensor", "dynamic": False},
        {"strategy": "tensor_group", "group_size": 16},
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
    ],
    ids=str,
)
def test_other_settings_are_left_to_compressed_tensors(others: dict[str, Any]) -> None:
    assert Rounding.of(settings_of("int", **others)) is None


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(quantized.build_compressed_tensors(tmp_path_factory.mktemp("w8a8") / "model", "llama", "W8A8"))


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of inputs that are rounded by themselves, by one call, as long as it is used."""
    rounded, ordinary = list[int](), Rounding.rounded

    def counted(self: Rounding, x: torch.Tensor) -> torch.Tensor:
        rounded.append(x.numel())
        return ordinary(self, x)

    monkeypatch.setattr(Rounding, "rounded", counted)
    return rounded


def plainly_loaded(directory: Path, **options: Any) -> Any:
    """As by `load`, with inputs that compressed-tensors rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rabbitllm.engine.fusions.fuse_activations", lambda model: 0)
        return load(directory, ALL, **{"exact": False, **options})


@torch.no_grad()
def test_the_linears_of_a_model(directory: Path, left: list[int]) -> None:
    """And of its copies; not where a program changes the settings, wants gradients or has other dtypes."""
    plain, model = plainly_loaded(directory), load(directory, ALL, exact=False)
    left.clear()
    expected = plain(INPUT).logits
    for _ in range(2):  # Linears with the same input are one product from then on
        assert torch.equal(model(INPUT).logits, expected)
    assert left == []
    linear, other = model.model.layers[0].mlp.up_proj, plain.model.layers[0].mlp.up_proj
    for shape in ((1, 3), (3,), (2, 3), (1, 60), (60,), (1, 1), ()):  # of two dimensions all have one scale
        x = (
            torch.randn(*shape, linear.in_features).bfloat16()
            * torch.logspace(0, 2, shape[-1] if shape else 1)[:, None]
        )
        x = x.bfloat16() if shape else x[0].bfloat16()
        assert torch.equal(linear(x), other(x))
        assert torch.equal(model.model.layers[0].mlp(x), plain.model.layers[0].mlp(x))
    left.clear()
    x = torch.randn(1, 3, linear.in_features).bfloat16()
    assert torch.equal(copy.deepcopy(linear)(x), other(x))
    assert len(left) == 1
    with torch.enable_grad():
        assert torch.equal(linear(x), other(x))
    assert torch.equal(linear(x.float()), other(x.float()))
    for module in (linear, other):
        module.quantization_enabled = False
    assert torch.equal(linear(x), other(x))
    for module in (linear, other):
        module.quantization_enabled = True
        module.quantization_scheme = module.quantization_scheme.model_copy(
            update={"input_activations": settings_of("int", num_bits=4)}
        )
    assert torch.equal(linear(x), other(x))
    for part in (model, plain):  # in place, for all of its Linears
        down = part.model.layers[0].mlp.down_proj
        down.quantization_scheme.input_activations.num_bits = 4
    x = torch.randn(1, 3, down.in_features).bfloat16()
    assert torch.equal(model.model.layers[0].mlp.down_proj(x), down(x))
    assert len(left) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "scheme", ["W8A8", "FP8-dynamic", "FP8_BLOCK-dynamic", "NVFP4", "FP8-static", "MXFP4", "MXFP8"]
)
@torch.no_grad()
def test_layers_are_one_call_until_settings_change(
    tmp_path: Path, scheme: str, dtype: torch.dtype, left: list[int]
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    build = quantized.build_compressed_tensors
    directory = split(build(tmp_path / "model", "llama", scheme, dtype=dtype, head_dim=32, **sizes))
    plain, model, watched = plainly_loaded(directory), *(load(directory, ALL, exact=False) for _ in range(2))
    for layer in watched.model.layers:
        for linear in layer.mlp.gate_proj, layer.mlp.down_proj:
            linear.register_forward_hook(lambda *given: None)
    parts, limit = (plain, model, watched), 0.5 if "FP4" in scheme else 0.2  # of fewer codes
    caches = [part(INPUT).past_key_values for part in parts]
    left.clear()

    def step() -> tuple[list[torch.Tensor], list[float]]:
        """The logits, and operations of torch a layer."""
        logits, counts = [], []
        for part, cache in zip(parts, caches, strict=True):
            with Operations() as operations:
                logits.append(part(INPUT[:, :1], past_key_values=cache).logits)
            counts.append(operations.count / part.config.num_hidden_layers)
        return logits, counts

    for _ in range(12):
        (expected, result, same), (many, few, _) = step()
        assert torch.equal(result, same)  # by the calls of an attention and of Linears
        assert float((result - expected).norm() / expected.norm()) < limit
    assert few < 20 < (60 if scheme == "FP8-static" else 200) < many
    assert left == []
    for part in parts:  # in place
        for name, value in part.model.layers[0].mlp.up_proj.named_parameters():
            if name.startswith("input"):
                value.data.mul_(3)
    expected, result, same = step()[0]
    assert torch.equal(result, same)
    assert float((result - expected).norm() / expected.norm()) < limit
    assert left == []
    for part in parts:  # in place, of all Linears
        part.model.layers[0].mlp.up_proj.quantization_scheme.input_activations.num_bits = 6
    many, few, _ = step()[1]
    assert abs(many - few) < 20


@torch.no_grad()
def test_matrices_without_a_kernel_get_rounded_inputs(tmp_path: Path, left: list[int]) -> None:
    """Not by the product of plain matrices."""
    directory = split(quantized.build_compressed_tensors(tmp_path / "model", "llama", "W8A8", hidden_size=48))
    expected = plainly_loaded(directory, fast_bfloat16=True)(INPUT).logits
    model = load(directory, ALL, exact=False, fast_bfloat16=True)
    left.clear()
    assert torch.equal(model(INPUT).logits, expected)
    assert len(left) == 6 * model.config.num_hidden_layers


@torch.no_grad()
def test_an_mlp_of_which_one_linear_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last: of two dimensions all of its rows have one scale, though plain matrices before it take each alone."""
    monkeypatch.setattr(quantized, "_LINEAR", re.compile(r"down_proj\.weight$"))
    folder = quantized.build_compressed_tensors(tmp_path / "model", "llama", "W8A8", intermediate_size=256)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["re:.*(head|gate_proj|up_proj|[qkvo]_proj)$"]
    (folder / "config.json").write_text(json.dumps(config))
    directory = split(folder)
    plain, model = plainly_loaded(directory, fast_bfloat16=True), load(directory, ALL, exact=False, fast_bfloat16=True)
    mlp, other = model.model.layers[0].mlp, plain.model.layers[0].mlp
    for shape in ((1, 3), (3,)):
        x = torch.randn(*shape, model.config.hidden_size) * torch.logspace(0, 2, 3)[:, None]
        for _ in range(2):
            assert torch.equal(mlp(x.bfloat16()), other(x.bfloat16()))
    assert call_of(mlp) is not None


def test_a_rounding_without_their_bits_is_not_used(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = plainly_loaded(directory), plainly_loaded(directory)
    assert fuse_activations(model) == 7 * model.config.num_hidden_layers
    ordinary = Rounding.rounded
    monkeypatch.setattr(Rounding, "rounded", lambda self, x: ordinary(self, x) * (1 + 2**-7))
    assert fuse_activations(other) == 0
