"""Recurrent layers' steps in one call have the bits of transformers' own functions, which compute all else."""

from __future__ import annotations

import copy
import functools
import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache

from rabbitllm.base.openmp import torchs_team
from rabbitllm.engine import _recurrences
from rabbitllm.engine._norms import fuse_norms
from rabbitllm.engine._recurrences import (
    MAX_ROWS,
    MAX_TOKENS,
    ConvolutionStep,
    DeltaStep,
    SelectiveStep,
    StateSpaceChunk,
    StateSpaceStep,
    fuse_recurrences,
    step_of,
)
from rabbitllm.quant import bfloat_products
from tests.engine.test_hybrid_caches import family
from tests.support.builders import build_checkpoint
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import ALL, load, split

pytestmark = [pytest.mark.bits, pytest.mark.skipif(torchs_team() is None, reason="torch has no team that is known")]
GATED, KIMI = "torch_recurrent_gated_delta_rule", "recurrent_kimi_delta_attention"
CHUNKS = "torch_chunk_gated_delta_rule"
DELTA = [("qwen3_next", GATED), ("qwen3_5", GATED), ("olmo_hybrid", GATED), ("kimi_linear", KIMI), ("glm5_next", KIMI)]
# sequences, heads of keys and of values, rows and columns of a state
SHAPES = [(1, 2, 4, 128, 128), (3, 2, 2, 16, 32), (1, 3, 3, 96, 192), (2, 1, 3, 256, 64), (40, 1, 2, 64, 32)]


def function(model: str, name: str) -> Callable[..., Any]:
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}", exc_type=ImportError)
    chosen: Callable[..., Any] = getattr(module, name)
    return chosen


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran."""
    names, run = list[str](), _recurrences._run

    def counted(kernel: str, *more: Any) -> None:
        names.append(kernel)
        run(kernel, *more)

    monkeypatch.setattr(_recurrences, "_run", counted)
    return names


def operands(shape: tuple[int, ...], dtype: torch.dtype, by_row: bool, tokens: int = 1) -> dict[str, Any]:
    count, keys, heads, rows, columns = shape
    if by_row:
        keys = heads
    return {
        "query": torch.randn(count, tokens, keys, rows).to(dtype),
        "key": torch.randn(count, tokens, keys, rows).to(dtype),
        "value": torch.randn(count, tokens, heads, columns).to(dtype),
        "g": -torch.rand(count, tokens, heads, *([rows] if by_row else [])) * 3,
        "beta": torch.rand(count, tokens, heads).to(dtype),
        "initial_state": torch.randn(count, heads, rows, columns),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def with_own_state(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "initial_state": given["initial_state"].clone()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("model", "name"), DELTA)
@torch.no_grad()
def test_delta_rules_have_the_bits_of_the_function(model: str, name: str, dtype: torch.dtype, calls: list[str]) -> None:
    ordinary = function(model, name)
    step = DeltaStep(ordinary)
    for shape in SHAPES:
        given = operands(shape, dtype, by_row=name == KIMI)
        expected, got = ordinary(**with_own_state(given)), step(**given)
        assert all(map(torch.equal, got, expected))
        assert (got[0].dtype, got[0].shape) == (dtype, expected[0].shape)
        assert got[1] is given["initial_state"]  # transformers' caches copy it to itself
        assert torch.equal(step(**with_own_state(given))[0], ordinary(**given)[0])
    assert calls == ["delta_step"] * 3 * len(SHAPES)  # the first of a shape is tried before


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values, of each token side by side no more: as a convolution leaves them."""
    return x.flatten(2).mT.contiguous().mT.unflatten(2, x.shape[2:])


