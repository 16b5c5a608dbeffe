"""Llama 4's layers by routed expert, compared with transformers' own forward; and `fast_bfloat16=True`."""

from __future__ import annotations

import copy
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn
from torch.autograd import forward_ad
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.forwards import RowProducts, route_llama4
from rabbitllm.engine.placement import SLOTS, Tier
from rabbitllm.errors import OptionError
from rabbitllm.quant import bfloat_products
from rabbitllm.telemetry.passes import EXPERTS_READ
from tests.engine.test_experts import TensorExperts
from tests.support import tiny_configs, tiny_inputs
from tests.support.builders import build_checkpoint
from tests.support.hybrid_families import HYBRIDS
from tests.support.kernel_rows import kernel_rows as kernel_rows
from tests.support.kernel_rows import plain_products as plain_products
from tests.support.long_generation import assert_same_trail, continued, prompts
from tests.support.picture_models import add_image_outputs
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import ALL, INPUT, assert_same, dequantized, load, plain_model, run, split

EXPERTS = 8


def layer(top_k: int, dtype: torch.dtype, seed: int = 0, **settings: int) -> Any:
    """A mixture of random experts."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_local_experts": EXPERTS, **settings}
    config: Any = Llama4TextConfig(num_experts_per_tok=top_k, num_attention_heads=4, num_key_value_heads=2, **sizes)
    moe = Llama4TextMoe(config).to(dtype).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return moe


def by_expert(moe: Any) -> Any:
    """A copy that computes by routed expert."""
    changed = copy.deepcopy(moe)
    route_llama4(changed)
    return changed


def inputs(tokens: int, dtype: torch.dtype, hidden: int = 96, seed: int = 1) -> torch.Tensor:
    return torch.randn(1, tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routed(moe: Any, x: torch.Tensor) -> set[int]:
    """The experts of all tokens, by the router's logits."""
    chosen = moe.router(x.reshape(-1, moe.hidden_dim))[1].topk(moe.top_k, dim=1).indices
    return set(chosen.flatten().tolist())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_equal_transformers(dtype: torch.dtype, top_k: int, tokens: int, threads: int) -> None:
    torch.set_num_threads(threads)
    moe, x = layer(top_k, dtype), inputs(tokens, dtype)
    with torch.no_grad():
        expected, logits = moe(x)
        outputs, found_logits = by_expert(moe)(x)
    assert outputs.dtype == dtype
    assert torch.equal(outputs, expected)
    assert torch.equal(found_logits, logits)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("hidden", "intermediate"), [(500, 300), (640, 256)])
