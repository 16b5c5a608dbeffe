"""Renders a conversation as token ids: by the tokenizer's chat template, or in a plain format.

A model without a chat template was not trained to chat. Its prompt is

    <system prompt>

    User: <question>
    Assistant: <answer>
    User: <question>
    Assistant:

and since it would continue with the user's next question, its answer ends before a line that begins with `User:`.
"""

from __future__ import annotations

from typing import Any

from rabbitllm.errors import ChatError
from rabbitllm.generation.conversation import ASSISTANT, SYSTEM, USER
from rabbitllm.generation.template import has_template, template_ids

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


def prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The whole conversation as ids, up to the beginning of the model's answer.

    Args:
        tokenizer: tokenizer of the model.
        messages: as `Conversation.messages` returns them; the last one is a question.

    Raises:
        ChatError: the template refuses these messages.
    """
    if not has_template(tokenizer):
        return [int(token) for token in tokenizer(plain_text(messages))["input_ids"]]

    def refused(why: str) -> ChatError:
        return ChatError(
            f"The model's chat template refuses this conversation: {why}.",
            "Try without a system prompt (/system -), or /reset."
            if messages[0]["role"] == SYSTEM
            else "/reset begins again.",
        )

    return template_ids(tokenizer, messages, refused)


def common_length(first: list[int], second: list[int]) -> int:
    """The length of the common prefix."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))
