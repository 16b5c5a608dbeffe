"""The bits of each tensor of a mixed split, and the budgets they were chosen for: a record and its JSON. Pure.

The compression of a mixed split is called "auto".

Journal and manifest keep the record, so that an unfinished split resumes with the same bits, and a complete one
documents them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rabbitllm.formats.json_text import text_of
from rabbitllm.quant.compression import BLOCKS, COMPRESSIONS, check_compression

AUTO = "auto"
"""A compression for each tensor."""
SPLITS: tuple[str | None, ...] = (*COMPRESSIONS, AUTO)
"""Names for the compression of a split directory."""


def check_split(compression: str | None) -> None:
    """Refuse an unknown compression, and one whose package is not installed.

    Raises:
        OptionError, MissingPackageError: see `check_compression`.
    """
    check_compression("4bit" if compression == AUTO else compression)


def losses_first(compression: str | None) -> float:
    """A sort key for splits by increasing loss; a mixed split comes after 8bit."""
    return COMPRESSIONS.index("8bit") + 0.5 if compression == AUTO else COMPRESSIONS.index(compression)


@dataclass(frozen=True, slots=True)
class BitAllocation:
    """Bits by tensor.

    Attributes:
        schemes: tensor -> its scheme; tensors without one are stored uncompressed.
        max_disk: disk budget in bytes; None for the space that was free.
        memory: memory budget of all weights in bytes; None for no limit.
    """

    schemes: Mapping[str, str]
    max_disk: int | None = None
    memory: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`: names by scheme."""
        names: dict[str, list[str]] = {}
        for name, scheme in self.schemes.items():
            names.setdefault(scheme, []).append(name)
        return {"max_disk": self.max_disk, "memory": self.memory, "schemes": names}


def from_json(content: Mapping[str, Any]) -> BitAllocation:
    """The record that `as_json` wrote.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is malformed.
    """
    schemes: dict[str, str] = {}
    for scheme, names in content["schemes"].items():
        if scheme not in BLOCKS:
            raise ValueError(f"{scheme!r} is no compression")
        schemes.update(dict.fromkeys(map(text_of, names), scheme))
    return BitAllocation(schemes, _size(content["max_disk"]), _size(content["memory"]))


def _size(value: object) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"{value!r} is no size")
    return value