@pytest.mark.parametrize(("model", "name"), [DELTA[0], DELTA[3]])
@torch.no_grad()
def test_delta_rules_of_several_prompts(model: str, name: str, calls: list[str]) -> None:
    """Whose tensors have strides that torch keeps."""
    ordinary = function(model, name)
    step = DeltaStep(ordinary, prompts=True)
    for tokens, shape in ((9, SHAPES[1]), (2, SHAPES[3]), (33, SHAPES[4])):
        given = operands(shape, torch.bfloat16, by_row=name == KIMI, tokens=tokens)
        given |= {key: turned(given[key]) for key in ("query", "key", "value", "g", "beta")}
        assert not given["query"].is_contiguous()
        # sums of what does not lie side by side are rounded otherwise
        got, expected = step(**with_own_state(given)), ordinary(**given)
        torch.testing.assert_close(got, expected, rtol=2**-6, atol=1e-3)
    assert calls == ["delta_step"] * 2 * 3


@pytest.mark.parametrize("name", ["query", "value", "g", "beta"])
@pytest.mark.parametrize(("count", "tokens"), [(40, 1), (1, 5)])
@torch.no_grad()
def test_fewer_values_than_keys_are_left_to_the_function(name: str, count: int, tokens: int, calls: list[str]) -> None:
    """They differ only past what is tried."""
    tensors = operands((count, 1, 2, 64, 32), torch.float32, by_row=False, tokens=tokens)
    tensors[name] = tensors[name][:16, :2]
    with pytest.raises((RuntimeError, IndexError)):
        DeltaStep(function("qwen3_next", GATED))(**tensors)
    assert not calls


@pytest.mark.parametrize("model", ["qwen3_next", "lfm2", "mamba2"])
@torch.no_grad()
def test_convolutions_have_the_bits_of_the_function(model: str, calls: list[str]) -> None:
    ordinary = function(model, "causal_conv1d_update")
    step = ConvolutionStep(ordinary)
    for count, channels, tokens, taps, activation in (
        (1, 8192, 4, 4, "silu"),
        (3, 70, 3, 3, None),
        (2, 64, 3, 4, "gelu"),
        (40, 256, 4, 4, "silu"),  # more than are tried
    ):
        for has_bias in (False, True):
            x, state, weight, bias = (
                torch.randn(*form).bfloat16() * 3
                for form in ((count, 1, channels), (count, channels, tokens), (channels, taps), (channels,))
            )
            more = weight, bias if has_bias else None, activation
            expected_state = state.clone()
            for scale in (1, 1e30, torch.inf):
                expected = ordinary(x.transpose(1, 2) * scale, expected_state, *more)
                got = step(x.transpose(1, 2) * scale, state, *more)
                assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
                assert torch.equal(state, expected_state)
    # with instructions for bfloat16 torch adds products of some shapes in another order; these are left to it
    assert 4 * 8 <= len(calls) <= 5 * 8 or bfloat_products.torch_has_instructions()  # two orders may be tried
    assert {*calls} == {"convolution_step"}


@pytest.mark.parametrize("taps", [3, 4, 5])
@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_convolutions_add_in_the_order_of_the_function(taps: int, has_bias: bool) -> None:
    """Other sequences than those that are tried, whose sums are mostly rounding, too."""
    ordinary = function("mamba2", "causal_conv1d_update")
    step = ConvolutionStep(ordinary)
    forms = ((40, 1024, 1), (40, 1024, taps), (1024, taps), (1024,))[: 3 + has_bias]
    x, state, weight, *bias = step._samples([torch.empty(form, dtype=torch.bfloat16) for form in forms])
    expected_state = state.clone()
    expected = ordinary(x, expected_state, weight, *bias)
    assert torch.equal(step(x, state, weight, *bias), expected)
    assert torch.equal(state, expected_state)


