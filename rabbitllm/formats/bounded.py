"""Untrusted JSON and small files, read within limits and without ambiguity.

Python's own JSON reader accepts a repeated key (the last one wins, while a scanner may see the first), and turns a few
bytes of text into a hundred times as many bytes of objects. Here the memory is limited before decoding, by the number
of values and the size of the text. Type and size of a file are checked before it is read. Independent of the meaning of
the content.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from rabbitllm.errors import CheckpointNotFoundError, CorruptVocabularyError, InvalidIndexError

COPY_AGAIN = "Download or copy the file again."
MAX_VALUES = 600_000
"""Limit of values, lists and tables in one text, counted as its commas and opening brackets. A tensor takes 8 of them
in a safetensors header and 1 in an index; so 75,000 tensors in a shard, 600,000 in a checkpoint."""
MAX_TEXT_BYTES = 64 << 20
"""Limit of a text in memory, where one character outside Latin-1 makes all of them two or four bytes wide."""
MAX_DIGITS = 400
"""Limit of the digits of a number in a message. A float has fewer than 310 before its point; more only cost time."""


def decode_json(
    raw: bytes,
    constant: Callable[[str], Any] | None = None,
    whole: Callable[[str], Any] | None = None,
    fraction: Callable[[str], Any] | None = None,
) -> Any:
    """The value of a JSON text.

    Args:
        raw: UTF-8; the caller limits its length.
        constant: converts NaN and the infinities, which are not JSON; None for Python's conversion.
        whole: converts the digits of an integer; None for Python's conversion, which is many times as fast.
        fraction: converts the digits of any other number; None for Python's conversion.

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
        pairs = _refuse_repeated_keys
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=whole, parse_float=fraction)
    except RecursionError:
        raise ValueError("it is nested too deeply (maximum recursion depth exceeded)") from None


def decode_message(raw: bytes) -> Any:
    """The value of a JSON message, all strings in which can be written as UTF-8.

    Args:
        raw: see `decode_json`.

    Raises:
        ValueError: it is malformed; the message says what was found.
    """
    try:
        value = decode_json(raw, no_constant, _parse_integer, _parse_fraction)
        if b"\\u" in raw:  # unpaired surrogates, which no tokenizer accepts
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it has an unpaired surrogate") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    return value


def no_constant(word: str) -> Any:
    """Refuse NaN and the infinities."""
    raise ValueError(f"{word} is not JSON")


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


def _parse_fraction(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {short(digits, 40)} is too large")
    return value


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {repeated[:80]!r} appears twice")
    return table


def short(value: object, limit: int = 80) -> str:
    """The beginning of a value's representation, at most `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def text_of(value: object) -> str:
    """A decoded value that must be a string.

    Raises:
        TypeError: it is not a string.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


FETCH_POINTER = "Fetch the file itself: run `git lfs pull` in the clone, or download it. Then make the same call again."
POINTER_BYTES = 32
"""Bytes of a file that `is_lfs_pointer` needs."""


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that begins with `head` is what a clone without git-lfs has in the place of a large file."""
    return head.startswith(b"version https://git-lfs")


def is_pointer_file(path: Path) -> bool:
    """Whether a file in the folder is such a pointer; False for one that cannot be read."""
    with contextlib.suppress(OSError), open_regular(path, OSError) as file:
        return is_lfs_pointer(file.read(POINTER_BYTES))
    return False


MAX_BYTES = 40 << 20
"""Limit of a file's size. An index of 74,000 expert matrices has 7 MB."""
_REMEDY = "Download the file again."


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InvalidIndexError: the file is not a regular file, not one JSON object, not UTF-8, repeats a key, or exceeds
            `MAX_BYTES` or the limits of `decode_json`.
    """
    raw = read_regular(
        path, MAX_BYTES, lambda problem: InvalidIndexError(f"{path} is not a JSON file: it {problem}.", _REMEDY)
    )
    check_begins_json(path, raw)
    try:
        decoded = decode_json(raw)
    except ValueError as error:
        raise InvalidIndexError(f"{path} is not valid JSON: {error}.", _REMEDY) from None
    if not isinstance(decoded, dict):
        raise InvalidIndexError(f"{path} holds a JSON {type(decoded).__name__}; expected an object.", _REMEDY)
    return decoded


def check_begins_json(path: Path, head: bytes | None = None) -> None:
    """Refuse a JSON file whose first bytes (`head`, or those of the file) show that it became another one on the way.

    Raises:
        InvalidIndexError: it is a git-lfs pointer, or an editor put a byte-order mark before its text.
    """
    if head is None:
        with open_regular(path, OSError) as file:
            head = file.read(POINTER_BYTES)
    if is_lfs_pointer(head):
        raise InvalidIndexError(f"{path} is a git-lfs pointer, not the file itself.", FETCH_POINTER)
    if head.startswith(codecs.BOM_UTF8):
        raise InvalidIndexError(
            f"{path} begins with a byte-order mark, which JSON does not allow.", "Save it as UTF-8 without that mark."
        )


MAX_FILE_BYTES = 64 << 20
"""Limit of a file. Gemma's 262,144 pieces take 5 MB, Llama 3's 128,000 tokens 2 MB."""


def read_vocabulary(path: Path, refusal: Callable[[str], CorruptVocabularyError]) -> bytes:
    """All of a regular file of at most 67 MB.

    Args:
        path: the file.
        refusal: makes the error for a problem.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CorruptVocabularyError: it is not a regular file, or is larger.
    """
    try:
        return read_regular(path, MAX_FILE_BYTES, lambda problem: refusal(f"it {problem}"))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"There is no vocabulary {path}.", "Use the path of tokenizer.model.") from None


def open_regular(path: Path, refusal: Callable[[str], Exception]) -> BinaryIO:
    """Open a file for reading, without waiting: the opening of a pipe would block until a writer opens it too.

    Args:
        path: the file.
        refusal: makes the error for a problem, which is a verb and its object.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a valid path.
    """
    with contextlib.suppress(IsADirectoryError):
        flag = getattr(os, "O_NONBLOCK", 0)
        file = open(path, "rb", opener=lambda path, flags: os.open(path, flags | flag))  # noqa: SIM115
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file
        file.close()
    raise refusal("is not a regular file")


def read_regular(path: Path, limit: int, refusal: Callable[[str], Exception]) -> bytes:
    """The content of a file of at most `limit` bytes; arguments and errors as of `open_regular`."""
    with open_regular(path, refusal) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise refusal(f"has {size:,} bytes; at most {limit:,} are read")
        return file.read(limit)
