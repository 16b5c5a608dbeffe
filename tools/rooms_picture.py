"""Draws docs/pictures/rooms.svg: the packages of rabbitllm and the order in which they import each other.

    python -m tools.rooms_picture

Rooms and floors come from the import-linter contract in pyproject.toml, their texts from the first sentence of each
room's docstring. `tests/test_architecture.py` compares the file with what this module draws.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
GROUPS = {
    "commands and front ends": (
        "#dbe9f9",
        "cli ray batch_jobs chat evaluation harness run server bench demo models estimate notebooks rabbitllm_1_names",
    ),
    "from a name to a model": ("#fbe7c6", "auto_model prepare"),
    "token ids in, token ids out": ("#d8efdc", "generation pipeline engine quant"),
    "shards in, layer files out": ("#f7dadd", "splitter lazy store checkpoints formats"),
    "ground": ("#e8e6ee", "display telemetry storage base errors version"),
}
"""Name -> colour, and the rooms of that colour."""
LEFT_OUT = ("__main__",)
"""A module that only calls `cli`."""
WIDTH, MARGIN, GAP, PADDING = 1000, 16, 8, 8
NAME_SIZE, TEXT_SIZE, LINE = 14, 11, 14
CHARACTER = 6.0
"""Width of a character of the text, at most about."""


def floors() -> list[list[str]]:
    """The rooms of each floor, the highest floor first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    every_floor = [[room.strip() for room in floor.split("|")] for floor in contract["layers"]]
    return [floor for floor in every_floor if floor[0] not in LEFT_OUT]


def sentence_of(room: str) -> str:
    """The first sentence of a room's docstring."""
    package = ROOT / "rabbitllm" / room / "__init__.py"
    path = package if package.exists() else ROOT / "rabbitllm" / f"{room}.py"
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=[.:])\s*\n\n|(?<=\.)\s+(?=[A-Z])", text)[0]
    return " ".join(sentence.replace("`", "").split()).rstrip(".:")


def colour_of(room: str) -> str:
    """Its colour; a KeyError names a room without a group."""
    return {member: colour for colour, rooms in GROUPS.values() for member in rooms.split()}[room]


def drawn() -> str:
    """The picture, as text of an SVG file."""
    shapes, y = [], MARGIN
    x = MARGIN
    for name, (colour, _) in GROUPS.items():
        shapes.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{colour}" stroke="#777"/>')
        shapes.append(f'<text x="{x + 20}" y="{y + 11}" font-size="12">{escape(name)}</text>')
        x += 20 + round(len(name) * 6.2) + 24
    y += 14 + 2 * GAP
    for floor in floors():
        width = (WIDTH - 2 * MARGIN - (len(floor) - 1) * GAP) / len(floor)
        texts = [textwrap.wrap(sentence_of(room), int((width - 2 * PADDING) / CHARACTER)) for room in floor]
        height = 2 * PADDING + LINE + max(map(len, texts)) * LINE
        for number, (room, lines) in enumerate(zip(floor, texts, strict=True)):
            left = round(MARGIN + number * (width + GAP))
            shapes.append(
                f'<rect x="{left}" y="{y}" width="{round(width)}" height="{height}" rx="5" '
                f'fill="{colour_of(room)}" stroke="#777"/>'
            )
            shapes.append(
                f'<text x="{left + PADDING}" y="{y + PADDING + 11}" font-size="{NAME_SIZE}" '
                f'font-weight="bold">{escape(room)}</text>'
            )
            for index, line in enumerate(lines, 1):
                shapes.append(
                    f'<text x="{left + PADDING}" y="{y + PADDING + 11 + index * LINE}" '
                    f'font-size="{TEXT_SIZE}">{escape(line)}</text>'
                )
        y += height + GAP
    total = y + MARGIN - GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{total}" viewBox="0 0 {WIDTH} {total}" '
        'font-family="system-ui, sans-serif" fill="#222">'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{total}" fill="#fff"/>', *shapes, "</svg>", ""])


if __name__ == "__main__":
    if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != drawn():
        PICTURE.write_text(drawn(), encoding="utf-8")
