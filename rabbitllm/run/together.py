"""Starts a command as the first of several processes that compute a model together, or as a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from rabbitllm.auto_model import LoadRequest
from rabbitllm.base.options import Hosts
from rabbitllm.errors import OptionError
from rabbitllm.models.pull import loaded_model


def called_together(
    workers: int, address: str | None, model: str, console: Console, environment: Mapping[str, str] = os.environ
) -> Hosts | None:
    """The processes that compute a model together; None if this one computes it alone.

    Args:
        workers: number of workers to wait for; 0 to use torchrun's environment if there is one.
        address: address of this process for the workers.
        model: name of the model, as given by the user.
        console: console for the command to start a worker.
        environment: environment variables of this process.

    Raises:
        OptionError: an address without workers, or workers without an address.
    """
    if bool(workers) != (address is not None):
        raise OptionError(
            "--workers and --address must be used together.", "Example: --workers 1 --address 192.168.1.5:29500."
        )
    if address is None:
        return Hosts.of_torchrun(environment)

    def announce(found: str) -> None:
        many = "1 worker" if workers == 1 else f"{workers} workers"
        console.print(f"waiting for {many}: rabbitllm worker {model} --join {found}", soft_wrap=True, markup=False)

    return Hosts(address, workers, announce=announce)


def own_device(device: str | None, hosts: Hosts | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The device of this process; those that torchrun started on one machine get a GPU each."""
    local = environment.get("LOCAL_RANK", "")
    if device is not None or hosts is None or hosts.rank is None or not local.isdigit():
        return device
    import torch

    return f"cuda:{local}" if int(local) < torch.cuda.device_count() else None


def work(request: LoadRequest, console: Console) -> None:
    """Compute a span of layers until the first process ends.

    Args:
        request: the model and the hosts.
        console: console for messages.

    Raises:
        RabbitLLMError: as `loaded_model` does; or another process ended unexpectedly.
    """
    worker: Any = loaded_model(request, console)
    span = worker.span
    console.print(f"ready: layers {span.begin + 1} to {span.end}, of {len(worker.names)} hosts")
    console.print(str(worker.model.placement), markup=False)
    worker.work()
    console.print(f"the first process has ended; {worker.passes:,} passes")
