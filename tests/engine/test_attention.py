"""Attention of one token in two calls has the class's bits up to the KV cache, and then its result but for rounding."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.cohere.modeling_cohere import CohereAttention, CohereConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2Config
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.models.olmo.modeling_olmo import OlmoConfig, OlmoDecoderLayer

from rabbitllm.base.programs import Program
from rabbitllm.engine import _attention, _whole_steps, kv_room, row_attention
from rabbitllm.engine._attention import _AttentionForm, _plain, fuse_attention, fuse_layers, relative_error
from rabbitllm.engine._norms import fuse_norms
from rabbitllm.engine.kv_room import cached
from tests.engine.test_siblings import PROMPT, checkpoint
from tests.support.builders import DELTA, Family
from tests.support.kernel_rows import plain_products as plain_products
from tests.support.tiny_models import ALL, load

pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("plain_products")]
# a window shorter than the text, in one layer; the other one has another base of angles
GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 100, "sliding_window": 6}
PHI = {
    "sliding_window": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
}
# queries with gates, of which a quarter of each head is rotated, after norms; the MLP is a mixture or not
GATED = {"head_dim": 64, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
# the gated delta rule in one of two layers
HYBRID: dict[str, Any] = {**GATED, "layer_types": ["linear_attention", "full_attention"], "linear_value_head_dim": 32}
# sinks, biases of all Linears, and a window in one of two layers; all experts, of which rounding can choose no others
OSS = {
    "head_dim": 32,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
}
# other angles from the ninth token on
LONG = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 8,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 8,
        "factor": 8.0,
        "short_factor": [1.0 + index / 50 for index in range(24)],
        "long_factor": [2.0 + index for index in range(24)],
    },
}
ROUNDING = 2**-8
"""Of a result in bfloat16, relative to its norm: twice the unit roundoff."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The attention of each step in two calls, and that of each layer of whole steps."""
    modules, compute = list[Any](), _attention._step

    def counted(form: Any, module: Any, *more: Any) -> Any:
        if (result := compute(form, module, *more)) is not None:
            modules.append(module)
        return result

    monkeypatch.setattr(_attention, "_step", counted)
    whole = _whole_steps._Whole._compute

    def counted_whole(self: Any, *args: Any, **named: Any) -> Any:
        result = whole(self, *args, **named)
        modules.extend(self.calls)
        return result

    monkeypatch.setattr(_whole_steps._Whole, "_compute", counted_whole)
    return modules


