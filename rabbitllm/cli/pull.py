"""`rabbitllm pull`: a model made ready, and what is where afterwards."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli.arguments import FolderOption, JsonOption, ModelArgument, compression_of, put_json


def pull_command(
    model: ModelArgument,
    compression: Annotated[str, typer.Option(help="none, 4bit or 8bit.")] = "none",
    folder: FolderOption = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Delete each shard when it is used up, also one that was here before.")
    ] = False,
    keep_shards: Annotated[
        bool, typer.Option("--keep-shards", help="Of a repository: fetch all shards into the hub cache, and keep them.")
    ] = False,
    delete_original: Annotated[
        bool, typer.Option("--delete-original", help="Delete what is left of the original when the split is whole.")
    ] = False,
    max_disk: Annotated[str | None, typer.Option(help="What the split may occupy, e.g. 57GiB.")] = None,
    min_free_disk: Annotated[str, typer.Option(help="What is to stay free of the disk.")] = "1GB",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None,
    shard_transfer: Annotated[str, typer.Option(help="How shards come from the hub: auto, file or stream.")] = "auto",
    token: Annotated[str | None, typer.Option(help="For the hub; better in HF_TOKEN, or `hf auth login`.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell whether it would fit; exits with 1 if not.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the disk in use over time into this file (.png, .svg or .pdf).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Get a model ready to run: split it, unless that is done, and say what is where.

    What is on your disk stays there: a folder's shards, and those in the hub cache. Shards that are fetched for this
    are not kept (--keep-shards keeps them). Killed or interrupted, the same call goes on.

    Example: rabbitllm pull Qwen/Qwen2.5-7B-Instruct --compression 4bit
    """
    from huggingface_hub.utils import disable_progress_bars
    from rich.console import Console

    from rabbitllm.checkpoints.hub import HubAccess
    from rabbitllm.profiling.disk_picture import pictured
    from rabbitllm.pull import make
    from rabbitllm.pull.report import show_dry_run, show_pulled
    from rabbitllm.split_display import shown

    disable_progress_bars()  # shards have a bar of ours, and what else is fetched is small
    wish = make.Wish(
        name=model,
        compression=compression_of(compression),
        folder=folder,
        sequential=sequential,
        keep_shards=keep_shards,
        delete_original=delete_original,
        access=HubAccess(revision, token),
        max_disk=max_disk,
        min_free_disk=min_free_disk,
        shard_transfer=shard_transfer,
        trust_remote_code=trust_remote_code,
    )
    console = Console(highlight=False)
    if dry_run:
        with Console(stderr=True).status("reading headers …"):
            found = make.dry_run(wish)
        if as_json:
            put_json(make.dry_run_record(found))
        else:
            show_dry_run(found, wish, console)
        raise typer.Exit(0 if found.fits else 1)
    with contextlib.redirect_stdout(sys.stderr), pictured(plot), shown():
        pulled = make.pull(wish)
    if as_json:
        put_json(make.pulled_record(pulled))
    else:
        show_pulled(pulled, wish, console)
