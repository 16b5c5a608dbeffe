"""The experts of few tokens in one call have the bits of the model's own class, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from rabbitllm.base.programs import Program
from rabbitllm.engine import _expert_pool, _routed
from rabbitllm.engine._attention import relative_error
from rabbitllm.engine._fusing import replace
from rabbitllm.engine._gates import OneCall
from rabbitllm.engine.experts import ExpertStack, MappedExperts, ResidentExperts
from rabbitllm.engine.span_reader import SpanReader
from rabbitllm.quant import _kernels, _vectors
from rabbitllm.quant.joint import JointProduct
from rabbitllm.quant.products import MAX_GROUPED
from tests.engine.test_attention import GEMMA, PHI
from tests.engine.test_siblings import SIZES, assert_same_logits, checkpoint
from tests.support import quantized
from tests.support.builders import build_checkpoint
from tests.support.kernel_rows import plain_products as plain_products
from tests.support.tiny_models import ALL, budget_that_keeps, load, split

pytestmark = [pytest.mark.bits, pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used")]

MANY = {"num_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 256}
FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3_moe": ("4bit", MANY),
    "qwen3_next": ("q8_0", {**MANY, "shared_expert_intermediate_size": 256, "num_hidden_layers": 4}),
    "mixtral": ("q4_k_m", {"num_local_experts": 24, "num_experts_per_tok": 3}),
    "deepseek_v3": ("8bit", {"n_routed_experts": 24, "num_experts_per_tok": 3, "moe_intermediate_size": 256}),
    "gpt_oss": ("4bit", {"num_local_experts": 24, "num_experts_per_tok": 3, "layer_types": ["full_attention"] * 2}),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The tokens of each module of experts that was not left to its class, and the programs that it ran."""
    counted, compute, run, programs = list[tuple[int, int]](), _routed._computed, Program.__call__, list[int]()

    def computed(form: Any, module: Any, stacks: Any, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor | None:
        del programs[:]
        if (result := compute(form, module, stacks, x, *routing)) is not None:
            counted.append((len(x), len(programs)))
        return result

    def ran(self: Program, *addresses: int, **more: Any) -> None:
        programs.append(1)
        run(self, *addresses, **more)

    monkeypatch.setattr(_routed, "_adds_alike", lambda sums, threads: True)  # it runs programs, too
    monkeypatch.setattr(_routed, "_computed", computed)
    monkeypatch.setattr(Program, "__call__", ran)
    return counted


class BothGated(nn.Module):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate.sigmoid() * up


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


@pytest.mark.parametrize(
    ("family", "kept"),
    [("qwen3_moe", "a quarter"), *((family, kept) for family in FAMILIES for kept in ("resident", "streamed"))],
)
def test_a_model_has_the_same_logits(
    tmp_path: Path, family: str, kept: str, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compression, settings = FAMILIES[family]
    directory = checkpoint(tmp_path, family, compression, **settings)
    quarter = kept == "a quarter"
    budget = budget_that_keeps(directory, 0.25, exact=False) if quarter else ALL * (kept == "resident")
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_mixtures", lambda model: 0)  # which computes some of the steps
    assert_same_logits(directory, budget, "fuse_experts", "Experts", monkeypatch)
    layers = {"deepseek_v3": 1, "qwen3_next": 4}.get(family, 2)
    steps = [programs for tokens, programs in calls if tokens == 1]
    assert len(steps) == 4 * layers
    assert set(steps) == {1} or kept != "resident"
    assert max(steps) <= 4  # those that arrive one after the other, and the sum


@pytest.mark.usefixtures("plain_products")
@torch.no_grad()
def test_bits_of_few_tokens_do_not_depend_on_what_was_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that are in memory, and those that pass through it, are multiplied by the same kernels."""
    monkeypatch.setattr(_expert_pool, "MAX_TRANSIT", 3)  # as of large experts: fewer than a text uses
    settings: dict[str, Any] = {**MANY, "num_experts": 48, "shared_expert_intermediate_size": 256}
    settings["layer_types"] = ["linear_attention", "full_attention"]
    directory = checkpoint(tmp_path, "qwen3_next", None, **settings)
    options: dict[str, Any] = {"exact": False, "fast_bfloat16": True}
    budget, generator = budget_that_keeps(directory, 0.5, **options), torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 300, (1, 4), generator=generator) for _ in range(4)]
    expected = [load(directory, budget, **options)(text).logits for text in texts]
    model, others = load(directory, budget, **options), torch.randint(3, 300, (2, 1, 40), generator=generator)
    (pool,) = model.streamer.pools.values()
    assert 0 < pool.cache.slots < sum(source.experts for source in pool.sources)
    for half, other in enumerate(others):
        uses = {name: np.zeros_like(values) for name, values in pool.uses().items()}
        for values in uses.values():
            values[:, half::2] = 1e6  # they stay: of the others more are used than there is memory for
        pool.warm(uses)
        model(other)
        assert all(torch.equal(model(text).logits, result) for text, result in zip(texts, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_bits_of_the_class_for_any_rows_and_threads(tmp_path: Path, family: str, calls: list[tuple[int, int]]) -> None:
    compression, settings = FAMILIES[family]
    module = experts_of(load(checkpoint(tmp_path, family, compression, **settings), exact=False))[-1]
    generator = torch.Generator().manual_seed(0)
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (1, 3, 5):
            for dtype in (torch.bfloat16, torch.float32):
                x = (torch.randn(rows, 256, generator=generator) * 10.0 ** (rows - 2)).bfloat16()
                index = torch.stack([torch.randperm(24, generator=generator)[:3] for _ in range(rows)])
                index[-1] = index[0].flip(0)  # experts of several rows
                weights = torch.rand(rows, 3, generator=generator).to(dtype)
                assert torch.equal(module(x, index, weights), type(module).forward(module, x, index, weights))
    torch.set_num_threads(before)
    assert calls == [(rows, 1) for rows in (1, 3, 5) for _ in range(2)] * 2


@torch.no_grad()
def test_an_expert_that_a_token_chooses_twice(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    """As DeepSeek-V4's hashes of tokens may choose."""
    module = experts_of(load(checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY), exact=False))[-1]
    weights, x = torch.rand(1, 3).bfloat16(), torch.randn(1, 256).bfloat16()
    for index in (torch.tensor([[5, 5, 2]]), torch.tensor([[7, 7, 7]])):
        assert torch.equal(module(x, index, weights), type(module).forward(module, x, index, weights))
    assert calls == [(1, 1)] * 2


@torch.no_grad()
def test_bits_do_not_depend_on_which_experts_are_in_memory(tmp_path: Path) -> None:
    """In bfloat16, whose experts in memory are multiplied where they are; `serve --exact` promises it."""
    settings = {**FAMILIES["qwen3_next"][1], "head_dim": 64, "num_experts": 12, "num_local_experts": 12}
    settings |= {"moe_intermediate_size": 512}
    directory = checkpoint(tmp_path, "qwen3_next", None, **settings)
    options = {"exact": False, "fast_bfloat16": None}
    nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    model = load(directory, nbytes // 2, **options)
    assert any(0 < pool.slots < pool.experts for pool in model.placement.pools)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 250, (1, tokens), generator=generator) for tokens in (2, 3, 5, 7, 8, 11, 17, 40)]
    first = [model(prompt).logits for prompt in prompts]
    for index in torch.randperm(12 * len(prompts), generator=generator).tolist():
        index %= len(prompts)
        others = int(torch.randint(1, 13, (), generator=generator))
        model(torch.randint(3, 250, (1, others), generator=generator))
        assert torch.equal(model(prompts[index]).logits, first[index])


