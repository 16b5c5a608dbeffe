"""Greedy answers of a model to problems: what training scores and what the demonstration shows. Trains nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rabbitllm.demo.tasks import Problem

LONGEST_ANSWER = 20
"""Tokens; every right answer is shorter."""


@torch.inference_mode()
def answers(model: Any, tokenizer: Any, problems: Sequence[Problem]) -> list[str]:
    """The answers to all problems at once, as text without surrounding white space.

    Args:
        model: a causal language model of transformers.
        tokenizer: its own, padding on the left.
        problems: answered in one batch.
    """
    batch = tokenizer([problem.prompt for problem in problems], return_tensors="pt", padding=True).to(model.device)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=LONGEST_ANSWER)
    return [text.strip() for text in tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)]
