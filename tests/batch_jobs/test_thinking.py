"""Lines answered by a model that thinks: reasoning apart from the text, its tokens, and the options of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rabbitllm
from rabbitllm.batch_jobs.items import Defaults, Item, parse_task
from rabbitllm.errors import OptionError
from rabbitllm.generation.reasoning import Thinking
from tests.batch_jobs.answering import answers
from tests.support.commands import invoke
from tests.support.thinking_models import ANSWER, QUESTION, REASONING_TOKENS, THOUGHT, thinker
from tests.support.tiny_models import load, one_thread, split

__all__ = ["one_thread"]

MESSAGES = [{"role": "user", "content": QUESTION}]
CALL = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}}
LINES: list[dict[str, Any]] = [{"messages": MESSAGES}, {"messages": MESSAGES, "n": 2}, {"prompt": QUESTION}, CALL]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinker(tmp_path_factory.mktemp("thinker") / "model")


def lines_of(checkpoint: Path, defaults: Defaults) -> list[Any]:
    items = [Item(index, index, parse_task(line, index, defaults)) for index, line in enumerate(LINES)]
    return [answer.line for answer in sorted(answers(load(split(checkpoint)), items), key=lambda answer: answer.index)]


def test_lines_have_the_reasoning_apart(checkpoint: Path) -> None:
    chat, several, raw, call = lines_of(checkpoint, Defaults())
    apart = {"text": ANSWER, "reasoning": THOUGHT, "reasoning_tokens": REASONING_TOKENS, "finish": "stop"}
    assert chat == {"id": 0, **apart, "prompt_tokens": chat["prompt_tokens"], "new_tokens": 5}
    assert several["answers"] == [{**apart, "new_tokens": 5}] * 2
    assert raw["text"] == THOUGHT + ANSWER  # a prompt without the template is continued as it is
    body = call["response"]["body"]
    assert body["choices"][0]["message"]["reasoning_content"] == THOUGHT
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": REASONING_TOKENS}


def test_thinking_is_turned_off_for_all_lines(checkpoint: Path) -> None:
    chat, several, _, call = lines_of(checkpoint, Defaults(thinking=Thinking(enabled=False)))
    assert (chat["text"], chat["new_tokens"]) == (ANSWER, 2)
    assert "reasoning" not in chat
    assert [answer["text"] for answer in several["answers"]] == [ANSWER] * 2
    assert "reasoning_content" not in call["response"]["body"]["choices"][0]["message"]


def test_the_options_of_a_job(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(LINES[0]) + "\n")

    def job(*options: str) -> Any:
        command = ["batch", str(checkpoint), str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), *options]
        invoke(*command, "--device", "cpu")
        return json.loads((tmp_path / "out.jsonl").read_text())

    assert job()["reasoning"] == THOUGHT
    assert "reasoning" not in job("--no-thinking", "--overwrite")
    model = load(split(checkpoint))
    assert rabbitllm.batch(model, LINES[:1], thinking=False)[0]["text"] == ANSWER
    with pytest.raises(OptionError, match="An effort of thinking cannot be set"):
        rabbitllm.batch(model, LINES[:1], effort="low")
    with pytest.raises(OptionError, match="An effort of thinking cannot be set"):
        job("--effort", "low", "--overwrite")
