"""Conversations as ids: by the template or in the plain format."""

from __future__ import annotations

from typing import Any

import pytest

from rabbitllm.chat.conversation import Conversation, Exchange
from rabbitllm.errors import ChatError
from rabbitllm.generation.template import has_template, plain_text, prompt_ids
from tests.chat.talkers import TEMPLATE, characters

TALK = Conversation("Be brief.", (Exchange("Who?", " Me.\n"), Exchange("Why?", "", True)))


def text_of(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids)
    return text


def test_the_template_is_used() -> None:
    tokenizer = characters()
    assert has_template(tokenizer)
    wanted = "system: Be brief.\nuser: Who?\nassistant:  Me.\n\nuser: Why?\nassistant: \nuser: And?\nassistant: "
    assert text_of(tokenizer, prompt_ids(tokenizer, TALK.messages("And?"))) == wanted
    tokenizer.chat_template = TEMPLATE.replace("assistant: ", "ASSISTANT: ")
    assert text_of(tokenizer, prompt_ids(tokenizer, TALK.messages("And?"))).endswith("And?\nASSISTANT: ")


def test_the_plain_format() -> None:
    tokenizer = characters(None)
    assert not has_template(tokenizer)
    wanted = "Be brief.\n\nUser: Who?\nAssistant: Me.\nUser: Why?\nAssistant: \nUser: And?\nAssistant:"
    assert plain_text(TALK.messages("And?")) == wanted
    assert text_of(tokenizer, prompt_ids(tokenizer, TALK.messages("And?"))) == wanted
    assert plain_text(Conversation().messages("And?")) == "User: And?\nAssistant:"


def test_a_template_that_fails_is_a_refusal() -> None:
    tokenizer = characters("{{ messages[0].content + 1 }}")
    with pytest.raises(ChatError, match="refuses this conversation: can only concatenate str"):
        prompt_ids(tokenizer, TALK.messages("And?"))
