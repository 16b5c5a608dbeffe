"""4bit products of GPUs: memory is reserved for the dequantized parts of a pass only, and no pass takes more; quantized
scales are multiplied as they are stored, with the same bits.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.load_plan import LoadPlan, is_near, make_load_plan
from rabbitllm.engine.placement import SLOTS, Tier
from rabbitllm.engine.span_reader import BLOCK
from rabbitllm.estimate.machine import Machine
from rabbitllm.estimate.outline import published
from rabbitllm.estimate.predict import stretched
from rabbitllm.quant import products
from rabbitllm.quant.products import FusedMatrix, QuantizedMatrix
from rabbitllm.quant.schemes import Quantized, bitsandbytes
from rabbitllm.splitter.plan import PlannedFiles
from rabbitllm.store.layer_store import LayerStore
from tests.engine.test_fake_gpu import load_on
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.tiny_models import ALL, split

GIB = 1 << 30
MADE_FOR_EACH_USE = (Tier.PACKED, Tier.PINNED, Tier.STREAMED)
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}


def plan_of_72b(folder: Path, compression: str, right: Sequence[str]) -> LoadPlan:
    """Qwen2.5-72B on two T4 with 12 GiB for weights on each; the kernels of these devices are right."""
    model = next(entry for entry in published() if entry.repository == "Qwen/Qwen2.5-72B-Instruct")
    (folder / "config.json").write_text(json.dumps(model.outline.sample))
    gpus = [FakeGpu(index, has_bf16=False) for index in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rabbitllm.engine.load_plan._is_right", lambda device, *trial: device.name in right)
        files = PlannedFiles(model.outline.plans[compression], folder / "split")
        options = RunOptions(max_memory={**{gpu.name: 12 * GIB for gpu in gpus}, "cpu": 20 * GIB})
        sample = make_load_plan(files, options, folder, gpus)
        return stretched(sample, model.outline.layers, Machine(gpus, options))


def by_bitsandbytes(matrix: FusedMatrix, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product by the function that bitsandbytes documents."""
    functions, form = bitsandbytes(), matrix.form
    state = functions.functional.QuantState(
        matrix.absmax, torch.Size(form.shape), matrix.table, 64, "nf4", getattr(torch, str(form.dtype))
    )
    product: torch.Tensor = functions.matmul_4bit(x, matrix.payload.view(-1, 1).t(), quant_state=state, bias=bias)
    return product


@pytest.mark.parametrize(("compression", "packed", "dequantized"), [("4bit", 45, 37), ("4bit-double", 50, 41)])
def test_layers_multiplied_from_codes_need_no_memory_for_matrices(
    tmp_path: Path, compression: str, packed: int, dequantized: int
) -> None:
    names = ("fake:0", "fake:1")
    for right, expected in ((names, packed), (names[:1], dequantized), ((), dequantized)):
        plan = plan_of_72b(tmp_path, compression, right)
        units = [placed for placed in plan.placement.units if ".layers." in placed.unit]
        assert sum(placed.tier is Tier.PACKED for placed in units) == expected
        used = plan.as_multiplied().sources
        for device, limit in plan.placement.limits.items():
            placed_units = [p for p in plan.placement.units if p.device == device and p.tier in MADE_FOR_EACH_USE]
            kept = sum(placed.stored for placed in placed_units if placed.tier is Tier.PACKED)
            scratch = max(used[placed.unit].scratch_bytes for placed in placed_units)
            slots = SLOTS * max(placed.stored for placed in placed_units if placed.tier is not Tier.PACKED)
            assert kept + slots + scratch <= limit
            assert (scratch < 0.2e9) is (device in right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [64, 192, 4096])