@torch.no_grad()
def test_activations_of_strided_results() -> None:
    """The class computes two tokens, and takes the last one of each channel: not by vectors."""
    ordinary = function("mamba2", "causal_conv1d_update")
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    if bfloat_products.torch_has_instructions():  # which take numbers below the normal ones for 0
        values = values[(values == 0) | (values.abs() >= torch.finfo(torch.bfloat16).tiny)]
    x, weight = values[None, :, None], torch.tensor([0, 0, 0, 1]).bfloat16()
    weight = weight.expand(x.shape[1], -1).contiguous()
    for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
        states = [torch.zeros(1, x.shape[1], 4).bfloat16() for _ in range(2)]
        own, few = ConvolutionStep(ordinary), 64  # what differs is seldom among few that are tried
        for begin in range(0, x.shape[1], few):
            part = slice(begin, min(begin + few, x.shape[1]))
            given = x[:, part], weight[part]
            expected, got = (
                step(given[0], state[:, part].contiguous(), given[1], None, activation)
                for step, state in zip((ordinary, own), states, strict=True)
            )
            assert torch.equal(expected, got)


@pytest.mark.parametrize(
    ("model", "name", "of_chunks"), [(*DELTA[0], CHUNKS), (*DELTA[3], "chunk_kimi_delta_attention")]
)
@torch.no_grad()
def test_few_tokens_that_continue_a_text_have_the_bits_of_single_ones(
    model: str, name: str, of_chunks: str, calls: list[str]
) -> None:
    by_token, chunks = function(model, name), function(model, of_chunks)
    step = DeltaStep(chunks)
    for tokens, shape in ((2, SHAPES[0]), (MAX_TOKENS, SHAPES[1]), (5, SHAPES[3])):
        given = operands(shape, torch.bfloat16, by_row=name == KIMI, tokens=tokens)
        expected, in_chunks = by_token(**with_own_state(given)), chunks(**with_own_state(given))
        got = step(**given)
        assert all(map(torch.equal, got, expected))
        assert torch.allclose(got[1], in_chunks[1], rtol=1e-3, atol=1e-4)
    assert calls == ["delta_step"] * 2 * 3
    for tokens, more in ((MAX_TOKENS + 1, {}), (4, {"initial_state": None})):
        given = {**operands(SHAPES[0], torch.bfloat16, by_row=name == KIMI, tokens=tokens), **more}
        assert all(map(torch.equal, step(**given), chunks(**given)))
        expected = by_token(**given)
        assert all(map(torch.equal, DeltaStep(chunks, prompts=True)(**given), expected))
    assert len(calls) == 2 * 3 + 2 + 2


def of_heads(numbers: torch.Tensor, *width: int) -> torch.Tensor:
    return numbers[(..., *[None] * len(width))].expand(*numbers.shape, *width)


@torch.no_grad()
def test_state_spaces_have_the_bits_of_the_function(calls: list[str]) -> None:
    ordinary = function("mamba2", "mamba2_selective_state_update")
    step = StateSpaceStep(ordinary)
    for count, heads, width, size, groups in ((1, 16, 64, 128, 8), (3, 8, 16, 16, 1), (2, 24, 64, 128, 2)):
        state, x = torch.randn(count, heads, width, size), torch.randn(count, heads, width).bfloat16()
        dt, a = of_heads(torch.randn(count, heads).bfloat16(), width), of_heads(-torch.rand(heads), width, size)
        b, c = torch.randn(2, count, groups, size).bfloat16()
        d, bias = (of_heads(torch.randn(heads).bfloat16(), width) for _ in range(2))
        for scale in (1, 1e20):
            own = state.clone()
            expected = ordinary(own, x * scale, dt, a, b, c, d, dt_bias=bias, dt_softplus=True)
            assert torch.equal(step(state, x * scale, dt, a, b, c, d, dt_bias=bias, dt_softplus=True), expected)
            assert torch.equal(state, own)
        before, more = len(calls), {"dt_bias": bias, "dt_softplus": True}
        for other in ((a * torch.rand(size), d), (a, d * torch.rand(width).bfloat16())):  # not the same in a whole head
            given = x, dt, other[0], b, c, other[1]
            expected = ordinary(state.clone(), *given, **more)
            assert torch.equal(step(state.clone(), *given, **more), expected)
        assert len(calls) == before
    assert calls == ["state_space_step"] * 3 * 3


