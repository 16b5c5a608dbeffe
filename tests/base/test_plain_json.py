"""Records with folders, choices and tuples in them, as JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rabbitllm.base.plain_json import plain


class Colour(enum.Enum):
    GREY = "grey"


@dataclass(frozen=True)
class Rabbit:
    folder: Path
    colour: Colour
    ears: tuple[Colour, ...]
    weight: float | None = None


def test_nested_values_become_plain() -> None:
    rabbit = Rabbit(Path("a") / "b", Colour.GREY, (Colour.GREY, Colour.GREY))
    record = plain({"first": dataclasses.asdict(rabbit), "by": MappingProxyType({"name": [rabbit.folder]})})
    assert json.loads(json.dumps(record)) == record
    assert record == {
        "first": {"folder": str(rabbit.folder), "colour": "grey", "ears": ["grey", "grey"], "weight": None},
        "by": {"name": [str(rabbit.folder)]},
    }
