"""The loader's own check of a model, passed to a split so that it runs before anything is deleted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from rabbitllm.base.options import StreamOptions
from rabbitllm.checkpoints.meta_checkpoint import CONFIG_NAME
from rabbitllm.prepare.config import config_folder
from rabbitllm.prepare.source import Source

if TYPE_CHECKING:
    from rabbitllm.engine.devices import Device
    from rabbitllm.splitter.request import Acceptance
    from rabbitllm.store.layer_store import WeightFiles

TooLittle: TypeAlias = Literal["refuse", "warn", "ignore"]
"""Action if this process may not take the memory that one layer needs."""


@contextlib.contextmanager
def acceptance(
    source: Source,
    options: StreamOptions,
    devices: Sequence[Device] | None = None,
    *,
    too_little: TooLittle = "warn",
) -> Iterator[Acceptance]:
    """Yield the check that refuses what loading would refuse: of planned layer files, and of finished ones.

    `from_pretrained`, `pull`, `convert` and RabbitLLM 1.1's functions pass it to `ensure_split`, which calls it
    before the first shard is touched and before the last one is deleted; `plan` decides by the same code.

    Args:
        source: the source of the split.
        options: options for running the model.
        devices: devices to run it on; by default those that the options name.
        too_little: action if this process may not take the memory that one layer needs: "refuse" if it will load the
            model itself, "warn" (once) if the split may be for another machine, "ignore" if several processes will load
            it.
    """
    from rabbitllm.engine import load_plan  # with torch
    from rabbitllm.engine.devices import resolve_devices

    if devices is None:
        devices = resolve_devices(options.device, options.max_memory, options.pin_memory)
    with config_folder(source) as folder:
        if not source.finished or too_little == "warn":  # else the model is loaded next, which checks the same
            load_plan.check(folder, options, devices)
        judges = {"refuse": load_plan.refuse_too_little_memory, "warn": load_plan.warn_of_too_little_memory}
        judge = judges.get(too_little)

        def accept(store: WeightFiles) -> None:
            nonlocal judge
            home = store.folder if (store.folder / CONFIG_NAME).exists() else folder
            load_plan.accept(store, options, home, devices, judge)
            judge = judge if too_little == "refuse" else None  # a warning is given once

        yield accept


def quantize_on(devices: Sequence[Device]) -> str:
    """Return the device that a split quantizes on: the first GPU among the devices, else "cpu"."""
    return next((device.name for device in devices if device.torch_device.type == "cuda"), "cpu")
