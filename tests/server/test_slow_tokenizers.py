"""Checkpoints whose tokenizer is a SentencePiece model and has no fast form."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from tests.server.serving import NAME, Running, running
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import split

SIZE, PAD, UNKNOWN, BEGIN, END = 350, 0, 1, 2, 3
TEXTS = ["A rabbit hops over the field and eats grass, a hare does not.", "Köln, naïve café, “7 of 12”."]
CONFIG = {
    "tokenizer_class": "GPTSw3Tokenizer",
    "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_checkpoint(
        tmp_path_factory.mktemp("slow") / "model", "llama", vocab_size=SIZE, bos_token_id=BEGIN, eos_token_id=END
    )
    for path in (*folder.glob("*token*"), *folder.glob("*.jinja")):
        path.unlink()
    pieces = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=pieces,
        model_type="bpe",
        vocab_size=SIZE,
        byte_fallback=True,
        minloglevel=2,
        pad_id=PAD,
        unk_id=UNKNOWN,
        bos_id=BEGIN,
        eos_id=END,
    )
    (folder / "spiece.model").write_bytes(pieces.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    assert not AutoTokenizer.from_pretrained(folder).is_fast
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(split(folder)) as server:
        yield server


@pytest.mark.parametrize("seed", range(4))
def test_streams_and_bytes_of_tokens_are_the_whole_text(server: Running, seed: int) -> None:
    """Also of characters that are several tokens."""
    messages: Any = [{"role": "user", "content": "A rabbit 日"}]
    asked: dict[str, Any] = {"model": NAME, "messages": messages, "max_tokens": 80, "temperature": 1.5, "seed": seed}
    asked["logit_bias"] = {str(token): -100 for token in (PAD, UNKNOWN, BEGIN)}  # they are no text
    chats = server.openai().chat.completions
    choice = chats.create(**asked, logprobs=True).choices[0]
    streamed = [chunk.choices[0].delta.content or "" for chunk in chats.create(**asked, stream=True)]
    assert "".join(streamed) == choice.message.content
    assert len(list(filter(None, streamed))) > 10
    raw = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    valid = raw.decode(errors="ignore")
    assert valid.strip() == choice.message.content.replace("\ufffd", "").strip()
    assert not valid.isascii()


def test_answers_in_a_form_are_refused_by_name(server: Running) -> None:
    chat = {"messages": [{"role": "user", "content": "A rabbit"}], "max_tokens": 8}
    for form in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"choice": ["hare"]}}):
        answer = server.post("/v1/chat/completions", {**chat, **form})
        assert answer.status_code == 400
        assert "A GPTSw3Tokenizer cannot be used with a grammar" in answer.json()["error"]["message"]
    assert server.post("/v1/chat/completions", chat).status_code == 200