@torch.no_grad()
def test_selective_steps_have_the_bits_of_the_function(calls: list[str]) -> None:
    ordinary = function("jamba", "mamba_selective_state_update")
    step = SelectiveStep(ordinary)
    for count, channels, size in ((1, 256, 16), (3, 96, 16), (2, 1024, 8)):
        state, a = torch.randn(count, channels, size), -torch.rand(channels, size) * 4
        x, dt, z = torch.randn(3, count, channels).bfloat16()
        b, c = torch.randn(2, count, size).bfloat16()
        d, more = torch.randn(channels).bfloat16(), {"dt_bias": torch.randn(channels), "dt_softplus": True}
        x[0, 3] = torch.nan
        for scale in (1, 1e20):
            own = state.clone()
            expected = ordinary(own, x * scale, dt, a, b, c, d, z=z, **more)
            result = step(state, x * scale, dt, a, b, c, d, z=z, **more)
            assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
            assert torch.equal(state.nan_to_num(7), own.nan_to_num(7))
        before = len(calls)
        wide = [y.float() for y in (x, dt, b, c, d, z)]
        left = [
            ((x, dt, a, b, c, d), {**more, "z": None}),
            ((x, dt, a, b, c, d), {**more, "z": z, "dt_softplus": False}),
        ]
        left.append(((*wide[:2], a, *wide[2:5]), {**more, "z": wide[5]}))
        for given, options in left:
            expected = ordinary(state.clone(), *given, **options)
            assert torch.equal(step(state.clone(), *given, **options).nan_to_num(7), expected.nan_to_num(7))
        assert len(calls) == before
    assert calls == ["selective_step"] * 3 * 3


@torch.no_grad()
def test_few_tokens_of_state_spaces_have_the_bits_of_single_ones(calls: list[str]) -> None:
    single, ordinary = (function("mamba2", name) for name in ("mamba2_selective_state_update", "mamba2_chunk_scan"))
    chunk = StateSpaceChunk(ordinary)
    count, heads, width, size, groups = 2, 16, 64, 128, 4
    a, d, bias = -torch.rand(heads), *torch.randn(2, heads).bfloat16()
    for tokens in (1, 3):
        x, dt = torch.randn(count, tokens, heads, width).bfloat16(), torch.randn(count, tokens, heads).bfloat16()
        b, c = torch.randn(2, count, tokens, groups, size).bfloat16()
        state = torch.randn(count, heads, width, size)
        own, more = state.clone(), {"D": d, "dt_bias": bias, "dt_softplus": True, "return_final_states": True}
        in_chunks, last = ordinary(x, dt, a, b, c, chunk_size=256, initial_states=state.clone(), **more)
        for other in ({"dt_limit": (0.0, 1.0)}, {"initial_states": None}):
            given = {"initial_states": state, **more, **other}
            expected = ordinary(x, dt, a, b, c, chunk_size=256, **given)
            assert all(map(torch.equal, chunk(x, dt, a, b, c, chunk_size=256, **given), expected))
        got, new = chunk(x, dt, a, b, c, chunk_size=256, initial_states=state, dt_limit=(0.0, torch.inf), **more)
        for token in range(tokens):
            steps = of_heads(dt[:, token], width), of_heads(a, width, size), b[:, token], c[:, token]
            given = x[:, token], *steps, of_heads(d, width), of_heads(bias, width), True
            assert torch.equal(got[:, token], single(own, *given))
        assert torch.equal(new, own)
        assert new is state
        assert (got.float() - in_chunks).norm() < 0.02 * in_chunks.norm()
        assert (new - last).norm() < 0.02 * last.norm()
    assert set(calls) == {"state_space_step"}
    many = torch.randn(1, MAX_TOKENS + 1, heads, width).bfloat16()
    assert not chunk._fits(many, **{"initial_states": torch.zeros(1, heads, width, size), **more})