@pytest.mark.parametrize(
    ("family", "budget"),
    [("qwen3_moe", 0), ("mixtral", 0), ("deepseek_v3", 0), ("gpt_oss", 8_000_000), ("awq", 0), ("gptq", 0)],
)
@torch.no_grad()
def test_many_tokens_of_experts_that_come_and_go(
    tmp_path: Path, family: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert is one read, and has the results of the class, which reads it leaf by leaf; some have many rows."""
    if family == "gpt_oss":  # with biases
        directory = split(UNCOMPRESSED["mxfp4"](tmp_path / "model"))
    elif family in STREAMED:
        directory = STREAMED[family](tmp_path / "model")
    else:
        compression, settings = FAMILIES[family]
        directory = checkpoint(tmp_path, family, compression, **settings)
    monkeypatch.setattr("rabbitllm.engine._expert_pool.MAX_TRANSIT", 4)
    model, reads = load(directory, budget, exact=False, dtype="bfloat16"), list[int]()
    module, read = experts_of(model)[-1], SpanReader.read

    def noted(self: SpanReader, spans: Any, buffer: memoryview) -> None:
        reads.append(len(spans))
        if len(reads) == failing:
            raise OSError(5, "the disk said no")
        read(self, spans, buffer)

    monkeypatch.setattr(SpanReader, "read", noted)
    for rows in (40, MAX_GROUPED // 3 + 1):
        for dtype in (torch.bfloat16, torch.float32):
            index = torch.stack([torch.randperm(module.num_experts)[:3] for _ in range(rows)])
            index[:, 0] = torch.where(torch.rand(rows) < 0.7, 5, index[:, 0])  # one with many rows, also twice a token
            x, weights = torch.randn(rows, 256).bfloat16(), torch.rand(rows, 3).to(dtype)
            reads.clear()
            failing = 5
            with pytest.raises(OSError, match="the disk said no"):
                module(x, index, weights)
            failing = 0
            reads.clear()
            result = module(x, index, weights)
            assert len(reads) <= module.num_experts
            assert torch.equal(result, type(module).forward(module, x, index, weights))


@torch.no_grad()
def test_forward_without_hooks_after_experts_were_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be called again in the same pass, when others are in the slots of those that were read ahead."""
    directory = checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY)
    monkeypatch.setattr("rabbitllm.engine._expert_pool.MAX_TRANSIT", 8)
    model = load(directory, 0, exact=False)
    (first, second), rows, (pool,) = experts_of(model), 2 * MAX_GROUPED // 3, model.streamer.pools.values()
    index = torch.stack([torch.randperm(24)[:3] for _ in range(rows)])
    given = torch.randn(rows, 256).bfloat16(), index, torch.rand(rows, 3)
    expected = second(*given)
    first(*given)
    assert len(pool._ahead[2]) == 4
    for _ in range(2):
        assert torch.equal(second.forward(*given), expected)


