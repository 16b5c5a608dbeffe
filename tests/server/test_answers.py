"""Tokens by themselves, as text and as bytes."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models

from rabbitllm.server.answers import TokenTexts, bytes_of_characters
from tests.support.builders import make_tokenizer


@pytest.mark.parametrize("text", ["the rain", "Köln 東京 🐇", "a\n\tb", "  two"])
def test_bytes_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    tokenizer = make_tokenizer()
    texts = TokenTexts(tokenizer)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert b"".join(bytes(texts.of(token)[1]) for token in tokens).decode() == text


def test_special_tokens_have_their_names() -> None:
    assert TokenTexts(make_tokenizer()).of(2) == ("<eos>", tuple(b"<eos>"))


def test_byte_characters_are_those_of_the_tokenizers_library() -> None:
    assert sorted(bytes_of_characters()) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(bytes_of_characters().values()) == [*range(256)]


def test_spaces_and_bytes_of_sentencepiece() -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "rain": 2, **{f"<0x{value:02X}>": 3 + value for value in range(256)}}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast: Any = transformers.PreTrainedTokenizerFast
    texts = TokenTexts(fast(tokenizer_object=tokenizer, unk_token="<unk>"))
    assert texts.of(1) == (" the", tuple(b" the"))
    assert texts.of(2) == ("rain", tuple(b"rain"))
    assert texts.of(3 + 0xC3) == ("\ufffd", (0xC3,))
    assert texts.of(3 + 0x41) == ("A", (0x41,))
