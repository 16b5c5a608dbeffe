"""Questions to a tiny model, each with a mark of its own and the answer that plain transformers gives to it alone.

The model's tokenizer has a word for each token, so that a text says which tokens it is made of.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.lib.checkpoint import write_tokenizer
from tests.support.builders import VOCABULARY_SIZE, build_checkpoint

CONTEXT = 1024
_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass(frozen=True)
class Question:
    """A prompt, and its greedy answer.

    Attributes:
        text: words, beginning with two that no other question begins with.
        answer: words.
        new_tokens: of the answer, at most.
    """

    text: str
    answer: str
    new_tokens: int


def model_of_words(folder: Path) -> Path:
    """A tiny Llama in float32, whose chat template gives a message's words and nothing else; no text ends
    by itself."""
    build_checkpoint(folder, "llama", tokenizer=False, eos_token_id=None, max_position_embeddings=CONTEXT)
    write_tokenizer(folder, VOCABULARY_SIZE)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


NEW_TOKENS = (8, 12, 16, 24)


def questions(folder: Path, count: int) -> list[Question]:
    """So many, no two with the same answer; what has the answer of another one is left out and replaced."""
    chance = random.Random(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    by_words: dict[str, Question] = {}
    number = 0
    while len(by_words) < count:
        number += 1
        mark = [1 + number % (VOCABULARY_SIZE - 1), 1 + number // (VOCABULARY_SIZE - 1)]
        more = [chance.randrange(3, VOCABULARY_SIZE) for _ in range(chance.randrange(4, 28))]
        text = " ".join(f"w{i}" for i in [*mark, *more])
        question = answered(model, tokenizer, text, NEW_TOKENS[number % len(NEW_TOKENS)])
        words = question.answer.split()
        if len(words) == question.new_tokens:  # none of them the unknown word, which no text shows
            by_words.setdefault(" ".join(words[: min(NEW_TOKENS)]), question)
    return list(by_words.values())


def answered(model: Any, tokenizer: Any, text: str, new_tokens: int) -> Question:
    """The question of a text."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return Question(text, tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True), new_tokens)
