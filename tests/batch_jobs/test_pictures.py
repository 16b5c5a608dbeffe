"""Lines with pictures: in this package's format and in OpenAI's, each with the tokens that it has alone."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from rabbitllm.batch_jobs.inputs import text_and_size
from rabbitllm.batch_jobs.items import Defaults, Item, Refused, parse_task
from tests.batch_jobs.answering import answers
from tests.generation.test_media import by_itself, prompt, request
from tests.support.picture_models import build, encoded, picture
from tests.support.tiny_models import load, one_thread, split

__all__ = ["one_thread"]

QUESTION = "What is this?"


def messages(data: bytes) -> list[dict[str, Any]]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    return [{"role": "user", "content": parts}]


def lines() -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{"messages": messages(encoded(picture(seed))), "max_tokens": 6} for seed in (0, 1)]
    body = {"messages": messages(encoded(picture(1))), "max_tokens": 6, "temperature": 0}
    records.append({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body})
    records.append({"messages": messages(b"no picture")})
    return [*records, {"messages": [{"role": "user", "content": [{"type": "video"}]}]}]


def test_lines_with_pictures(tmp_path: Path, one_thread: None) -> None:
    model = load(split(build(tmp_path / "gemma3", "gemma3")), 0, exact=False)
    items = [Item(index, index, parse_task(line, index, Defaults())) for index, line in enumerate(lines())]
    assert isinstance(items[4].task, Refused)
    assert "expected the type text or image_url" in items[4].task.message
    assert all(1000 < text_and_size(item.task)[1] < 2000 for item in items[:3])  # not the letters of the picture
    expected = [by_itself(model, request(prompt(model, "image", seed, text=QUESTION))) for seed in (0, 1)]
    texts = [model.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in expected]
    by_index = {answer.index: answer.line for answer in answers(model, items[:4])}
    assert [by_index[index]["text"] for index in (0, 1)] == texts
    assert by_index[2]["response"]["body"]["choices"][0]["message"]["content"] == texts[1]
    assert by_index[3]["error"]["code"] == "invalid_media"
