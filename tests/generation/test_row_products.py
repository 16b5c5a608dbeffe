"""Linear layers in shared passes, by the product for a few rows of bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rabbitllm.generation.joint_pass import JointPasses
from rabbitllm.generation.scoring import Room, ScoredText, score
from rabbitllm.quant import bfloat_products
from tests.generation.together import CHUNK, Text, alone, generated, prompts, together
from tests.support.builders import build_checkpoint
from tests.support.kernel_rows import kernel_rows as kernel_rows
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import ALL, load, split


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(build_checkpoint(tmp_path_factory.mktemp("products") / "model", "llama"))


@pytest.mark.parametrize("budget", [0, ALL], ids=["streamed", "resident"])
def test_company_changes_no_bit_of_a_text(folder: Path, kernel_rows: list[int], budget: int) -> None:
    model = load(folder, budget, dtype="bfloat16")
    given = prompts()
    found = together(model, given)
    assert max(kernel_rows) > max(len(prompt) for prompt in given)
    for number, text in enumerate(found):
        lone: list[Text] = []
        passes = JointPasses(model)
        chunks = {"prefill_chunk_size": CHUNK} if number % 2 else {}
        passes.add(lambda: lone.append(generated(model, given[number], **chunks)))  # noqa: B023 - runs before the next
        while passes.members:
            passes.run(passes.members)
        passes.close()
        assert torch.equal(lone[0].logits, text.logits)


def test_results_are_those_of_the_ordinary_product_but_for_rounding(folder: Path, kernel_rows: list[int]) -> None:
    model = load(folder, 0, dtype="bfloat16")
    given = prompts()
    for ids, one, other in zip(given, together(model, given), alone(model, given), strict=True):
        assert_as_near(one.logits[0].bfloat16(), other.logits[0].bfloat16(), exact_logits(folder.parent, ids)[0, -1])
    assert kernel_rows


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_float32_codes_and_exact_passes_have_their_own_ways(
    folder: Path, kernel_rows: list[int], compression: str | None
) -> None:
    found = split(folder.parent, compression) if compression else folder
    model = load(found, 0, exact=compression is None, dtype="float32")
    together(model, prompts())
    together(load(folder, 0, dtype="bfloat16"), prompts(), exact=True)
    assert not kernel_rows


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_the_kernel_is_made_before_anybody_waits(folder: Path, compression: str | None) -> None:
    found = split(folder.parent, compression) if compression else folder
    model = load(found, 0, dtype="bfloat16")
    bfloat_products.kernel_here.cache_clear()
    JointPasses(model).close()
    assert bfloat_products.kernel_here.cache_info().currsize == 1


def test_afterwards_the_model_is_as_it_was(folder: Path, kernel_rows: list[int]) -> None:
    model = load(folder, 0, dtype="bfloat16")
    given = prompts()
    before = alone(model, given)
    together(model, given)
    assert not any("forward" in module.__dict__ for module in model.modules() if isinstance(module, nn.Linear))
    count = len(kernel_rows)
    for one, other in zip(alone(model, given), before, strict=True):
        assert torch.equal(one.logits, other.logits)
    assert len(kernel_rows) == count


def forwards(model: Any) -> dict[str, Any]:
    """Of the modules that have one of their own."""
    return {name: module.forward for name, module in model.named_modules() if "forward" in module.__dict__}


def test_a_head_among_others_that_go_by_themselves(folder: Path, kernel_rows: list[int]) -> None:
    """A unit that is a linear layer runs its hooks around the calls of all, and is put back as it was each time."""
    model = load(folder, 0, dtype="bfloat16")
    given, before = prompts(), forwards(model)
    found = together(model, given, packing=False)
    for ids, one, other in zip(given, found, together(model, given), strict=True):
        assert_as_near(one.logits[0].bfloat16(), other.logits[0].bfloat16(), exact_logits(folder.parent, ids)[0, -1])
    assert kernel_rows
    assert forwards(model) == before


def test_texts_that_are_scored(folder: Path, kernel_rows: list[int]) -> None:
    """By the same products; micro-batches take turns at the head too, and leave the model as it was."""
    model = load(folder, 0, dtype="bfloat16")
    before = forwards(model)
    texts = [ScoredText(number, tuple(ids[0].tolist()), (7, 40 + number)) for number, ids in enumerate(prompts())]
    found = {one.index: one for one in score(model, texts, Room(tokens=20))}
    assert kernel_rows
    assert forwards(model) == before
    count = len(kernel_rows)
    for one in score(model, texts, Room(exact=True)):
        assert one.logprob == pytest.approx(found[one.index].logprob, rel=0.02)
    assert len(kernel_rows) == count
