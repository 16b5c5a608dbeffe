"""Messages through a model's chat template, which is a program of the model's authors and may fail as it likes.

Knows tokenizers; knows no model, and not what becomes of the ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import RabbitLLMError

TEMPLATE_SECONDS = 30.0
"""That a template may compute; conversations that fill a context take a second."""
TEMPLATE_LETTERS = 64 << 20
"""That one operation of a template may make; a context of a million tokens has 4 million."""


@contextlib.contextmanager
def bounded_template() -> Iterator[None]:
    """Bound the chat template that this thread runs while the context is open: in time, and in what it makes.

    Raises:
        ValueError: a template took too long, made too much, or calls itself without end.
    """
    from rabbitllm.generation import template_limits  # with jinja

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
    """Whether the tokenizer brings a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_ids(
    tokenizer: Any, messages: Sequence[dict[str, str]], refused: Callable[[str], RabbitLLMError]
) -> list[int]:
    """Messages as ids, up to where the model's answer begins.

    Args:
        tokenizer: of the model, with a chat template.
        messages: each with its `role` and its `content`.
        refused: makes the error to raise, of what went wrong.

    Raises:
        RabbitLLMError: what `refused` makes, where the template refuses these messages or fails at them.
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
