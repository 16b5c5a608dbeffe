"""JSON that a stranger wrote, decoded within bounds and in one meaning only.

Python's own reader accepts a key twice (the last one wins, while a scanner may see the first), and turns a few bytes
of text into a hundred times as many of objects. What a text will become is bounded here before it is decoded, from the
number of its values and the size of the text. Knows nothing of what the JSON means.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

MAX_VALUES = 600_000
"""Values, lists and tables in one text, counted as its commas and opening brackets. A tensor takes 8 of them in a
safetensors header and 1 in an index; so 75,000 tensors in a shard, 600,000 in a checkpoint."""
MAX_TEXT_BYTES = 64 << 20
"""In memory, where one character outside Latin-1 makes all of them two or four bytes wide."""
MAX_DIGITS = 400
"""Of a number in a message. A float has fewer than 310 before its point; more is only work."""


def decode_json(
    raw: bytes, constant: Callable[[str], Any] | None = None, whole: Callable[[str], Any] | None = None
) -> Any:
    """The value of a JSON text.

    Args:
        raw: UTF-8; its own length is the caller's to bound.
        constant: makes a value of NaN and the infinities, which are no JSON; None for Python's.
        whole: makes a value of a whole number as it is written; None for Python's, many times as fast.

    Raises:
        ValueError: it is not UTF-8 or not JSON, has a key twice, nests or holds more than any checkpoint needs; says
            what was found.
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
    """The value of a JSON text from elsewhere, every text in which can be written as UTF-8.

    Args:
        raw: see `decode_json`.

    Raises:
        ValueError: it is none; says what was found.
    """
    try:
        value = decode_json(raw, _no_number, _whole)
        if b"\\u" in raw:  # halves of a character, which no tokenizer takes
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
    """A decoded value that has to be text.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
