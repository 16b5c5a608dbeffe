"""What of an argument and a pipe becomes the prompt, and what ids it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from rabbitllm.errors import OptionError
from rabbitllm.generation import template
from rabbitllm.run import joined, prompt_of
from tests.support.builders import make_tokenizer


def prompt_ids(tokenizer: Any, text: str, system: str | None = None, *, raw: bool = False) -> list[int]:
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    return list(prompt_of(model, text, system, raw=raw).ids)


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
def test_both_become_one(argument: str | None, piped: str | None, prompt: str) -> None:
    assert joined(argument, piped) == prompt


@pytest.mark.parametrize(("argument", "piped"), [(None, None), ("", None), ("  ", "\n"), (None, "")])
def test_nothing_is_no_prompt(argument: str | None, piped: str | None) -> None:
    with pytest.raises(OptionError, match="There is no prompt"):
        joined(argument, piped)


@pytest.mark.parametrize("way", ["pipe", "file", "nothing"])
def test_what_is_piped_or_redirected_is_read(tmp_path: object, way: str) -> None:
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


def test_through_the_chat_template() -> None:
    tokenizer = make_tokenizer()
    found = prompt_ids(tokenizer, "Hello", "Be brief.")
    assert tokenizer.decode(found, skip_special_tokens=True) == "system: Be brief.\nuser: Hello\nassistant:"
    assert "system" not in tokenizer.decode(prompt_ids(tokenizer, "Hello"))


def test_as_it_is() -> None:
    tokenizer = make_tokenizer()
    raw = prompt_ids(tokenizer, "Hello", raw=True)
    assert raw == tokenizer("Hello")["input_ids"]
    tokenizer.chat_template = None
    assert prompt_ids(tokenizer, "Hello") == raw


@pytest.mark.parametrize("raw", [True, False])
def test_a_system_prompt_needs_a_place(raw: bool) -> None:
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
    ("template", "why"), [("{{ messages[0].content + 1 }}", "can only concatenate str"), ("{% nonsense %}", "nonsense")]
)
def test_a_template_that_fails(template: str, why: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(OptionError, match=f"chat template refuses this prompt: .*{why}"):
        prompt_ids(tokenizer, "Hello")


TWICE = "{% for i in range(99999) %}{% for j in range(99999) %}"
ENDLESS = {
    "infinite recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "it takes more than": TWICE + "{% endfor %}{% endfor %}",
    "its output has more than": TWICE + "xxxxxxxx{% endfor %}{% endfor %}",
    "its output": "{% set n = namespace(x='xx') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "its outp": "{% set x = ['x' * 9999] * 9999 %}{% for y in x %}{{ y }}{% endfor %}",
}


@pytest.mark.parametrize("why", ENDLESS)
def test_a_template_that_does_not_end(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "takes" in why:
        monkeypatch.setattr(template, "TEMPLATE_SECONDS", 0.5)
    else:
        monkeypatch.setattr(template, "TEMPLATE_LETTERS", 1 << 20)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ENDLESS[why]
    with pytest.raises(OptionError, match=f"chat template refuses this prompt: {why}"):
        prompt_ids(tokenizer, "Hello")
    assert prompt_ids(make_tokenizer(), "Hello")


HUGE = (Path(__file__).parent / "templates_that_make_too_much.txt").read_text().splitlines()

ONE_BY_ONE = """
import resource, sys
from tests.run.test_prompt import HUGE, prompt_ids
from rabbitllm.generation import template
from tests.support.builders import make_tokenizer

template.TEMPLATE_SECONDS = 2.0
tokenizer = make_tokenizer()
prompt_ids(tokenizer, "Hello")
(used,) = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize")]
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
for tokenizer.chat_template in HUGE:
    try:
        prompt_ids(tokenizer, "Hello")
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, getattr(error, "problem", error), flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
def test_an_operation_of_a_template_that_makes_too_much() -> None:
    """In a process of its own, which may not take the memory."""
    ran = subprocess.run([sys.executable, "-c", ONE_BY_ONE], capture_output=True, text=True, check=False, timeout=600)
    said = ran.stdout.splitlines()
    for made, why in zip(HUGE, [*said, *[ran.stderr[-300:]] * 99], strict=False):
        assert re.match("OptionError .*: it(s output has| computes with integers of| takes) more than", why), made


SANE = (Path(__file__).parent / "templates_within_limits.txt").read_text().splitlines()


def test_a_template_within_the_limits_gives_what_transformers_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer()
    chat = [{"role": role, "content": f" Hello <{role}>\n world "} for role in ("system", "user", "assistant", "user")]

    def texts() -> list[str]:
        chat_template_utils._compile_jinja_template.cache_clear()
        return [tokenizer.apply_chat_template(chat, chat_template=one, tokenize=False) for one in SANE]

    with template.bounded_template():
        bounded = texts()
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)
    plain = texts()
    chat_template_utils._compile_jinja_template.cache_clear()
    assert bounded == plain
    assert all(bounded)


def test_an_empty_template_is_none() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = ""
    assert prompt_ids(tokenizer, "Hello") == prompt_ids(tokenizer, "Hello", raw=True)


def test_a_model_without_a_tokenizer() -> None:
    with pytest.raises(OptionError, match="no tokenizer"):
        prompt_ids(None, "Hello")
