"""Generations that share passes: rows that go through a module together, their products, and GPUs."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.expert_finding import is_routed
from rabbitllm.engine.load import load_model
from rabbitllm.generation._coroutines import RowKind, joined, rowwise
from rabbitllm.generation._model_runner import ModelRunner
from rabbitllm.generation.scoring import Room, ScoredText, score
from rabbitllm.quant import bfloat_products
from tests.generation.together import CHUNK, LENGTHS, Text, alone, assert_alike, generated, prompts, together
from tests.support import quantized
from tests.support.builders import VOCABULARY_SIZE, build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.hybrid_families import HYBRIDS
from tests.support.kernel_rows import kernel_rows as kernel_rows
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import ALL, load, plain_model, split


class Twice(nn.Linear):
    """Does more than its kind."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * len(input)


def test_row_kinds() -> None:
    assert rowwise(nn.Linear(4, 6)) is rowwise(Conv1D(6, 4)) is RowKind.FEATURES
    assert rowwise(nn.Embedding(9, 4)) is RowKind.IDS
    assert rowwise(Twice(4, 6)) is rowwise(nn.LayerNorm(4)) is None


def test_linears_that_round_rows_together(tmp_path: Path) -> None:
    """Of two dimensions all rows have one scale, so those of two sequences are no call."""
    pytest.importorskip("compressed_tensors")
    model = load(split(quantized.build_compressed_tensors(tmp_path / "model", "llama", "W8A8")), exact=False)
    linear = model.model.layers[0].mlp.up_proj
    rows = torch.randn(2, linear.in_features).bfloat16() * torch.tensor([[1], [100]]).bfloat16()
    with torch.no_grad():
        assert not torch.equal(linear(rows)[0], linear(rows[:1])[0])
    assert rowwise(linear) is None
    assert rowwise(model.lm_head) is RowKind.FEATURES


@pytest.mark.parametrize("module", [nn.Linear(4, 6), nn.Embedding(9, 4)], ids=["features", "ids"])
def test_every_call_gets_its_own_rows_back(module: nn.Module) -> None:
    shapes: list[tuple[int, ...]] = [(1, 3), (2, 5), (1, 1), (7,)]
    is_ids = isinstance(module, nn.Embedding)
    inputs = [torch.randint(0, 9, shape) if is_ids else torch.randn(*shape, 4) for shape in shapes]
    row_kind = rowwise(module)
    assert row_kind is not None
    joint = joined(row_kind, [((rows,), {}) for rows in inputs])
    assert joint is not None
    args, parts = joint
    for output, rows in zip(parts(module(*args)), inputs, strict=True):
        torch.testing.assert_close(output, module(rows))


def test_calls_that_cannot_be_joined() -> None:
    first, second = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    assert joined(RowKind.FEATURES, [((first,), {}), ((second.double(),), {})]) is None
    assert joined(RowKind.FEATURES, [((first,), {}), ((second[..., :2],), {})]) is None
    assert joined(RowKind.FEATURES, [((first,), {}), ((second,), {"scale": 2})]) is None
    rows, index, weights = torch.randn(3, 4), torch.zeros(3, 2, dtype=torch.long), torch.randn(3, 2)
    assert joined(RowKind.EXPERTS, [((rows, index, weights), {}), ((rows, index, weights[:, :1]), {})]) is None
    assert joined(RowKind.EXPERTS, [((rows, index, weights), {}), ((rows, index), {})]) is None


