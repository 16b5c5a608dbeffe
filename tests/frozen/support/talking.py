"""What plain transformers says: greedy and drawn continuations of prompts and of conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.frozen.support.families import build, plain_model

GREEDY: Mapping[str, object] = {"do_sample": False}


def talker(folder: Path, **settings: object) -> Path:
    """A checkpoint for conversations: float32, so that the order of a summation never decides about a token."""
    wanted = {"max_position_embeddings": 4096, "tie_word_embeddings": False, **settings}
    return build(folder, "llama-tied-float32", **wanted)


class Reference:
    """Plain transformers on a checkpoint.

    Args:
        folder: with weights and a tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self.model = plain_model(folder)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def tokens(self, ids: Sequence[int], new: int, *, seed: int | None = None, **how: Any) -> list[int]:
        """New tokens after a prompt; greedy unless `temperature` or `top_p` is given.

        Without a seed the state of the random numbers stays as it is.
        """
        if seed is not None:
            torch.manual_seed(seed)
        given = torch.tensor([list(ids)])
        with torch.inference_mode():
            made = self.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=new,
                pad_token_id=0,
                tokenizer=self.tokenizer,
                **({"do_sample": True, **how} if how else GREEDY),
            )
        return list(made[0, len(ids) :].tolist())

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def ids(self, text: str) -> list[int]:
        """Of a text that is gone on with as it is."""
        return list(self.tokenizer(text)["input_ids"])

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Of a conversation by its template, the beginning of an answer included."""
        kept = [{"role": one["role"], "content": one["content"]} for one in messages]
        made = self.tokenizer.apply_chat_template(kept, add_generation_prompt=True, return_dict=True)
        return list(made["input_ids"])