@torch.no_grad()
def test_what_is_left_to_the_function(calls: list[str]) -> None:
    ordinary = function("qwen3_next", GATED)
    step = DeltaStep(ordinary)
    given = operands((1, 2, 2, 64, 64), torch.float32, by_row=False)
    others = [
        operands((1, 2, 2, 64, 64), torch.float32, by_row=False, tokens=MAX_TOKENS + 1),
        operands((1, 2, 2, 24, 16), torch.float32, by_row=False),
        operands((1, 1, 1, 2 * MAX_ROWS, 16), torch.float32, by_row=False),
        {**given, "initial_state": given["initial_state"].bfloat16()},
        {**given, "initial_state": given["initial_state"].transpose(2, 3)},  # with its rows as columns
        {**given, "initial_state": None},
        {**given, "use_qk_l2norm_in_kernel": False},
    ]
    for other in others:
        assert all(map(torch.equal, step(**other), ordinary(**other)))
    assert step(**{**given, "output_final_state": False})[1] is None
    with torch.enable_grad():
        step(**{**given, "value": given["value"].clone().requires_grad_()})[0].sum().backward()
    with pytest.raises(ValueError, match="packed sequences"):
        step(**given, cu_seqlens=torch.tensor([0, 1]))
    convolution = function("lfm2", "causal_conv1d_update")
    for tokens, gap in ((2, 1), (1, 2)):
        x, state = torch.randn(1, 8, tokens).bfloat16(), torch.randn(1, 8, 4 * gap).bfloat16()[..., ::gap]
        more = torch.randn(8, 4).bfloat16(), None, "silu"
        expected = convolution(x, state.clone(), *more)
        assert torch.equal(ConvolutionStep(convolution)(x, state, *more), expected)
    assert calls == []


@torch.no_grad()
def test_functions_with_other_results_are_not_replaced() -> None:
    ordinary = function("qwen3_next", GATED)

    @functools.wraps(ordinary)
    def otherwise(*args: Any, **named: Any) -> Any:
        result, state = ordinary(*args, **named)
        return result + 1, state

    given = operands((1, 2, 2, 64, 64), torch.float32, by_row=False)
    expected = ordinary(**with_own_state(given))[0] + 1
    assert torch.equal(DeltaStep(otherwise)(**given)[0], expected)


@pytest.mark.parametrize("budget", [ALL, 0], ids=["resident", "streamed"])
@pytest.mark.parametrize(
    ("name", "wide", "kernels"),
    [
        ("qwen3_next", {"linear_value_head_dim": 32}, {"delta_step", "convolution_step"}),
        ("kimi_linear", {"linear_head_dim": 32}, {"delta_step", "convolution_step"}),
        ("lfm2", {}, {"convolution_step"}),
        ("mamba2", {}, {"convolution_step", "state_space_step"}),
        # no experts: sums of products with matrices of bfloat16 have another order than torch's
        ("jamba", {"num_experts": 1, "num_experts_per_tok": 1}, {"convolution_step", "selective_step"}),
        ("falcon_mamba", {}, {"convolution_step", "selective_step"}),
    ],
)
def test_a_model_has_the_logits_of_transformers(
    tmp_path: Path, name: str, wide: dict[str, Any], kernels: set[str], budget: int, calls: list[str]
) -> None:
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    own = {key: vars(module)[key] for key in _recurrences._STEPS if key in vars(module)}
    folder = build_checkpoint(tmp_path / "model", HYBRIDS[family(name)], dtype=torch.bfloat16, **wide)
    prompts, mask = torch.randint(3, 90, (2, 5)), torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    how: Any = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    expected = plain.generate(prompts, attention_mask=mask, **how)
    assert calls == []
    model = load(split(folder, None), budget, exact=False)
    got = model.generate(prompts, attention_mask=mask, **how)
    assert all(map(torch.equal, got.logits, expected.logits))
    assert {kernel for kernel, count in Counter(calls).items() if count > 3} == kernels  # and not in their trials alone
    assert {key: vars(module)[key] for key in own} == own  # other models of the process keep them
    calls.clear()
    load(split(folder, None), budget, exact=True).generate(prompts, attention_mask=mask, **how)
    assert calls == []


