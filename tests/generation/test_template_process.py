"""Chat templates in a process of their own: what exceeds a limit, and that all others give transformers' text."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from jinja2 import TemplateError

from rabbitllm.errors import OptionError
from rabbitllm.generation import _template_process
from rabbitllm.generation._template_process import TemplateProcess, TooManyLetters, in_the_process
from rabbitllm.generation.template import ChatTemplate, PromptRefused
from tests.support.builders import make_tokenizer, talking
from tests.support.forked import in_a_fork
from tests.support.fresh_process import python

GREETING = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
HELLO = [{"role": "user", "content": "Hello"}]
NESTED = "{% for i in range(64) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
PAIR = "{% set n = namespace(x=['x'], y=['x']) %}" + NESTED
TIME, SPACE = "it takes more than 1 s of processor time", "it uses too much memory"
HOSTILE = {
    "{{ 1 }}" * 300_000: TIME,
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": TIME,
    PAIR + "{{ n.x == n.y }}": TIME,
    PAIR + "{{ n.x in [n.y] }}": TIME,
    PAIR + "{{ raise_exception(n.x) }}": TIME,
    "{{ ('a b ' * 10000000)|title }}": f"{TIME}|{SPACE}",
    "{{ ('a b ' * 20000000)|wordcount }}": f"{TIME}|{SPACE}",
    "{{ strftime_now('%c' * 20000000) }}": f"{TIME}|{SPACE}",
    "{{ 'x' * 10**10 }}": SPACE,
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}": "infinite recursion",
    "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}": "infinite recursion",
    "{{ 'x y ' * 15000000 }}": "The prompt has 60,000,000 letters; the model's context has 256 tokens",
}
"""Template -> what is said of it."""
limited = pytest.mark.skipif(sys.platform != "linux", reason="the kernel limits memory and processor time")


def prompt(template: str) -> tuple[int, ...]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return ChatTemplate(talking(tokenizer, 256)).prompt(HELLO).ids


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> TemplateProcess:
    """A process with a short limit of time."""
    process = TemplateProcess()
    monkeypatch.setattr(_template_process, "PROCESS", process)
    monkeypatch.setattr("rabbitllm.generation.template.PROCESS", process)
    monkeypatch.setattr(_template_process, "SECONDS", 1)
    return process


def rendered(template: str, **variables: Any) -> str:
    return _template_process.PROCESS.rendered(template, variables, 1000)


@limited
@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_template_ends_by_a_clear_error(template: str) -> None:
    import resource

    ids = prompt(GREETING)
    before, here = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises((PromptRefused, OptionError), match=HOSTILE[template]):
        prompt(template)
    after, this_process = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4
    assert this_process.ru_utime + this_process.ru_stime - here.ru_utime - here.ru_stime < 4
    assert this_process.ru_maxrss - here.ru_maxrss < 64 << 10, "in KiB"
    assert prompt(GREETING) == ids
    assert resource.prlimit(_template_process.PROCESS._process.pid, resource.RLIMIT_AS)[0] == _template_process.MEMORY


HUGE = (Path(__file__).parent / "templates_that_make_too_much.txt").read_text().splitlines()


@pytest.mark.long
@limited
@pytest.mark.parametrize("template", HUGE)
def test_an_operation_with_a_huge_result(template: str) -> None:
    with pytest.raises(
        (PromptRefused, OptionError), match=f"{TIME}|{SPACE}|infinite recursion|The prompt has|too large"
    ):
        prompt(template)


SANE = [
    *(Path(__file__).parent / "templates_within_limits.txt").read_text().splitlines(),
    (Path(_template_process.__file__).parents[1] / "demo/model/chat_template.jinja").read_text(),
    "{{ strftime_now('%Y') }}{{ bos_token }}{{ messages[1]|tojson }}{{ 'é🐇'|tojson(indent=1) }}{{ dict(a=1) }}",
    "{{ tools is none }}{{ documents is defined }}{{ x is defined }}{{ messages[0].nothing }}{{ 1e300 * 1e300 }}\ud800",
]


def test_templates_give_the_text_of_transformers() -> None:
    tokenizer = make_tokenizer()
    chat = [{"role": role, "content": f" Höhe <{role}>\n 🐇 "} for role in ("system", "user", "assistant", "user")]

    def texts() -> list[str]:
        return [tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False) for template in SANE]

    with in_the_process(1 << 20):
        remote = texts()
    assert remote == texts()
    assert all(remote)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ raise_exception('roles must alternate') }}", TemplateError("roles must alternate")),
        ("{% nonsense %}", TemplateError("Encountered unknown tag 'nonsense'.")),
        ("{{ messages[7].content.nothing }}", TemplateError("list object has no element 7")),
        ("{% set n = namespace() %}{% set n._x = 1 %}", TemplateError("underscore-prefixed")),
        ("{{ ''.__class__.__mro__ }}", TemplateError("unsafe")),
        ("{{ 'a' + 1 }}", RuntimeError("can only concatenate str")),
    ],
)
def test_an_error_of_a_template(template: str, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        rendered(template, messages=[])


def test_variable_names_are_those_of_transformers() -> None:
    from transformers.utils import chat_template_utils

    for template in SANE:
        with in_the_process(1 << 20):
            chat_template_utils._get_template_variables.cache_clear()
            remote = chat_template_utils._get_template_variables(template)
        chat_template_utils._get_template_variables.cache_clear()
        assert remote == chat_template_utils._get_template_variables(template)


def test_another_call_of_transformers_is_not_limited() -> None:
    tokenizer = make_tokenizer()
    with in_the_process(100), pytest.raises(TooManyLetters, match="1,000 letters"):
        tokenizer.apply_chat_template(HELLO, chat_template="{{ 'x' * 1000 }}", tokenize=False)
    assert tokenizer.apply_chat_template(HELLO, chat_template="{{ 'x' * 1000 }}", tokenize=False) == "x" * 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_starts_its_own(own_process: TemplateProcess) -> None:
    assert rendered("{{ 1 }}") == "1"
    assert own_process._process
    first = own_process._process.pid

    def in_the_fork() -> tuple[str, int]:
        text = rendered("{{ 2 }}")
        process = own_process._process
        assert process
        own_process._end()
        return text, process.pid

    text, forked = in_a_fork(in_the_fork)
    assert (text, rendered("{{ 3 }}")) == ("2", "3")
    assert own_process._process.pid == first != forked


def test_a_process_that_ended_is_started_again(own_process: TemplateProcess) -> None:
    assert rendered("{{ 1 }}") == "1"
    assert own_process._process
    own_process._process.kill()
    own_process._process.wait()
    assert rendered("{{ 2 }}") == "2"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX has signals")
def test_an_interrupted_request_leaves_no_answer_for_the_next(own_process: TemplateProcess) -> None:
    assert rendered("{{ 1 }}") == "1"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises((KeyboardInterrupt, ValueError)):
            rendered(PAIR + "{{ n.x == n.y }}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rendered("{{ 2 }}") == "2"


def test_the_limit_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_template_process, "SECONDS", 1000)
    monkeypatch.setattr(_template_process, "PATIENCE", 1.0)
    with pytest.raises(ValueError, match=r"it takes more than 1 s$"):
        rendered(PAIR + "{{ n.x == n.y }}")


def test_memory_where_the_kernel_does_not_limit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_template_process, "KERNEL_LIMITS_MEMORY", False)
    monkeypatch.setattr(_template_process, "MEMORY", 100 << 20)
    monkeypatch.setattr(_template_process, "SECONDS", 60)
    with pytest.raises(ValueError, match=SPACE):
        rendered("{% set x = 'x' * 200000000 %}" + PAIR + "{{ n.x == n.y }}")
    assert rendered("{{ 2 }}") == "2"


def test_the_process_ends_with_its_owner() -> None:
    code = (
        "from rabbitllm.generation._template_process import PROCESS\n"
        "PROCESS.rendered('{{ 1 }}', {}, 9)\n"
        "print(PROCESS._process.pid)"
    )
    ran = python(code)
    assert re.fullmatch(r"\d+\n", ran.stdout)
    assert not psutil.pid_exists(int(ran.stdout))
    assert not ran.stderr


def test_a_process_that_fails_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nothing/python")
    with pytest.raises(RuntimeError, match=r"the process that runs it does not start .*No such file"):
        rendered("{{ 1 }}")
    monkeypatch.undo()
    assert TemplateProcess().rendered("{{ 1 }}", {}, 9) == "1"