@pytest.mark.parametrize("name", ["mixtral", pytest.param("llama4", marks=pytest.mark.long)])
def test_experts_are_called_once_for_all_sequences(tmp_path: Path, name: str) -> None:
    model = load(split(build_checkpoint(tmp_path / "model", HYBRIDS[name])), 0)
    calls: list[tuple[int, int]] = []
    for index, module in enumerate(module for module in model.modules() if is_routed(module)):
        module.register_forward_pre_hook(
            lambda module, args, index=index: calls.append((index, len(args[0])))  # type: ignore[misc]
        )
    inputs = prompts()
    expected = alone(model, inputs)
    calls.clear()
    passes: list[int] = []
    texts = together(model, inputs, lambda _, index: passes.append(index), packing=False)
    assert_alike(texts, expected)
    layers = len({layer for layer, _ in calls})
    assert len(calls) == layers * len(passes)
    assert Counter(rows for layer, rows in calls if layer == 0)[LENGTHS[0] + 6 + LENGTHS[2]] == 1


@pytest.mark.parametrize("exact", [True, False])
def test_coroutines_at_an_inner_embedding_stay_in_their_layer(tmp_path: Path, exact: bool) -> None:
    """The table is a unit of its own, some of whose rows are read; the layer's weights are needed after it."""
    model = load(split(build_checkpoint(tmp_path / "model", HYBRIDS["qwen4_exp"])), 60_000, exact=exact)
    units = {placed.unit for placed in model.placement.units}
    assert any(inner.startswith(f"{outer}.") for inner in units for outer in units)
    inputs = prompts()
    assert_alike(together(model, inputs, exact=exact), alone(model, inputs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(build_checkpoint(tmp_path_factory.mktemp("products") / "model", "llama"))


@pytest.mark.parametrize("budget", [0, ALL], ids=["streamed", "resident"])
def test_other_sequences_change_no_bit(folder: Path, kernel_rows: list[int], budget: int) -> None:
    model = load(folder, budget, dtype="bfloat16")
    inputs = prompts()
    texts = together(model, inputs)
    assert max(kernel_rows) > max(len(prompt) for prompt in inputs)
    for index, text in enumerate(texts):
        lone: list[Text] = []
        runner = ModelRunner(model)
        chunks = {"prefill_chunk_size": CHUNK} if index % 2 else {}
        runner.coroutines.add(lambda: lone.append(generated(model, inputs[index], **chunks)))  # noqa: B023 - runs before the next
        while runner.coroutines.active:
            runner.run(runner.coroutines.active)
        runner.coroutines.close()
        assert torch.equal(lone[0].logits, text.logits)


def test_results_differ_from_plain_products_by_rounding_only(folder: Path, kernel_rows: list[int]) -> None:
    model = load(folder, 0, dtype="bfloat16")
    inputs = prompts()
    for ids, text, other in zip(inputs, together(model, inputs), alone(model, inputs), strict=True):
        assert_as_near(text.logits[0].bfloat16(), other.logits[0].bfloat16(), exact_logits(folder.parent, ids)[0, -1])
    assert kernel_rows


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_float32_codes_and_exact_passes_skip_the_kernel(
    folder: Path, kernel_rows: list[int], compression: str | None
) -> None:
    source = split(folder.parent, compression) if compression else folder
    model = load(source, 0, exact=compression is None, dtype="float32")
    together(model, prompts())
    together(load(folder, 0, dtype="bfloat16"), prompts(), exact=True)
    assert not kernel_rows


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_the_kernel_is_compiled_at_start(folder: Path, compression: str | None) -> None:
    source = split(folder.parent, compression) if compression else folder
    model = load(source, 0, dtype="bfloat16")
    bfloat_products.max_rows.cache_clear()
    ModelRunner(model).coroutines.close()
    assert bfloat_products.max_rows.cache_info().currsize == 1


def test_the_model_is_restored_afterwards(folder: Path, kernel_rows: list[int]) -> None:
    model = load(folder, 0, dtype="bfloat16")
    inputs = prompts()
    before = alone(model, inputs)
    together(model, inputs)
    assert not any("forward" in module.__dict__ for module in model.modules() if isinstance(module, nn.Linear))
    count = len(kernel_rows)
    for text, reference in zip(alone(model, inputs), before, strict=True):
        assert torch.equal(text.logits, reference.logits)
    assert len(kernel_rows) == count


def own_forwards(model: Any) -> dict[str, Any]:
    """Of the modules that have one of their own."""
    return {name: module.forward for name, module in model.named_modules() if "forward" in module.__dict__}


def test_a_head_without_packing(folder: Path, kernel_rows: list[int]) -> None:
    """A unit that is a linear layer runs its hooks around the calls of all, and is put back as it was each time."""
    model = load(folder, 0, dtype="bfloat16")
    inputs, before = prompts(), own_forwards(model)
    texts = together(model, inputs, packing=False)
    for ids, text, other in zip(inputs, texts, together(model, inputs), strict=True):
        assert_as_near(text.logits[0].bfloat16(), other.logits[0].bfloat16(), exact_logits(folder.parent, ids)[0, -1])
    assert kernel_rows
    assert own_forwards(model) == before


def test_scored_texts(folder: Path, kernel_rows: list[int]) -> None:
    """By the same products; micro-batches take turns at the head too, and leave the model as it was."""
    model = load(folder, 0, dtype="bfloat16")
    before = own_forwards(model)
    texts = [ScoredText(index, tuple(ids[0].tolist()), (7, 40 + index)) for index, ids in enumerate(prompts())]
    scored = {result.index: result for result in score(model, texts, Room(tokens=20))}
    assert kernel_rows
    assert own_forwards(model) == before
    count = len(kernel_rows)
    for result in score(model, texts, Room(exact=True)):
        assert result.logprob == pytest.approx(scored[result.index].logprob, rel=0.02)
    assert len(kernel_rows) == count


def generate(model: Any, ids: torch.Tensor) -> list[int]:
    ids = ids.to(model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    tokens: list[int] = output[0].tolist()
    return tokens


AT_ONCE = {("llama", False, 1), ("llama", True, 2), ("gemma3", True, 1), ("gemma3", False, 2)}
"""Of each two the other half is for the long run."""


@pytest.mark.parametrize(
    ("family", "exact", "count"),
    [
        pytest.param(*way, marks=() if way in AT_ONCE else pytest.mark.long)
        for way in itertools.product(("llama", "gemma3"), (False, True), (1, 2))
    ],
)
def test_sequences_on_gpus(tmp_path: Path, family: str, count: int, exact: bool) -> None:
    checkpoint = build_checkpoint(tmp_path / family, family, dtype=torch.float32)
    plain = plain_model(checkpoint, dtype=torch.float32).eval()
    split_folder = split(checkpoint)
    gpus = [FakeGpu(index) for index in range(count)]
    limits: dict[str, int] = {gpu.name: 40_000 for gpu in gpus} | {"cpu": 0}
    with watched(), torch.no_grad():
        options = RunOptions(max_memory=limits, show_progress=False, dtype="float32", exact=True)
        model = load_model(split_folder, options, None, gpus)
        assert model.placement.uploaded_bytes > 0
        runner = ModelRunner(model, exact=exact)
        prompts = [
            torch.randint(3, VOCABULARY_SIZE, (1, 4 + 9 * n), generator=torch.Generator().manual_seed(n))
            for n in range(4)
        ]
        tokens: dict[int, list[int]] = {}

        def work(number: int) -> None:
            tokens[number] = generate(model, prompts[number])

        coroutines = [runner.coroutines.add(lambda number=number: work(number)) for number in range(len(prompts))]  # type: ignore[misc]
        count_before = sum(gpu.uploads for gpu in gpus)
        rounds = 0
        while runner.coroutines.active:
            runner.run(runner.coroutines.active)
            rounds += 1
        runner.coroutines.close()
        uploads = sum(gpu.uploads for gpu in gpus) - count_before
    assert [coroutine.error for coroutine in coroutines] == [None] * 4
    assert tokens == {number: generate(plain, ids) for number, ids in enumerate(prompts)}
    assert uploads <= (rounds + 1) * len(model.placement.units)  # once a pass, not once a text