def test_single_token_is_rounded_as_in_the_batch_of_all_experts(threads: int, hidden: int, intermediate: int) -> None:
    """One matrix by itself would be spread over the threads, which shows at these sizes."""
    torch.set_num_threads(threads)
    moe = layer(1, torch.float32, hidden_size=hidden, intermediate_size=intermediate)
    for seed in range(2):
        x = inputs(1, torch.float32, hidden, seed)
        with torch.no_grad():
            assert torch.equal(by_expert(moe)(x)[0], moe(x)[0])


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("top_k", [1, 2])
def test_experts_without_a_token_are_not_used(top_k: int, tokens: int) -> None:
    moe, x = layer(top_k, torch.float32), inputs(tokens, torch.float32)
    with torch.no_grad():
        expected = moe(x)[0]
        unused = sorted(set(range(EXPERTS)) - routed(moe, x))
        assert unused
        moe.experts.gate_up_proj[unused] = torch.nan
        moe.experts.down_proj[unused] = torch.nan
        assert moe(x)[0].isnan().all()
        assert torch.equal(by_expert(moe)(x)[0], expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 3, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_routed_expert_of_a_stack_is_requested_once(dtype: torch.dtype, tokens: int, threads: int) -> None:
    torch.set_num_threads(threads)
    moe, x = layer(1, dtype), inputs(tokens, dtype)
    with torch.no_grad():
        expected, chosen = moe(x)[0], routed(moe, x)
        leaves = {name: parameter.data for name, parameter in moe.experts.named_parameters()}
        asked = {name: TensorExperts(**{name: leaf}) for name, leaf in leaves.items()}
        for name, supply in asked.items():
            setattr(moe.experts, name, nn.Parameter(supply.stack(name)))
        assert torch.equal(by_expert(moe)(x)[0], expected)
    for supply in asked.values():
        assert supply.asked == sorted(chosen)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_models_generate_the_same(tmp_path: Path, dtype: torch.dtype, top_k: int) -> None:
    folder = build_checkpoint(tmp_path / "model", HYBRIDS["llama4"], dtype=dtype, num_experts_per_tok=top_k)
    model = plain_model(folder, dtype=dtype)
    expected = continued(model, prompts(), 12)
    assert any(isinstance(module, Llama4TextMoe) for module in model.modules())
    route_llama4(model)
    assert_same_trail(continued(model, prompts(), 12), expected)


@pytest.mark.parametrize(
    ("dtype", "compression"),
    [
        (torch.bfloat16, None),
        (torch.float32, "4bit"),
        pytest.param(torch.float32, None, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, "8bit", marks=pytest.mark.long),
    ],
)
def test_streamed_experts(tmp_path: Path, dtype: torch.dtype, compression: str | None) -> None:
    """A loaded model reads only routed experts, and has the bits of transformers' model."""
    sizes = {"num_local_experts": 12, "num_hidden_layers": 4}
    folder = build_checkpoint(tmp_path / "model", HYBRIDS["llama4"], dtype=dtype, shards=2, **sizes)
    plain = dequantized(folder, tmp_path / "meant", compression, dtype) if compression else folder
    expected = continued(plain_model(plain, dtype=dtype), prompts(), 12)
    directory = split(folder, compression)
    for budget in (0, 200_000, ALL):
        model = load(directory, budget, profiling=True)
        assert len(model.placement.experts) == 4
        assert_same_trail(continued(model, prompts(), 12), expected)
        if budget == 0:
            assert {placed.tier for placed in model.placement.experts} == {Tier.ROUTED}
            model.profiler.clear()
            with torch.inference_mode():
                model(torch.tensor([[7]]))
            counted = [totals[EXPERTS_READ] for totals in model.profiler.layers.values() if EXPERTS_READ in totals]
            assert [total.count for total in counted] == [1] * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fast") / "model"
    return build_checkpoint(folder, "llama", dtype=torch.bfloat16, hidden_size=128, intermediate_size=256)


@pytest.mark.parametrize("budget", [0, ALL], ids=["streamed", "resident"])
def test_every_linear_layer_uses_the_kernel_and_is_as_close_as_torchs(
    checkpoint: Path, kernel_rows: list[int], budget: int
) -> None:
    model = load(split(checkpoint), budget, fast_bfloat16=True, exact=False)
    with torch.inference_mode():
        actual, torchs = model(INPUT).logits, plain_model(checkpoint)(INPUT).logits
    # the head's rows are those of INPUT too, since all logits are asked for
    assert kernel_rows == [INPUT.numel()] * (7 * model.config.num_hidden_layers + 1)
    assert_as_near(actual, torchs, exact_logits(checkpoint, INPUT))


@pytest.mark.parametrize(("family", "kind"), [("qwen3_moe", "Qwen3MoeTopKRouter"), ("gpt_oss", "GptOssTopKRouter")])
@torch.no_grad()
def test_routers_use_the_kernel(tmp_path: Path, kernel_rows: list[int], family: str, kind: str) -> None:
    """A class's forward has another product and nothing else; copies compute with their own weight."""
    folder = build_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16, hidden_size=128)
    model = load(split(folder), fast_bfloat16=True, exact=False)
    router, x = (
        next(module for module in model.modules() if type(module).__name__ == kind),
        inputs(1, torch.bfloat16, 128),
    )
    logits, weights, chosen = router(x[0])
    assert kernel_rows == [1]
    exact = x[0].double() @ router.weight.double().T + getattr(router, "bias", torch.zeros(1))
    assert_as_near(logits, type(router).forward(router, x[0])[0], exact)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", lambda *given: logits)
        _, expected, others = type(router).forward(router, x[0])
    assert torch.equal(weights, expected)
    assert torch.equal(chosen, others)
    copied = copy.deepcopy(router)
    copied.weight = nn.Parameter(torch.zeros_like(router.weight))
    assert not copied(x[0])[0].equal(logits)
    assert router(x[0])[0].equal(logits)
    del kernel_rows[:]
    load(split(folder), exact=False)(INPUT)
    assert not kernel_rows


@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_linears_of_falcon_use_the_kernel(kernel_rows: list[int], has_bias: bool) -> None:
    linear, x = FalconLinear(64, 32, bias=has_bias).bfloat16(), inputs(3, torch.bfloat16, 64)
    products, expected = RowProducts(cast("Any", SimpleNamespace(dtype=torch.bfloat16)), [linear]), linear(x)
    assert kernel_rows == [3]
    exact = copy.deepcopy(linear).double()(x.double())
    products.close()
    assert_as_near(expected, linear(x), exact)
    assert kernel_rows == [3]
    own = FalconLinear.forward
    with pytest.MonkeyPatch.context() as patch:  # a program's own, which comes after the trial
        patch.setattr(FalconLinear, "forward", lambda self, input: own(self, input) * 2)
        RowProducts(cast("Any", SimpleNamespace(dtype=torch.bfloat16)), [linear])
        assert torch.equal(linear(x), own(linear, x) * 2)


