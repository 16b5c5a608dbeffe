"""The commands about splits on this machine: `rabbitllm ls`, `show`, `verify` and `rm`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli import exit_codes
from rabbitllm.cli.arguments import (
    FolderOption,
    JsonOption,
    ModelArgument,
    RevisionOption,
    WhichSplitOption,
    put_json,
    put_result,
)
from rabbitllm.store.layer_store import Verification, verify


def ls_command(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER", help="Further folders to search, with their subfolders.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the splits on this machine, complete or not.

    Searches RABBITLLM_HOME, two levels of the working folder, and the folders given with their subfolders.

    Examples:
      rabbitllm ls
      rabbitllm ls . --json
    """
    from rabbitllm.base.options import expand
    from rabbitllm.models.library import NEAR_DEPTH, as_record, below, known
    from rabbitllm.models.library_report import put_entries

    entries = {entry.folder.resolve(): entry for entry in (*known(), *below(Path.cwd(), NEAR_DEPTH))}
    for folder in folders or ():
        entries |= {entry.folder.resolve(): entry for entry in below(expand(folder))}
    splits = [*entries.values()]
    put_result(as_json, lambda: [as_record(entry) for entry in splits], lambda console: put_entries(splits, console))


def show_command(
    model: ModelArgument, folder: FolderOption = None, revision: RevisionOption = None, as_json: JsonOption = False
) -> None:
    """Show a model's architecture, size and splits.

    Reads configs and headers only. For a model that is not split, reads them from the checkpoint or the hub.

    Examples:
      rabbitllm show my-checkpoint
      rabbitllm show Qwen/Qwen2.5-7B-Instruct --json
    """
    from huggingface_hub.utils import disable_progress_bars
    from rich.console import Console

    from rabbitllm.models.library_report import put_shown
    from rabbitllm.models.show import show, shown_record

    disable_progress_bars()  # at most a config is fetched
    with Console(stderr=True).status("reading headers …"):
        shown = show(model, folder, revision)
    put_result(as_json, lambda: shown_record(shown), lambda console: put_shown(shown, console))


def verify_command(
    model: ModelArgument,
    compression: WhichSplitOption = None,
    place: FolderOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Write damaged layer files again, from the original shards.")
    ] = False,
    original: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With --repair: folder of the original checkpoint; by default the parent of the split.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the layer files of a split, and repair damaged ones.

    Reads every layer file and checks checksum, shapes and tensors. Exits with 1 if a damaged file is left.

    Examples:
      rabbitllm verify my-checkpoint --compression 4bit
      rabbitllm verify my-checkpoint --repair
    """
    from rabbitllm.base.options import expand
    from rabbitllm.base.terminal import counted
    from rabbitllm.models.library import of_model, one_of_model
    from rabbitllm.models.library_report import repair_advice, verification_record, verification_text
    from rabbitllm.prepare import finish_repair, read_lock, refuse_half_repaired, repair_split

    folder, saving_path = expand(model), expand(place) if place is not None else None
    is_place = place is None and folder.is_dir()  # then the check itself reports the problem
    if of_model(model, compression, saving_path) or not is_place:
        folder = one_of_model(model, compression, saving_path).folder
    if repair:
        finish_repair(folder, original)
    start = time.perf_counter()
    with read_lock(folder):
        refuse_half_repaired(folder)
        verification = _verify_and_show(folder)
    seconds = time.perf_counter() - start
    if as_json:
        put_json(verification_record(verification, seconds))
    else:
        print(verification_text(verification, seconds))
    if not verification.damaged:
        return
    if not repair or verification.manifest is None:
        if not as_json:
            print(repair_advice(verification))
        raise typer.Exit(1)
    repair_split(folder, verification.manifest, {damage.layer for damage in verification.damaged}, original)
    damaged = _verify_and_show(folder).damaged
    if not as_json:
        repaired = f"repaired: {counted(len(verification.damaged), 'layer file')}"
        print(f"{counted(len(damaged), 'layer file')} still damaged" if damaged else repaired)
    raise typer.Exit(1 if damaged else 0)


def _verify_and_show(folder: Path) -> Verification:
    from rabbitllm.display.split_display import shown_reading

    with shown_reading(sum(path.stat().st_size for path in folder.glob("*.safetensors"))) as tell:
        return verify(folder, tell)


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
    --only-copy, a split whose original checkpoint is not found: in its folder, in the hub cache, or on the hub.

    Examples:
      rabbitllm rm my-checkpoint --compression 4bit
      rabbitllm rm my-checkpoint --yes --json
    """
    from rich.console import Console
    from rich.text import Text

    from rabbitllm.base.options import expand
    from rabbitllm.base.terminal import put, size
    from rabbitllm.errors import CheckpointNotFoundError, OptionError
    from rabbitllm.models.library import one_of_model
    from rabbitllm.models.library_report import put_removal
    from rabbitllm.models.remove import original_of, plan_removal, refuse_only_copy, remove, remove_empty_folders
    from rabbitllm.store.locations import one_of_several, resolve_name

    saving_path = expand(folder) if folder else None
    try:
        entry = one_of_model(model, compression, saving_path)
    except CheckpointNotFoundError:
        remove_empty_folders(model, saving_path)
        raise
    named = expand(one_of_several(resolve_name(model))[0])
    folder_of_it = named if named.is_dir() and named != entry.folder else None
    removal = plan_removal(entry.folder, folder_of_it)
    original = original_of(removal.entry, folder_of_it, asks_hub=not only_copy)
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
    record = {"folder": str(removal.entry.folder), "freed_bytes": freed}
    text = Text(f"Removed {removal.entry.folder}: {size(freed)} freed.")
    put_result(as_json, lambda: record, lambda console: put(console, text))


def has_terminal() -> bool:
    """Whether stdin is a terminal, so that a question can be answered."""
    return sys.stdin.isatty()
