"""What distributions are compared on: windows of a text, or the held-out problems of the models that were trained here.

A window begins with the tokenizer's beginning-of-sequence token, where it has one and puts it there itself, and is
predicted from its second token on. Of a problem its answer is predicted, and the end behind it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rabbitllm.demo.tasks import Problem
from rabbitllm.errors import OptionError, QualityError
from rabbitllm.generation.scoring import ScoredText

LEAST_POSITIONS = 16
"""Of which numbers say anything at all."""


def bundled_text() -> str:
    """English prose, dialogue, figures and some code, a few kB."""
    return files("rabbitllm.evaluation").joinpath("text.txt").read_text(encoding="utf-8")


def text_of(path: Path) -> str:
    """A file's text.

    Raises:
        OptionError: it cannot be read, or is no UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read as text: {error}.", "Give a file of UTF-8 text.") from error


def windows(tokenizer: Any, text: str, *, window: int, tokens: int) -> list[ScoredText]:
    """Windows of a text, from its beginning on, one after the other.

    Args:
        tokenizer: of the models.
        text: any.
        window: tokens of each, at most.
        tokens: to be predicted, at most.

    Raises:
        OptionError: impossible numbers.
        QualityError: the text is too short.
    """
    if window < 2 or tokens < LEAST_POSITIONS:
        raise OptionError(
            f"window={window}, tokens={tokens}: at least 2 and {LEAST_POSITIONS} are needed.", "Give larger numbers."
        )
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    own = tokenizer("")["input_ids"]
    lead = own[:1] if own[:1] == [tokenizer.bos_token_id] else []
    found: list[ScoredText] = []
    left, begin, step = tokens, 0, window - len(lead)
    while left > 0 and begin < len(ids):
        whole = (*lead, *ids[begin : begin + step])[: left + 1]
        if len(whole) > 1:
            found.append(ScoredText(len(found), whole[:1], whole[1:]))
            left -= len(whole) - 1
        begin += step
    predicted = sum(len(one.continuation) for one in found)
    if predicted < LEAST_POSITIONS:
        raise QualityError(
            f"The text has {predicted} tokens to be predicted; at least {LEAST_POSITIONS} are needed.",
            "Give a longer text.",
        )
    return found


def answers_of(tokenizer: Any, problems: Sequence[Problem]) -> list[ScoredText]:
    """Problems with their right answers, and the end of each."""
    prompts = tokenizer([problem.prompt for problem in problems])["input_ids"]
    answers = tokenizer([f" {problem.answer}" for problem in problems])["input_ids"]
    return [
        ScoredText(number, tuple(prompt), (*answer, tokenizer.eos_token_id))
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def is_trained_here(tokenizer: Any) -> bool:
    """Whether a tokenizer is that of the bundled model, so that its problems mean something to the model."""
    written = files("rabbitllm.demo").joinpath("model", "tokenizer.json").read_text(encoding="utf-8")
    bundled = json.loads(written)
    special = {one["content"]: one["id"] for one in bundled["added_tokens"]}
    return bool(tokenizer.get_vocab() == {**bundled["model"]["vocab"], **special})
