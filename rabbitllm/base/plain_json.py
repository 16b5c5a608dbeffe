"""Records as what `json.dumps` takes: no folder is a Path any more, and no choice an enum. Knows nothing of records."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEYS = {"quantize": "quantise", "quantized": "quantised", "quantize_on": "quantise_on"}
"""Field -> its key, for the fields whose keys were published in another spelling: programs read them."""


def plain(value: Any) -> Any:
    """A value with all that is in it as dicts, lists, strings and numbers.

    Args:
        value: what `dataclasses.asdict` gives, or a part of it: mappings with string keys, lists, tuples, enums of
            plain values, paths, and what JSON knows itself.
    """
    if isinstance(value, Mapping):
        return {KEYS.get(key, key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
