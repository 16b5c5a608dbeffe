"""`rabbitllm rm`: remove a split directory, and nothing else."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rabbitllm.cli import exit_codes
from rabbitllm.cli.arguments import FolderOption, JsonOption, ModelArgument, WhichSplitOption, put_json


def rm_command(
    model: ModelArgument,
    compression: WhichSplitOption = None,
    folder: FolderOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without confirmation.")] = False,
    only_copy: Annotated[
        bool, typer.Option("--only-copy", help="Remove the split even if it is the only copy of the model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove a split, and keep the original checkpoint.

    Asks for confirmation. Refuses a folder with other files in it, a split in use by another process, and, without
    --only-copy, a split whose original checkpoint is not found.

    Examples:
      rabbitllm rm my-checkpoint --compression 4bit
      rabbitllm rm my-checkpoint --yes --json
    """
    from rich.console import Console
    from rich.text import Text

    from rabbitllm.base.options import expand
    from rabbitllm.base.terminal import put, size
    from rabbitllm.errors import OptionError
    from rabbitllm.models.library import one_of_model
    from rabbitllm.models.library_report import put_removal
    from rabbitllm.models.remove import original_of, plan_removal, refuse_only_copy, remove
    from rabbitllm.store.locations import meant

    plain = expand(model)
    entry = None if plain.is_symlink() else one_of_model(model, compression, expand(folder) if folder else None)
    removal = plan_removal(plain if entry is None else entry.folder)
    named = expand(meant(model))
    original = original_of(removal.entry, named if named.is_dir() and named != removal.entry.folder else None)
    errors = Console(stderr=True, highlight=False)
    put_removal(removal, original, errors)
    if not only_copy:
        refuse_only_copy(removal, original)
    if not yes:
        if not has_terminal():
            raise OptionError(
                "There is no terminal for the confirmation; nothing was removed.", "Pass --yes to confirm."
            )
        if not typer.confirm("Remove it?", err=True):
            put(errors, Text("Nothing was removed."))
            raise typer.Exit(exit_codes.ERROR)
    freed = remove(removal)
    if as_json:
        put_json({"folder": str(removal.entry.folder), "freed_bytes": freed})
    else:
        put(Console(highlight=False), Text(f"Removed {removal.entry.folder}: {size(freed)} freed."))


def has_terminal() -> bool:
    """Whether stdin is a terminal, so that a question can be answered."""
    return sys.stdin.isatty()
