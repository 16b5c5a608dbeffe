"""The training script: what a step sees, and that a run makes a checkpoint with its score. Trains next to nothing."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import rabbitllm.demo
from tests.support.tiny_models import one_thread  # noqa: F401  a fixture that applies by itself
from tools import train_demo as train
from tools.demo_prose import held_out_prose, training_prose
from tools.train_demo import BUNDLED, LARGER, SHAPES, UNLABELLED, Shape, batches, plan_for


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Path(rabbitllm.demo.__file__).parent / "model")


def test_the_bundled_model_can_be_made_again() -> None:
    """Its recorded plan is that of the script."""
    recorded = json.loads((Path(rabbitllm.demo.__file__).parent / "score.json").read_text(encoding="utf-8"))["training"]
    plan = plan_for(BUNDLED, steps=None, minutes=None, seed=0)
    assert {name: value for name, value in recorded.items() if name not in ("threads", "seconds")}.items() <= vars(
        plan
    ).items()
    assert plan.prose == 0


def test_the_larger_model_can_be_quantized_by_others() -> None:
    """Rows of 256-weight blocks, about 25 million weights, and none of them ever rounded."""
    shape = SHAPES[LARGER]
    assert not any(size % 256 for size in (shape.hidden, shape.intermediate, shape.heads * shape.head_dim))
    with torch.device("meta"):
        model = train.build_model(AutoTokenizer.from_pretrained(Path(rabbitllm.demo.__file__).parent / "model"), shape)
    assert 24e6 < sum(p.numel() for p in model.parameters()) < 28e6
    assert all(p.shape[-1] % 256 == 0 for p in model.parameters() if p.dim() > 1)
    assert plan_for(LARGER, steps=None, minutes=None, seed=0).rounded_from == 1


@pytest.mark.long
def test_prose_is_never_in_both_parts() -> None:
    training, kept = training_prose(), held_out_prose()
    assert len(training) > 10 * len(kept) > 100_000
    paragraphs = {text for text in kept.split("\n\n") if len(text) > 200}
    assert len(paragraphs) > 20
    shared = [text for text in paragraphs if text in training]
    assert len(shared) <= len(paragraphs) // 20  # some modules are copies of others


@pytest.mark.long
def test_what_a_step_sees(tokenizer: Any) -> None:
    plan = plan_for(LARGER, steps=None, minutes=None, seed=3)
    first, second = islice(batches(tokenizer, plan), 2)
    for problems, prose in (first, second):
        assert prose.ids.shape == (plan.prose, plan.window)
        assert torch.equal(prose.ids, prose.labels)
        assert problems.ids.shape == problems.labels.shape
        assert len(problems.ids) == plan.batch
        labelled = problems.labels != UNLABELLED
        assert torch.equal(problems.ids[labelled], problems.labels[labelled])
        # each kind counts half, whatever the number of tokens
        assert problems.divisor == 2 * int(labelled.sum())
        assert prose.divisor == 2 * plan.prose * (plan.window - 1)
        text = tokenizer.decode(problems.ids[0], skip_special_tokens=True)
        assert text.startswith("Q: ")
    assert not torch.equal(first[1].ids, second[1].ids)


def test_problems_alone_come_in_two_parts(tokenizer: Any) -> None:
    plan = plan_for(BUNDLED, steps=None, minutes=None, seed=0)
    short, long = next(batches(tokenizer, plan))
    assert len(short.ids) == len(long.ids) == plan.batch // 2
    assert short.ids.shape[1] < long.ids.shape[1]
    assert short.divisor == long.divisor == sum(int((part.labels != UNLABELLED).sum()) for part in (short, long))


@pytest.mark.long
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SHAPES, LARGER, Shape(64, 128, 2, 2, 1, 32))
    for name, few in (("PROSE_WINDOWS", 2), ("HELD_OUT_PROBLEMS", 8), ("WIDER_PROBLEMS", 8)):
        monkeypatch.setattr(train, name, few)
    monkeypatch.setattr("sys.argv", ["train", "--out", str(tmp_path), "--size", LARGER, "--steps", "3"])
    train.main()
    record = json.loads((tmp_path / "score.json").read_text(encoding="utf-8"))
    assert record["training"]["steps"] == 3
    assert record["prose"].keys() == {"bf16", "8bit", "4bit"}
    # it has learnt next to nothing: about as unsure as the vocabulary is large, and rounding does not change that
    assert 4 < record["prose"]["4bit"] < 8
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() or (
        tmp_path / "model" / "model.safetensors"
    ).exists()
    assert "bf16: " in capsys.readouterr().out
