"""This machine as far as it has been measured: each rate once, however many models are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rabbitllm.engine.devices import Device
from rabbitllm.options import StreamOptions
from rabbitllm.planning.overheads import Overhead, Sizes, overhead
from rabbitllm.planning.reading import upload_rate


@dataclass
class Machine:
    """Where models would compute.

    Attributes:
        devices: the first layer's first.
        options: as `AutoModel.from_pretrained` would be given them.
        min_free: bytes that are to stay free of the disk.
    """

    devices: Sequence[Device]
    options: StreamOptions
    min_free: int
    _overheads: dict[tuple[Sizes, torch.dtype, str], Overhead] = field(default_factory=dict)
    _uploads: dict[str, float] = field(default_factory=dict)

    def device(self, name: str) -> Device:
        """By name."""
        return next(device for device in self.devices if device.name == name)

    def overhead(self, sizes: Sizes, dtype: torch.dtype, device: str) -> Overhead:
        """See `overheads.overhead`."""
        key = (sizes, dtype, device)
        if key not in self._overheads:
            self._overheads[key] = overhead(sizes, dtype, self.device(device))
        return self._overheads[key]

    def upload(self, device: str) -> float:
        """See `reading.upload_rate`."""
        if device not in self._uploads:
            self._uploads[device] = upload_rate(self.device(device))
        return self._uploads[device]
