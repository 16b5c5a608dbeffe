"""`rabbitllm worker`: computes some layers of a model for another process."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import Annotated

from rabbitllm.cli.arguments import NO_OPTIONS, ModelArgument, ModelOptions, with_model_options
from rabbitllm.cli.help import hosts_option


@with_model_options("max_disk", "sequential", "verify_source", "fast_bfloat16")
def worker_command(
    model: ModelArgument,
    join: Annotated[str, hosts_option(metavar="HOST:PORT", help="Address of the first process.")],
    options: ModelOptions = NO_OPTIONS,
) -> None:
    """Compute a span of layers for a run or chat on another host.

    That host runs `rabbitllm run --workers N` or `rabbitllm chat --workers N`; the worker ends with it. All hosts need
    the same model, in a shared folder or split on each. Use it only in a trusted network: every process that reaches
    the port can use the model. Received data is never run as code.

    Examples:
      rabbitllm worker my-checkpoint --join 192.168.1.5:29500
      rabbitllm worker /shared/Llama-70B --join 192.168.1.5:29500 --device cpu
    """
    from rich.console import Console

    from rabbitllm.base.options import Hosts
    from rabbitllm.run import local_device, work

    hosts = Hosts(join)
    request = replace(options, device=local_device(options.device, hosts)).request(model, hosts)
    with contextlib.redirect_stdout(sys.stderr):
        work(request, Console(stderr=True, highlight=False))
