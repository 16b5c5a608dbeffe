"""`rabbitllm plan`: what a split would take of the disk and how long, and what a token, before any of it is done."""

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
    device: Annotated[str, typer.Option(help="Where to generate: cuda:N, cpu, or auto for every GPU.")] = "cuda:0",
    max_memory: Annotated[
        list[str] | None, typer.Option(help="Bytes for weights of a device, e.g. 0=14GiB or cpu=24GiB; more than once.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Tell from headers alone what splitting a model would take, what fits, and the call to make. Changes nothing.

    And how long a token will take on this machine, which is measured for that, with the model kept where it fits.

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
            device=device,
            max_memory=_limits(max_memory or []),
        )
    if as_json:
        json.dump(as_record(forecast), sys.stdout, indent=1)
        print()
    else:
        show(forecast, Console(highlight=False))


def _limits(given: list[str]) -> dict[int | str, int | str] | None:
    """`max_memory` from words such as "0=14GiB".

    Raises:
        OptionError: a word without "=".
    """
    from rabbitllm.errors import OptionError

    found: dict[int | str, int | str] = {}
    for word in given:
        name, equals, size = word.partition("=")
        if not equals:
            raise OptionError(f"--max-memory {word} names no device.", "For example --max-memory 0=14GiB.")
        found[int(name) if name.isdigit() else name] = size
    return found or None
