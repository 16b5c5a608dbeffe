"""Layers with several streams by one call or two have the bits of their class, and notice what changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from rabbitllm.engine import _streams
from rabbitllm.engine._norms import fuse_norms
from rabbitllm.engine._streams import fuse_streams
from rabbitllm.engine.turns import taking_turns
from tests.engine.test_routed import MANY
from tests.engine.test_siblings import PROMPT, checkpoint
from tests.support.call_counts import called_parts
from tests.support.hybrid_families import HYBRIDS
from tests.support.kernel_rows import plain_products as plain_products
from tests.support.tiny_models import ALL, load, plain_model

qwen4_exp = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("plain_products")]
KINDS = ["linear_attention", "indexed_attention", "linear_attention"]
SETTINGS = {
    **MANY,
    "num_hidden_layers": len(KINDS),
    "layer_types": KINDS,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "indexer_head_dim": 64,
    "shared_expert_intermediate_size": 256,
    "linear_value_head_dim": 32,
    "output_gate_type": "sigmoid",
    "hc_lowrank": 64,
    "hc_count": 4,
}
STEPS = 12
Change = Callable[[pytest.MonkeyPatch, Any], Any]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each layer of a step that was computed by calls, whether its attention was part of one."""
    mixers, compute = list[bool](), _streams._StreamCalls.__call__

    def counted(self: Any, *args: Any) -> torch.Tensor:
        mixers.append(self._mixer is not None)
        return compute(self, *args)

    monkeypatch.setattr(_streams._StreamCalls, "__call__", counted)
    return mixers


def pair(directory: Path, monkeypatch: pytest.MonkeyPatch, budget: int = ALL, **options: Any) -> list[Any]:
    """A model with such calls, and one without."""
    models = [load(directory, budget, **{"exact": False, "fast_bfloat16": True, **options})]
    with monkeypatch.context() as patch:
        patch.setattr("rabbitllm.engine.fusions.fuse_streams", lambda model: 0)
        return [*models, load(directory, budget, **{"exact": False, "fast_bfloat16": True, **options})]


@torch.no_grad()
def results(model: Any, prompt: torch.Tensor = PROMPT, **named: Any) -> list[torch.Tensor]:
    """Logits of a prompt and of steps, and all that the cache keeps of them."""
    cache = DynamicCache(config=model.config)
    logits = [model(prompt, cache=cache, **named).logits]
    for step in range(STEPS):
        mask = {name: nn.functional.pad(value, (0, step + 1), value=1) for name, value in named.items()}
        logits.append(model(torch.full((len(prompt), 1), 7 * step + 1), cache=cache, **mask).logits)
    for layer in cache.layers:
        kept = [*layer.conv_states.values(), *layer.recurrent_states.values()] if hasattr(layer, "conv_states") else []
        logits += [tensor for tensor in kept or (layer.keys, layer.values, layer.indexer_keys) if tensor is not None]
    return logits


def are_equal(models: list[Any], **named: Any) -> bool:
    of_calls, expected = (results(model, **named) for model in models)
    return len(of_calls) == len(expected) and all(map(torch.equal, of_calls, expected))


