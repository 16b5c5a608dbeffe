"""`/image` in a chat: answers of the whole conversation with its pictures, as transformers has them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rabbitllm.chat.conversation import Conversation
from rabbitllm.chat.loop import ChatLoop, ChatStreams
from rabbitllm.generation.session import Session
from tests.support.picture_models import build, encoded, picture
from tests.support.tiny_models import load, one_thread, split

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(build(tmp_path_factory.mktemp("pictures") / "qwen", "qwen2_5_vl"))


def chatted(model: Any, *lines: str, draft: Any = None) -> tuple[ChatLoop, str]:
    """A conversation over a pipe, and what it notes."""
    remaining, notes = list(lines), io.StringIO()

    def read_line(prompt: str) -> str:
        if not remaining:
            raise EOFError
        return remaining.pop(0)

    streams = ChatStreams(read_line, io.StringIO(), Console(file=notes, width=200), interactive=False)
    loop = ChatLoop(Session(model, max_new_tokens=5, draft=draft), streams, "model", Conversation())
    loop.run()
    return loop, notes.getvalue()


def test_a_conversation_with_pictures(folder: Path, tmp_path: Path, one_thread: None) -> None:
    for seed in range(2):
        (tmp_path / f"{seed}.png").write_bytes(encoded(picture(seed)))
    model = load(folder, 0)
    lines = ("Hello", f"/image {tmp_path}/0.png", "What is this?", "And now?", f"/image {tmp_path}/1.png", "And this?")
    loop, _ = chatted(model, *lines)
    exchanges = loop.conversation.exchanges
    assert [len(exchange.pictures) for exchange in exchanges] == [0, 1, 0, 1]
    for count in range(1, 4):
        messages: list[dict[str, Any]] = []
        for index, exchange in enumerate(exchanges[: count + 1]):
            parts = [{"type": "image", "image": picture(index // 2)} for _ in exchange.pictures]
            messages.append({"role": "user", "content": [*parts, {"type": "text", "text": exchange.question}]})
            if index < count:
                messages.append({"role": "assistant", "content": [{"type": "text", "text": exchange.answer}]})
        inputs = model.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        ends = {"eos_token_id": model.tokenizer.eos_token_id, "pad_token_id": 0}
        tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False, **ends)[0, inputs["input_ids"].shape[1] :]
        text = model.tokenizer.decode(tokens, skip_special_tokens=True)
        assert exchanges[count].answer.strip() == text.strip()


def test_it_is_said_once_that_pictures_have_no_drafts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(encoded(picture()))
    attach, model, said = f"/image {tmp_path}/0.png", load(folder), "drafts are not used in a conversation"
    for draft in ("ngram", None):
        notes = chatted(model, "Hello", attach, attach, "These?", attach, "This?", draft=draft)[1]
        assert notes.count(said) == (draft is not None)
    assert said not in chatted(model, "Hello", draft="ngram")[1]


def test_invalid_pictures_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(encoded(picture()))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    saved = f"/save {tmp_path}/talk.json"
    lines = (f"/image {tmp_path}/bad.png", f"/image {tmp_path}/none.png", f"/image {tmp_path}/0.png", "This?", saved)
    loop, notes = chatted(load(folder), *lines)
    assert len(loop.conversation.exchanges) == 1
    for note in ("is not a picture", "cannot be read", "goes with the next message", "pictures cannot be saved"):
        assert note in notes
    assert not (tmp_path / "talk.json").exists()
