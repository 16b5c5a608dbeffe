"""Checkpoints that are published quantized, multiplied from their codes: as close to the exact result as transformers.

Without `exact=True`; with it they have the bits of transformers, see `test_published.py`.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from rabbitllm.engine._published_conversions import ExpertMatrices
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.load_plan import LoadPlan, make_load_plan
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.published_codes import Part, form_of
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.errors import UnknownArchitectureError
from rabbitllm.quant import _vectors
from rabbitllm.quant.coded import CodedForm, CodedMatrix
from rabbitllm.store.layer_store import LayerStore
from tests.support import quantized
from tests.support.builders import reference_logits
from tests.support.hybrid_families import HYBRIDS
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import (
    ALL,
    INPUT,
    assert_same,
    budget_that_keeps,
    load,
    options_for,
    run,
    split,
    tiers,
)

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
pytestmark = [
    pytest.mark.skipif(VERSION < (5, 21), reason="its quantizers are others"),
    pytest.mark.skipif(not _vectors.lanes(), reason="codes are dequantized for each use"),
]
needs_compressed = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="it is not installed")

Build = Callable[[Path], Path]
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8}
MANY = {**EXPERTS, "num_experts": 24}
"""Of which a quarter leaves room for less than all, with what is needed to rearrange them."""


def compressed(family: str, scheme: str, **settings: Any) -> Build:
    return lambda folder: quantized.build_compressed_tensors(folder, family, scheme, shards=2, **settings)


def compressed_and_plain(family: str, scheme: str, **settings: Any) -> Build:
    """And the model of its matrices, for schemes that transformers does not decompress to double precision."""

    def build(folder: Path) -> Path:
        compressed(family, scheme, **settings)(folder)
        quantized.decompressed(folder.parent / "plain", folder, scheme, family, **settings)
        return folder

    return build


def gptq(
    form: str, group: int = 16, family: str = "qwen3_moe", *, bits: int = 4, ordered: bool = True, **sizes: int
) -> Build:
    """With groups of inputs in their order, or in any."""

    def build(folder: Path) -> Path:
        plain = folder.parent / "plain"
        settings = {"form": form, "group": group, "bits": bits, "ordered": ordered, **sizes}
        return quantized.build_gptq(folder, family, plain, shards=2, **settings)

    return build


CODED: dict[str, tuple[Build, set[str]]] = {
    "fp8-llama": (lambda folder: quantized.build_fp8(folder, "llama", 32, shards=2), {"fp8 F32 32x32"}),
    "fp8-qwen3_moe": (
        lambda folder: quantized.build_fp8(folder, "qwen3_moe", 32, shards=2, **EXPERTS),
        {"fp8 F32 32x32"},
    ),
    "fp8-static-mistral": (lambda folder: quantized.build_fp8_static(folder, "mistral"), {"fp8 BF16 0x0"}),
    "mxfp8-qwen2": (lambda folder: quantized.build_mxfp8(folder, "qwen2", shards=2), {"fp8 U8 1x32"}),
    "mxfp4-gpt_oss": (lambda folder: quantized.build_mxfp4(folder, shards=2), {"fp4 U8 1x32"}),
    "fp4-fp8-deepseek_v4": (
        lambda folder: quantized.build_deepseek_fp4(folder, HYBRIDS["deepseek_v4"]),
        {"fp4 F8_E8M0 1x32", "fp8 F8_E8M0 16x16"},
    ),
    "awq-qwen3_moe": (
        lambda folder: quantized.build_awq(folder, "qwen3_moe", folder.parent / "plain", shards=2, group=32, **MANY),
        {"int4 I32 1x32"},
    ),
    "awq-llama": (
        lambda folder: quantized.build_awq(folder, "llama", folder.parent / "plain", shards=2, group=32),
        {"int4 I32 1x32"},
    ),
    "awq-bfloat16-llama": (
        lambda folder: quantized.build_awq(folder, "llama", folder.parent / "plain", group=32, dtype=torch.bfloat16),
        {"int4 U32 1x32"},
    ),
    "awq-bfloat16-qwen3_moe": (
        lambda folder: quantized.build_awq(
            folder, "qwen3_moe", folder.parent / "plain", shards=2, group=32, dtype=torch.bfloat16, **MANY
        ),
        {"int4 U32 1x32"},
    ),
    "torchao-int8-llama": (
        lambda folder: quantized.build_torchao_int8(folder, folder.parent / "plain"),
        {"int8 F32 1x0"},
    ),
    "torchao-int8-zeros-llama": (
        lambda folder: quantized.build_torchao_int8(folder, folder.parent / "plain", 16),
        {"int8 U32 1x16"},
    ),
    "gptq-qwen2": (gptq("gptq", family="qwen2"), {"int4 I32 1x16"}),
    "gptq-qwen3_moe": (gptq("gptq", **MANY), {"int4 I32 1x16"}),
    "gptq-v2-qwen3_moe": (gptq("gptq_v2", group=64, **MANY), {"int4 I32 1x0"}),
    "gptq-any-order-llama": (gptq("gptq", 32, "llama", ordered=False), {"int4 I32 1x32"}),
    "gptq-any-order-qwen3_moe": (gptq("gptq", ordered=False, **MANY), {"int4 I32 1x16"}),
    "gptq-8-qwen2": (gptq("gptq", 64, "qwen2", bits=8), {"uint8 I32 1x0", "uint8 I32 1x64"}),
    "gptq-8-qwen3_moe": (gptq("gptq_v2", bits=8, **MANY), {"uint8 I32 1x16"}),
    "gptq-8-any-order-qwen3_moe": (gptq("gptq", bits=8, ordered=False, **MANY), {"uint8 I32 1x16"}),
    "auto-round-qwen3_moe": (
        lambda folder: quantized.build_auto_round(
            folder, "qwen3_moe", folder.parent / "plain", "auto_round:auto_gptq", **MANY
        ),
        {"int4 I32 1x16"},
    ),
    "fp8-static-qwen3_moe": (
        lambda folder: quantized.build_fp8_static(folder, "qwen3_moe", **MANY),
        {"fp8 BF16 0x0", "fp8 F32 1x0"},
    ),
    "modelopt-nvfp4-qwen3_moe": (
        lambda folder: quantized.build_modelopt(folder, "qwen3_moe", "NVFP4", folder.parent / "plain", **MANY),
        {"fp4 F8_E4M3 1x16", "fp4 F32 1x16"},
    ),
    "modelopt-fp8-qwen3_moe": (
        lambda folder: quantized.build_modelopt(folder, "qwen3_moe", "FP8_PB_WO", folder.parent / "plain", **MANY),
        {"fp8 BF16 16x16", "fp8 F32 16x16"},
    ),
    "nvfp4-qwen3_moe": (
        compressed_and_plain("qwen3_moe", "NVFP4A16", **MANY),
        {"fp4 F8_E4M3 1x16", "fp4 F32 1x16"},
    ),
    "int4-llama": (compressed("llama", "W4A16"), {"int4 BF16 1x16"}),
    "int4-qwen3_moe": (compressed_and_plain("qwen3_moe", "W4A16", **EXPERTS), {"int4 BF16 1x16"}),
    "int4-zeros-llama": (compressed_and_plain("llama", "W4A16-asymmetric"), {"int4 U32 1x16"}),
    "int4-zeros-qwen3_moe": (compressed_and_plain("qwen3_moe", "W4A16-asymmetric", **MANY), {"int4 U32 1x16"}),
    "int8-llama": (compressed("llama", "INT8"), {"int8 BF16 1x0"}),
    "int8-qwen3_moe": (compressed_and_plain("qwen3_moe", "W8A16", **MANY), {"uint8 BF16 1x0"}),
    "int8-zeros-llama": (compressed_and_plain("llama", "W8A16-asymmetric"), {"uint8 U32 1x0"}),
    "int8-zeros-qwen3_moe": (compressed_and_plain("qwen3_moe", "INT8-asymmetric", **MANY), {"int8 U32 1x0"}),
    "int8-quantized-inputs-llama": (compressed("llama", "W8A8"), {"int8 BF16 1x0"}),
    "nvfp4-llama": (compressed_and_plain("llama", "NVFP4A16"), {"fp4 F8_E4M3 1x16"}),
    "fp8-dynamic-llama": (compressed("llama", "FP8-dynamic"), {"fp8 BF16 1x0"}),
    "modelopt-mixed-llama": (
        lambda folder: quantized.build_modelopt(folder, "llama", "MIXED_PRECISION", folder.parent / "plain"),
        {"fp4 F8_E4M3 1x16", "fp8 BF16 0x0"},
    ),
}
"""Name -> how it is built, and the forms of its matrices."""
MODELS = [
    pytest.param(name, marks=[needs_compressed] * name.startswith(("int", "nvfp4", "fp8-dynamic"))) for name in CODED
]
QUANTIZED_INPUTS = ("fp8-dynamic-llama", "int8-quantized-inputs-llama")
"""Rounding may send an input to another code."""


def plan_of(directory: Path, **options: Any) -> LoadPlan:
    settings = options_for(ALL, **options)
    return make_load_plan(LayerStore(directory), settings, directory, [CpuDevice()])


def forms_of(plan: LoadPlan) -> set[str]:
    """The forms in which matrices of a model are multiplied."""
    dense = (how.form.scheme for s in plan.sources.values() for job in s.jobs for how, _ in job.quantized)
    leaves = (leaf for source in plan.experts for leaf in source.leaves.values())
    return {*dense, *(leaf.coded.form.scheme for leaf in leaves if leaf.coded is not None)}


@pytest.mark.bits
@pytest.mark.parametrize("name", MODELS)
def test_every_tier_is_as_close_as_transformers(tmp_path: Path, name: str) -> None:
    build, forms = CODED[name]
    folder = build(tmp_path / "model")
    plain = tmp_path / "plain" if (tmp_path / "plain").is_dir() else folder
    directory = split(folder)
    assert forms_of(plan_of(directory, exact=False)) == forms
    assert not forms_of(plan_of(directory, exact=True))
    resident = load(directory, exact=False)
    result = run(resident)
    if name not in QUANTIZED_INPUTS:
        expected = reference_logits(plain, INPUT, "auto")  # type: ignore[arg-type]
        routed = bool(resident.placement.experts)
        assert_as_near(result.logits, expected.logits, exact_logits(plain, INPUT), routed=routed)
    streamed = load(directory, 0, exact=False)
    assert {Tier.STREAMED, Tier.ROUTED} & set(tiers(streamed).values())
    assert_same(run(streamed), result)
    if resident.placement.experts:
        model = load(directory, budget_that_keeps(directory, 0.25, exact=False), exact=False)
        for _ in range(2):
            assert_same(run(model), result)


def test_zeros_that_symmetric_integers_cannot_have(tmp_path: Path) -> None:
    folder = quantized.build_torchao_int8(tmp_path / "model", tmp_path / "plain")

    def changed(name: str, tensor: torch.Tensor) -> quantized.Named:
        yield name, tensor + 1 if name.endswith("up_proj._weight_zero_point") else tensor

    (folder / "model.safetensors.index.json").unlink()
    quantized.rewrite(folder, changed, None, 1)
    directory = split(folder)
    with pytest.raises(UnknownArchitectureError, match=r"up_proj\.weight have zeros that are not 0"):
        run(load(directory, exact=False))
    run(load(directory))


@needs_compressed
@pytest.mark.parametrize("scheme", ["W4A16-asymmetric", "W8A16"])
def test_scales_have_fewer_bits_than_a_model_in_float32(tmp_path: Path, scheme: str) -> None:
    """So they are used as stored, and have zeros."""
    directory = split(compressed_and_plain("llama", scheme)(tmp_path / "model"))
    options: dict[str, Any] = {"exact": False, "dtype": "float32"}
    assert forms_of(plan_of(directory, **options)) == {"int4 U32 1x16" if "4" in scheme else "uint8 BF16 1x0"}
    result, expected = run(load(directory, **options)), run(load(directory, dtype="float32"))
    assert (result.logits - expected.logits).norm() < 2e-3 * expected.logits.norm()


@needs_compressed
@pytest.mark.parametrize("scheme", ["FP8-dynamic", "FP8-static", "NVFP4", "W8A8"])
def test_linears_with_quantized_inputs(tmp_path: Path, scheme: str) -> None:
    """One by one with the same inputs, since a rounded input may get another code in the next layer."""
    directory = split(compressed("llama", scheme)(tmp_path / "model"))
    model, exact = load(directory, exact=False), load(directory)
    calls: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(name: str) -> Any:
        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            calls.setdefault(name, (args[0].clone(), output.clone()))

        return hook

    for name, module in exact.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(record(name))
    run(exact)
    coded = [name for name in calls if isinstance(model.get_submodule(name).weight, QuantizedWeight)]
    assert len(coded) == 7 * model.config.num_hidden_layers
    with torch.inference_mode():
        for name in coded:
            x, expected = calls[name]
            error = (model.get_submodule(name)(x).float() - expected.float()).norm()
            assert error <= 2**-7 * expected.float().norm(), name


@pytest.mark.parametrize(
    ("build", "least"),
    [
        (
            lambda folder: quantized.build_awq(folder, "llama", folder.parent / "plain", group=32, num_hidden_layers=6),
            3,
        ),
        (gptq("gptq", 64, "qwen2", num_hidden_layers=6), 3),
        pytest.param(compressed("llama", "W4A16-asymmetric", num_hidden_layers=6), 2.5, marks=needs_compressed),
    ],
)
def test_rearranged_codes_are_counted(tmp_path: Path, build: Build, least: float) -> None:
    """What is resident: of a group a scale and a zero take four bytes, not two and a half; of layers that stay, too."""
    directory = split(build(tmp_path / "model"))
    model = load(directory, exact=False)
    plan, exact = plan_of(directory, exact=False), plan_of(directory)
    weights = [*model.parameters()]
    matrices = [weight.matrix for weight in weights if isinstance(weight, QuantizedWeight)]
    taken = sum(matrix.payload.nbytes + matrix.scales.nbytes for matrix in matrices)
    taken += sum(weight.nbytes for weight in weights if not isinstance(weight, QuantizedWeight))
    assert sum(source.ready_bytes for source in plan.sources.values()) == taken
    layers = {name: source for name, source in plan.sources.items() if source.unit.is_layer}
    assert sum(exact.sources[name].ready_bytes for name in layers) > least * sum(s.ready_bytes for s in layers.values())
    budgets = range(taken, 0, -4096)
    placements = (plan.placed([CpuDevice()], options_for(budget, exact=False)).placement for budget in budgets)
    in_tiers = (len({placement.of(name).tier for name in layers}) for placement in placements)
    chosen = next(budget for budget, count in zip(budgets, in_tiers, strict=True) if count > 1)
    kept = load(directory, chosen, exact=False)
    assert {kept.placement.of(name).tier for name in layers} == {Tier.RESIDENT, Tier.STREAMED}
    assert_same(run(kept), run(model))


@pytest.mark.parametrize("name", ["fp8-llama", "mxfp4-gpt_oss"])
def test_resident_weights_take_the_size_of_the_codes(tmp_path: Path, name: str) -> None:
    directory = split(CODED[name][0](tmp_path / "model"))
    plan, exact = plan_of(directory, exact=False), plan_of(directory)
    nbytes = sum(tensor.nbytes for tensor in LayerStore(directory).tensors.values())
    assert sum(source.ready_bytes for source in (*plan.sources.values(), *plan.experts)) == nbytes
    assert sum(source.ready_bytes for source in (*exact.sources.values(), *exact.experts)) > 1.2 * nbytes
    assert plan.placement.is_resident
    assert sum(placed.counted for placed in (*plan.placement.units, *plan.placement.experts)) <= nbytes


def test_weight_is_its_codes(tmp_path: Path) -> None:
    """Copied with the model, differentiable by its inputs, and a dequantized matrix for any other operation."""
    directory = split(CODED["fp8-llama"][0](tmp_path / "model"))
    model, exact = load(directory, exact=False), load(directory)
    name = "model.layers.0.mlp.up_proj.weight"
    weight, whole = model.get_parameter(name), exact.get_parameter(name)
    assert isinstance(weight, QuantizedWeight)
    assert isinstance(weight.matrix, CodedMatrix)
    assert torch.equal(weight * 1, whole)
    copied = copy.deepcopy(weight)
    assert isinstance(copied, QuantizedWeight)
    assert torch.equal(copied * 1, whole)
    x = torch.randn(3, weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.linear(x, weight).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, len(weight), dtype=torch.bfloat16) @ whole)


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("rows of no whole number of segments", lambda folder: quantized.build_fp8(folder, "llama", hidden_size=48)),
        ("blocks of no power of two", lambda folder: quantized.build_fp8(folder, "llama", 24)),
        ("of 2 bits", lambda folder: quantized.build_gptq(folder, "llama", folder.parent / "plain", 2)),
    ],
)
def test_matrices_without_a_kernel_have_the_bits_of_transformers(
    tmp_path: Path, name: str, build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    directory = split(build(tmp_path / "model"))
    plan = plan_of(directory, exact=False)
    dense = [entry.target for source in plan.sources.values() for job in source.jobs for _, entry in job.quantized]
    assert not any("q_proj" in target for target in dense)
    with caplog.at_level(logging.WARNING):
        result = run(load(directory, 0, exact=False))
    assert (
        "On cpu a part of the layers is dequantized" if dense else "On cpu each layer is dequantized"
    ) in caplog.text
    if not dense:
        assert_same(result, run(load(directory)))


@pytest.mark.parametrize("budget", [ALL, 0])
@pytest.mark.parametrize(("leaf", "of"), [("experts", r"experts\.\d+\.down"), ("q_proj", "q"), ("self_attn.o", "o")])
def test_groups_in_another_order_than_the_settings_say(tmp_path: Path, budget: int, leaf: str, of: str) -> None:
    """They are seen when an expert or a layer is read; with `exact=True` they are taken as they are."""
    folder = quantized.build_gptq(tmp_path / "model", "qwen3_moe", tmp_path / "plain", ordered=True, **MANY)
    with_groups(folder, f"{of}_proj", lambda groups: groups.flip(0))
    directory = split(folder)
    with pytest.raises(UnknownArchitectureError, match=rf"model\.layers\.\d\..*{leaf}.* have groups of another order"):
        run(load(directory, budget, exact=False))
    run(load(directory, budget))


def test_an_order_that_differs_within_an_expert_or_groups_of_other_sizes(tmp_path: Path) -> None:
    """Gate and up are one matrix; projections of attention are not."""

    def logits(leaf: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        folder = gptq("gptq", ordered=False, **MANY)(tmp_path / f"{len([*tmp_path.iterdir()])}" / "model")
        with_groups(folder, leaf, change)
        return run(load(split(folder), exact=False))

    logits("q_proj", lambda groups: groups.flip(0))
    with pytest.raises(UnknownArchitectureError, match=r"gate_up_proj have another order in each matrix of an expert"):
        logits(r"experts\.\d+\.up_proj", lambda groups: groups.flip(0))
    with pytest.raises(UnknownArchitectureError, match=r"q_proj.* have groups of another order or size"):
        logits("q_proj", lambda groups: groups.clamp(min=1))


@needs_compressed
def test_zeros_that_do_not_fit_their_scales_have_no_kernel() -> None:
    """Whose number or dtype is another, that are missing, or whose scales no word of 32 bits holds."""
    from compressed_tensors.quantization import QuantizationArgs

    codes, scales, zeros = ("I32", (36, 16)), ("BF16", (36, 8)), ("I32", (5, 8))

    def form(
        codes: Part = codes, scales: Part = scales, zeros: Part | None = zeros, bits: int = 4, **settings: Any
    ) -> CodedForm | None:
        args = QuantizationArgs(**{"num_bits": bits, "type": "int", "symmetric": False, **settings})
        group = SimpleNamespace(targets=["Linear"], weights=args)
        config = SimpleNamespace(config_groups={"all": group})
        quantizer = SimpleNamespace(compressor=SimpleNamespace(quantization_config=config))
        operation = ExpertMatrices(SimpleNamespace(hf_quantizer=quantizer))
        return form_of(operation, "q_proj", codes, scales, (36, 128), zeros)

    assert form() == CodedForm("int4", "U32", (1, 16), (36, 128))
    assert form(scales=("F16", (36, 8)), zeros=("I8", (36, 8))) == CodedForm("int4", "I32", (1, 16), (36, 128))
    of_bytes = ("I8", (36, 128))
    assert form(of_bytes, zeros=("I8", (36, 8)), bits=8) == CodedForm("int8", "U32", (1, 16), (36, 128))
    assert form(zeros=None, symmetric=True) == CodedForm("int4", "BF16", (1, 16), (36, 128))
    for others in ({"zeros": None}, {"scales": ("F32", (36, 8))}, {"bits": 2}, {"type": "float"}):
        assert form(**others) is None  # type: ignore[arg-type]
    for wrong in (("I32", (36, 8)), ("I32", (5, 4)), ("I8", (5, 8)), ("F32", (36, 8))):
        assert form(zeros=wrong) is None
    for bits in (4, 8):  # packed, of codes that are not
        assert form(of_bytes, zeros=("I32", (-(-36 * bits // 32), 8)), bits=bits) is None


def with_groups(folder: Path, leaf: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the groups of inputs of some matrices, in one shard."""

    def changed(name: str, tensor: torch.Tensor) -> quantized.Named:
        yield name, change(tensor).contiguous() if re.search(rf"{leaf}\.g_idx$", name) else tensor

    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    quantized.rewrite(folder, changed, None, 1)


def test_model_multiplied_from_codes_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(split(CODED["mxfp4-gpt_oss"][0](tmp_path / "model")), exact=False)
    assert "dequantized" not in caplog.text
