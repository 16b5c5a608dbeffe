"""The measured rates of this machine; each is measured once, however many models use it."""

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
"""Sizes of a model with 8 billion parameters."""


def product_key(device: str, form: str, mapped: bool, tokens: int) -> Hashable:
    """Return the key of a measurement of products in `Machine.measured`.

    Args:
        device: its name.
        form: form that weights are multiplied from.
        mapped: whether they are resident in mapped files, or come into a buffer for each pass.
        tokens: number at a time.
    """
    return ("product", device, form, mapped, tokens)


@dataclass
class Machine:
    """The devices and options that models would run with.

    Attributes:
        devices: the first layer's first.
        options: as `AutoModel.from_pretrained` would get them.
        min_free: bytes of the disk to keep free.
        prompts: whether the first token, after a prompt, is estimated; else nothing is measured for it.
    """

    devices: Sequence[Device]
    options: StreamOptions
    min_free: int
    prompts: bool = True
    _overheads: dict[tuple[LayerSizes, torch.dtype, str], Overhead] = field(default_factory=dict)
    _uploads: dict[str, float] = field(default_factory=dict)

    def device(self, name: str) -> Device:
        """Return a device by name."""
        return next(device for device in self.devices if device.name == name)

    def something_to_read(self, folder: Path, files: Sequence[Path]) -> AbstractContextManager[Sequence[Path]]:
        """See `reading.something_to_read`."""
        return something_to_read(folder, files, self.min_free)

    def measured(self, key: Hashable, measure: Callable[[], Measured]) -> Measured:
        """Measure a rate for one model, of its own shapes and sizes; `key` identifies the kind of measurement."""
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
    """A machine for many models in little time: the first measurement of each kind is reused for all.

    Large products of one form are about equally fast, whatever their shapes. The other costs of a token depend on the
    sizes of layers; typical sizes are measured.

    Attributes:
        files: files to measure reading with; None to choose them for each model.
    """

    files: Sequence[Path] | None = None
    _measured: dict[Hashable, object] = field(default_factory=dict)

    def something_to_read(self, folder: Path, files: Sequence[Path]) -> AbstractContextManager[Sequence[Path]]:
        """Yield `files`; if None see `reading.something_to_read`."""
        return super().something_to_read(folder, files) if self.files is None else nullcontext(self.files)

    def measured(self, key: Hashable, measure: Callable[[], Measured]) -> Measured:
        """Return the first measurement with the same key."""
        if key not in self._measured:
            self._measured[key] = measure()
        return cast(Measured, self._measured[key])

    def overhead(self, sizes: LayerSizes, dtype: torch.dtype, device: str) -> Overhead:
        """Return the overhead of typical sizes."""
        return super().overhead(TYPICAL, dtype, device)
