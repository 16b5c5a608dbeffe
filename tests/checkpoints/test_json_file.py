"""JSON that is read, and JSON that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rabbitllm.checkpoints import json_file
from rabbitllm.checkpoints.json_file import read_json
from rabbitllm.errors import InvalidIndexError


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("{}", {}),
        (' \n{"a": {"b": [1, 2.5, null, true]}}\n', {"a": {"b": [1, 2.5, None, True]}}),
        ('{"ключ": "猫"}', {"ключ": "猫"}),
        ('{"a": {"x": 1}, "b": {"x": 2}}', {"a": {"x": 1}, "b": {"x": 2}}),
        ('{"time_step_limit": [0.0, Infinity]}', {"time_step_limit": [0.0, float("inf")]}),  # as Mamba 2 is published
    ],
)
def test_read(tmp_path: Path, text: str, content: object) -> None:
    (tmp_path / "f.json").write_text(text, encoding="utf-8")
    assert read_json(tmp_path / "f.json") == content


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON: Extra data"),
        (b'{"a": "\xff"}', "not valid JSON.*0xff"),
        (b"\xef\xbb\xbf{}", "not valid JSON.*BOM"),
        (b'{"a": 1, "a": 1}', "the key 'a' appears twice"),
        (b'{"x": {"b": 1, "c": 2, "b": 3}}', "the key 'b' appears twice"),
        (b"[]", "holds a JSON list; expected an object"),
        (b"null", "holds a JSON NoneType"),
        (b'"text"', "holds a JSON str"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON.*recursion"),
    ],
)
def test_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(raw)
    with pytest.raises(InvalidIndexError, match=message) as refused:
        read_json(path)
    assert "f.json" in str(refused.value)


def test_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    with path.open("wb") as stream:
        stream.truncate(json_file.MAX_BYTES + 1)  # a hole: it takes no disk
    with pytest.raises(InvalidIndexError, match=r"f.json has 268,435,457 bytes; at most 268,435,456 is read"):
        read_json(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "f.json")