@torch.no_grad()
def test_no_other_expert_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, each = (
        load(checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY), exact=False),
        list[Any](),
        MappedExperts.each,
    )

    def noted(self: MappedExperts, leaf: str, experts: Sequence[int]) -> Any:
        asked.append((leaf, *experts))
        return each(self, leaf, experts)

    monkeypatch.setattr(MappedExperts, "each", noted)
    (first, *_), x = experts_of(model), torch.randn(1, 256).bfloat16()
    first(x, torch.tensor([[7, 2, 19]]), torch.ones(1, 3))
    assert asked == [("down_proj", 2, 7, 19), ("gate_up_proj", 2, 7, 19)]


@pytest.mark.parametrize("compression", ["4bit", None])
@torch.no_grad()
def test_experts_that_stay_are_asked_for_once(
    tmp_path: Path, compression: str | None, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then their matrices may be replaced."""
    folder = UNCOMPRESSED["bfloat16"](tmp_path / "model")
    first, second = experts_of(load(split(folder, compression), exact=False))
    weights, x = torch.rand(2, 3).bfloat16(), torch.randn(2, 256).bfloat16()
    index = torch.tensor([[7, 2, 19], [2, 7, 8]])
    expected = first(x, index, weights)
    with monkeypatch.context() as patch:
        for name in ("each", "order"):
            patch.setattr(ResidentExperts, name, None)
        assert torch.equal(first(x, index, weights), expected)
        assert torch.equal(first(x[1:], index[1:], weights[1:]), expected[1:])
        with pytest.raises(TypeError):  # of 23 nothing is known
            first(x, index + 4, weights)
        patch.setattr(_routed.KeptExperts, "batches", None)  # those of one token are not even grouped
        assert torch.equal(first(x[1:], index[1:], weights[1:]), expected[1:])
    assert calls == [(2, 1), (2, 1), (1, 1), (1, 1)]
    for name in ("down_proj", "gate_up_proj"):
        first._parameters[name] = second._parameters[name]
        result = first(x, index, weights)
        assert not torch.equal(result, expected)
        expected = result
    assert torch.equal(result, second(x, index, weights))
    assert len(calls) == 7


@torch.no_grad()
def test_data_of_another_form_at_the_same_address(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    """As what leaves out every other expert sets it."""
    folder = UNCOMPRESSED["bfloat16"](tmp_path / "model")
    module = experts_of(load(split(folder, None), exact=False))[0]
    x, index, weights = torch.randn(1, 256).bfloat16(), torch.tensor([[7, 2, 9]]), torch.rand(1, 3).bfloat16()
    weight = module._parameters["gate_up_proj"]
    twice = torch.randn(2 * len(weight), *weight.shape[1:]).bfloat16() / 16
    for data in (twice[: len(weight)], twice[::2]):
        weight.data = data
        expected = type(module).forward(module, x, index, weights)
        assert relative_error(module(x, index, weights), expected) < 1 / 256
    assert calls == [(1, 1)] * 2


class DoubledWeight(nn.Module):
    """A parametrization, as an adapter's."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@pytest.mark.parametrize(("compression", "path"), [(None, "experts"), ("4bit", "q_proj"), ("4bit", "norm")])
@torch.no_grad()
def test_a_parametrized_weight_is_used(tmp_path: Path, compression: str | None, path: str) -> None:
    folder = UNCOMPRESSED["bfloat16"](tmp_path / "model")
    model = load(split(folder, compression), exact=False)
    layer = model.model.layers[0]
    module = {"experts": layer.mlp.experts, "q_proj": layer.self_attn.q_proj, "norm": layer.input_layernorm}[path]
    x, more = torch.randn(1, 256).bfloat16(), (torch.tensor([[7, 2, 9]]), torch.rand(1, 3).bfloat16())
    given = (x, *more) if path == "experts" else (x,)
    name = "down_proj" if path == "experts" else "weight"
    plain = module(*given)
    nn.utils.parametrize.register_parametrization(module, name, DoubledWeight())
    for _ in range(2):
        assert relative_error(module(*given), plain * 2) < 1 / 64


@torch.no_grad()
def test_rows_of_another_width_are_refused_as_by_the_class(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    module = experts_of(load(checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY), exact=False))[0]
    for x in (torch.ones(1, 128).bfloat16(), torch.ones(1, 512).bfloat16()):
        with pytest.raises(RuntimeError):
            module(x, torch.tensor([[7, 2, 19]]), torch.ones(1, 3))
    assert not calls


@torch.no_grad()
def test_what_is_left_to_the_class(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    model = load(checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY), exact=False)
    module = experts_of(model)[0]
    index, weights = torch.tensor([[7, 2, 19]]), torch.rand(1, 3)

    def assert_same(rows: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        x = torch.randn(rows, 256, dtype=dtype)
        routing = index.expand(rows, 3), weights.expand(rows, 3).contiguous()
        result: torch.Tensor = module(x, *routing)
        assert torch.equal(result, type(module).forward(module, x, *routing))
        return result

    assert_same()
    assert calls == [(1, 1)]
    del calls[:]
    assert_same(33)  # of one expert
    assert_same(dtype=torch.float32)
    with torch.enable_grad():
        assert_same()
    seen = list[torch.Tensor]()
    hook = module.act_fn.register_forward_hook(lambda module, args, output: seen.append(output))
    assert_same()
    hook.remove()
    assert len(seen) == 2
    model.set_experts_implementation("eager")
    assert_same()
    model.set_experts_implementation("grouped_mm")
    module.act_fn = nn.Tanh()
    assert_same()
    assert not calls
    with pytest.raises(IndexError):
        module._parameters["gate_up_proj"][24]
    hook = module.register_forward_hook(lambda module, args, output: output * 0)
    module.act_fn = nn.SiLU()
    assert not module(torch.randn(1, 256).bfloat16(), index, weights).any()  # a hook on what it returns


@torch.no_grad()
def test_a_class_that_computes_something_else_is_not_replaced() -> None:
    class Limited(Qwen3MoeExperts):  # type: ignore[misc]
        def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
            gate, up = both.chunk(2, -1)
            return self.act_fn(gate) * up.clamp(-1, 1)  # type: ignore[no-any-return]

    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=128, num_experts=4, hidden_act="silu")
    for kind, has_bits in ((Qwen3MoeExperts, True), (Limited, False)):
        form = _routed._ExpertsForm.of(kind(config))
        assert form is not None
        assert _routed._has_bits(kind(config), form) is has_bits


@pytest.mark.parametrize("act", [nn.Bilinear(2, 2, 2), nn.Sequential(nn.SiLU()), BothGated()])
def test_an_activation_with_parts_or_of_two_tensors_is_left_to_the_class(act: nn.Module) -> None:
    """Such as Inkling 2's, which bounds gates and factors."""
    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=128, num_experts=4)
    experts = Qwen3MoeExperts(config)
    experts.act_fn = act
    assert _routed.fuse_experts(experts) == 0


