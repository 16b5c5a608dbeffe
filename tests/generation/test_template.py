"""Conversations as ids: by the template or in the plain format."""

from __future__ import annotations

from typing import Any

import pytest

from rabbitllm.chat.conversation import Conversation, Exchange
from rabbitllm.generation.template import ChatTemplate, PromptRefused
from tests.chat.talkers import TEMPLATE, characters
from tests.support.builders import talking

TALK = Conversation("Be brief.", (Exchange("Who?", " Me.\n"), Exchange("Why?", "", True)))


def template_of(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(talking(tokenizer))


def text_of(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    text: str = tokenizer.decode(template_of(tokenizer).prompt(messages).ids)
    return text


def test_the_template_is_used() -> None:
    tokenizer = characters()
    assert template_of(tokenizer).is_there
    assert template_of(tokenizer).stops == ()
    expected = "system: Be brief.\nuser: Who?\nassistant:  Me.\n\nuser: Why?\nassistant: \nuser: And?\nassistant: "
    assert text_of(tokenizer, TALK.messages("And?")) == expected
    tokenizer.chat_template = TEMPLATE.replace("assistant: ", "ASSISTANT: ")
    assert text_of(tokenizer, TALK.messages("And?")).endswith("And?\nASSISTANT: ")


def test_the_plain_format() -> None:
    tokenizer = characters(None)
    assert not template_of(tokenizer).is_there
    assert template_of(tokenizer).stops == ("\nUser:",)
    expected = "Be brief.\n\nUser: Who?\nAssistant: Me.\nUser: Why?\nAssistant: \nUser: And?\nAssistant:"
    assert text_of(tokenizer, TALK.messages("And?")) == expected
    assert text_of(tokenizer, Conversation().messages("And?")) == "User: And?\nAssistant:"
    with pytest.raises(PromptRefused, match="messages of the role tool need a template"):
        text_of(tokenizer, [{"role": "tool", "content": "a"}])


def test_a_failing_template_is_refused() -> None:
    with pytest.raises(PromptRefused, match="can only concatenate str") as caught:
        text_of(characters("{{ messages[0].content + 1 }}"), TALK.messages("And?"))
    assert caught.value.program == "chat template"


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("{{ messages }}", False),
        ("{# tools #}{{ messages }} no tools here", False),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}", True),
        ("{% generation %}{{ tools }}{% endgeneration %}", True),
        ("{% for m in messages %}{% if not m %}{% continue %}{% endif %}{{ tools }}{% endfor %}", True),
        ("{% unheard %}{{ tools }}", True),
    ],
)
def test_names_that_a_template_reads(source: str, reads: bool) -> None:
    assert template_of(characters(source)).reads("tools") is reads


def test_a_separate_template_for_tools() -> None:
    tokenizer = characters()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    template = template_of(tokenizer)
    assert not template.reads("tools")
    assert template.reads("tools", with_tools=True)
