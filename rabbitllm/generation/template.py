"""Renders a conversation as token ids: by the tokenizer's chat template, or in a plain format.

A chat template is a program by the model's authors that may fail in any way. A model without one was not trained to
chat. Its prompt is

    <system prompt>

    User: <question>
    Assistant: <answer>
    User: <question>
    Assistant:

and since it would continue with the user's next question, its answer ends before a line that begins with `User:`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import ChatError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
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
        raise ValueError("its recursion does not end") from error
    except MemoryError as error:
        raise ValueError("it uses too much memory") from error
    finally:
        mine.budget = before


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def template_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    refused: Callable[[Exception], Exception],
    **more: Any,
) -> list[int]:
    """Messages as ids, up to the beginning of the model's answer.

    Args:
        tokenizer: tokenizer with a chat template.
        messages: each with its `role` and its `content`.
        refused: makes the error to raise from the template's own: it rejects these messages, or fails on them.
        more: further variables of the template.
    """
    try:
        with bounded_template():
            made = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **more,
            )
    except Exception as error:  # a template may raise anything
        raise refused(error) from error
    return [int(token) for token in made["input_ids"]]


PLAIN_NAMES = {USER: "User:", ASSISTANT: "Assistant:"}
PLAIN_END = "\n" + PLAIN_NAMES[USER]
"""Stop string of an answer in the plain format."""


def plain_text(messages: list[dict[str, str]]) -> str:
    """Messages in the plain format, ready for an answer."""
    parts = []
    for message in messages:
        role, content = message["role"], message["content"].strip()
        parts.append(f"{content}\n" if role == SYSTEM else f"{PLAIN_NAMES[role]} {content}")
    return "\n".join([*parts, PLAIN_NAMES[ASSISTANT]])


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """The whole conversation as ids, up to the beginning of the model's answer.

    Args:
        tokenizer: tokenizer of the model.
        messages: as `Conversation.messages` returns them; the last one is a question.

    Raises:
        ChatError: the template refuses these messages.
    """
    if not has_template(tokenizer):
        return [int(token) for token in tokenizer(plain_text(messages))["input_ids"]]

    def refused(error: Exception) -> ChatError:
        return ChatError(
            f"The model's chat template refuses this conversation: {harmless(str(error))}.",
            "Try without a system prompt (/system -), or /reset."
            if messages[0]["role"] == SYSTEM
            else "/reset starts a new conversation.",
        )

    return template_ids(tokenizer, messages, refused)
