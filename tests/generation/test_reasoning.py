"""Reasoning apart from the answer, in both executors: its text, its tokens, and what turns it on and off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.errors import OptionError
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.reasoning import Thinking
from rabbitllm.generation.request import FinishReason, Request, Result
from rabbitllm.generation.session import Session
from rabbitllm.generation.template import ChatTemplate
from tests.generation.submitting import Open, Submitted
from tests.support.thinking_models import (
    ANSWER,
    KEEPING,
    QUESTION,
    REASONING_TOKENS,
    TEMPLATE,
    THOUGHT,
    channel_thinker,
    thinker,
)
from tests.support.tiny_models import load, split

ASKED = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(thinker(tmp_path_factory.mktemp("thinker") / "model"))


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(channel_thinker(tmp_path_factory.mktemp("channels") / "model"))


def asked(folder: Path, limit: int | None = None, **thinking: Any) -> tuple[Result, str, str]:
    """The answer of a session, and what was written of it and of the reasoning."""
    pieces: list[str] = []
    thoughts: list[str] = []
    session = Session(load(folder), limit, thinking=Thinking(**thinking))
    result = session.answer(ASKED, pieces.append, think=lambda text, _: thoughts.append(text))
    return result, "".join(pieces), "".join(thoughts)


def test_a_session_tells_them_apart(folder: Path, channels: Path) -> None:
    for path, tokens in ((folder, REASONING_TOKENS), (channels, 3)):
        result, text, thoughts = asked(path)
        assert (result.text, result.reasoning) == (text, thoughts) == (ANSWER, THOUGHT)
        assert result.reasoning_tokens == tokens
        assert result.finish is FinishReason.STOP
        assert not result.is_cut_off_in_thoughts


def test_a_batch_counts_as_a_session_does(folder: Path, open_batch: Open, ask: Callable[..., list[Submitted]]) -> None:
    batch, model = open_batch(folder=folder)
    assert isinstance(batch, Batch)
    template = ChatTemplate(model)
    prompt = template.prompt(ASKED)
    request = Request(prompt.ids, 9, thoughts=template.thoughts(prompt.ids))
    (submitted,) = ask(batch, [request])
    end, alone = submitted.finished, asked(folder)[0]
    assert (end.text, end.reasoning, end.reasoning_tokens) == (alone.text, alone.reasoning, alone.reasoning_tokens)


def test_thoughts_alone_that_reach_the_limit(folder: Path) -> None:
    for limit in (2, 3):  # the third token is the closing mark
        result, text, thoughts = asked(folder, limit)
        assert (text, thoughts, result.reasoning_tokens) == ("", THOUGHT, limit)
        assert result.is_cut_off_in_thoughts
    assert not asked(folder, 4)[0].is_cut_off_in_thoughts


def test_thinking_is_turned_off(folder: Path, channels: Path) -> None:
    for result, text, thoughts in (asked(folder, enabled=False), asked(channels, effort="low")):
        assert (text, thoughts, result.reasoning_tokens) == (ANSWER, "", 0)


@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_both_names_of_the_switch(tmp_path: Path, name: str) -> None:
    model = load(split(thinker(tmp_path / "model", TEMPLATE.replace("enable_thinking", name))))
    assert ChatTemplate(model).thinking(Thinking(False)) == {name: False}
    assert ChatTemplate(model).less_thinking == "--no-thinking"


def test_what_the_template_does_not_read_is_refused(folder: Path, channels: Path) -> None:
    with pytest.raises(OptionError, match=r"An effort of thinking cannot be set: .* does not read reasoning_effort"):
        asked(folder, effort="high")
    with pytest.raises(OptionError, match="does not read enable_thinking or thinking") as error:
        asked(channels, enabled=False)
    assert "Use --effort, which it does read" in str(error.value)
    assert ChatTemplate(load(channels)).less_thinking == "--effort low"


@pytest.mark.parametrize("template", [TEMPLATE, KEEPING])
def test_earlier_reasoning_goes_to_templates_that_read_it(tmp_path: Path, template: str) -> None:
    session = Session(load(split(thinker(tmp_path / "model", template))))
    answer = {"role": "assistant", "content": ANSWER}
    counts = [
        session.answer([*ASKED, {**answer, **reasoning}, *ASKED], lambda text: None).prompt_tokens
        for reasoning in ({}, {"reasoning_content": THOUGHT})
    ]
    assert (counts[1] > counts[0]) == (template is KEEPING)
