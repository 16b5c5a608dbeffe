"""Untrusted JSON, decoded within limits and without ambiguity.

Python's own reader accepts a repeated key (the last one wins, while a scanner may see the first), and turns a few
bytes of text into a hundred times as many bytes of objects. Here the memory is limited before decoding, by the number
of values and the size of the text. Independent of the meaning of the JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

MAX_VALUES = 600_000
"""Limit of values, lists and tables in one text, counted as its commas and opening brackets. A tensor takes 8 of them
in a safetensors header and 1 in an index; so 75,000 tensors in a shard, 600,000 in a checkpoint."""
MAX_TEXT_BYTES = 64 << 20
"""Limit of a text in memory, where one character outside Latin-1 makes all of them two or four bytes wide."""
MAX_DIGITS = 400
"""Limit of the digits of a number in a message. A float has fewer than 310 before its point; more only cost time."""


def decode_json(
    raw: bytes, constant: Callable[[str], Any] | None = None, whole: Callable[[str], Any] | None = None
) -> Any:
    """The value of a JSON text.

    Args:
        raw: UTF-8; the caller limits its length.
        constant: converts NaN and the infinities, which are not JSON; None for Python's conversion.
        whole: converts the digits of an integer; None for Python's conversion, which is many times as fast.

    Raises:
        ValueError: it is not UTF-8 or not JSON, repeats a key, or exceeds the limits of nesting or size; the message
            says what was found.
    """
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if values > MAX_VALUES:
        raise ValueError(f"it has about {values:,} values; at most {MAX_VALUES:,} are read")
    text = raw.decode("utf-8")
    if sys.getsizeof(text) > MAX_TEXT_BYTES:
        raise ValueError(f"it takes {sys.getsizeof(text):,} bytes as text; at most {MAX_TEXT_BYTES:,} are read")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=constant, parse_int=whole)
    except RecursionError:
        raise ValueError("it is nested deeper than any checkpoint's (maximum recursion depth exceeded)") from None


def decode_message(raw: bytes) -> Any:
    """The value of a JSON message, all strings in which can be written as UTF-8.

    Args:
        raw: see `decode_json`.

    Raises:
        ValueError: it is malformed; the message says what was found.
    """
    try:
        value = decode_json(raw, _no_number, _whole)
        if b"\\u" in raw:  # lone surrogates, which no tokenizer accepts
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has half of a character beyond the first 65,536") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no UTF-8") from None
    return value


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} appears twice")
    return table


def text_of(value: object) -> str:
    """A decoded value that must be a string.

    Raises:
        TypeError: it is not a string.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