def attended(
    form: _AttentionForm, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    program, out, plain = Program(9), torch.empty_like(q), [_plain(each, q.dtype) for each in (keys, values)]
    of_heads = 0 if sinks is None else sinks.data_ptr()
    form.add_attention(program, program.address(0), program.address(1), 2, sinks=of_heads)
    program(q.data_ptr(), out.data_ptr(), *cached(*plain))
    return out


@pytest.mark.parametrize(("heads", "keys", "width"), [(9, 3, 64), (4, 4, 32), (7, 1, 128), (2, 1, 256)])
def test_attention_of_a_row(heads: int, keys: int, width: int) -> None:
    form = _AttentionForm(heads, keys, width, width, width**-0.5)
    for tokens in (1, 2, 3, 7, 100):
        for scale in (1e-3, 1, 10):
            q = (torch.randn(1, heads, 1, width) * scale).bfloat16()
            k, v = torch.randn(2, 1, keys, tokens + 5, width).bfloat16()[:, :, :, 2 : tokens + 2]
            repeated = (tensor.double().repeat_interleave(heads // keys, 1) for tensor in (k, v))
            out = attended(form, q, k, v)
            assert relative_error(out, scaled_dot_product_attention(q.double(), *repeated)) < ROUNDING
            threads = torch.get_num_threads()
            torch.set_num_threads(1 if threads > 1 else 2)
            assert torch.equal(attended(form, q, k, v.transpose(2, 3).contiguous().transpose(2, 3)), out)
            torch.set_num_threads(threads)
            sinks = torch.randn(heads).bfloat16() * 4
            scores = q.double() @ k.double().repeat_interleave(heads // keys, 1).mT * form.scaling
            shares = torch.cat([scores, sinks.double().view(1, heads, 1, 1)], -1).softmax(-1)[..., :-1]
            expected = shares @ v.double().repeat_interleave(heads // keys, 1)
            assert relative_error(attended(form, q, k, v, sinks), expected) < ROUNDING
    k = torch.randn(1, keys, 9, width).bfloat16()
    k[0, 0, 4, 3] = torch.nan
    assert attended(form, torch.ones(1, heads, 1, width).bfloat16(), k, k)[0, 0].isnan().all()


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_what_is_infinitely_unlike_a_query_has_no_weight(tokens: int) -> None:
    """As with torch: keys that exceed float16 are infinite. If there are no others the result is 0, or of the sink."""
    q, sinks = torch.ones(1, 4, 1, 32).bfloat16(), torch.randn(4).bfloat16()
    form, (k, v) = _AttentionForm(4, 2, 32, 32, 1.0), torch.randn(2, 1, 2, tokens, 32).bfloat16()
    for end in (1, tokens):
        k[:, :, :end, 3] = -torch.inf
        expected = scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True)
        assert expected.isfinite().all()
        result, of_sinks = attended(form, q, k, v), attended(form, q, k, v, sinks)
        assert (result - expected).float().norm() <= 2**-6 * expected.float().norm()
        others = attended(form, q, k[:, :, end:], v[:, :, end:], sinks) if end < tokens else torch.zeros_like(q)
        assert torch.equal(of_sinks, others)
    k[0, 0, 0] = 0
    k[0, 0, 1:] = 8  # of a weight that is 0 in float32
    v[0, 0, 0, 5] = torch.inf
    result = attended(form, q, k, v)[0, 0, 0]
    assert result[5].isinf() if tokens == 1 else result[5].isnan()
    assert result.isfinite().sum() == 31


@torch.no_grad()
def cached_logits(model: Any, steps: int = 12) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of steps with given tokens, and the first keys and values; more tokens than a window has."""
    cache = DynamicCache(config=model.config)
    model(PROMPT, past_key_values=cache)
    seen = [model(torch.tensor([[step + 1]]), past_key_values=cache).logits for step in range(steps)]
    first = next(layer for layer in cache.layers if hasattr(layer, "keys"))
    return torch.cat(seen, 1), [first.keys, first.values]


@pytest.mark.parametrize(
    ("family", "compression", "settings"),
    [
        ("llama", "4bit", {}),
        ("qwen2", "q8_0", {}),
        ("qwen3", "q4_k_m", {"head_dim": 64}),
        ("mistral", "8bit", {"head_dim": 32, "sliding_window": 6}),
        ("qwen3_moe", "q8_0", {"head_dim": 32}),
        ("gemma3", "q8_0", GEMMA),
        ("phi3", "q4_k_m", PHI),
        ("phi3", "q8_0", {**LONG, "num_attention_heads": 4, "num_key_value_heads": 2}),
        ("qwen3_next", "q8_0", GATED),
        (Family("qwen3_5_text", DELTA), "4bit", GATED),
        ("gpt_oss", "8bit", OSS),
        ("qwen2", None, {}),
        ("gpt_oss", None, OSS),
        ("gemma3", None, GEMMA),
        ("phi3", None, PHI),
    ],
)
@pytest.mark.parametrize("budget", [ALL, 0], ids=["resident", "streamed"])
def test_a_model_has_the_class_s_cache_and_nearly_its_logits(
    tmp_path: Path,
    family: str | Family,
    compression: str | None,
    settings: dict[str, Any],
    budget: int,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = checkpoint(tmp_path, family, compression, **settings)
    model = load(directory, budget, exact=False, fast_bfloat16=True)
    got, cached = cached_logits(model)
    assert len(calls) == 2 * 12
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_attention", lambda model: 0)
    expected, cached_by_class = cached_logits(load(directory, budget, exact=False, fast_bfloat16=True))
    assert all(map(torch.equal, cached, cached_by_class))
    assert relative_error(got, expected) < 8 * ROUNDING
    assert len(calls) == 2 * 12
    monkeypatch.undo()
    assert not any(
        "forward" in vars(module) for module in load(directory, budget).modules() if "Attention" in str(type(module))
    )


@pytest.mark.parametrize(
    ("family", "compression", "settings"),
    [
        ("qwen2", "q8_0", {}),
        ("qwen3_moe", "q8_0", {"head_dim": 32}),
        ("qwen3_next", "q8_0", GATED),
        ("gemma3", "q8_0", GEMMA),
        ("phi3", "q8_0", PHI),
        ("phi3", "q8_0", LONG),
        (Family("qwen3_5_text", DELTA), "q8_0", GATED),
        ("qwen3_next", "q8_0", HYBRID),
        (Family("qwen3_5_text", DELTA), "4bit", HYBRID),
        ("llama", None, {}),
        ("gemma3", None, GEMMA),
        ("gpt_oss", "4bit", OSS),
    ],
)
def test_a_layer_has_the_bits_of_its_parts(
    tmp_path: Path,
    family: str | Family,
    compression: str | None,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers, compute = list[Any](), _attention._step

    def counted(*given: Any) -> Any:
        if (result := compute(*given)) is not None:
            layers.append(given[-1])
        return result

    monkeypatch.setattr(_attention, "_step", counted)
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_models", lambda model: 0)
    directory = checkpoint(tmp_path, family, compression, **settings)
    model = load(directory, exact=False, fast_bfloat16=True)
    got, _ = cached_logits(model)
    assert set(layers) == {*model.model.layers}
    layer, seen = model.model.layers[0], list[Any]()
    of_layer = [part for name, part in layer.named_children() if name != "input_layernorm"]
    watched = of_layer + [*layer.mlp.children()]
    for part in watched:
        hook = part.register_forward_hook(lambda module, args, output: seen.append(output))
        assert torch.equal(cached_logits(model)[0], got)
        hook.remove()
    assert len(seen) == len(watched) * 13
    norm = layer.input_layernorm
    epsilon = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    setattr(norm, epsilon, 1.0)
    assert not torch.equal(changed := cached_logits(model)[0], got)
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_layers", lambda model: 0)
    parts = load(directory, exact=False, fast_bfloat16=True)
    assert torch.equal(cached_logits(parts)[0], got)
    setattr(parts.model.layers[0].input_layernorm, epsilon, 1.0)
    assert torch.equal(cached_logits(parts)[0], changed)


Change = Callable[[pytest.MonkeyPatch, Any], None]
CHANGES: dict[str, Change] = {
    "weight": lambda patch, layer: patch.setitem(
        layer.self_attn.v_proj._parameters, "weight", layer.self_attn.k_proj.weight
    ),
    "weight of a norm": lambda patch, layer: patch.setitem(
        layer.post_attention_layernorm._parameters, "weight", nn.Parameter(layer.input_layernorm.weight * 2)
    ),
    "number": lambda patch, layer: patch.setattr(layer.input_layernorm, "variance_epsilon", 1.0),
    "part": lambda patch, layer: patch.setitem(layer._modules, "mlp", nn.Identity()),
    "inner part": lambda patch, layer: patch.setitem(layer.mlp._modules, "up_proj", layer.mlp.gate_proj),
    "forward": lambda patch, layer: patch.setitem(vars(layer.mlp.act_fn), "forward", torch.relu),
    "hook": lambda patch, layer: patch.setitem(layer.mlp._forward_hooks, 7, lambda module, args, output: output * 2),
    "other hooks": lambda patch, layer: patch.setattr(
        layer.mlp, "_forward_hooks", OrderedDict({7: lambda module, args, output: output * 2})
    ),
    "hook of a part": lambda patch, layer: patch.setitem(
        layer.mlp.down_proj._forward_pre_hooks, 7, lambda module, args: (args[0] * 2,)
    ),
}


@torch.no_grad()
def test_a_change_between_two_steps_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(tmp_path, "llama", "q8_0")
    models = [load(directory, exact=False)]
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_layers", lambda model: 0)
    models.append(load(directory, exact=False))
    cache = DynamicCache(config=models[0].config)
    models[0](PROMPT, past_key_values=cache)

    def steps() -> list[torch.Tensor]:
        return [model(PROMPT[:, :1], past_key_values=copy.deepcopy(cache)).logits for model in models]

    ordinary = steps()
    assert torch.equal(*ordinary)
    for name, change in CHANGES.items():
        with monkeypatch.context() as patch:
            for model in models:
                change(patch, model.model.layers[1])
            changed = steps()
        assert torch.equal(*changed), name
        assert not torch.equal(changed[0], ordinary[0]), name
        assert all(map(torch.equal, steps(), ordinary)), name


@torch.no_grad()
def test_what_a_class_reads_of_its_config_or_of_torch_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(checkpoint(tmp_path, Family("olmo"), "q8_0"), exact=False)
    forwards = [(module, vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]
    cache = DynamicCache(config=model.config)
    model(PROMPT, past_key_values=cache)
    attentions = [module for module, _ in forwards if hasattr(module, "q_proj")]
    mlps = [module for module, _ in forwards if hasattr(module, "up_proj")]
    assert len(attentions) == len(mlps) == len(model.model.layers)

    def of_both() -> list[torch.Tensor]:
        results = []
        for kept in (forwards, []):
            for module, forward in forwards:
                vars(module).pop("forward", None)
                vars(module).update({"forward": forward} if kept else {})
            calls = (PROMPT, None), (PROMPT[:, :1], copy.deepcopy(cache)), (PROMPT[:, :3], copy.deepcopy(cache))
            results += [model(ids, past_key_values=past).logits for ids, past in calls]
        return results

    ordinary = of_both()
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setattr(model.config, "clip_qkv", 0.02),
        lambda patch: patch.setattr(nn.functional, "silu", lambda x, **named: torch.relu(x)),
        lambda patch: patch.setattr(nn.functional, "scaled_dot_product_attention", lambda q, *args, **named: q * 2),
    ]
    for change in changes:
        with monkeypatch.context() as patch:
            change(patch)
            changed = of_both()
        for fused, plain, before in zip(changed, changed[3:], ordinary, strict=False):
            assert _attention.relative_error(fused, plain) < 0.02 < _attention.relative_error(fused, before)
        for fused, before in zip(of_both(), ordinary, strict=True):
            assert torch.equal(fused, before)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gpt_oss", OSS), ("gemma2", {"head_dim": 32, "attn_logit_softcapping": 0.5, "final_logit_softcapping": None})],
)
@torch.no_grad()
def test_prompts_of_a_class_s_own_attention_are_computed_in_float32(
    tmp_path: Path, family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch has no instructions for bfloat16; weights that are asked for are those of the class."""
    monkeypatch.setattr(row_attention.bfloat_products, "torch_has_instructions", lambda: False)
    row_attention.in_float32.cache_clear()
    numbers, compute = list[int](), row_attention.prompt_attention.attend_in_float32

    def counted(queries: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        numbers.append(queries.shape[2])
        return compute(queries, *args, **named)

    ids = PROMPT.repeat(1, 40 // PROMPT.shape[1] + 1)[:, :40]
    folder = checkpoint(tmp_path, family, None, **settings)
    model = load(folder, exact=False, fast_bfloat16=True)
    monkeypatch.setattr(row_attention.prompt_attention, "attend_in_float32", counted)
    logits = model(ids).logits
    assert numbers[-2:] == [40, 40]
    del numbers[:]
    of_class = model(ids, output_attentions=True)
    assert not numbers
    assert len(of_class.attentions) == 2
    wide = load(folder, dtype="float32")(ids).logits
    assert relative_error(logits, wide) < 1.2 * relative_error(of_class.logits, wide)
    row_attention.in_float32.cache_clear()


@torch.no_grad()
def test_attention_with_other_arguments_is_that_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that takes sinks by another name, and ignores them where there are none."""
    monkeypatch.setattr(row_attention.bfloat_products, "torch_has_instructions", lambda: False)
    called = list[Any]()

    def own(module: Any, query: Any, key: Any, value: Any, mask: Any, sink: Any = None, **named: Any) -> Any:
        called.append(sink)
        repeated = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return nn.functional.scaled_dot_product_attention(query, *repeated, mask, scale=0.25).transpose(1, 2), None

    attend, module = row_attention.in_float32(own), nn.Module().eval()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    inputs = module, *(torch.randn(1, heads, 20, 32).bfloat16() for heads in (4, 2, 2)), None
    del called[:]
    expected = attend(*inputs, scaling=0.25)[0]
    assert not called
    assert relative_error(attend(*inputs, scaling=0.25, sink=1.0)[0], expected) < 1 / 64
    assert called == [1.0]


@torch.no_grad()
def test_weights_of_tokens_and_another_function_are_those_of_the_class(
    tmp_path: Path, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where attention has sinks, which `sdpa` does not know."""
    model = load(checkpoint(tmp_path, "gpt_oss", None, **OSS), exact=False, fast_bfloat16=True)
    cache = DynamicCache(config=model.config)
    model(PROMPT, past_key_values=cache)

    def step(**named: Any) -> Any:
        return model(PROMPT[:, :1], past_key_values=copy.deepcopy(cache), **named)

    ordinary = step().logits
    assert len(calls) == 2
    weights = step(output_attentions=True).attentions
    assert [of_layer.shape[:3] for of_layer in weights] == [(1, model.config.num_attention_heads, 1)] * 2
    own = modeling_gpt_oss.eager_attention_forward

    def doubled(*arguments: Any, **named: Any) -> Any:
        result, of_tokens = own(*arguments, **named)
        return result * 2, of_tokens

    with monkeypatch.context() as patch:
        patch.setattr(modeling_gpt_oss, "eager_attention_forward", doubled)
        assert not torch.equal(changed := step().logits, ordinary)
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "eager", doubled)
        assert torch.equal(step().logits, changed)
    added = torch.ones(1, 1, 1, PROMPT.shape[1] + 1, dtype=torch.bool)  # to scores, though not to sinks
    step(attention_mask={"full_attention": added, "sliding_attention": added[..., -OSS["sliding_window"] :]})
    assert len(calls) == 2
    assert torch.equal(step().logits, ordinary)
    assert len(calls) == 4


@torch.no_grad()
def test_layers_that_share_a_weight_compute_with_their_own_others(tmp_path: Path) -> None:
    model = load(checkpoint(tmp_path, "llama", "q8_0"), exact=False)
    first, second = model.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    cache = DynamicCache(config=model.config)
    model(PROMPT, past_key_values=cache)
    for _ in range(2):
        results = [model(PROMPT[:, :1], past_key_values=copy.deepcopy(cache)).logits]
    for module in model.model.layers.modules():
        vars(module).pop("forward", None)
    results.append(model(PROMPT[:, :1], past_key_values=copy.deepcopy(cache)).logits)
    assert _attention.relative_error(*results) < 0.02


class Scaled(LlamaDecoderLayer):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        return super().forward(hidden_states, **named) * 2


@torch.no_grad()
def test_transformers_own_cache_grows_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the logits of copies for each token: cut, twice after a deep copy, with beams, after inference mode."""
    monkeypatch.setattr(kv_room, "MIN_ROOM_BYTES", 1)
    model = load(checkpoint(tmp_path, "llama", "q8_0"), exact=False)

    def seen(places: list[int]) -> list[torch.Tensor]:
        cache, found = DynamicCache(config=model.config), list[torch.Tensor]()

        def goes_on(of: DynamicCache, *tokens: int) -> None:
            for token in tokens:
                found.append(model(torch.tensor([[token]]), past_key_values=of).logits)
                places.append(of.layers[0].keys.data_ptr())

        model(PROMPT, past_key_values=cache)
        with torch.inference_mode():
            goes_on(cache, *range(1, 9))
        goes_on(cache, *range(1, 9))
        cache.crop(-3)
        goes_on(cache, 4, 5)
        copied = copy.deepcopy(cache)
        goes_on(cache, 6, 7)
        goes_on(copied, 8, 9)
        goes_on(cache, 1)
        found += [cache.layers[0].keys, copied.layers[0].values]
        found.append(model.generate(PROMPT, max_new_tokens=6, num_beams=2, do_sample=False))
        return found

    in_place, copies = list[int](), list[int]()
    results = seen(in_place)
    monkeypatch.setattr(_attention, "updated", lambda cache, keys, values, index: cache.update(keys, values, index))
    monkeypatch.setattr(_whole_steps, "_hides_nothing", lambda *given: False)
    assert all(map(torch.equal, results, seen(copies)))
    assert len({*in_place}) <= 5 < len({*copies})


def test_a_layer_that_adds_otherwise_is_not_replaced() -> None:
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    layers = nn.ModuleList([LlamaDecoderLayer(config, 0), Scaled(config, 0)])
    assert fuse_layers(layers) == 0
    fuse_norms(layers)
    assert fuse_layers(layers) == 1
    assert not any("forward" in vars(layer) for layer in layers[1:])
    # a norm of another kind, which refuses what is not as wide as the layer
    olmo = OlmoConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    assert fuse_layers(OlmoDecoderLayer(olmo, 0)) == 0


@torch.no_grad()
def test_what_is_left_to_the_class(tmp_path: Path, calls: list[Any]) -> None:
    model = load(checkpoint(tmp_path, "qwen3", "q8_0", head_dim=64), exact=False)
    attention = model.model.layers[0].self_attn
    x, angles = torch.randn(1, 1, 256).bfloat16(), tuple(torch.randn(2, 1, 1, 64).bfloat16())

    def assert_of_class(x: torch.Tensor = x, mask: Any = None, **more: Any) -> None:
        of_class = type(attention).forward
        for cache in (DynamicCache, lambda: None):
            named = {"hidden_states": x, "position_embeddings": tuple(part.to(x.dtype) for part in angles)}
            named.update(attention_mask=mask, **more)
            results = [
                compute(cache=cache(), **named)[0] for compute in (attention, lambda **n: of_class(attention, **n))
            ]
            assert torch.equal(*results)

    attention(x, position_embeddings=angles, attention_mask=None, cache=DynamicCache())
    assert_of_class(torch.randn(1, 3, 256).bfloat16())
    assert_of_class(torch.randn(2, 1, 256).bfloat16())
    assert_of_class(x.float())
    assert_of_class(mask=torch.zeros(1, 1, 1, 1).bfloat16())
    attention(
        hidden_states=x, position_embeddings=angles, attention_mask=torch.ones(1, 1, 1, 1).bool(), cache=DynamicCache()
    )
    assert calls.pop() is attention
    assert not calls
    assert_of_class(mask=torch.zeros(1, 1, 1, 1).bool())
    assert_of_class(softcap=None)
    with torch.enable_grad():
        assert_of_class()
    seen = list[Any]()
    for part in (attention.q_proj, attention.k_norm, attention.o_proj):
        hook = part.register_forward_hook(lambda module, args, output: seen.append(output))
        assert_of_class()
        hook.remove()
    assert len(seen) == 3 * 4
    linear = attention.v_proj
    attention.v_proj = nn.Sequential(linear)  # as an adapter wraps it
    assert_of_class()
    attention.v_proj = linear
    for owner, name in ((attention, "scaling"), (attention.k_norm, "variance_epsilon")):
        value = getattr(owner, name)
        setattr(owner, name, 2 * value + 1)
        assert_of_class()
        setattr(owner, name, value)
    attention.config._attn_implementation = "eager"
    assert_of_class()
    assert not calls
    attention.config._attn_implementation = "sdpa"
    attention(hidden_states=x, position_embeddings=angles, attention_mask=None, cache=DynamicCache())
    assert calls == [attention]


class Shifted(LlamaAttention):  # type: ignore[misc]
    def forward(self, *args: Any, **named: Any) -> Any:
        output, weights = super().forward(*args, **named)
        return output + 1, weights


def test_classes_that_attend_otherwise_are_not_replaced() -> None:
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    of_gemma = Gemma2Config(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    for settings in (config, of_gemma):
        settings._attn_implementation = "sdpa"
    assert fuse_attention(LlamaAttention(config, 0)) == 1
    assert fuse_attention(Shifted(config, 0)) == 0
    of_cohere = CohereConfig(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    of_cohere._attn_implementation = "sdpa"
    assert fuse_attention(CohereAttention(of_cohere, 0)) == 0  # neighbours are pairs
    of_gemma._attn_implementation = "eager"  # with a limit of scores
    assert fuse_attention(Gemma2Attention(of_gemma, 0)) == 0
    odd = LlamaAttention(LlamaConfig(hidden_size=48, num_attention_heads=2), 0)
    assert fuse_attention(odd) == 0


@torch.no_grad()
def test_a_layer_s_own_number_is_noticed(tmp_path: Path) -> None:
    model = load(checkpoint(tmp_path, Family("granite", {"residual_multiplier": 1.0}), "q8_0"), exact=False)
    layer, cache = model.model.layers[1], DynamicCache(config=model.config)
    model(PROMPT, past_key_values=cache)

    def step() -> torch.Tensor:
        return model(PROMPT[:, :1], past_key_values=copy.deepcopy(cache)).logits  # type: ignore[no-any-return]

    assert _attention.is_whole_layer(layer)
    ordinary, layer.residual_multiplier = step(), 0.25
    changed = step()
    del layer.forward
    assert torch.equal(changed, step())
    layer.residual_multiplier = 1.0
    assert _attention.relative_error(changed, ordinary) > 0.1
