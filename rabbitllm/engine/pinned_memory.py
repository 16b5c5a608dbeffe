"""Units kept in pinned host memory, from which their device copies at the full rate of its link.

Pinned memory cannot be swapped or moved, so a system may refuse some of it; units that get none are streamed from the
disk, with a warning.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rabbitllm.base.forks import ForkGuard
from rabbitllm.base.terminal import size
from rabbitllm.engine.devices import Device, aligned_host
from rabbitllm.engine.loader import bytes_of
from rabbitllm.engine.placement import Placement, Tier
from rabbitllm.engine.span_reader import ReadMode, SpanReader
from rabbitllm.engine.unit_source import UnitSource
from rabbitllm.store.layer_store import WeightFiles

logger = logging.getLogger(__name__)

REFUSALS = (RuntimeError, MemoryError, OSError)
"""Errors of a system or a driver that cannot pin more memory."""


class HostBuffers:
    """Pinned host memory for copies to one device; released when this object is freed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._locked: list[torch.Tensor] = []
        release = weakref.finalize(self, _release, device, self._locked, ForkGuard())
        release.atexit = False  # by then the driver may be unloaded, and the system frees all memory anyway

    def take(self, nbytes: int) -> torch.Tensor:
        """Pinned memory, uint8 (nbytes,), on a page boundary.

        Raises:
            RuntimeError, MemoryError, OSError: it is refused.
        """
        buffer = self._device.host_buffer(nbytes)
        self._locked.append(buffer)
        return buffer

    def take_anyhow(self, nbytes: int) -> torch.Tensor:
        """Pinned memory, or ordinary memory if that is refused: copies from it are slow, but correct."""
        try:
            return self.take(nbytes)
        except REFUSALS as error:
            logger.warning("%s of host memory could not be page-locked (%s): copies are slower.", size(nbytes), error)
            return aligned_host(nbytes)


def _release(device: Device, buffers: list[torch.Tensor], guard: ForkGuard) -> None:
    if not guard.is_here:  # a forked process has no driver, and the pages are pinned for its parent
        return
    device.synchronise()  # a copy may still be running
    for buffer in buffers:
        device.free_host_buffer(buffer)


@dataclass(frozen=True)
class PinnedUnits:
    """Units in host memory for one device: unit -> its bytes, and the owner of the pinned buffers."""

    units: Mapping[str, torch.Tensor]
    memory: HostBuffers


def keep_units(
    placement: Placement, sources: Mapping[str, UnitSource], devices: Mapping[str, Device], store: WeightFiles
) -> tuple[Placement, dict[str, PinnedUnits]]:
    """Read the units of `Tier.PINNED` into pinned memory.

    Args:
        placement: of all units.
        sources: every unit.
        devices: by name.
        store: the layer files.

    Returns:
        The placement, where units that could not be pinned are streamed, and device name -> its pinned units, for each
        device with memory of its own.

    Raises:
        OSError: a layer file cannot be read.
        IncompleteSplitError: its checksum differs.
    """
    memories = {name: HostBuffers(device) for name, device in devices.items() if not device.shares_host_memory}
    kept: dict[str, dict[str, torch.Tensor]] = {name: {} for name in memories}
    wanted = [placed for placed in placement.units if placed.tier is Tier.PINNED]
    # read once, so the page cache is better left to files that are read again and again
    reader = SpanReader(store, ReadMode(drop=True), store.checks)
    for at, placed in enumerate(wanted):
        source = sources[placed.unit]
        try:
            buffer = memories[placed.device].take(source.buffer_bytes)
        except REFUSALS as error:
            refused = wanted[at:]
            logger.warning(
                "No more than %s of host memory can be page-locked (%s); %d layers of %s that were to be "
                "kept there are read from the disk for each pass.",
                size(sum(done.stored for done in wanted[:at])),
                error,
                len(refused),
                size(sum(left.stored for left in refused)),
            )
            placement = placement.changed({left.unit: Tier.STREAMED for left in refused})
            break
        reader.read(source.spans, bytes_of(buffer))
        kept[placed.device][placed.unit] = buffer
    return placement, {name: PinnedUnits(kept[name], memories[name]) for name in memories}
