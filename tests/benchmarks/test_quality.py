"""Loss against bytes: others' weights are measured as ours are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from bitsandbytes import functional

import rabbitllm.demo
from benchmarks.quality import quality
from rabbitllm.evaluation.compare import compare
from tests.support.tiny_models import load, one_thread, split  # noqa: F401  a fixture

DEMO_MODEL = Path(rabbitllm.demo.__file__).parent / "model"


@pytest.fixture
def subject() -> quality.Subject:
    return quality.Subject("bundled", DEMO_MODEL, None, quality.Extent(problems=8))


def test_weights_of_others_are_measured_as_ours_are(subject: quality.Subject, tmp_path: Path) -> None:
    """bitsandbytes' own 4bit weights, put into a plain model, and RabbitLLM's, streamed."""
    with subject.with_weights(subject.weights) as model:
        assert subject.summary(model).divergence.largest == 0

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        if weight.dim() < 2:
            return weight
        codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        return functional.dequantize_4bit(codes, state).bfloat16().float()  # made in the checkpoint's dtype

    with subject.with_weights({name: rounded(weight) for name, weight in subject.weights.items()}) as model:
        theirs = subject.summary(model)
        at_middles = subject.at_middles(model)
    assert subject.summary(subject.plain).divergence.largest == 0  # it has its own again
    (ids, token), *_ = subject.middles()
    assert tuple(ids + [token]) == (subject.texts[0].context + subject.texts[0].continuation)[: len(ids) + 1]
    assert torch.equal(subject.at_middles(subject.plain)[0], subject.plain(torch.tensor([ids])).logits[0, -1])
    assert at_middles.shape == (len(subject.texts), len(subject.weights["lm_head.weight"]))
    with (
        pytest.raises(ValueError, match="not the weights of bundled"),
        subject.with_weights({"lm_head.weight": subject.weights["lm_head.weight"]}),
    ):
        pass
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    options = {"dtype": "float32"}
    found = compare(load(split(folder, "4bit"), **options), load(split(folder), **options), subject.texts)
    assert theirs.divergence.mean == pytest.approx(found.divergence.mean, rel=1e-3)
    assert theirs.divergence.mean > 0
