"""`rabbitllm worker`: computes some layers of a model for another process."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from rabbitllm.cli.arguments import (
    CompressionHereOption,
    DeviceOption,
    FolderOption,
    MemoryOption,
    ModelArgument,
    NoSplitOption,
    NoVerifyOption,
    RevisionOption,
    TrustOption,
    wish_to_run,
)


def worker_command(
    model: ModelArgument,
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the first process waits.", show_default=False)],
    compression: CompressionHereOption = None,
    device: DeviceOption = None,
    max_memory: MemoryOption = None,
    folder: FolderOption = None,
    no_split: NoSplitOption = False,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    no_verify_checksums: NoVerifyOption = False,
) -> None:
    """Compute a span of a model's layers for `rabbitllm run --workers N` on another host, until that ends.

    The model is the same, in a shared folder or split on each host. Nothing that is received is run, but any process
    that reaches the hosts can compute with them. Use it only in a network that you trust.

    Example: rabbitllm worker /shared/Qwen2.5-72B --join 192.168.1.5:29500 --max-memory cpu=24GiB
    """
    from huggingface_hub.utils import disable_progress_bars
    from rich.console import Console

    from rabbitllm.base.options import Hosts
    from rabbitllm.run.together import own_device, work

    hosts = Hosts(join)
    disable_progress_bars()  # shards have our own bar, and other files are small
    wish = wish_to_run(
        model,
        compression=compression,
        folder=folder,
        sequential=False,
        max_disk=None,
        device=own_device(device, hosts),
        max_memory=max_memory,
        no_split=no_split,
        revision=revision,
        trust_remote_code=trust_remote_code,
        no_verify_checksums=no_verify_checksums,
        hosts=hosts,
    )
    with contextlib.redirect_stdout(sys.stderr):
        work(wish, Console(stderr=True, highlight=False), split=not no_split)
