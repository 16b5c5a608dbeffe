"""What of an argument and a pipe becomes the prompt, and what ids it is."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from rabbitllm.errors import OptionError
from rabbitllm.run import join_prompt, prompt_of
from tests.support.builders import make_tokenizer, talking


def prompt_ids(tokenizer: Any, text: str, system: str | None = None, *, raw: bool = False) -> list[int]:
    return list(prompt_of(talking(tokenizer), text, system, raw=raw)[0].ids)


@pytest.mark.parametrize(
    ("argument", "piped", "prompt"),
    [
        ("say", None, "say"),
        (None, "a text\n", "a text"),
        ("What is this?", "a text\nof lines\n\n", "a text\nof lines\n\nWhat is this?"),
        ("say", "", "say"),
        ("say", "\n", "say"),
        ("", "text", "text"),
        (None, "  indented\n", "  indented"),
        ("é 兎".encode().decode("ascii", "surrogateescape"), None, "é 兎"),  # where the locale has no encoding
        ("say \udcff", None, "say \ufffd"),
    ],
)
def test_argument_and_piped_text_are_joined(argument: str | None, piped: str | None, prompt: str) -> None:
    assert join_prompt(argument, piped) == prompt


@pytest.mark.parametrize(("argument", "piped"), [(None, None), ("", None), ("  ", "\n"), (None, "")])
def test_missing_prompt_is_refused(argument: str | None, piped: str | None) -> None:
    with pytest.raises(OptionError, match="There is no prompt"):
        join_prompt(argument, piped)


@pytest.mark.parametrize("way", ["pipe", "file", "nothing"])
def test_piped_or_redirected_text_is_read(tmp_path: object, way: str) -> None:
    command = [sys.executable, "-c", "from rabbitllm.run import piped_text; print(ascii(piped_text()))"]
    text = "höhe\nund 🐇\n"
    if way == "pipe":
        out = subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout
    elif way == "file":
        path = f"{tmp_path}/prompt.txt"
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        with open(path, "rb") as file:
            out = subprocess.run(command, stdin=file, capture_output=True, check=True).stdout
    else:
        out = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
    assert out.decode().strip() == (ascii(text) if way != "nothing" else "None")


def test_chat_template_is_used() -> None:
    tokenizer = make_tokenizer()
    ids = prompt_ids(tokenizer, "Hello", "Be brief.")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "system: Be brief.\nuser: Hello\nassistant:"
    assert "system" not in tokenizer.decode(prompt_ids(tokenizer, "Hello"))


def test_raw_prompt() -> None:
    tokenizer = make_tokenizer()
    raw = prompt_ids(tokenizer, "Hello", raw=True)
    assert raw == tokenizer("Hello")["input_ids"]
    tokenizer.chat_template = None
    assert prompt_ids(tokenizer, "Hello") == raw


@pytest.mark.parametrize("raw", [True, False])
def test_system_prompt_needs_a_template(raw: bool) -> None:
    tokenizer = make_tokenizer()
    if not raw:
        tokenizer.chat_template = None
    with pytest.raises(OptionError, match="a system prompt is not possible"):
        prompt_ids(tokenizer, "Hello", "Be brief.", raw=raw)


def test_a_template_that_refuses() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    )
    with pytest.raises(OptionError, match="refuses a system prompt: System role not supported"):
        prompt_ids(tokenizer, "Hello", "Be brief.")
    assert len(prompt_ids(tokenizer, "Hello")) == 1


@pytest.mark.parametrize(
    ("template", "why"),
    [("{{ messages[0].content + 1 }}", "can only concatenate str"), ("{% nonsense %}", "nonsense")]
    + [("{{ ''.__class__.x }}", r"is unsafe\.(?!\.)"), ("{{ raise_exception('Why?.') }}", r"Why\?\.(?!\.)")],
)
def test_a_template_that_fails(template: str, why: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(OptionError, match=f"chat template refuses this prompt: .*{why}"):
        prompt_ids(tokenizer, "Hello")


def test_an_empty_template_is_none() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ""
    assert prompt_ids(tokenizer, "Hello") == prompt_ids(tokenizer, "Hello", raw=True)


def test_a_model_without_a_tokenizer() -> None:
    with pytest.raises(OptionError, match=r"(?s)no tokenizer.*into a/model"):
        prompt_ids(None, "Hello")
