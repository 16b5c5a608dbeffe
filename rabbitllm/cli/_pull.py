"""`rabbitllm pull`: prepare a model, and report where its parts are."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Annotated

import typer

from rabbitllm.cli._spelling import typed_here
from rabbitllm.cli.arguments import (
    NO_OPTIONS,
    DiskPlotOption,
    FitScalesOption,
    JsonOption,
    MinFreeDiskOption,
    ModelArgument,
    ModelOptions,
    RayOption,
    put_result,
    with_model_options,
)
from rabbitllm.cli.help import hosts_option, shards_option


@with_model_options("dtype", "no_split", "no_verify_checksums", "fast_bfloat16", uncompressed=True)
def pull_command(
    model: ModelArgument,
    options: ModelOptions = NO_OPTIONS,
    keep_shards: Annotated[
        bool, shards_option("--keep-shards", help="Download a repository's shards to the hub cache and keep them.")
    ] = False,
    delete_original: Annotated[
        bool, shards_option("--delete-original", help="Delete the original checkpoint when the split is complete.")
    ] = False,
    min_free_disk: MinFreeDiskOption = "1GB",
    shard_transfer: Annotated[
        str,
        shards_option(
            metavar="NAME",
            help="file: a shard is downloaded, split and deleted; stream: it is split while it arrives, and is never a "
            "file; auto: the first that fits on the disk.",
        ),
    ] = "auto",
    token: Annotated[
        str | None, shards_option(help="Access token of the hub; prefer HF_TOKEN or `hf auth login`.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check whether the split would fit; exits with 1 if not.")
    ] = False,
    ray: RayOption = None,
    ray_tasks: Annotated[
        int | None, hosts_option(help="With --ray: maximum shards at a time; by default one per two processors.")
    ] = None,
    fit_scales: FitScalesOption = False,
    plot: DiskPlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Download and split a model, so that it is ready to run.

    Local shards and shards in the hub cache are kept, unless --sequential or --delete-original is given. Downloaded
    shards are deleted once used, unless --keep-shards is given. Killed or interrupted, the same command resumes.

    Examples:
      rabbitllm pull Qwen/Qwen2.5-7B-Instruct --compression 4bit
      rabbitllm pull my-checkpoint --compression 8bit --dir layers
    """
    from rich.console import Console

    from rabbitllm.display.pictures import pictured
    from rabbitllm.display.split_display import shown
    from rabbitllm.models import pull as pulling

    request = options.request(
        model,
        shards=pulling.shard_policy(
            sequential=options.sequential, keep_shards=keep_shards, delete_original=delete_original
        ),
        token=token,
        loads=False,
        of_split={"min_free_disk": min_free_disk, "shard_transfer": shard_transfer, "fit_scales": fit_scales},
    )
    if dry_run:
        with Console(stderr=True).status("reading headers …"):
            result = pulling.dry_run(request)
        show_run = partial(pulling.show_dry_run, result, request, typed=typed_here)
        put_result(as_json, lambda: pulling.dry_run_record(result), show_run)
        raise typer.Exit(0 if result.fits else 1)
    with contextlib.redirect_stdout(sys.stderr), pictured(plot), shown():
        if ray is None:
            pulled = pulling.pull(request)
        else:
            from rabbitllm.ray.shards import pull_on

            pulled = pull_on(ray, request, ray_tasks)
    put_result(as_json, lambda: pulling.pulled_record(pulled), partial(pulling.show_pulled, pulled, request))
