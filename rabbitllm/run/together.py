"""Several processes that answer together: how a command becomes the first of them, or one of the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from rabbitllm.base.options import Hosts
from rabbitllm.errors import OptionError
from rabbitllm.models.pull.loaded import loaded_model
from rabbitllm.models.pull.make import Wish


def called_together(
    workers: int, address: str | None, model: str, console: Console, environment: Mapping[str, str] = os.environ
) -> Hosts | None:
    """The processes that compute a model together; None if this one is to do it alone.

    Args:
        workers: how many others to wait for; 0 leaves it to torchrun, if that started this process.
        address: where they reach this process.
        model: as the user names it.
        console: is told where it waits, and what to type there.
        environment: of this process.

    Raises:
        OptionError: an address without workers, or workers without an address.
    """
    if bool(workers) != (address is not None):
        raise OptionError(
            "--workers and --address belong together.", "For example --workers 1 --address 192.168.1.5:29500."
        )
    if address is None:
        return Hosts.of_torchrun(environment)

    def announce(found: str) -> None:
        many = "1 worker" if workers == 1 else f"{workers} workers"
        console.print(f"waiting for {many}: rabbitllm worker {model} --join {found}", soft_wrap=True, markup=False)

    return Hosts(address, workers, announce=announce)


def own_device(device: str | None, hosts: Hosts | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The device of this process: of several that torchrun started on a machine each takes a GPU of its own."""
    local = environment.get("LOCAL_RANK", "")
    if device is not None or hosts is None or hosts.rank is None or not local.isdigit():
        return device
    import torch

    return f"cuda:{local}" if int(local) < torch.cuda.device_count() else None


def work(wish: Wish, console: Console, *, split: bool = True) -> None:
    """Compute a span of layers until the first process ends.

    Args:
        wish: which model, and with whom.
        console: where it is said what is done.
        split: False for out of the checkpoint's own shards.

    Raises:
        RabbitLLMError: as `loaded_model` does; or another process ended before its time.
    """
    worker: Any = loaded_model(wish, console, split=split)
    span = worker.span
    console.print(f"ready: layers {span.begin + 1} to {span.end}, of {len(worker.names)} hosts")
    console.print(str(worker.model.placement), markup=False)
    worker.work()
    console.print(f"the first process has ended; {worker.passes:,} passes")
