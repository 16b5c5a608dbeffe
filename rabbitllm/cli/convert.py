"""`rabbitllm convert`: any splittable checkpoint as sharded safetensors."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli.arguments import (
    DiskPlotOption,
    JsonOption,
    MinFreeDiskOption,
    ModelArgument,
    RevisionOption,
    put_json,
)


def convert_command(
    source: ModelArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to; must be empty or missing.")],
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Take one shard at a time, and delete each when it is used up.")
    ] = False,
    delete_original: Annotated[
        bool, typer.Option("--delete-original", help="Remove the original when the new folder is complete.")
    ] = False,
    revision: RevisionOption = None,
    max_disk: Annotated[str | None, typer.Option(help="Bytes that this may occupy, e.g. 57GiB.")] = None,
    min_free_disk: MinFreeDiskOption = "1GB",
    plot: DiskPlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint again as safetensors, a shard a layer, with index, config and tokenizer.

    The original stays as it is unless you say otherwise. Killed or interrupted, the same call goes on.

    Example: rabbitllm convert pytorch-model -o safetensors-model
    """
    from rich.console import Console
    from rich.text import Text

    from rabbitllm.base.terminal import counted, harmless, put, put_fact, size
    from rabbitllm.display.pictures import pictured
    from rabbitllm.display.split_display import shown
    from rabbitllm.models.convert import convert

    start = time.perf_counter()
    with pictured(plot) as disk, shown():
        made = convert(
            source,
            output,
            sequential=sequential,
            delete_original=delete_original,
            revision=revision,
            max_disk=max_disk,
            min_free_disk=min_free_disk,
        )
    seconds = time.perf_counter() - start
    if as_json:
        put_json({**dataclasses.asdict(made), "folder": str(made.folder), "seconds": seconds})
        return
    console = Console(highlight=False)
    put(console, Text(str(made.folder), "bold"))
    put_fact(console, "tensors", f"{made.tensors:,}, {size(made.nbytes)}, in {counted(made.shards, 'shard')}")
    if made.beside:
        put_fact(console, "other files", ", ".join(map(harmless, made.beside)))
    if "config.json" not in made.beside:
        put_fact(console, "config", "there was none: these are the weights alone, and transformers needs one")
    if plot is not None and disk is not None:
        put_fact(console, "picture", str(plot) if disk.points else "none, since nothing was left to do")
    put_fact(console, "time", "none, it was whole already" if made.before else f"{seconds:.1f} s")
