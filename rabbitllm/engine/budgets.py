"""How much memory weights may take on each device: the caller's limit, or a default."""

from __future__ import annotations

from collections.abc import Sequence

from rabbitllm.base.options import StreamOptions
from rabbitllm.engine.devices import CpuDevice, Device

HOST_MARGIN = 1 << 30
DEVICE_MARGIN = 3 << 29
"""Bytes left to activations and the KV cache if the caller sets no limit, at most a sixteenth of the free memory;
a tenth of the free memory is left in addition."""


def budget_of(device: Device, options: StreamOptions) -> int:
    """Bytes for weights on a device."""
    limit = (options.max_memory or {}).get(device.name)
    return default_budget(device) if limit is None else limit


def weight_memory(devices: Sequence[Device], options: StreamOptions) -> int:
    """Bytes of memory for weights: on the devices, and pinned host memory."""
    return sum(budget_of(device, options) for device in devices) + host_room(devices, options)


def host_room(devices: Sequence[Device], options: StreamOptions) -> int:
    """Bytes of host memory to pin, for all devices with memory of their own; at most the free memory, since pinned
    memory cannot be swapped."""
    if not options.pin_memory or all(device.shares_host_memory for device in devices):
        return 0
    free = default_budget(CpuDevice())
    return min((options.max_memory or {}).get("cpu", free), free)


def default_budget(device: Device) -> int:
    """Bytes for weights on a device without a limit by the caller: free memory less the needs of one sequence."""
    free = device.free_bytes()
    margin = HOST_MARGIN if device.shares_host_memory else DEVICE_MARGIN
    return free - free // 10 - min(margin, free // 16)
