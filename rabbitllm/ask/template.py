"""Messages through a model's chat template, which is a program of the model's authors and may fail as it likes.

Knows tokenizers; knows no model, and not what becomes of the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rabbitllm.errors import RabbitLLMError
from rabbitllm.terminal import harmless


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
        made = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise refused(harmless(str(error))) from error
    return [int(token) for token in made["input_ids"]]