class _OfOneWidth(nn.Linear):
    """A class as repositories have them in their own code."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        assert input.shape[-1] == 64
        return input @ self.weight.T


@pytest.mark.usefixtures("kernel_rows")
@torch.no_grad()
def test_a_class_that_asserts_what_a_trial_has_not_is_left_as_it_is() -> None:
    linear, x = _OfOneWidth(64, 32, bias=False).bfloat16(), inputs(3, torch.bfloat16, 64)
    RowProducts(cast("Any", SimpleNamespace(dtype=torch.bfloat16)), [linear])
    assert "forward" not in vars(linear)
    assert torch.equal(linear(x), x @ linear.weight.T)


def test_cpu_with_bfloat16_products_uses_torchs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat_products, "max_rows", lambda: 0)
    folder = split(checkpoint)
    result, expected = run(load(folder, 0, fast_bfloat16=True, exact=False)), run(load(folder, 0))
    assert torch.equal(result.logits, expected.logits)


@pytest.mark.parametrize("exact", [False, True])
def test_commands_use_the_kernel_by_default(checkpoint: Path, kernel_rows: list[int], exact: bool) -> None:
    model = load(split(checkpoint), 0, fast_bfloat16=None, exact=exact)
    with torch.inference_mode():
        logits = model(INPUT).logits
    assert bool(kernel_rows) == (not exact)
    if exact:
        with torch.inference_mode():
            assert torch.equal(logits, plain_model(checkpoint)(INPUT).logits)


@pytest.mark.parametrize(
    ("compression", "tied", "is_tried"),
    [("4bit", False, False), ("4bit", True, False), (None, True, True)],
)
def test_the_kernel_is_not_tried_without_plain_matrices(
    tmp_path: Path, compression: str | None, tied: bool, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling it takes a second or two of a first start."""
    tried = list[Any]()
    monkeypatch.setattr("rabbitllm.engine.forwards.load_kernels", tried.append)
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, tied=tied, hidden_size=128)
    load(split(folder, compression), fast_bfloat16=None, exact=False)
    assert bool(tried) == is_tried


