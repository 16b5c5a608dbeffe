"""Runs a model's chat template, a program by the model's authors that may fail in any way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import RabbitLLMError

TEMPLATE_SECONDS = 30.0
"""Time limit of a template; conversations that fill a context take a second."""
TEMPLATE_LETTERS = 64 << 20
"""The most letters that one operation of a template may make; a context of a million tokens has 4 million."""


@contextlib.contextmanager
def bounded_template() -> Iterator[None]:
    """Limit the time and the output of the chat template that this thread runs while the context is open.

    Raises:
        ValueError: a template took too long, made too much, or calls itself without end.
    """
    from rabbitllm.generation import template_limits  # imports jinja

    template_limits.install()
    mine = template_limits.MINE
    before, mine.budget = mine.budget, template_limits.TemplateBudget(TEMPLATE_LETTERS, TEMPLATE_SECONDS)
    try:
        yield
    except RecursionError as error:
        raise ValueError("it calls itself without end") from error
    except MemoryError as error:
        raise ValueError("it takes all memory") from error
    finally:
        mine.budget = before


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_ids(
    tokenizer: Any, messages: Sequence[dict[str, str]], refused: Callable[[str], RabbitLLMError]
) -> list[int]:
    """Messages as ids, up to the beginning of the model's answer.

    Args:
        tokenizer: tokenizer with a chat template.
        messages: each with its `role` and its `content`.
        refused: makes the error to raise from a description of what went wrong.

    Raises:
        RabbitLLMError: made by `refused`; the template rejects these messages or fails on them.
    """
    from jinja2 import TemplateError

    try:
        with bounded_template():
            made = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise refused(harmless(str(error))) from error
    return [int(token) for token in made["input_ids"]]
