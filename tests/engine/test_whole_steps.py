"""A token by one call for all layers has the bits of layers called one by one, and is left to these otherwise."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from rabbitllm.engine import _delta_layers, _whole_steps
from rabbitllm.engine._fusing import notes_on
from rabbitllm.engine._siblings import fused_weight
from rabbitllm.engine._whole_steps import fuse_models
from rabbitllm.generation.request import Request, Sampling
from rabbitllm.generation.session import answer
from tests.engine.test_attention import CHANGES, GEMMA, HYBRID, PHI
from tests.engine.test_siblings import PROMPT, checkpoint
from tests.support.builders import DELTA, Family
from tests.support.kernel_rows import plain_products as plain_products
from tests.support.tiny_models import load

pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("plain_products")]
STEPS = 5
WINDOWS = ["sliding_attention", "full_attention"]
RULES = Family("qwen3_5_text", DELTA)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return counted_steps(monkeypatch)


def counted_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each step by one call had."""
    layers, compute = list[int](), _whole_steps._Whole._compute

    def counted(self: Any, *args: Any, **named: Any) -> Any:
        result = compute(self, *args, **named)
        layers.append(len(self.calls))
        return result

    monkeypatch.setattr(_whole_steps._Whole, "_compute", counted)
    return layers


def pair(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A model with whole steps, and one without."""
    models = [load(directory, exact=False, fast_bfloat16=True)]
    with monkeypatch.context() as patch:
        patch.setattr("rabbitllm.engine.fusions.fuse_models", lambda model: 0)
        return [*models, load(directory, exact=False, fast_bfloat16=True)]


@torch.no_grad()
def results_of(model: Any, **named: Any) -> list[torch.Tensor]:
    """Logits of a prompt and some steps, and all keys, values and states."""
    cache = DynamicCache(config=model.config)
    results = [model(PROMPT, past_key_values=cache).logits]
    for step in range(STEPS):
        results.append(model(torch.tensor([[step + 1]]), past_key_values=cache, **named).logits)
    return results + [tensor for layer in cache.layers for tensor in kept_by(layer)]


def kept_by(layer: Any) -> list[torch.Tensor]:
    """What a layer of a cache keeps of a text."""
    rules = [*layer.conv_states.values(), *layer.recurrent_states.values()] if hasattr(layer, "conv_states") else []
    kept: list[torch.Tensor] = rules or [layer.keys, layer.values]
    return kept


@pytest.mark.parametrize(
    ("family", "compression", "settings"),
    [
        ("llama", "4bit", {"num_hidden_layers": 3}),
        ("qwen2", "q8_0", {}),
        ("qwen3", "q4_k_m", {"head_dim": 64}),
        ("phi3", "8bit", {**PHI, "sliding_window": None}),
        ("phi3", "8bit", PHI),
        ("gemma3", "4bit", {**GEMMA, "num_hidden_layers": 3, "layer_types": [*WINDOWS, "full_attention"]}),
        ("gemma3", None, {**GEMMA, "layer_types": WINDOWS}),
        ("llama", None, {"num_hidden_layers": 3}),
        ("qwen2", None, {}),
        ("phi3", None, {**PHI, "sliding_window": None}),
        (
            RULES,
            "4bit",
            {**HYBRID, "num_hidden_layers": 3, "layer_types": ["linear_attention", *HYBRID["layer_types"]]},
        ),
        (RULES, None, {**HYBRID, "layer_types": HYBRID["layer_types"][::-1]}),
    ],
)
def test_a_token_has_the_bits_of_its_layers(
    tmp_path: Path,
    family: str | Family,
    compression: str | None,
    settings: dict[str, Any],
    whole: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    models = pair(checkpoint(tmp_path, family, compression, **settings), monkeypatch)
    assert len({inspect.signature(model.model.forward) for model in models}) == 1
    expected = results_of(models[1])
    assert not whole
    assert all(map(torch.equal, results_of(models[0]), expected))
    assert whole == [len(models[0].model.layers)] * STEPS
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    assert all(map(torch.equal, results_of(models[0]), expected))
    torch.set_num_threads(threads)
    with torch.inference_mode():
        assert all(map(torch.equal, results_of(models[0]), expected))
    assert len(whole) == 3 * STEPS
    asked = {"max_new_tokens": 6, "do_sample": False, "output_hidden_states": True, "return_dict_in_generate": True}
    states = [model.generate(PROMPT, **asked).hidden_states for model in models]
    assert len(whole) == 3 * STEPS
    for of_whole, of_layers in zip(*states, strict=True):
        assert all(map(torch.equal, of_whole, of_layers))
    assert all(map(torch.equal, results_of(models[0]), expected))
    assert len(whole) == 4 * STEPS  # the hooks that kept the states are still there


Change = Callable[[pytest.MonkeyPatch, Any], None]


def of_a_layer(change: Change) -> Change:
    """A change to a model's second layer."""
    return lambda patch, model: change(patch, model.model.layers[1])


def added(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """What a hook returns."""
    return output + args[0]


def twice(x: torch.Tensor, **named: Any) -> torch.Tensor:
    """What another forward returns."""
    return x * 2


def of_another_class(patch: pytest.MonkeyPatch, model: Any, name: str) -> None:
    """A module gets a class of its own, as by a program that replaces forwards so."""
    part = model.get_submodule(name)
    base: Any = type(part)

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        result = base.forward(self, *args, **named)
        return (result[0] * 2, *result[1:]) if type(result) is tuple else result.flip(-1)

    patch.setattr(part, "__class__", type(base.__name__, (base,), {"forward": forward}))


MORE: dict[str, Change] = {
    "hook of a layer": lambda patch, model: patch.setitem(model.model.layers[1]._forward_hooks, 7, added),
    "forward of a layer": lambda patch, model: patch.setattr(
        model.model.layers[1], "forward", lambda x, **named: x * 2
    ),
    "layer": lambda patch, model: patch.setitem(model.model.layers._modules, "1", model.model.layers[0]),
    "layers": lambda patch, model: patch.setitem(model.model._modules, "layers", model.model.layers[:1]),
    "order of layers": lambda patch, model: patch.setattr(
        model.model.layers, "_modules", dict(zip("01", [*model.model.layers][::-1], strict=True))
    ),
    "number of layers": lambda patch, model: patch.setattr(model.model.config, "num_hidden_layers", 1),
    "embedding": lambda patch, model: patch.setitem(
        model.model._modules, "embed_tokens", nn.Embedding(512, 256, dtype=torch.bfloat16, _weight=ROWS)
    ),
    "last norm": lambda patch, model: patch.setitem(model.model._modules, "norm", nn.Identity()),
    "hook of the model": lambda patch, model: patch.setitem(
        model.model._forward_pre_hooks, 7, lambda module, args: None
    ),
    "data of a norm": lambda patch, model: patch.setattr(
        model.model.layers[1].input_layernorm.weight, "data", model.model.layers[1].input_layernorm.weight.data * 2
    ),
    "short norm": lambda patch, model: patch.setattr(model.model.layers[1].input_layernorm.weight, "data", HALF),
    "a norm's data in the same place, in another form": lambda patch, model: patch.setattr(
        model.model.layers[1].input_layernorm.weight,
        "data",
        model.model.layers[1].input_layernorm.weight.data[:1].expand(model.config.hidden_size),
    ),
    "short bias": lambda patch, model: patch.setitem(
        model.model.layers[1].self_attn.q_proj._parameters, "bias", nn.Parameter(HALF)
    ),
    "class": lambda patch, model: patch.setattr(LlamaModel, "forward", only_embeds),
    "class of layers": lambda patch, model: patch.setattr(
        LlamaDecoderLayer, "forward", lambda layer, x, **named: x * 2
    ),
    "class of norms": lambda patch, model: patch.setattr(LlamaRMSNorm, "forward", lambda norm, x: x * 2),
    "class of Linears": lambda patch, model: patch.setattr(
        nn.Linear, "forward", lambda linear, x: nn.functional.linear(x * 2, linear.weight, linear.bias)
    ),
    "class of MLPs": lambda patch, model: patch.setattr(LlamaMLP, "forward", lambda mlp, x: x * 2),
    **{
        f"class of one {name}": functools.partial(of_another_class, name=f"model.layers.1.{name}")
        for name in ("mlp", "mlp.up_proj", "input_layernorm", "self_attn")
    },
    "class of activations": lambda patch, model: patch.setattr(
        type(model.model.layers[1].mlp.act_fn), "forward", lambda act, x: torch.sigmoid(x)
    ),
    "class of attentions": lambda patch, model: patch.setattr(
        LlamaAttention, "forward", lambda attention, hidden_states, **named: (hidden_states * 2, None)
    ),
    "function of attentions": lambda patch, model: patch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * 2, k)
    ),
    "function of a function": lambda patch, model: patch.setattr(modeling_llama, "rotate_half", torch.zeros_like),
    "torch's attention": lambda patch, model: patch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda q, *args, **named: q * 2
    ),
    "torch's activation": lambda patch, model: patch.setattr(nn.functional, "silu", lambda x, **named: torch.relu(x)),
    "attention": lambda patch, model: patch.setitem(
        modeling_llama.ALL_ATTENTION_FUNCTIONS, "sdpa", lambda module, q, *args, **named: (q.transpose(1, 2), None)
    ),
}
ROWS = torch.randn(512, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
HALF = torch.full((1,), 0.5).bfloat16()
"""What torch uses for all columns."""
UNCHANGED = {"hook of the model"}


def only_embeds(model: Any, input_ids: Any, **named: Any) -> Any:
    return BaseModelOutputWithPast(last_hidden_state=model.embed_tokens(input_ids))


def replaced(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Other data of a weight, which is square."""

    def apply(patch: pytest.MonkeyPatch, model: Any) -> None:
        weight = model.model.layers[1].self_attn.q_proj.weight
        patch.setattr(weight, "data", change(weight.data))

    return apply


PLAIN: dict[str, Change] = {
    "data of a weight": replaced(lambda data: data * 2),
    "turned data of a weight": replaced(torch.Tensor.t),
    "values of a weight": replaced(lambda data: data.clone().mul_(2)),
}
"""Changes of weights that are plain matrices, which codes refuse."""


@pytest.mark.parametrize("compression", ["q8_0", None])
@torch.no_grad()
def test_a_change_between_two_steps_is_noticed(
    tmp_path: Path, compression: str | None, whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pair(checkpoint(tmp_path, "llama", compression), monkeypatch)
    cache = DynamicCache(config=models[0].config)
    models[0](PROMPT, past_key_values=cache)

    def steps() -> list[torch.Tensor]:
        return [model(PROMPT[:, :1], past_key_values=copy.deepcopy(cache)).logits for model in models]

    ordinary = steps()
    steps()  # what a step finds is remembered from its second time on
    changes = {**{name: of_a_layer(change) for name, change in CHANGES.items()}, **MORE}
    for name, change in (changes | ({} if compression else PLAIN)).items():
        with monkeypatch.context() as patch:
            for model in models:
                change(patch, model)
            changed = steps()
        assert torch.equal(*changed), name
        assert torch.equal(changed[0], ordinary[0]) == (name in UNCHANGED), name
        for module in models[0].modules():  # what was found while it was changed
            if (weight := fused_weight(module)) is not None:
                weight.calls = None
        notes_on(models[0].model).clear()
        whole.clear()
        assert all(map(torch.equal, (*steps(), *steps()), (*ordinary, *ordinary))), name
        assert whole == [2, 2], name


def numbers_of(name: str, added: float = 1.0) -> Change:
    """Other numbers of a delta rule, in their place."""
    return lambda patch, model: patch.setattr(
        model.model.layers[0].linear_attn.get_parameter(name),
        "data",
        model.model.layers[0].linear_attn.get_parameter(name).data / 2 + added,
    )


def of_the_rule(change: Callable[[pytest.MonkeyPatch, Any], None]) -> Change:
    return lambda patch, model: change(patch, model.model.layers[0].linear_attn)


OF_RULES: dict[str, Change] = {
    **{name: numbers_of(name) for name in ("A_log", "conv1d.weight", "norm.weight")},
    "dt_bias": numbers_of("dt_bias", -4.0),
    "short norm": of_the_rule(lambda patch, rule: patch.setattr(rule.norm.weight, "data", HALF)),
    "bias": of_the_rule(
        lambda patch, rule: patch.setitem(rule.conv1d._parameters, "bias", nn.Parameter(torch.ones(192).bfloat16()))
    ),
    "matrix": of_the_rule(
        lambda patch, rule: patch.setitem(rule.in_proj_b._parameters, "weight", rule.in_proj_a.weight)
    ),
    "hook of the norm": of_the_rule(
        lambda patch, rule: patch.setitem(rule.norm._forward_hooks, 7, lambda module, args, output: output * 2)
    ),
    "class of its norm": functools.partial(of_another_class, name="model.layers.0.linear_attn.norm"),
    "hook": of_the_rule(
        lambda patch, rule: patch.setitem(rule._forward_hooks, 7, lambda module, args, output: output * 2)
    ),
    "forward": of_the_rule(
        lambda patch, rule: patch.setitem(vars(rule), "forward", lambda hidden_states, **named: hidden_states * 2)
    ),
    "class": of_the_rule(
        lambda patch, rule: patch.setattr(type(rule), "forward", lambda rule, hidden_states, **named: hidden_states)
    ),
    "function": of_the_rule(
        lambda patch, rule: patch.setitem(
            inspect.unwrap(type(rule).forward).__globals__, "apply_mask_to_padding_states", lambda x, mask: x * 2
        )
    ),
    "number": of_the_rule(lambda patch, rule: patch.setattr(rule.norm, "variance_epsilon", 1.0)),
    "activation": of_the_rule(lambda patch, rule: patch.setattr(rule, "activation", "gelu")),
}


class OwnStates(LinearAttentionLayer):  # type: ignore[misc]
    """May keep its states in another form."""


def halves_states(cache: Any) -> None:
    """Let a cache give halves of its states."""
    given = cache.get_recurrent_state
    cache.get_recurrent_state = lambda *args, **named: given(*args, **named) / 2


OWN_STATES: list[Callable[[Any], object]] = [
    halves_states,
    lambda cache: setattr(cache, "update_recurrent_state", cache.update_recurrent_state),
    lambda cache: setattr(cache.layers[0], "update_recurrent_state", cache.layers[0].update_recurrent_state),
    lambda cache: setattr(cache.layers[0], "__class__", OwnStates),
]
"""Changes of caches, which may read and write their states otherwise then."""


@torch.no_grad()
def test_a_change_of_a_delta_rule_is_noticed(tmp_path: Path, whole: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    models = pair(checkpoint(tmp_path, RULES, "4bit", **HYBRID), monkeypatch)
    cache = DynamicCache(config=models[0].config)
    models[0](PROMPT, past_key_values=cache)

    def steps(prepare: Callable[[Any], object] = lambda cache: None) -> list[torch.Tensor]:
        results = []
        for model in models:
            prepare(own := copy.deepcopy(cache))
            results.append(model(PROMPT[:, :1], past_key_values=own).logits)
        return results

    ordinary = steps()
    for name, change in OF_RULES.items():
        with monkeypatch.context() as patch:
            for model in models[: 1 if name in ("class", "function") else 2]:
                change(patch, model)
            changed = steps()
        assert torch.equal(*changed), name
        assert not torch.equal(changed[0], ordinary[0]), name
        notes_on(models[0].model).clear()
        whole.clear()
        assert all(map(torch.equal, steps(), ordinary)), name
        assert whole == [2], name
    whole.clear()
    for prepare in (lambda cache: cache.layers[0].activate_past_recording(), *OWN_STATES):
        assert torch.equal(*steps(prepare))
        assert not whole

    def interrupt(*given: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_delta_layers, "decays_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            steps()
    assert all(map(torch.equal, steps(), ordinary))


@torch.no_grad()
def test_what_is_left_to_the_layers(tmp_path: Path, whole: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    models = pair(checkpoint(tmp_path, "llama", "q8_0"), monkeypatch)
    length = PROMPT.shape[1]

    def assert_alike(tokens: int, **named: Any) -> None:
        found = []
        for model in models:
            cache = DynamicCache(config=model.config)
            model(PROMPT, past_key_values=cache)
            found.append(model(PROMPT[:, :tokens], past_key_values=cache, **named).logits)
        assert torch.equal(*found)

    assert_alike(1, attention_mask=torch.ones(1, length + 1).long(), position_ids=torch.tensor([[length + 3]]))
    assert whole == [2]
    whole.clear()
    assert_alike(2)
    assert_alike(1, attention_mask=torch.tensor([[0] * 2 + [1] * (length - 1)]))
    assert_alike(1, attention_mask=torch.ones(1, 1, 1, length + 1).bool())
    assert_alike(1, output_hidden_states=True)
    beams = [model.generate(PROMPT, max_new_tokens=4, num_beams=2, do_sample=False) for model in models]
    assert torch.equal(*beams)
    with torch.enable_grad():
        assert_alike(1)
    assert not whole


def test_the_tokens_of_an_answer(tmp_path: Path, whole: list[int]) -> None:
    model, pieces = load(checkpoint(tmp_path, "llama", "q8_0"), exact=False), list[str]()
    ids = tuple(PROMPT[0].tolist())
    tokens = answer(model, Request(ids, STEPS + 1, Sampling()), pieces.append).tokens
    assert whole == [2] * (len(tokens) - 1)
    assert len(tokens) > 2
    expected = model.generate(PROMPT, max_new_tokens=STEPS + 1, do_sample=False)[0, len(ids) :]
    assert list(tokens) == expected.tolist()


@torch.no_grad()
def test_layers_of_a_cache_that_share_room(tmp_path: Path, whole: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    models, results = pair(checkpoint(tmp_path, "llama", "q8_0"), monkeypatch), list[list[torch.Tensor]]()
    for model in models:
        cache = DynamicCache(config=model.config)
        model(PROMPT, past_key_values=cache)
        results.append([])
        for share in (copy.copy, lambda layer: layer):  # a layer's copy, or the layer itself
            cache.layers[1] = share(cache.layers[0])
            results[-1] += [model(PROMPT[:, :1], past_key_values=cache).logits for _ in range(2)]
        results[-1] += [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert whole
    assert all(map(torch.equal, *results))


class Doubling(LlamaModel):  # type: ignore[misc]
    """Does something between its layers."""

    def forward(self, inputs_embeds: Any = None, attention_mask: Any = None, cache: Any = None, **named: Any) -> Any:
        angles = self.rotary_emb(inputs_embeds, position_ids=torch.tensor([[2]]))
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, position_embeddings=angles, attention_mask=None, cache=cache) * 2
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def test_classes_that_do_otherwise_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_models", lambda model: 0)
    model = load(checkpoint(tmp_path, "llama", "q8_0"), exact=False)
    inner = model.model
    assert fuse_models(model) == 1
    del inner.forward
    inner.__class__ = Doubling
    assert fuse_models(model) == 0
