"""What a chat template refuses, as the server answers it."""

from __future__ import annotations

from typing import Any

import pytest

from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server.api_error import PROMPT_ERRORS, APIError, prompt_error
from tests.support.builders import make_tokenizer, talking


def answer_of(template: Any, *messages: dict[str, str]) -> APIError:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(PROMPT_ERRORS) as refused:
        ChatTemplate(talking(tokenizer, 4096)).prompt(messages)
    error: Any = refused.value
    return prompt_error(error)


def test_template_refusal_is_quoted() -> None:
    error = answer_of("{{ raise_exception('roles must alternate') }}", {"role": "user", "content": "a"})
    assert "roles must alternate" in error.message
    error = answer_of("{{ raise_exception('Roles must alternate.') }}", {"role": "user", "content": "a"})
    assert error.message.endswith("Roles must alternate.")
    assert not error.message.endswith("..")


def test_failing_template_is_a_refusal() -> None:
    error = answer_of("{{ messages[7].content.nothing.there }}", {"role": "user", "content": "a"})
    assert error.code == "template_error"
    error = answer_of("{{ messages[0].content + 1 }}", {"role": "user", "content": "a"})
    assert error.message == "The model's chat template refuses this conversation."  # nothing of a Python error


def test_without_a_template_there_are_no_tool_messages() -> None:
    assert "need a template" in answer_of(None, {"role": "tool", "content": "a"}).message


def test_text_longer_than_the_context_is_refused() -> None:
    error = answer_of("{{ 'x y ' * 10000000 }}", {"role": "user", "content": "a"})
    assert error.message == "The prompt has 40,000,000 letters; the model's context has 4,096 tokens."
    assert error.code == "context_length_exceeded"
    error = answer_of(None, {"role": "user", "content": "a" * 10**6})
    assert error.message == "The prompt has 1,000,017 letters; the model's context has 4,096 tokens."