def delta_layer(name: str, **sizes: int) -> tuple[nn.Module, DynamicCache]:
    """A layer of the gated delta rule, and a cache with the states of five tokens."""
    settings = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
    kind = {"qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5"}[name]
    config_class = getattr(settings, f"{kind}TextConfig", None) or getattr(settings, f"{kind}Config")
    config = config_class(hidden_size=64, layer_types=["linear_attention"], num_hidden_layers=1, **sizes)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    layer = getattr(module, f"{kind}GatedDeltaNet")(config, 0).bfloat16().eval()
    torch.nn.init.uniform_(layer.norm.weight, 0.5, 1.5)
    cache = DynamicCache(config=config)
    layer(hidden_states=torch.randn(1, 5, 64).bfloat16(), cache=cache)
    return layer, cache


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize(("keys", "heads", "rows", "columns"), [(16, 32, 128, 128), (2, 4, 32, 64), (2, 2, 64, 96)])
@torch.no_grad()
def test_a_layer_of_the_delta_rule_has_the_bits_of_its_class(
    name: str, keys: int, heads: int, rows: int, columns: int, calls: list[str]
) -> None:
    sizes = {"linear_num_key_heads": keys, "linear_num_value_heads": heads}
    widths = {"linear_key_head_dim": rows, "linear_value_head_dim": columns}
    plain, cache = delta_layer(name, **sizes, **widths)
    fused, other = copy.deepcopy(plain), copy.deepcopy(cache)
    fuse_norms(fused)
    assert fuse_recurrences(fused) == 1
    for scale in (1, 30, torch.inf, 1):
        x, operations = torch.randn(1, 1, 64).bfloat16() * scale, Operations()
        expected = plain(hidden_states=x, cache=cache)
        with operations:
            result = fused(hidden_states=x, cache=other)
        assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
        for states in ("get_recurrent_state", "get_conv_state"):
            state, own = (getattr(both, states)(0) for both in (other, cache))
            assert torch.equal(state.nan_to_num(7), own.nan_to_num(7))
        assert operations.count <= 35
    assert calls == []  # of the functions within: all is one call


@torch.no_grad()
def test_a_layer_of_the_delta_rule_leaves_the_rest_to_its_class(calls: list[str]) -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
    plain, cache = delta_layer("qwen3_next", **sizes, linear_value_head_dim=64)
    fused = copy.deepcopy(plain)
    fuse_norms(fused)
    fuse_recurrences(fused)
    x = torch.randn(1, 1, 64).bfloat16()

    def both(x: torch.Tensor, **named: Any) -> list[torch.Tensor]:
        return [layer(hidden_states=x, cache=copy.deepcopy(cache), **named) for layer in (plain, fused)]

    # rounding of float32 seldom changes a bfloat16
    assert_alike = functools.partial(torch.testing.assert_close, rtol=2**-7, atol=1e-5)
    compiled = torch.compile(fused, backend="eager")
    assert torch.equal(compiled(hidden_states=x, cache=copy.deepcopy(cache)), both(x)[0])
    for values, named in (
        (torch.cat([x, x], 1), {}),
        (x, {"attention_mask": torch.zeros(1, 1)}),
    ):
        calls.clear()
        assert_alike(*both(values, **named))
        assert calls
    calls.clear()
    seen = list[Any]()
    fused.norm.register_forward_hook(lambda *given: seen.append(given))
    assert_alike(*both(x))
    assert len(seen) == 1
    assert calls
    fused.norm._forward_hooks.clear()
    for layer in (plain, fused):
        layer.norm.weight.data.mul_(2)  # read in each step
        layer.A_log.data.add_(1)
    calls.clear()
    assert_alike(*both(x))
    assert calls == []


def test_models_without_a_recurrence_keep_their_forwards() -> None:
    assert fuse_recurrences(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU())) == 0
    assert step_of(function("qwen3_next", GATED)) is step_of(function("qwen3_next", GATED))
