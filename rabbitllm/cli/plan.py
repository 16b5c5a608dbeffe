"""`rabbitllm plan`: what a split would take of the disk and how long, before any of it is done."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer


def plan_command(
    model: Annotated[str, typer.Argument(help="A folder, or a repository as organisation/name.")],
    compression: Annotated[str, typer.Option(help="The one to prefer: none, 8bit or 4bit.")] = "none",
    folder: Annotated[str | None, typer.Option("--dir", help="Folder for the split directory.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None,
    max_disk: Annotated[str | None, typer.Option(help="What the split may occupy, e.g. 57GiB.")] = None,
    min_free_disk: Annotated[str, typer.Option(help="What is to stay free of the disk.")] = "1GB",
    bandwidth: Annotated[
        str | None, typer.Option(help="Bytes a second for shards, e.g. 12MB; by default it is measured.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Tell from headers alone what splitting a model would take, what fits, and the call to make. Changes nothing.

    Example: rabbitllm plan Qwen/Qwen2.5-72B-Instruct --compression 4bit --max-disk 57GiB
    """
    from huggingface_hub.utils import disable_progress_bars
    from rich.console import Console

    from rabbitllm.planning.plan import plan
    from rabbitllm.planning.report import show
    from rabbitllm.splitter.forecast import as_json as as_record

    disable_progress_bars()  # a config of a few KB is fetched at most
    with Console(stderr=True).status("reading headers, measuring …"):
        forecast = plan(
            model,
            compression=None if compression.lower() == "none" else compression,
            layer_shards_saving_path=folder,
            revision=revision,
            max_disk=max_disk,
            min_free_disk=min_free_disk,
            bandwidth=bandwidth,
        )
    if as_json:
        json.dump(as_record(forecast), sys.stdout, indent=1)
        print()
    else:
        show(forecast, Console(highlight=False))
