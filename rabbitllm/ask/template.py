"""Messages through a model's chat template, which is a program of the model's authors and may fail as it likes.

Knows tokenizers; knows no model, and not what becomes of the ids.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from rabbitllm.errors import RabbitLLMError
from rabbitllm.terminal import harmless

TEMPLATE_SECONDS = 30.0
"""That a template may compute; conversations that fill a context take a second."""
TEMPLATE_LETTERS = 64 << 20
"""That a template may make, or hold in one variable; a context of a million tokens has 4 million."""


@contextlib.contextmanager
def bounded_template() -> Iterator[None]:
    """End a chat template that does not end by itself, in this thread, while the context is open.

    Jinja has no limits of its own. Each line of a template's code is watched; what one operation makes is not.

    Raises:
        ValueError: a template took too long, made too much, or calls itself without end.
    """
    from jinja2.utils import Namespace

    deadline = time.monotonic() + TEMPLATE_SECONDS
    made = 0

    def watched(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal made
        if event == "return" and isinstance(value, str):
            made += len(value)
        held = [*frame.f_locals.values()]
        held += [one for space in held if isinstance(space, Namespace) for one in space._Namespace__attrs.values()]
        held += [one for space in held if isinstance(space, dict) for one in space.values()]
        largest = max((len(one) for one in held if isinstance(one, str | list)), default=0)
        if made > TEMPLATE_LETTERS or largest > TEMPLATE_LETTERS:
            raise ValueError(f"it makes a text of more than {TEMPLATE_LETTERS:,} letters")
        if time.monotonic() > deadline:
            raise ValueError(f"it takes more than {TEMPLATE_SECONDS:.0f} s")
        return watched

    def called(frame: FrameType, event: str, value: Any) -> Any:
        return watched if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    except RecursionError as error:
        raise ValueError("it calls itself without end") from error
    except MemoryError as error:
        raise ValueError("it takes all memory") from error
    finally:
        sys.settrace(before)


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
