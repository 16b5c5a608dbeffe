"""Makes values that `json.dumps` accepts: of records some fields, of paths strings, of enums their values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEYS = {"quantize": "quantise", "quantized": "quantised", "quantize_on": "quantise_on"}
"""Field -> its key, for fields whose published keys have another spelling, which programs depend on."""


def plain(value: Any) -> Any:
    """Convert a value, recursively, to dicts, lists, strings and numbers.

    Args:
        value: a result of `dataclasses.asdict`, or a part of it: mappings with string keys, lists, tuples, enums of
            plain values, paths, and JSON's own types.
    """
    if isinstance(value, Mapping):
        return {KEYS.get(key, key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, enum.Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def fields_of(record: object, *names: str) -> dict[str, Any]:
    """Return attributes of a record under their own names."""
    return {name: getattr(record, name) for name in names}
