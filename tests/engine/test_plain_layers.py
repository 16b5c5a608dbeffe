"""Layers that call the modules inside them as functions compute what their classes do, and notice every change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.engine._plain_layers import call_plainly
from rabbitllm.quant import _vectors
from tests.engine.test_siblings import checkpoint, logits
from tests.support.tiny_models import ALL, load


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.twice(self.up(x))) * self.scale  # type: ignore[no-any-return]

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Inner(), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))  # type: ignore[no-any-return]


class Counting(Inner):
    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)


X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def called() -> list[nn.Module]:
    """The modules whose `__call__` ran."""
    return []


@pytest.fixture
def layer(called: list[nn.Module], monkeypatch: pytest.MonkeyPatch) -> Iterator[Layer]:
    call: Any = nn.Module._call_impl

    def noted(self: nn.Module, *args: Any, **named: Any) -> Any:
        called.append(self)
        return call(self, *args, **named)

    monkeypatch.setattr(nn.Module, "_call_impl", noted)
    torch.manual_seed(0)
    made = Layer()
    assert call_plainly([made]) == 1
    with torch.no_grad():
        yield made


def agrees(layer: nn.Module) -> None:
    assert torch.equal(layer(X), type(layer).forward(layer, X))


def test_the_modules_inside_are_not_called(layer: Layer, called: list[nn.Module]) -> None:
    result = layer(X)
    assert called == [layer]
    expected, parts = Layer.forward(layer, X), called[1:]
    assert torch.equal(result, expected)
    assert parts == [layer.norm, layer.inner, layer.inner.up, layer.inner.down]
    with torch.enable_grad():
        assert layer(X).requires_grad
    assert called[5:] == [layer, *parts]


def test_changes_are_noticed(layer: Layer) -> None:
    before = layer(X)
    layer.inner.scale = 3.0
    agrees(layer)
    layer.inner.up.weight.data *= 2
    agrees(layer)
    layer.inner.down = nn.Linear(8, 8)
    agrees(layer)
    layer.inner.up.forward = lambda x: x + 1  # type: ignore[method-assign]
    agrees(layer)
    layer.inner = Inner()
    agrees(layer)
    assert not torch.equal(layer(X), before)


@pytest.mark.parametrize("kind", ["pre", "after", "global"])
def test_hooks_run(layer: Layer, kind: str) -> None:
    seen = list[nn.Module]()
    layer(X)
    if kind == "pre":
        handle = layer.inner.up.register_forward_pre_hook(lambda module, args: seen.append(module))
    elif kind == "after":
        handle = layer.inner.up.register_forward_hook(lambda module, args, output: seen.append(module))
    else:
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    layer(X)
    handle.remove()
    assert layer.inner.up in seen
    del seen[:]
    layer(X)
    assert not seen


def test_modules_that_set_attributes_stay_themselves(layer: Layer, called: list[nn.Module]) -> None:
    layer.inner = counting = Counting()
    for _ in range(3):
        layer(X)
    assert counting.count == 3
    assert counting.up in called


def test_copies_have_parts_of_their_own(layer: Layer) -> None:
    layer(X)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        copied.inner.scale = 5.0
        agrees(copied)
        agrees(layer)
        assert not torch.equal(copied(X), layer(X))


@pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used")
@pytest.mark.parametrize("budget", [ALL, 0], ids=["resident", "streamed"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_models_have_the_same_bits(tmp_path: Path, family: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(tmp_path, family, "4bit")
    model = load(directory, budget, exact=False)
    with torch.no_grad():
        got = logits(model)
    assert all("_plain_layer" in vars(layer) for layer in model.model.layers)
    monkeypatch.setattr("rabbitllm.engine.load.call_plainly", lambda layers: 0)
    with torch.no_grad():
        assert torch.equal(got, logits(load(directory, budget, exact=False)))
    exact = load(directory, budget)
    assert not any("forward" in vars(layer) for layer in exact.model.layers)
