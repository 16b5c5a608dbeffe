"""lm_eval's harness on a streamed model: the same scores, and the same loglikelihoods, as with plain transformers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.errors import OptionError
from rabbitllm.generation.scoring import Room
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import ALL, dequantized, load, plain_model, split

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from rabbitllm.harness import OnePassLM

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


def harness_own(model: Any, tokenizer: Any, batch_size: int = 2, **options: Any) -> HFLM:
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, **options)


def evaluated(harness: HFLM, task: dict[str, Any]) -> tuple[list[Any], Any]:
    """The loglikelihood of every answer, and the scores."""
    found = simple_evaluate(
        harness,
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
        meant = dequantized(source, tmp_path / "meant", compression, plain_model(source).dtype)
    model = load(split(source, compression), budget)
    found, wanted = (evaluated(harness_own(who, model.tokenizer), task) for who in (model, plain_model(meant)))
    assert found == wanted
    assert [len(answers) for answers in found[0]] == [3, 3, 3]
    assert len({likelihood for answers in found[0] for likelihood, _ in answers}) == 9


@contextlib.contextmanager
def passes(model: Any) -> Iterator[list[None]]:
    """One for each time that a layer's weights are brought."""
    brought: list[None] = []
    hook = model.model.layers[1].register_forward_pre_hook(lambda *given: brought.append(None))
    try:
        yield brought
    finally:
        hook.remove()


NEAR = {("float32", True): 1e-5, ("float32", False): 1e-4, ("bfloat16", True): 1e-5, ("bfloat16", False): 0.1}
"""By how much likelihoods may differ: texts that share products are rounded otherwise than each alone."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("exact", [False, True])
def test_in_one_pass_they_are_those_of_the_harness_own_way(
    tmp_path: Path, task: dict[str, Any], exact: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    source = build_checkpoint(tmp_path / "source", "llama", dtype=getattr(torch, dtype))
    model = load(split(source), 0, dtype=dtype)
    with passes(model) as brought:
        samples, scores = evaluated(OnePassLM(model, room=Room(exact=exact)), task)
    assert len(brought) == 1
    own = harness_own(plain_model(source), model.tokenizer, batch_size=1, softmax_dtype="float32")
    plain, plain_scores = evaluated(own, task)
    if exact or dtype == "float32":
        assert scores == plain_scores
    for found, wanted in zip(flat(samples), flat(plain), strict=True):
        assert found[0] == pytest.approx(wanted[0], abs=NEAR[dtype, exact])


def flat(samples: list[Any]) -> list[tuple[float, bool]]:
    return [tuple(answer) for answers in samples for answer in answers]


def test_long_contexts_are_cut_and_rolling_windows_are_seen_as_the_harness_does(tmp_path: Path) -> None:
    source = build_checkpoint(tmp_path / "source", "llama", dtype=torch.float32)
    model = load(split(source), 0, dtype="float32")
    own = HFLM(pretrained=plain_model(source), tokenizer=model.tokenizer, max_length=12)
    ours = OnePassLM(model, max_length=12)
    long = "the and in the rabbit " * 9
    pairs = [
        Instance("loglikelihood", {}, (long, " the hare"), 0),
        Instance("loglikelihood", {}, ("", "the rabbit"), 1),
    ]
    with passes(model) as brought:
        found = ours.loglikelihood(pairs, disable_tqdm=True)
    assert len(brought) == 1
    for one, wanted in zip(found, own.loglikelihood(pairs, disable_tqdm=True), strict=True):
        assert one == (pytest.approx(wanted[0], abs=1e-4), wanted[1])
    rolling = [Instance("loglikelihood_rolling", {}, (text,), n) for n, text in enumerate((long, "the hare"))]
    wanted = own.loglikelihood_rolling(rolling, disable_tqdm=True)
    assert ours.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(wanted, abs=1e-3)
    with pytest.raises(OptionError, match="limit max_length is 12"):
        ours.loglikelihood([Instance("loglikelihood", {}, ("the", " " + long), 0)], disable_tqdm=True)
