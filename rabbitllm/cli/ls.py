"""`rabbitllm ls`: the split directories of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli.arguments import JsonOption, put_json


def ls_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", help="Further folders to search, with their subfolders."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the splits on this machine, complete or not.

    Searches RABBITLLM_HOME and the folders given.

    Examples:
      rabbitllm ls
      rabbitllm ls . --json
    """
    from rich.console import Console

    from rabbitllm.base.options import expand
    from rabbitllm.models.library import as_record, below, known
    from rabbitllm.models.library_report import put_entries

    found = {entry.folder.resolve(): entry for entry in known()}
    for folder in folders or ():
        found |= {entry.folder.resolve(): entry for entry in below(expand(folder))}
    if as_json:
        put_json([as_record(entry) for entry in found.values()])
    else:
        put_entries([*found.values()], Console(highlight=False))
