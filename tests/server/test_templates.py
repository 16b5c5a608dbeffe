"""What a chat template reads, found in its source."""

from __future__ import annotations

from typing import Any

import pytest

from rabbitllm.server.api_error import APIError
from rabbitllm.server.templates import Template, names_in
from tests.support.builders import make_tokenizer


def with_template(template: Any) -> Template:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return Template(tokenizer)


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
def test_names(source: str, reads: bool) -> None:
    assert ("tools" in names_in(source)) is reads


def test_a_template_of_its_own_for_tools() -> None:
    template = with_template({"default": "{{ messages }}", "tool_use": "{{ tools }}"})
    assert not template.reads("tools")
    assert template.reads("tools", with_tools=True)


def test_what_a_template_refuses_is_told_in_its_words() -> None:
    template = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(APIError, match="roles must alternate"):
        template.ids([{"role": "user", "content": "a"}], [], {})


def test_a_template_that_fails_is_a_refusal() -> None:
    template = with_template("{{ messages[7].content.nothing.there }}")
    with pytest.raises(APIError) as refused:
        template.ids([{"role": "user", "content": "a"}], [], {})
    assert refused.value.code == "template_error"


def test_without_a_template_the_plain_format_is_used() -> None:
    template = with_template(None)
    ids = template.ids([{"role": "user", "content": "a"}], [], {})
    assert template.tokenizer.decode(ids, skip_special_tokens=True) == "User: a\nAssistant:"
    assert template.stops == ("\nUser:",)
    with pytest.raises(APIError, match="no chat template"):
        template.ids([{"role": "tool", "content": "a"}], [], {})
