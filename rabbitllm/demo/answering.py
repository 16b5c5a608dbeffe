"""Greedy answers of a model to problems, for scoring in training and in the demonstration. Trains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rabbitllm.demo.models import BundledModel, DemoModel
from rabbitllm.demo.tasks import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

BATCH = 50


@torch.inference_mode()
def answers(
    model: StreamedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], of: DemoModel | None = None
) -> list[str]:
    """The answers to all problems at once, as text without surrounding white space.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        problems: the problems, answered in one batch.
        of: the model that they are for; the bundled one by default.
    """
    of = of or BundledModel()
    prompts = of.prompts(tokenizer, problems)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=of.longest_answer)
    return [text.strip() for text in tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)]


def right_answers(
    model: StreamedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], of: DemoModel | None = None
) -> int:
    """How many problems a model answers correctly."""
    of = of or BundledModel()
    batches = (problems[at : at + BATCH] for at in range(0, len(problems), BATCH))
    pairs = (pair for batch in batches for pair in zip(answers(model, tokenizer, batch, of), batch, strict=True))
    return sum(of.is_right(text, problem) for text, problem in pairs)