@pytest.mark.parametrize(
    ("compression", "kept"),
    [("4bit", "resident"), ("4bit", "half"), ("4bit", "streamed"), ("q4_k_m", "resident"), (None, "resident")],
)
def test_a_token_has_the_bits_of_its_class(
    tmp_path: Path, compression: str | None, kept: str, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, HYBRIDS["qwen4_exp"], compression, **SETTINGS)
    stored = sum(placed.stored for placed in load(directory).placement.units)
    budget = {"resident": ALL, "half": stored // 2, "streamed": 0}[kept]
    models = pair(directory, monkeypatch, budget)
    for _ in range(2):  # the first use of an expert is left to the class of its mixture
        assert are_equal(models)
    assert calls == [True] * len(KINDS) * 2 * STEPS
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    assert are_equal(models)
    torch.set_num_threads(threads)
    assert len(calls) == 3 * len(KINDS) * STEPS
    assert are_equal(models, prompt=PROMPT.repeat(3, 1))
    padded = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert are_equal(models, prompt=PROMPT.repeat(2, 1), attention_mask=padded)
    assert are_equal(models, attention_mask=padded[:1])
    assert are_equal(models, attention_mask=padded[1:])
    asked = {"max_new_tokens": 6, "do_sample": False, "output_hidden_states": True, "return_dict_in_generate": True}
    states = [model.generate(PROMPT, **asked).hidden_states for model in models]
    assert all(all(map(torch.equal, *pair)) for pair in zip(*states, strict=True))
    del calls[:]
    assert are_equal(models)
    assert len(calls) == len(KINDS) * STEPS  # the hooks that kept the states are still there


@torch.no_grad()
def test_parts_are_called_where_sequences_take_turns(tmp_path: Path, calls: list[bool]) -> None:
    model = load(checkpoint(tmp_path, HYBRIDS["qwen4_exp"], "4bit", **SETTINGS), exact=False, fast_bfloat16=True)
    results(model)
    assert len(calls) == len(KINDS) * STEPS
    counts = called_parts(model)
    with taking_turns():
        results(model)
    assert {*counts.values()} == {1 + STEPS}
    assert len(calls) == len(KINDS) * STEPS


def test_exactly_layers_are_left_to_their_class(tmp_path: Path, calls: list[bool]) -> None:
    directory = checkpoint(tmp_path, HYBRIDS["qwen4_exp"], None, **SETTINGS)
    assert are_equal([load(directory), plain_model(directory.parent)])
    assert not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_norms_of_parts_of_a_row(dtype: torch.dtype) -> None:
    for groups, columns in ((4, 64), (2, 100), (4, 2560), (1, 128)):
        norm = qwen4_exp.Qwen4ExpTextRMSNorm(groups * columns, columns).to(dtype)
        norm.weight.data.normal_()
        fused = copy.deepcopy(norm)
        assert fuse_norms(fused) == 1
        for rows in (1, 5, 200):
            x = torch.randn(1, rows, groups * columns).to(dtype)
            assert torch.equal(fused(x), norm(x))
        for size in (columns // 2, None):
            norm.group_size = fused.group_size = size
            assert torch.equal(fused(x), norm(x))


def doubled(module: Any, args: Any, output: Any) -> Any:
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


def hooked(*names: str) -> Change:
    return lambda patch, layer: patch.setitem(layer.get_submodule(".".join(names))._forward_hooks, 7, doubled)


def other_weight(*names: str) -> Change:
    def change(patch: pytest.MonkeyPatch, layer: Any) -> None:
        part = layer.get_submodule(".".join(names))
        patch.setitem(part._parameters, "weight", nn.Parameter(part.weight.flip(0).clone()))

    return change


class OwnMix(nn.Module):
    """Mixes no streams."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[..., : x.shape[-1] // 4].contiguous(), x, torch.ones(1, 1, 4, dtype=x.dtype)


class OwnRule(nn.Module):
    """Has no state."""

    def forward(self, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
        return hidden_states.flip(-1)


MIX, OTHER_MIX, RULE = "attn_hyper_connection", "mlp_hyper_connection", "linear_attn"
NORM, INJECT, DOWN = "hc_norm", "block_inject_weight", "input_mix_weight_down"
PLAIN_MIX = qwen4_exp.Qwen4ExpTextGatedResidual.forward
PLAIN_LAYER = qwen4_exp.Qwen4ExpTextDecoderLayer.forward
CHANGES: dict[str, Change] = {
    **{f"hook on {name}": hooked(*name.split(".")) for name in (MIX, OTHER_MIX, RULE, "mlp", "ple")},
    **{f"hook on {name}": hooked(MIX, name) for name in (NORM, INJECT, DOWN)},
    **{f"hook on {name}": hooked(RULE, name) for name in ("norm", "in_proj_b", "out_proj")},
    "hook on the layer": lambda patch, layer: patch.setitem(layer._forward_hooks, 7, doubled),
    "weight of the norm": other_weight(MIX, NORM),
    **{f"weight of {mix} {name}": other_weight(mix, name) for mix in (MIX, OTHER_MIX) for name in (INJECT, DOWN)},
    "weight of the rule": other_weight(RULE, "out_proj"),
    "first weight of the rule": other_weight(RULE, "in_proj_qkv"),
    "part": lambda patch, layer: patch.setitem(layer._modules, MIX, layer._modules[OTHER_MIX]),
    **{
        f"own {mix}": lambda patch, layer, mix=mix: patch.setitem(layer._modules, mix, OwnMix())
        for mix in (MIX, OTHER_MIX)
    },
    "own rule": lambda patch, layer: patch.setitem(layer._modules, RULE, OwnRule()),
    "epsilon": lambda patch, layer: patch.setattr(layer._modules[MIX].hc_norm, "eps", 1.0),
    "size of groups": lambda patch, layer: patch.setattr(layer._modules[MIX].hc_norm, "group_size", 512),
    "n-grams": lambda patch, layer: patch.setitem(vars(layer), "ple", None),
    "class of mixes": lambda patch, layer: patch.setattr(
        type(layer._modules[MIX]), "forward", lambda self, x: doubled(self, (), PLAIN_MIX(self, x))
    ),
    "class of layers": lambda patch, layer: patch.setattr(
        type(layer), "forward", lambda self, *args, **named: PLAIN_LAYER(self, *args, **named) * 2
    ),
}


@pytest.mark.parametrize("compression", ["4bit", None])
def test_a_change_between_two_steps_is_noticed(
    tmp_path: Path, compression: str | None, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pair(checkpoint(tmp_path, HYBRIDS["qwen4_exp"], compression, **SETTINGS), monkeypatch)
    caches = [DynamicCache(config=model.config) for model in models]

    @torch.no_grad()
    def steps() -> list[torch.Tensor]:
        return [model(PROMPT[:, :1], cache=cache).logits for model, cache in zip(models, caches, strict=True)]

    for model, cache in zip(models, caches, strict=True):
        with torch.no_grad():
            model(PROMPT, cache=cache)
    for _ in range(2):
        assert torch.equal(*steps())
    for name, change in CHANGES.items():
        with monkeypatch.context() as patch:
            for model in models[: 1 if name.startswith("class") else 2]:
                change(patch, model.model.layers[0])
            assert torch.equal(*steps()), name
        del calls[:]
        assert torch.equal(*steps()), name
        assert len(calls) == len(KINDS), name


def test_classes_that_do_otherwise_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(tmp_path, HYBRIDS["qwen4_exp"], "4bit", **SETTINGS)
    replaced, own = list[int](), fuse_streams

    def counted(model: Any) -> int:
        replaced.append(own(model))
        return replaced[-1]

    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_streams", counted)
    load(directory, exact=False)
    with monkeypatch.context() as patch:
        patch.setattr(
            qwen4_exp.Qwen4ExpTextDecoderLayer,
            "forward",
            lambda self, x, **named: PLAIN_LAYER(self, x, **named) + x,
        )
        load(directory, exact=False)
    monkeypatch.setattr(
        qwen4_exp.Qwen4ExpTextGatedResidual, "forward", lambda self, x: doubled(self, (), PLAIN_MIX(self, x))
    )
    load(directory, exact=False)
    mixes = 2 * len(KINDS) + 1
    assert replaced == [mixes + len(KINDS), mixes, 0]
