"""This machine as far as it has been measured: each rate once, however many models are asked about."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import torch

from rabbitllm.base.options import StreamOptions
from rabbitllm.engine.devices import Device
from rabbitllm.estimate.overheads import LayerSizes, Overhead, overhead
from rabbitllm.estimate.reading import something_to_read, upload_rate

Measured = TypeVar("Measured")
TYPICAL = LayerSizes(vocabulary=128256, hidden=4096, inner=14336, heads=32, key_heads=8, head=128)
"""Of a model with 8 billion parameters."""


def product_key(device: str, form: str, mapped: bool, tokens: int) -> Hashable:
    """What `Machine.measured` knows products by.

    Args:
        device: where.
        form: that weights are multiplied from.
        mapped: whether they stay, as mapped, or come into a buffer for each pass.
        tokens: at a time.
    """
    return ("product", device, form, mapped, tokens)


@dataclass
class Machine:
    """Where models would compute.

    Attributes:
        devices: the first layer's first.
        options: as `AutoModel.from_pretrained` would be given them.
        min_free: bytes that are to stay free of the disk.
        prompts: whether the first token is asked for, after a prompt; else nothing is measured for it.
    """

    devices: Sequence[Device]
    options: StreamOptions
    min_free: int
    prompts: bool = True
    _overheads: dict[tuple[LayerSizes, torch.dtype, str], Overhead] = field(default_factory=dict)
    _uploads: dict[str, float] = field(default_factory=dict)

    def device(self, name: str) -> Device:
        """By name."""
        return next(device for device in self.devices if device.name == name)

    def something_to_read(self, folder: Path, files: Sequence[Path]) -> AbstractContextManager[Sequence[Path]]:
        """See `reading.something_to_read`."""
        return something_to_read(folder, files, self.min_free)

    def measured(self, key: Hashable, measure: Callable[[], Measured]) -> Measured:
        """What is measured for one model, of its own shapes and sizes; `key` says what kind of thing it is."""
        return measure()

    def overhead(self, sizes: LayerSizes, dtype: torch.dtype, device: str) -> Overhead:
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


@dataclass
class RoughMachine(Machine):
    """The same for many models in little time: of each kind of thing what was measured first is taken for all.

    Large products of one form are about equally fast, whatever their shapes. The other costs of a token depend on the
    sizes of layers; typical sizes are measured.

    Attributes:
        files: that reading was measured with, once there are any.
    """

    files: Sequence[Path] | None = None
    _measured: dict[Hashable, object] = field(default_factory=dict)

    def something_to_read(self, folder: Path, files: Sequence[Path]) -> AbstractContextManager[Sequence[Path]]:
        """What is given beforehand, or see `reading.something_to_read`."""
        return super().something_to_read(folder, files) if self.files is None else nullcontext(self.files)

    def measured(self, key: Hashable, measure: Callable[[], Measured]) -> Measured:
        """By its kind."""
        if key not in self._measured:
            self._measured[key] = measure()
        return cast(Measured, self._measured[key])

    def overhead(self, sizes: LayerSizes, dtype: torch.dtype, device: str) -> Overhead:
        """Of typical sizes."""
        return super().overhead(TYPICAL, dtype, device)