@torch.no_grad()
@pytest.mark.parametrize("own", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("used", "width"), [(10, 2048), (3, 256), (1, 64), (10, 64), (20, 2048)])
def test_sums_have_torchs_order_or_are_left_to_it(used: int, width: int, own: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for is_wide, dtype in enumerate((own, torch.float32)):
        sums = _routed._ExpertSums(2, used, width, bool(is_wide), own)
        products = (torch.randn(2 * used, width, generator=generator) * 1e3).to(own)
        weights = torch.rand(2, used, generator=generator).to(dtype)
        expected = (products.view(2, used, width) * weights.unsqueeze(-1)).sum(1).to(own)
        result = sums(products.flip(0), weights, _routed.array("q", reversed(range(2 * used))))
        is_alike = _routed._adds_alike(sums, torch.get_num_threads())
        assert torch.equal(result, expected) or not is_alike
        assert is_alike or (used, width) in ((10, 64), (20, 2048))


OSS = {"num_local_experts": 24, "num_experts_per_tok": 3, "num_hidden_layers": 3}
UNCOMPRESSED: dict[str, Callable[[Path], Path]] = {
    "bfloat16": lambda folder: build_checkpoint(folder, "qwen3_moe", dtype=torch.bfloat16, **{**SIZES, **MANY}),
    "float32": lambda folder: build_checkpoint(folder, "qwen3_moe", dtype=torch.float32, **{**SIZES, **MANY}),
    "float16": lambda folder: build_checkpoint(folder, "qwen3_moe", dtype=torch.float16, **{**SIZES, **MANY}),
    "turned": lambda folder: build_checkpoint(folder, "gpt_oss", dtype=torch.bfloat16, **{**SIZES, **OSS}),
    "fp8": lambda folder: quantized.build_fp8(folder, "qwen3_moe", **{**SIZES, **MANY}),
    "awq": lambda folder: quantized.build_awq(folder, "qwen3_moe", folder.parent / "plain", **{**SIZES, **MANY}),
    "gptq": lambda folder: quantized.build_gptq(folder, "qwen3_moe", folder.parent / "plain", **{**SIZES, **MANY}),
    "mxfp4": lambda folder: quantized.build_mxfp4(folder, **{**SIZES, **OSS, "head_dim": 64}),
}
"""Forms that are not the package's own -> a checkpoint with them."""
AS_BFLOAT16 = "bfloat16", "gptq"
"""Those whose experts are multiplied as matrices of bfloat16."""


@pytest.mark.parametrize(
    ("form", "budget"),
    [
        *((form, ALL) for form in ("bfloat16", "float32", "turned", "fp8", "mxfp4", "awq")),
        ("bfloat16", 3_000_000),
        pytest.param("float16", ALL, marks=pytest.mark.long),
        pytest.param("gptq", ALL, marks=pytest.mark.long),
        *(
            pytest.param(form, 3_000_000, marks=pytest.mark.long)
            for form in ("float32", "float16", "fp8", "awq", "gptq")
        ),
    ],
)
@pytest.mark.usefixtures("plain_products")
@torch.no_grad()
def test_only_chosen_experts_are_touched(
    tmp_path: Path, form: str, budget: int, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = "bfloat16" if form in (*AS_BFLOAT16, "awq") else None  # AWQ and GPTQ publish float16
    model = load(split(UNCOMPRESSED[form](tmp_path / "model")), budget, exact=False, dtype=dtype)
    module = experts_of(model)[0]
    seen, each, grouped = set[int](), ResidentExperts.each, torch.nn.functional.grouped_mm

    def noted(self: ResidentExperts, leaf: str, experts: Sequence[int]) -> Any:
        seen.update(experts)
        return each(self, leaf, experts)

    def by_expert(x: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
        assert isinstance(weight, ExpertStack)  # of a tensor it would walk all experts
        return grouped(x, weight, **more)

    monkeypatch.setattr(ResidentExperts, "each", noted)
    for rows in (1, 3):
        x = torch.randn(rows, 256).to(model.dtype)
        index = torch.tensor([[7, 2, 19], [2, 7, 8], [23, 0, 7]])[:rows]
        weights = torch.rand(rows, 3).to(model.dtype)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "grouped_mm", by_expert)
            result = module(x, index, weights)
        del module.forward
        expected = module(x, index, weights)
        replace(module, _routed._forward, _routed._ExpertsForm.of(module))
        assert seen == (set(index.flatten().tolist()) if budget == ALL else set())
        if form in (*AS_BFLOAT16, "turned"):  # sums of another order
            assert relative_error(result, expected) < 1 / 256
        else:
            assert torch.equal(result, expected)
    assert [tokens for tokens, _ in calls] == ([] if form in ("float32", "float16") else [1, 3])


@torch.no_grad()
def test_many_tokens_of_turned_experts(tmp_path: Path) -> None:
    """More than a call of few tokens takes; torch needs seconds for each expert where it has no instructions."""
    module = experts_of(load(split(UNCOMPRESSED["turned"](tmp_path / "model")), exact=False))[0]
    x, index = torch.randn(MAX_GROUPED, 256).bfloat16(), torch.randint(module.num_experts, (MAX_GROUPED, 2))
    weights = torch.rand(index.shape).bfloat16()
    result, forward = module(x, index, weights), vars(module).pop("forward")
    assert relative_error(result, module(x, index, weights)) < 1 / 256
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rabbitllm.quant.turned.is_faster", lambda: False)
        assert torch.equal(forward(x, index, weights), module(x, index, weights))


def test_gpt_oss_as_published_has_the_same_logits(
    tmp_path: Path, calls: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed, its biases with its layers."""
    directory = split(UNCOMPRESSED["mxfp4"](tmp_path / "model"))
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_mixtures", lambda model: 0)  # which computes some of the steps
    assert_same_logits(directory, 3_000_000, "fuse_experts", "Experts", monkeypatch)
    assert [tokens for tokens, _ in calls] == [4] * 3 + [1] * 3 * 4


@torch.no_grad()
def test_biases_with_gaps_are_left_to_the_class(tmp_path: Path, calls: list[tuple[int, int]]) -> None:
    model = load(split(UNCOMPRESSED["mxfp4"](tmp_path / "model")), ALL, exact=False)
    module = experts_of(model)[0]
    x, weights, index = torch.randn(1, 256).bfloat16(), torch.rand(1, 2).bfloat16(), torch.tensor([[0, 2]])
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        bias = module._parameters[name]
        bias.data = torch.randn(bias.shape).bfloat16()
        expected = module(x, index, weights)
        assert len(calls) == 1
        bias.data = bias.data.t().contiguous().t()
        result = module(x, index, weights)
        assert len(calls) == 1
        assert relative_error(result, expected) < 1 / 256
        bias.data = bias.data.contiguous()
        calls.clear()


@torch.no_grad()
def test_pairs_that_are_gated_otherwise_are_left_to_the_class() -> None:
    class Unlimited(GptOssExperts):  # type: ignore[misc]
        def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
            gate, up = both[..., ::2], both[..., 1::2].clamp(-self.limit, self.limit)
            return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    config = GptOssConfig(hidden_size=64, intermediate_size=128, num_local_experts=4)
    for kind, has_bits in ((GptOssExperts, True), (Unlimited, False)):
        form = _routed._ExpertsForm.of(kind(config))
        assert form == _routed._ExpertsForm(None, (1.702, 7.0), True, True)
        assert _routed._has_bits(kind(config), form) is has_bits


class _Operations(TorchDispatchMode):
    """The names of the operations of torch within the layers of a model."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.names, self._is_within = list[str](), False
        for layer in layers:
            layer.register_forward_pre_hook(lambda *given: self._enter(True))
            layer.register_forward_hook(lambda *given: self._enter(False))

    def _enter(self, is_within: bool) -> None:
        self._is_within = is_within

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [func.name()] * self._is_within
        return func(*args, **(kwargs or {}))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The products by kernels that are not within a call of the experts."""
    counted = list[str]()
    for owner, name in ((JointProduct, "__call__"), (OneCall, "__call__"), (_kernels, "run")):
        ordinary = getattr(owner, name)

        def ran(*given: Any, ordinary: Any = ordinary) -> Any:
            counted.append("of codes")
            return ordinary(*given)

        monkeypatch.setattr(owner, name, ran)
    return counted


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Qwen3-Next's kind, with 512 experts a layer of which a token uses 10; 50 MB."""
    sizes = {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    many = {**SIZES, **sizes, "num_experts": 512, "num_experts_per_tok": 10}
    kinds = {"layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 32}
    return build_checkpoint(tmp_path_factory.mktemp("many"), "qwen3_next", dtype=torch.bfloat16, **many, **kinds)


@pytest.mark.parametrize(
    ("compression", "budget"),
    [
        (None, ALL),
        ("4bit", 8_000_000),
        pytest.param(None, 25_000_000, marks=pytest.mark.long),
        pytest.param("4bit", ALL, marks=pytest.mark.long),
    ],
)
@torch.no_grad()
def test_a_decode_step_takes_few_operations(
    many_experts: Path,
    compression: str | None,
    budget: int,
    calls: list[tuple[int, int]],
    products: list[str],
) -> None:
    """After a prompt of which tokens used most experts."""
    model = load(split(many_experts, compression), budget, exact=False)
    assert bool(model.placement.pools) is (budget < ALL)
    layers, operations = model.model.layers, _Operations(model.model.layers)
    output = model(torch.arange(300)[None], use_cache=True)
    for token in (7, 9):
        del products[:], calls[:], operations.names[:]
        with operations:
            output = model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
    is_within = compression is not None and budget < ALL  # a call of more than the experts
    assert [tokens for tokens, _ in calls] == ([] if is_within else [1, 1])
    products += [name for name in operations.names if "mm" in name]
    assert is_within or 3 * len(layers) < len(products) + len(calls)
    assert len(products) + len(calls) <= 10 * len(layers), products
    assert len(operations.names) <= (92 if compression is None else 42) * len(layers), operations.names


EIGHT = {**SIZES, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 64}
"""Of each token, of more experts than half of the memory and what is needed to read them have room for."""
STREAMED: dict[str, Callable[[Path], Path]] = {
    "bfloat16": lambda folder: split(build_checkpoint(folder, "qwen3_moe", dtype=torch.bfloat16, **EIGHT)),
    **{
        scheme: lambda folder, scheme=scheme: checkpoint(folder.parent, "qwen3_moe", scheme, **EIGHT)  # type: ignore[misc]
        for scheme in ("4bit", "8bit")
    },
    "q4_k_m": lambda folder: checkpoint(
        folder.parent, "qwen3_moe", "q4_k_m", **{**EIGHT, "moe_intermediate_size": 256}
    ),
    "fp8": lambda folder: split(quantized.build_fp8(folder, "qwen3_moe", 32, **EIGHT)),
    "mxfp8": lambda folder: split(quantized.build_mxfp8(folder, "qwen3_moe", **EIGHT)),
    "mxfp4": lambda folder: split(
        quantized.build_mxfp4(
            folder, **{**SIZES, **OSS, "num_local_experts": 64, "num_experts_per_tok": 8, "head_dim": 64}
        )
    ),
    "awq": lambda folder: split(quantized.build_awq(folder, "qwen3_moe", folder.parent / "plain", group=32, **EIGHT)),
    "gptq": lambda folder: split(
        quantized.build_gptq(folder, "qwen3_moe", folder.parent / "plain", group=64, ordered=True, **EIGHT)
    ),
    **{
        f"gptq of {bits} bits in any order": lambda folder, bits=bits: split(  # type: ignore[misc]
            quantized.build_gptq(folder, "qwen3_moe", folder.parent / "plain", bits, group=64, **EIGHT)
        )
        for bits in (4, 8)
    },
    **{
        scheme: lambda folder, scheme=scheme: split(  # type: ignore[misc]
            quantized.build_compressed_tensors(folder, "qwen3_moe", scheme, **EIGHT)
        )
        for scheme in ("W4A16", "MXFP4A16", "NVFP4A16", "W8A16", "W4A16-asymmetric", "INT8-asymmetric", "W8A8")
    },
    "fp8-static": lambda folder: split(quantized.build_fp8_static(folder, "qwen3_moe", **EIGHT)),
    **{
        form: lambda folder, form=form: split(  # type: ignore[misc]
            quantized.build_modelopt(folder, "qwen3_moe", form, folder.parent / "plain", **EIGHT)
        )
        for form in ("NVFP4", "FP8", "FP8_PB_WO")
    },
    "bitsandbytes": lambda folder: split(quantized.build_bitsandbytes(folder, "qwen3_moe", 4)),
}
"""Form -> a split directory of a mixture in it."""
SHORT_FORMS = "bfloat16", "q4_k_m", "fp8", "mxfp4", "awq", "gptq of 8 bits in any order", "NVFP4", "W8A8"


@pytest.mark.parametrize("kept", ["all", "half"])
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.long] * (form not in SHORT_FORMS)) for form in STREAMED]
)
@torch.no_grad()
def test_a_decode_step_takes_few_operations_in_every_form(
    tmp_path: Path, form: str, kept: str, calls: list[tuple[int, int]], products: list[str]
) -> None:
    """Experts that are read are multiplied as those that stay are: by one call. After a prompt that used nearly all."""
    if form.startswith(("W", "INT8")) or form.endswith("A16"):
        pytest.importorskip("compressed_tensors")
    directory = STREAMED[form](tmp_path / "model")
    half = kept == "half"
    budget = budget_that_keeps(directory, 0.5, exact=False, dtype="bfloat16") if half else ALL
    model = load(directory, budget, exact=False, dtype="bfloat16")
    assert bool(model.placement.pools) is half
    layers, operations = model.model.layers, _Operations(model.model.layers)
    output = model(torch.arange(300)[None] % model.config.vocab_size, use_cache=True)
    for token in range(8):
        del products[:], calls[:], operations.names[:]
        with operations:
            output = model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
        products += [name for name in operations.names if "mm" in name]
        assert len(products) + len(calls) <= 12 * len(layers), products
        # a call that an expert's first use leaves to the class takes 16 more
        assert len(operations.names) <= 110 * len(layers), operations.names


@pytest.mark.parametrize(
    ("form", "most"),
    [("W4A16-asymmetric", 10), pytest.param("W8A8", 60, marks=pytest.mark.long), ("FP8-dynamic", 60)],
)
@pytest.mark.parametrize("budget", [ALL, 0])
@torch.no_grad()
def test_a_decode_step_of_a_published_dense_layer_takes_few_operations(
    tmp_path: Path, form: str, most: int, budget: int
) -> None:
    """Streamed, too; inputs that the scheme rounds are rounded by a call for each Linear."""
    pytest.importorskip("compressed_tensors")
    directory = split(quantized.build_compressed_tensors(tmp_path / "model", "llama", form, **SIZES))
    assert_few_operations(load(directory, budget, exact=False), most)


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("gemma3", GEMMA), ("phi3", PHI)])
@torch.no_grad()
def test_a_decode_step_of_a_dense_layer_takes_few_operations(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """Also past a window: what grows the KV cache, and copies of keys and values that are views."""
    assert_few_operations(load(checkpoint(tmp_path, family, "4bit", **settings), exact=False), 10)


def assert_few_operations(model: Any, most: int) -> None:
    """In each layer."""
    operations = _Operations(model.model.layers)
    output = model(torch.arange(30)[None], use_cache=True)
    for token in (7, 9):
        del operations.names[:]
        with operations:
            output = model(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
    assert len(operations.names) <= most * len(model.model.layers), operations.names
