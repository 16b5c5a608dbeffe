"""Greedy answers of a model to problems, for scoring in training and in the demonstration. Trains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rabbitllm.demo.tasks import Problem, exact_match

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

LONGEST_ANSWER = 20
"""Limit of tokens; every correct answer is shorter."""
BATCH = 50


@torch.inference_mode()
def answers(model: StreamedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> list[str]:
    """The answers to all problems at once, as text without surrounding white space.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer, padding on the left.
        problems: the problems, answered in one batch.
    """
    batch = tokenizer([problem.prompt for problem in problems], return_tensors="pt", padding=True).to(model.device)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=LONGEST_ANSWER)
    return [text.strip() for text in tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)]


def right_answers(model: StreamedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> int:
    """How many problems a model answers exactly."""
    batches = (problems[at : at + BATCH] for at in range(0, len(problems), BATCH))
    pairs = (pair for batch in batches for pair in zip(answers(model, tokenizer, batch), batch, strict=True))
    return sum(exact_match(text, problem) for text, problem in pairs)
