"""What each tensor of a mixed split has, and for which budgets that was chosen: a record, and its JSON. Pure.

A mixed split goes by the name "auto" among those at one compression for all tensors.

Journal and manifest keep it, so that a split that was begun goes on as it was begun, and one that is whole says what
it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rabbitllm.formats.json_text import text_of
from rabbitllm.quant.compression import BLOCKS, COMPRESSIONS, check_compression

AUTO = "auto"
"""Each tensor has a compression of its own."""
SPLITS: tuple[str | None, ...] = (*COMPRESSIONS, AUTO)
"""What a split directory may be called by."""


def check_split(compression: str | None) -> None:
    """Refuse what no split can be called by, or whose package is not installed.

    Raises:
        OptionError, MissingPackageError: as `check_compression`.
    """
    check_compression("4bit" if compression == AUTO else compression)


def losses_first(compression: str | None) -> float:
    """A key that sorts splits from the one that loses least to the one that loses most; a mixed one is behind 8bit."""
    return COMPRESSIONS.index("8bit") + 0.5 if compression == AUTO else COMPRESSIONS.index(compression)


@dataclass(frozen=True, slots=True)
class BitAllocation:
    """Bits by tensor.

    Attributes:
        schemes: tensor -> its scheme; those that are not named are stored as they are.
        max_disk: bytes that the caller allowed; None for what was free.
        memory: bytes that all weights were to keep within; None where memory was no limit.
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
        KeyError, TypeError, ValueError, AttributeError: it is none.
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