def test_quantized_scales_are_multiplied_as_they_are_stored(
    columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By bitsandbytes' own operation, whole and in parts, with the last block of scales full or not."""
    rows = 300
    generator = torch.Generator().manual_seed(0)
    codes, state = bitsandbytes().functional.quantize_4bit(
        torch.randn(rows, columns, generator=generator).to(dtype), quant_type="nf4", compress_statistics=True
    )
    form = Quantized("4bit-double", (rows, columns), str(dtype).removeprefix("torch."), float(state.offset))
    stored = [codes, state.absmax, state.code, state.state2.absmax, state.state2.code]
    parts: Any = dict.fromkeys(range(5))  # `of` asks for them in this order
    matrix, expanded = (cls.of(form, list(parts), stored.__getitem__) for cls in (FusedMatrix, QuantizedMatrix))
    plain = FusedMatrix(expanded.form, expanded.payload, expanded.absmax, expanded.table)
    assert (matrix.absmax.dtype, plain.absmax.dtype) == (torch.uint8, torch.float32)
    assert FusedMatrix.scale_bytes(form) == 0 < QuantizedMatrix.scale_bytes(form) == plain.absmax.nbytes
    assert torch.equal(matrix.dequantized(dtype), plain.dequantized(dtype))
    multiply, calls = products.multiply_4bit, []

    def counted(form: Any, *args: Any) -> torch.Tensor:
        calls.append((args[-1] is not None, form.shape[0]))
        return multiply(form, *args)

    monkeypatch.setattr(products, "multiply_4bit", counted)
    for limit in (products.FUSED_ELEMENTS, 70 * columns):
        monkeypatch.setattr(products, "FUSED_ELEMENTS", limit)
        for count in (1, 6, 40):
            x = torch.randn(count, columns, generator=generator).to(dtype)
            for bias in (None, torch.randn(rows, generator=generator).to(dtype)):
                calls.clear()
                product = matrix.clone().linear(x, bias)
                parts_of = [size for nested, size in calls if nested]
                assert sum(parts_of) == rows
                assert (len(parts_of) > 1) is (count > products.FEW_INPUTS and limit == 70 * columns)
                expected = plain.linear(x, bias)
                assert torch.equal(by_bitsandbytes(plain, x, bias), expected)
                assert torch.equal(product, expected) or (len(parts_of) > 1 and is_near(product, expected))


def multiply_as_a_gpu(ordinary: Any, form: Any, *args: Any) -> torch.Tensor:
    """bitsandbytes' fallback on a GPU (0.50, `_dequant_linear_fallback`): the test device does not see inside of it."""
    x, nested = args[2], args[4]
    held = []
    if len(x) > products.FEW_INPUTS:
        if nested is not None:
            held = [x.new_empty(args[1].shape, dtype=torch.float32) for _ in range(2)]
        held.append(x.new_empty(form.shape))
    result: torch.Tensor = ordinary(form, *args)
    return result


def tightest(folder: Path, gpu: FakeGpu, packed: int) -> int:
    """The smallest limit with so many packed layers."""

    def count(budget: int) -> int:
        options = RunOptions(max_memory={gpu.name: budget, "cpu": 0})
        units = make_load_plan(LayerStore(folder), options, folder, [gpu]).placement.units
        return sum(placed.tier is Tier.PACKED for placed in units if ".layers." in placed.unit)

    low, high = 0, 8 << 20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if count(middle) >= packed else (middle, high)
    return high


@pytest.mark.parametrize("compression", ["4bit", "4bit-double"])
@pytest.mark.parametrize("has_bf16", [True, False])
def test_passes_of_any_number_of_rows_stay_within_the_limit(
    tmp_path: Path, compression: str, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rabbitllm.engine.load_plan._is_right", lambda *trial: True)
    monkeypatch.setattr(products, "FUSED_ELEMENTS", 1 << 17)
    multiply = functools.partial(multiply_as_a_gpu, products.multiply_4bit)
    monkeypatch.setattr(products, "multiply_4bit", multiply)
    directory = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **SIZES), compression)
    rows = (1, 4, 5, 48)
    gpu = FakeGpu(0, capacity=ALL, has_bf16=has_bf16)
    activations = {}
    with watched(), torch.inference_mode():
        resident = load_on([gpu], directory, ALL, exact=False)
        assert resident.placement.is_resident
        for count in rows:
            activations[count] = peak_of_a_pass(gpu, resident, count) - gpu.used
        del resident
    limit = tightest(directory, gpu, 3)
    with watched(), torch.inference_mode():
        gpu = FakeGpu(0, capacity=ALL, has_bf16=has_bf16)
        model = load_on([gpu], directory, limit, exact=False)
        kinds = Counter(placed.tier for placed in model.placement.units if ".layers." in placed.unit)
        assert kinds == {Tier.PACKED: 3, Tier.STREAMED: 5}
        blocks = (3 + SLOTS) * BLOCK  # to which buffers are rounded
        for count in rows:
            part = 2 * count * SIZES["intermediate_size"] // 2  # of a result, before it is joined with the others
            assert peak_of_a_pass(gpu, model, count) <= limit + activations[count] + blocks + part, count


def peak_of_a_pass(gpu: FakeGpu, model: Any, rows: int) -> int:
    ids = torch.arange(rows)[None].to(model.device)
    gpu.peak = gpu.used
    model(ids, use_cache=False, logits_to_keep=1)
    return gpu.peak