@pytest.mark.usefixtures("plain_products")
@pytest.mark.parametrize("budget", [0, ALL], ids=["streamed", "resident"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("qwen2", {}), ("gemma3", {"layer_types": ["sliding_attention", "full_attention"]}), ("phi3", {})],
)
@torch.no_grad()
def test_tokens_are_as_near_as_torchs(tmp_path: Path, family: str, settings: dict[str, Any], budget: int) -> None:
    """A prompt long enough for attention of prompts, and the tokens after it one by one, in calls of whole layers."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, **settings}
    folder = build_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16, **sizes)
    ids, results = INPUT.repeat(1, 3)[:, :30], list[torch.Tensor]()
    for model in (load(split(folder), budget, fast_bfloat16=True, exact=False), plain_model(folder)):
        cache = transformers.DynamicCache(config=model.config)
        parts = [ids[:, :20], *ids[:, 20:].split(1, 1)]
        results.append(torch.cat([model(part, past_key_values=cache).logits for part in parts], 1))
    assert_as_near(*results, exact_logits(folder, ids))


@torch.no_grad()
def test_streamed_weights_take_no_memory_and_copies_have_their_own(checkpoint: Path, kernel_rows: list[int]) -> None:
    for budget in (0, ALL):
        model, seen = load(split(checkpoint), budget, fast_bfloat16=True, exact=False), list[Any]()
        layer, cache = model.model.layers[0], transformers.DynamicCache(config=model.config)
        linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]

        def note(*args: Any, seen: list[Any] = seen, linears: list[nn.Linear] = linears) -> None:
            seen.extend(weakref.ref(linear.weight) for linear in linears)

        layer.input_layernorm.register_forward_pre_hook(note)  # whose layer is called part by part then
        with torch.inference_mode():
            for token in range(3):
                model(torch.tensor([[token]]), cache=cache)
        assert len(seen) == 3 * len(linears)
        weights = {weight() for weight in seen} - {None}
        if budget == 0:  # they are views of the buffers
            slots = next(iter(model.streamer.executors.values())).loader._prefetcher._slots
            places = {slot.buffer.untyped_storage().data_ptr() for slot in slots}
            assert {weight.untyped_storage().data_ptr() for weight in weights} <= places
        assert len(linears) <= len(weights) <= len(linears) * (SLOTS if budget == 0 else 1)
    copied, x = copy.deepcopy(layer.mlp), torch.randn(1, 1, 128).bfloat16()
    copied.down_proj.weight.zero_()
    assert not copied(x).any()
    assert layer.mlp(x).any()
    copied.load_state_dict(layer.mlp.state_dict())
    assert torch.equal(copied(x), layer.mlp(x))


@pytest.mark.usefixtures("plain_products")
@torch.no_grad()
def test_a_class_that_rescales_its_weights_can_be_fast(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", HYBRIDS["rwkv"], dtype=torch.bfloat16)
    fast, plain = load(split(folder), fast_bfloat16=True, exact=False), plain_model(folder)
    assert_as_near(fast(INPUT).logits, plain(INPUT).logits, exact_logits(folder, INPUT))


@pytest.mark.usefixtures("plain_products")
@torch.no_grad()
def test_transforms_of_torch_get_its_own_products(checkpoint: Path) -> None:
    model, plain = load(split(checkpoint), fast_bfloat16=True, exact=False), plain_model(checkpoint)
    linear, x = model.model.layers[0].self_attn.q_proj, torch.randn(3, 1, 128).bfloat16()
    expected = nn.functional.linear(x, linear.weight)
    assert torch.equal(torch.func.vmap(linear)(x), expected)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(linear(forward_ad.make_dual(x, x))).tangent
        assert torch.equal(tangent, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        model.requires_grad_(False)  # else it refuses weights that are no part of a lambda
        traced = torch.jit.trace(lambda ids: model(ids, use_cache=False).logits, INPUT, check_trace=False)
    assert torch.equal(traced(INPUT.flip(1)), plain(INPUT.flip(1)).logits)


@pytest.mark.usefixtures("plain_products")
@torch.no_grad()
def test_a_weight_that_changes_after_another_one_was_multiplied(checkpoint: Path) -> None:
    model = load(split(checkpoint), fast_bfloat16=True, exact=False)
    for token in range(3):
        model(torch.tensor([[token]]))
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 1, 128).bfloat16()

    def double(weight: torch.Tensor) -> None:
        weight.data.mul_(2)  # which torch does not count

    def keys() -> torch.Tensor:
        attention.q_proj(x)  # and keys and values, with it
        return attention.k_proj(x)  # type: ignore[no-any-return]

    before = keys()
    attention.q_proj(x)
    attention.k_proj.weight.mul_(2)
    assert torch.equal(attention.k_proj(x), 2 * before)
    hook = attention.k_proj.register_forward_pre_hook(lambda module, args: double(module.weight))
    assert torch.equal(keys(), 4 * before)
    hook.remove()
    assert torch.equal(keys(), 4 * before)


def test_fast_bfloat16_is_refused_with_exact() -> None:
    with pytest.raises(OptionError, match=r"exact=True .*fast_bfloat16=True"):
        RunOptions(exact=True, fast_bfloat16=True)


def test_without_fast_bfloat16_logits_equal_transformers(checkpoint: Path, kernel_rows: list[int]) -> None:
    model = load(split(checkpoint), 0)
    with torch.inference_mode():
        assert torch.equal(model(INPUT).logits, plain_model(checkpoint)(INPUT).logits)
    assert not kernel_rows


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_linear_layers_that_transformers_keeps_in_float32(tmp_path: Path, compression: str | None) -> None:
    """Those of DeepSeek-V4's compressors at float16, in which plain transformers gives them float16 and fails."""
    folder = plain = build_checkpoint(tmp_path / "model", HYBRIDS["deepseek_v4"], dtype=torch.float16, shards=2)
    if compression is not None:
        plain = dequantized(folder, tmp_path / "reference", compression, torch.float16)
    reference = plain_model(plain, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="same dtype"), torch.inference_mode():
        reference(INPUT)
    for linear in reference.modules():
        if isinstance(linear, nn.Linear) and linear.weight.dtype == torch.float32:
            linear.register_forward_pre_hook(lambda module, args: (args[0].float(),))
            linear.register_forward_hook(lambda module, args, output: output.half())
    expected = run(reference)
    assert expected.logits.isfinite().all()
    for budget in (ALL, 0):
        assert_same(run(load(split(folder, compression), budget)), expected)
    assert run(load(split(folder, compression), exact=False)).logits.isfinite().all()


def test_llama4_with_pictures(tmp_path: Path) -> None:
    whole = transformers.Llama4ForConditionalGeneration
    random_model = next(tiny_configs.models(whole, "llama4", []))
    random_model.save_pretrained(tmp_path / "model", max_shard_size=1_000_000)
    plain: Any = whole.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    plain.language_model.register_forward_hook(add_image_outputs)
    sample = tiny_inputs.inputs_of(plain)
    assert sample.kinds == ("text", "image")
    expected = tiny_inputs.results(plain, sample.arguments)
    for budget in (ALL, 0):
        model = load(split(tmp_path / "model"), budget)
        assert tiny_inputs.same(tiny_inputs.results(model, sample.arguments), expected)
        generated = tiny_inputs.generated(model, sample.arguments)
        assert torch.equal(generated, tiny_inputs.generated(plain, sample.arguments))
