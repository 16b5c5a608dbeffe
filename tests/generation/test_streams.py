"""Text as it is generated: whole characters, at once, up to the first stop string, and as the tokenizer says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from rabbitllm.generation.streams import StoppedText, TextStream
from tests.support.builders import build_checkpoint, make_tokenizer
from tests.support.draws import draws
from tests.support.tiny_models import load, split

PROMPT = torch.tensor([[1, 7, 8]])


def words_in_front() -> Any:
    """A tokenizer of Llama 2's kind: a space is part of the word after it, and bytes stand in for what it lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁rabbit", "s", "▁", ".", "x"]
    model = models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    strip = decoders.Strip(content=" ", left=1)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


BYTES = make_tokenizer()
WORDS = words_in_front()


def streamed(tokenizer: Any, ids: list[int], at_a_time: int = 1) -> list[str]:
    """The pieces that come of tokens."""
    pieces: list[str] = []
    stream = TextStream(tokenizer, pieces.append)
    stream.put(PROMPT)
    for begin in range(0, len(ids), at_a_time):
        stream.put(torch.tensor(ids[begin : begin + at_a_time]))
    stream.end()
    assert stream.tokens == ids
    assert stream.text == "".join(pieces)
    assert len(stream.times) == len(ids)
    assert stream.times == sorted(stream.times)
    return pieces


def decoded(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


@settings(max_examples=draws(150), deadline=None)
@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=40), st.integers(1, 4))
def test_any_tokens_end_as_the_tokenizer_has_them(ids: list[int], at_a_time: int) -> None:
    assert "".join(streamed(BYTES, ids, at_a_time)) == decoded(BYTES, ids)


@settings(max_examples=draws(100), deadline=None)
@given(st.text(max_size=30))
def test_text_arrives_in_whole_characters(text: str) -> None:
    ids = BYTES.encode(text, add_special_tokens=False)
    pieces = streamed(BYTES, ids)
    assert "".join(pieces) == decoded(BYTES, ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("text", ["héllo", "🐇🐇", "né", "日本語", "a 🐇 b"])
@pytest.mark.parametrize("tokenizer", [BYTES, WORDS], ids=["bytes", "words"])
def test_a_character_of_several_tokens_comes_once_it_is_whole(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces) == decoded(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_each_word_arrives_with_its_token() -> None:
    a, rabbit, s, stop = (WORDS.convert_tokens_to_ids(piece) for piece in ("▁a", "▁rabbit", "s", "."))
    assert streamed(WORDS, [a, rabbit, s, stop, a]) == ["a", " rabbit", "s", ".", " a"]


def test_special_tokens_are_omitted_without_spaces() -> None:
    a, rabbit, end = (WORDS.convert_tokens_to_ids(piece) for piece in ("▁a", "▁rabbit", "</s>"))
    assert streamed(WORDS, [a, end, rabbit, end]) == ["a", " rabbit"]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    ids = BYTES.encode("🐇", add_special_tokens=False)[:2]
    assert "".join(streamed(BYTES, ids)) == decoded(BYTES, ids) == "\ufffd"


def test_several_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2"):
        TextStream(BYTES, print).put(torch.zeros(2, 3, dtype=torch.int64))


def test_streaming_from_generate(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    model = load(split(folder))
    pieces: list[str] = []
    stream = TextStream(model.tokenizer, pieces.append)
    inputs = model.tokenizer("the rabbit", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=9, do_sample=False, streamer=stream)
    new = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert stream.tokens == new
    assert "".join(pieces) == decoded(model.tokenizer, new)


few = st.text("ab\n", max_size=12)
stops = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3).map(tuple)


@given(st.lists(few, max_size=10), stops)
def test_stop_strings_in_any_pieces(pieces: list[str], stops: tuple[str, ...]) -> None:
    text = StoppedText(stops)
    parts = []
    for piece in pieces:
        parts.append(text.add(piece))
    before = "".join(parts)
    parts.append(text.add("", last=True))
    whole = "".join(pieces)
    ends = [(start + len(stop), start, stop) for stop in stops if (start := whole.find(stop)) >= 0]
    _, begin, stop = min(ends, default=(0, len(whole), None))
    assert ("".join(parts), text.stop) == (whole[:begin], stop)
    assert not any(stop in before for stop in stops)


def test_the_first_complete_stop_string_counts() -> None:
    text = StoppedText(("it>", "<end of it>", "<end of it> and"))
    assert (text.add("so <end of it> and"), text.stop) == ("so ", "<end of it>")


def test_a_partial_stop_string_waits() -> None:
    text = StoppedText(("\nUser:",))
    assert text.add("yes\nUs") == "yes"
    assert text.add("ually") == "\nUsually"
