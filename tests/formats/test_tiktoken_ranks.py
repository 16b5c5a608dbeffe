"""Vocabularies in tiktoken's format: read as it reads them, and refused where it would not notice."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from rabbitllm.errors import CheckpointNotFoundError, CorruptVocabularyError
from rabbitllm.formats import tiktoken_ranks
from rabbitllm.formats.tiktoken_ranks import MAX_TOKEN_BYTES, looks_like_ranks, parse_ranks, read_ranks
from tests.support.meta_files import tiktoken_file

SOUND = tiktoken_file(3)
LINES = SOUND.splitlines(keepends=True)


def line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


def test_tokens_are_at_their_ranks(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(SOUND)
    tokens = read_ranks(path)
    assert len(tokens) == len(LINES) == 263
    assert tokens[0] == b"!"
    assert tokens[256:] == (b"th", b"the", b"in", b"ing", b" t", b" th", b" the")
    assert parse_ranks(SOUND.removesuffix(b"\n"), "x") == tokens
    assert parse_ranks(SOUND.replace(b"\n", b"\r\n"), "x") == tokens
    assert parse_ranks(b"".join(reversed(LINES)), "x") == tokens


def test_tokens_equal_those_of_tiktoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = pytest.importorskip("tiktoken.load")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    path = tmp_path / "tokenizer.model"
    path.write_bytes(SOUND)
    assert load.load_tiktoken_bpe(str(path)) == {token: rank for rank, token in enumerate(read_ranks(path))}


@pytest.mark.parametrize(
    ("head", "is_it"),
    [(SOUND, True), (SOUND[:6], True), (b"IQ== 0", True), (b"\n\x0b\n", False), (b"", False), (b"IQ==", False)],
)
def test_format_is_recognised_by_first_line(head: bytes, is_it: bool) -> None:
    assert looks_like_ranks(head) is is_it


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the byte 0 is not a token"),
    "an empty line": (SOUND + b"\n" + line(b"xy", 263), "line 264 is b''"),
    "no rank": (SOUND + b"IQ==\n", "line 264 is b'IQ=='; expected a token in base64 and its rank"),
    "not base64": (SOUND + b"I! 263\n", "line 264 is b'I! 263'; expected"),
    "base64 cut off": (SOUND + b"eHl6e 263\n", "which is not base64"),
    "padding in the middle": (SOUND + b"eH=l 263\n", "line 264 is"),
    "a rank twice": (SOUND + line(b"xyz", 7), "rank 7 appears twice, again in line 264"),
    "a rank missing": (SOUND + line(b"xyz", 264), "of its 264 ranks 263 is missing"),
    "a rank below 0": (SOUND + b"eHl6 -1\n", "line 264 is"),
    "a rank with zeros": (SOUND + b"eHl6 0261\n", "line 264 is"),
    "a rank of many digits": (SOUND + b"eHl6 " + b"9" * 5000 + b"\n", r"line 264 has 5,005 bytes"),
    "a token twice": (SOUND + line(b"the", 263), "the token b'the' appears twice, at ranks 257 and 263"),
    "a token too long": (SOUND + line(b"x" * (MAX_TOKEN_BYTES + 60), 263), "a token has at most 1,024"),
    "one giant line": (b"A" * (1 << 20), r"line 1 has 1,048,576 bytes"),
    "a byte missing": (b"".join(line(bytes([b]), b) for b in range(255)), "the byte 255 is not a token"),
    "zero bytes": (bytes(1 << 12), "line 1 has 4,096 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str) -> None:
    data, says = HOSTILE[name]
    with pytest.raises(CorruptVocabularyError, match=r"^voc\.model is not a valid tiktoken vocabulary: .*" + says):
        parse_ranks(data, "voc.model")


def test_too_many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken_ranks, "MAX_TOKENS", 262)
    with pytest.raises(CorruptVocabularyError, match="more than 262 lines"):
        parse_ranks(SOUND, "x")


def test_irregular_or_oversized_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="There is no vocabulary"):
        read_ranks(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptVocabularyError, match="it is not a regular file"):
        read_ranks(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as stream:
        stream.truncate((64 << 20) + 1)
    with pytest.raises(CorruptVocabularyError, match="at most 67,108,864 are read"):
        read_ranks(tmp_path / "large")
