"""`rabbitllm plan`: predicted disk use and time of a split, and time per token, before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli.arguments import (
    NO_OPTIONS,
    FitScalesOption,
    JsonOption,
    MinFreeDiskOption,
    ModelArgument,
    ModelOptions,
    complete_model,
    limits_of,
    put_result,
    with_model_options,
)


@with_model_options(
    *("dtype", "sequential", "no_split", "verify_source", "trust_remote_code", "no_verify_checksums", "fast_bfloat16"),
    uncompressed=True,
)
def plan_command(
    model: ModelArgument,
    options: ModelOptions = NO_OPTIONS,
    min_free_disk: MinFreeDiskOption = "1GB",
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Download speed in bytes per second, e.g. 12MB; by default measured."),
    ] = None,
    fit_scales: FitScalesOption = False,
    draft: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Estimate seconds per token with a draft too: a small model, mtp, ngram, self, or auto; none is none.",
            autocompletion=complete_model,
        ),
    ] = "none",
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot the placement of layers to this file (.png, .svg or .pdf)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate disk, memory and speed of a model before a download.

    Reads headers only and changes nothing. Measures this machine's disk and kernels for the estimate of seconds per
    token. Shows which settings fit, and the call to make.

    Examples:
      rabbitllm plan Qwen/Qwen2.5-72B-Instruct --compression 4bit
      rabbitllm plan my-checkpoint --max-memory cpu=8GB --draft ngram
    """
    from rich.console import Console

    from rabbitllm.display.pictures import check_picture
    from rabbitllm.estimate.plan import plan
    from rabbitllm.estimate.report import draw_plan, show
    from rabbitllm.estimate.split_estimate import as_json as as_record
    from rabbitllm.models.library import compression_to_run

    if plot is not None:
        check_picture(plot)
    with Console(stderr=True).status("reading headers, measuring …"):
        estimate = plan(
            model,
            compression=compression_to_run(model, options.compression),
            layer_shards_saving_path=options.folder,
            revision=options.revision,
            max_disk=options.max_disk,
            min_free_disk=min_free_disk,
            bandwidth=bandwidth,
            device=options.device,
            max_memory=limits_of(options.max_memory),
            fit_scales=fit_scales,
            draft=draft,
        )
    if plot is not None:
        draw_plan(estimate, plot)
    put_result(as_json, lambda: as_record(estimate), lambda console: show(estimate, console))
