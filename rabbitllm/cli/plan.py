"""`rabbitllm plan`: what a split would take of the disk and how long, and what a token, before any of it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli.arguments import JsonOption, ModelArgument, compression_of, limits_of, put_json


def plan_command(
    model: ModelArgument,
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
    plot: Annotated[
        Path | None, typer.Option(help="Draw which layer will live where: .png, .svg or .pdf (needs matplotlib).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tell from headers alone what splitting a model would take, what fits, and the call to make. Changes nothing.

    And how long a token will take on this machine, which is measured for that, with the model kept where it fits.

    Example: rabbitllm plan Qwen/Qwen2.5-72B-Instruct --compression 4bit --max-disk 57GiB
    """
    from huggingface_hub.utils import disable_progress_bars
    from rich.console import Console

    from rabbitllm.planning.plan import plan
    from rabbitllm.planning.report import draw_plan, show
    from rabbitllm.profiling.picture import check_picture
    from rabbitllm.splitter.forecast import as_json as as_record

    if plot is not None:
        check_picture(plot)
    disable_progress_bars()  # a config of a few KB is fetched at most
    with Console(stderr=True).status("reading headers, measuring …"):
        forecast = plan(
            model,
            compression=compression_of(compression),
            layer_shards_saving_path=folder,
            revision=revision,
            max_disk=max_disk,
            min_free_disk=min_free_disk,
            bandwidth=bandwidth,
            device=device,
            max_memory=limits_of(max_memory),
        )
    if plot is not None:
        draw_plan(forecast, plot)
    if as_json:
        put_json(as_record(forecast))
    else:
        show(forecast, Console(highlight=False))
