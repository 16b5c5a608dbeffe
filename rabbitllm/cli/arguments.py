"""Arguments that several commands share, and what they are turned into."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def complete_model(incomplete: str) -> list[str]:
    """What a shell may go on with: models that are split here, and paths."""
    from rabbitllm import locations

    known = [name for name in locations.known_names() if name.lower().startswith(incomplete.lower())]
    path = Path(incomplete)
    folder, begun = (path, "") if incomplete.endswith("/") else (path.parent, path.name)
    lead = incomplete[: len(incomplete) - len(begun)]
    try:
        paths = sorted(lead + found.name + "/" * found.is_dir() for found in folder.expanduser().iterdir())
    except OSError:
        paths = []
    shown = (one for one in paths if begun.startswith(".") or not one.removeprefix(lead).startswith("."))
    return [*known, *(one for one in shown if one.startswith(incomplete))]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A repository, a folder, a file of weights, or a split directory.",
        autocompletion=complete_model,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
FolderOption = Annotated[Path | None, typer.Option("--dir", help="Folder for the split directory.")]
MemoryOption = Annotated[
    list[str] | None, typer.Option(help="What weights may take, as cpu=24GiB or 0=14GiB; again for each device.")
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cuda:N, cpu, or auto for every GPU; by default the first GPU there is.")
]


def compression_of(word: str) -> str | None:
    """`none` in any spelling -> None."""
    return None if word.lower() == "none" else word


def limits_of(given: list[str] | None) -> dict[int | str, int | str] | None:
    """`cpu=24GiB`, once for each device -> what `max_memory` takes.

    Raises:
        OptionError: no equals sign.
    """
    from rabbitllm.errors import OptionError

    found: dict[int | str, int | str] = {}
    for word in given or ():
        name, equals, size = word.partition("=")
        if not equals:
            raise OptionError(f"--max-memory {word} names no device.", "For example --max-memory cpu=24GiB.")
        found[int(name) if name.strip().isdigit() else name.strip()] = size.strip()
    return found or None


def put_json(record: Any) -> None:
    """One object on stdout."""
    json.dump(record, sys.stdout, indent=1)
    print()
