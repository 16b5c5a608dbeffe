"""The memory in which all weights of a mixed split should be resident, computed by the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rabbitllm.base.options import SplitOptions, StreamOptions
from rabbitllm.store.manifest import AUTO

if TYPE_CHECKING:
    from rabbitllm.engine.devices import Device


def with_memory(
    options: SplitOptions, stream_options: StreamOptions, devices: Sequence[Device] | None = None
) -> SplitOptions:
    """Return the options of a split; at "auto" with the memory in which its weights should be resident.

    Args:
        options: of the split.
        stream_options: options for running the model.
        devices: devices to run it on; by default those that the options name.

    Raises:
        DeviceError: the options name a GPU that does not exist.
    """
    if options.compression != AUTO:
        return options
    from rabbitllm.engine.devices import (
        resolve_devices,  # with torch
        weight_memory,
    )

    if devices is None:
        devices = resolve_devices(stream_options.device, stream_options.max_memory, stream_options.pin_memory)
    nbytes = weight_memory(devices, stream_options)
    return dataclasses.replace(options, memory=nbytes, memory_is_said=stream_options.max_memory is not None)
