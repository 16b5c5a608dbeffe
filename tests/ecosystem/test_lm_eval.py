"""lm_eval's harness on a streamed model: the same scores, and the same loglikelihoods, as with plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import build_checkpoint
from tests.support.tiny_models import ALL, dequantised, load, plain_model, split

pytest.importorskip("lm_eval")
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": "the and in the", "choices": ["re", "the the", "or"], "answer": 1},
    {"question": "on the on", "choices": ["an", "in", "er in the"], "answer": 2},
    {"question": "ing", "choices": ["th", "or the", "ed"], "answer": 0},
]


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    """A task of multiple choice with its data in a file here; the harness reads nothing else."""
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    return {
        "task": "three_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.jsonl")}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }


def evaluated(model: Any, tokenizer: Any, task: dict[str, Any]) -> tuple[list[Any], Any]:
    """The loglikelihood of every answer, and the scores."""
    found = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2),
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    samples = [sample["filtered_resps"] for sample in found["samples"]["three_questions"]]
    return samples, found["results"]["three_questions"]


@pytest.mark.parametrize("budget", [ALL, 0])
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_loglikelihoods_are_those_of_the_plain_model(
    tmp_path: Path, task: dict[str, Any], compression: str | None, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    source = build_checkpoint(tmp_path / "source", "llama")
    meant = source
    if compression is not None:
        meant = dequantised(source, tmp_path / "meant", compression, plain_model(source).dtype)
    model = load(split(source, compression), budget)
    found, wanted = (evaluated(who, model.tokenizer, task) for who in (model, plain_model(meant)))
    assert found == wanted
    assert [len(answers) for answers in found[0]] == [3, 3, 3]
    assert len({likelihood for answers in found[0] for likelihood, _ in answers}) == 9
