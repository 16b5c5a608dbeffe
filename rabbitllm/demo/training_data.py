"""The batches of training: problems, of which the answers are learnt, and windows of prose. Trains nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from rabbitllm.demo.prose import training_prose
from rabbitllm.demo.sizes import TrainingPlan
from rabbitllm.demo.tasks import training_stream

UNLABELLED = -100


@dataclass(frozen=True)
class TrainingRows:
    """Rows of a batch that are computed together.

    Attributes:
        ids: (rows, width) int64, padded on the right.
        labels: the same shape: the id where a token is to be predicted, else -100.
        divisor: divisor of the summed loss.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    divisor: int


def batches(tokenizer: Any, plan: TrainingPlan) -> Iterator[list[TrainingRows]]:
    """Batches without end.

    Problems come in two parts of similar length (less padding). Only the answer and its end have labels. One example
    in eight starts with the end token, since some callers start every text with it. With prose, it is a separate part,
    all of whose tokens have labels, with the same weight as all problems.
    """
    prose = _windows(tokenizer, plan) if plan.prose else None
    stream = training_stream(plan.seed)
    end = tokenizer.eos_token_id
    while True:
        problems = list(islice(stream, plan.batch))
        questions = tokenizer([problem.prompt for problem in problems])["input_ids"]
        answers = tokenizer([f" {problem.answer}" for problem in problems])["input_ids"]
        rows = []
        for index, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            question = [end, *question] if index % 8 == 0 else question
            rows.append(([*question, *answer, end], [*[UNLABELLED] * len(question), *answer, end]))
        rows.sort(key=lambda row: len(row[0]))
        tokens = sum(label != UNLABELLED for _, labels in rows for label in labels)
        if prose is None:
            half = plan.batch // 2
            yield [_padded(part, tokenizer.pad_token_id, tokens) for part in (rows[:half], rows[half:])]
        else:
            windows = [next(prose) for _ in range(plan.prose)]
            yield [
                _padded(rows, tokenizer.pad_token_id, 2 * tokens),
                _padded([(ids, ids) for ids in windows], tokenizer.pad_token_id, 2 * plan.prose * (plan.window - 1)),
            ]


def _windows(tokenizer: Any, plan: TrainingPlan) -> Iterator[list[int]]:
    """Windows of the prose without end, each once before any is repeated, in an order that depends on the seed."""
    ids = tokenizer(training_prose(), verbose=False)["input_ids"]
    order = random.Random(f"prose {plan.seed}")
    while True:
        first = order.randrange(plan.window)
        begins = list(range(first, len(ids) - plan.window, plan.window))
        order.shuffle(begins)
        for begin in begins:
            yield ids[begin : begin + plan.window]


def _padded(rows: Sequence[tuple[list[int], list[int]]], pad: int, divisor: int) -> TrainingRows:
    """Rows padded on the right, where a causal model does not see them."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [UNLABELLED] * (width - len(row)) for _, row in rows])
    return TrainingRows(ids, labels, divisor)
