"""`fast_bfloat16=True`: a model by itself through the kernel for bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rabbitllm.base.options import StreamOptions
from rabbitllm.errors import OptionError
from rabbitllm.quant import bfloat_products
from tests.support.builders import build_checkpoint
from tests.support.kernel_rows import kernel_rows as kernel_rows
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import ALL, INPUT, load, plain_model, run, split


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fast") / "model"
    return build_checkpoint(folder, "llama", dtype=torch.bfloat16, hidden_size=128, intermediate_size=256)


@pytest.mark.parametrize("budget", [0, ALL], ids=["streamed", "resident"])
def test_every_linear_layer_goes_through_it_and_loses_no_more_than_torchs(
    checkpoint: Path, kernel_rows: list[int], budget: int
) -> None:
    model = load(split(checkpoint), budget, fast_bfloat16=True, exact=False)
    with torch.inference_mode():
        found, torchs = model(INPUT).logits, plain_model(checkpoint)(INPUT).logits
    # the head's rows are those of INPUT too, since all logits are asked for
    assert kernel_rows == [INPUT.numel()] * (7 * model.config.num_hidden_layers + 1)
    assert_as_near(found, torchs, exact_logits(checkpoint, INPUT))


def test_where_the_processor_multiplies_bfloat16_nothing_changes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bfloat_products, "kernel_here", lambda: 0)
    folder = split(checkpoint)
    found, expected = run(load(folder, 0, fast_bfloat16=True, exact=False)), run(load(folder, 0))
    assert torch.equal(found.logits, expected.logits)


def test_it_does_not_go_together_with_exact_bits() -> None:
    with pytest.raises(OptionError, match=r"exact=True .*fast_bfloat16=True"):
        StreamOptions(exact=True, fast_bfloat16=True)


def test_without_it_logits_are_transformers(checkpoint: Path, kernel_rows: list[int]) -> None:
    model = load(split(checkpoint), 0)
    with torch.inference_mode():
        assert torch.equal(model(INPUT).logits, plain_model(checkpoint)(INPUT).logits)
    assert not kernel_rows
