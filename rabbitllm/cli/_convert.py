"""`rabbitllm convert`: any splittable checkpoint as sharded safetensors, or a model as one GGUF file."""

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
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="PATH", help="Folder to write, empty or not existing; with --to gguf the file."
        ),
    ],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="safetensors or gguf.")] = "safetensors",
    outtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help="Type of a GGUF file: auto (as in the source), f32, f16, bf16, q8_0, q4_0 and others. From GGUF to "
            "safetensors: bf16, f16, f32, or auto (as in the file; f32 if it is quantized).",
        ),
    ] = "auto",
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Convert one shard at a time, and delete each used shard.")
    ] = False,
    delete_original: Annotated[
        bool, typer.Option("--delete-original", help="Delete the original when the new folder is complete.")
    ] = False,
    revision: RevisionOption = None,
    max_disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Maximum disk use, e.g. 50GB; by default the free disk.")
    ] = None,
    min_free_disk: MinFreeDiskOption = "1GB",
    plot: DiskPlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint to safetensors or GGUF.

    Safetensors are one shard per layer, with the index, config and tokenizer; GGUF is one file for llama.cpp. The
    original is kept, unless --sequential or --delete-original is given. Killed or interrupted, the same command
    resumes.

    Examples:
      rabbitllm convert Qwen/Qwen2.5-7B-Instruct -o qwen --max-disk 20GB
      rabbitllm convert Qwen/Qwen3-0.6B -o qwen3.gguf --to gguf --outtype q8_0
    """
    from rich.console import Console
    from rich.text import Text

    from rabbitllm.base.terminal import counted, harmless, put, put_fact, size
    from rabbitllm.display.pictures import pictured
    from rabbitllm.display.split_display import shown
    from rabbitllm.models.convert import convert

    start = time.perf_counter()
    with pictured(plot) as disk, shown(converts=True):
        result = convert(
            source,
            output,
            to=to,
            outtype=outtype,
            sequential=sequential,
            delete_original=delete_original,
            revision=revision,
            max_disk=max_disk,
            min_free_disk=min_free_disk,
        )
    seconds = time.perf_counter() - start
    if as_json:
        put_json({**dataclasses.asdict(result), "folder": str(result.folder), "seconds": seconds})
        return
    console = Console(highlight=False)
    put(console, Text(str(result.folder), "bold"))
    files = counted(result.shards, "shard" if to == "safetensors" else "file")
    put_fact(console, "tensors", f"{result.tensors:,}, {size(result.nbytes)}, in {files}")
    if result.matrices:
        put_fact(console, "matrices", result.matrices)
    if result.beside:
        put_fact(console, "other files", ", ".join(map(harmless, result.beside)))
    if to == "safetensors" and "config.json" not in result.beside:
        put_fact(console, "config", "missing in the original; transformers needs a config.json")
    if plot is not None and disk is not None:
        put_fact(console, "picture", str(plot) if disk.points else "none, there was nothing to do")
    put_fact(console, "time", "none, it was complete already" if result.before else f"{seconds:.1f} s")
