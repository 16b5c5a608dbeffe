"""A batch of prompts of different lengths, continued for many tokens, with the logits of every step to compare.

Knows transformers' `generate`, and nothing of rabbitllm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

LENGTHS = (3, 9, 14, 20)
"""Tokens of each prompt; all but the longest are padded on the left."""
NEW_TOKENS = 100
"""A window of the small models rolls over a dozen times, a chunk is filled six times."""
PADDING = 0


@dataclass(frozen=True)
class Trail:
    """What a generation went through.

    Attributes:
        tokens: prompts and continuations, (batch, tokens).
        logits: as the model gave them, one (batch, vocabulary) a step; empty where `generate` keeps none.
        cache: the keys, values and states after the last step.
    """

    tokens: torch.Tensor
    logits: tuple[torch.Tensor, ...]
    cache: Any


def prompts(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> dict[str, torch.Tensor]:
    """Random prompts: `input_ids` and `attention_mask`, each (len(lengths), max(lengths)), padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), PADDING)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, 270, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def continued(
    model: Any, batch: dict[str, Any], new_tokens: int = NEW_TOKENS, *, mode: Any = torch.inference_mode, **options: Any
) -> Trail:
    """Generate exactly so many tokens, greedily unless `options` of `generate` say otherwise; drawn with seed 0."""
    settings = {
        "do_sample": False,
        "min_new_tokens": new_tokens,
        "max_new_tokens": new_tokens,
        "output_logits": True,
        "return_dict_in_generate": True,
        **options,
    }
    torch.manual_seed(0)
    with mode():
        output = model.generate(**{name: value.to(model.device) for name, value in batch.items()}, **settings)
    return Trail(output.sequences, output.logits or (), output.get("past_key_values"))


def assert_same_trail(got: Trail, expected: Trail) -> None:
    """The same logits at every step, bit for bit, and the same tokens; says which step is the first that differs."""
    assert len(got.logits) == len(expected.logits)
    for step, (logits, wanted) in enumerate(zip(got.logits, expected.logits, strict=True)):
        assert logits.dtype == wanted.dtype
        assert wanted.isfinite().all(), f"nothing to compare with at step {step}"
        assert torch.equal(logits, wanted), f"step {step} of {len(expected.logits)} differs"
    assert torch.equal(got.tokens, expected.tokens)
