"""JSON files of a checkpoint: bounded, unambiguous, or refused.

`NaN` and `Infinity` are accepted: configs of state-space models have them. Independent of the meaning of the JSON.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats.json_text import decode_json

MAX_BYTES = 40 << 20
"""Limit of a file's size. An index of 74,000 expert matrices has 7 MB."""
_REMEDY = "Fetch the file again."


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InvalidIndexError: the file is not a regular file, not one JSON object, not UTF-8, repeats a key, or exceeds
            `MAX_BYTES` or the limits of `decode_json`.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # opening a pipe blocks until a writer opens it
        raise InvalidIndexError(f"{path} is no regular file; expected JSON.", "Put the file itself there.")
    if found.st_size > MAX_BYTES:
        raise InvalidIndexError(f"{path.name} has {found.st_size:,} bytes; at most {MAX_BYTES:,} are read.", _REMEDY)
    try:
        decoded = decode_json(path.read_bytes())
    except ValueError as error:
        raise InvalidIndexError(f"{path} is not valid JSON: {error}.", _REMEDY) from None
    if not isinstance(decoded, dict):
        raise InvalidIndexError(f"{path} holds a JSON {type(decoded).__name__}; expected an object.", _REMEDY)
    return decoded
