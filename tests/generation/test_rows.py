"""Rows of several calls that go through a module as one matrix, and come back as each would have alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rabbitllm.engine.expert_finding import is_routed
from rabbitllm.generation.joint_pass import RowKind, joined, rowwise
from tests.generation.together import LENGTHS, alone, assert_alike, prompts, together
from tests.support.builders import build_checkpoint
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import load, split


class Twice(nn.Linear):
    """Does more than its kind."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * len(input)


def test_kinds() -> None:
    assert rowwise(nn.Linear(4, 6)) is rowwise(Conv1D(6, 4)) is RowKind.FEATURES
    assert rowwise(nn.Embedding(9, 4)) is RowKind.IDS
    assert rowwise(Twice(4, 6)) is rowwise(nn.LayerNorm(4)) is None


@pytest.mark.parametrize("module", [nn.Linear(4, 6), nn.Embedding(9, 4)], ids=["features", "ids"])
def test_every_call_gets_its_own_rows_back(module: nn.Module) -> None:
    shapes: list[tuple[int, ...]] = [(1, 3), (2, 5), (1, 1), (7,)]
    is_ids = isinstance(module, nn.Embedding)
    given = [torch.randint(0, 9, shape) if is_ids else torch.randn(*shape, 4) for shape in shapes]
    kind = rowwise(module)
    assert kind is not None
    batch = joined(kind, [((one,), {}) for one in given])
    assert batch is not None
    for got, one in zip(batch.parts(module(*batch.args)), given, strict=True):
        torch.testing.assert_close(got, module(one))


def test_what_does_not_fit_together() -> None:
    one, other = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    assert joined(RowKind.FEATURES, [((one,), {}), ((other.double(),), {})]) is None
    assert joined(RowKind.FEATURES, [((one,), {}), ((other[..., :2],), {})]) is None
    assert joined(RowKind.FEATURES, [((one,), {}), ((other,), {"scale": 2})]) is None
    rows, index, weights = torch.randn(3, 4), torch.zeros(3, 2, dtype=torch.long), torch.randn(3, 2)
    assert joined(RowKind.EXPERTS, [((rows, index, weights), {}), ((rows, index, weights[:, :1]), {})]) is None
    assert joined(RowKind.EXPERTS, [((rows, index, weights), {}), ((rows, index), {})]) is None


@pytest.mark.parametrize("name", ["mixtral", pytest.param("llama4", marks=pytest.mark.long)])
def test_experts_are_asked_once_for_all(tmp_path: Path, name: str) -> None:
    model = load(split(build_checkpoint(tmp_path / "model", HYBRIDS[name])), 0)
    calls: list[tuple[int, int]] = []
    for number, module in enumerate(module for module in model.modules() if is_routed(module)):
        module.register_forward_pre_hook(
            lambda module, args, number=number: calls.append((number, len(args[0])))  # type: ignore[misc]
        )
    given = prompts()
    expected = alone(model, given)
    calls.clear()
    passes: list[int] = []
    found = together(model, given, lambda _, number: passes.append(number), packing=False)
    assert_alike(found, expected)
    layers = len({layer for layer, _ in calls})
    assert len(calls) == layers * len(passes)
    assert Counter(rows for layer, rows in calls if layer == 0)[LENGTHS[0] + 6 + LENGTHS[2]] == 1
