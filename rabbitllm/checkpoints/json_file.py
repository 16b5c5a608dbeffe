"""JSON read from a checkpoint: bounded, unambiguous, or refused.

Python's own reader accepts a key twice (the last one wins, while a scanner may see the first), and files of any
size. `NaN` and `Infinity` are let through: configs of state-space models have them. Knows nothing of what the JSON
means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rabbitllm.errors import InvalidIndexError

MAX_BYTES = 256 << 20
"""The largest index known, of a model with 74,000 expert matrices, has 7 MB."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InvalidIndexError: not one JSON object, a key twice, not UTF-8, or larger than 256 MiB.
    """
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise InvalidIndexError(f"{path.name} has {size:,} bytes; at most {MAX_BYTES:,} is read.")
    try:
        decoded = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidIndexError(f"{path} is not valid JSON: {error}.", "Fetch the file again.") from None
    if not isinstance(decoded, dict):
        raise InvalidIndexError(f"{path} holds a JSON {type(decoded).__name__}; expected an object.")
    return decoded


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return table
