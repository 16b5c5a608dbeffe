"""`rabbitllm worker`: computes some layers of a model for another process."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import Annotated

import typer

from rabbitllm.cli.arguments import (
    NO_OPTIONS,
    ModelArgument,
    ModelOptions,
    with_model_options,
)


@with_model_options("dtype", "max_disk", "sequential", "verify_source", "fast_bfloat16")
def worker_command(
    model: ModelArgument,
    join: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address at which the first process waits.", show_default=False)
    ],
    options: ModelOptions = NO_OPTIONS,
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
    request = replace(options, device=own_device(options.device, hosts)).request(model, hosts)
    with contextlib.redirect_stdout(sys.stderr):
        work(request, Console(stderr=True, highlight=False))
