"""Brings the inputs of a device's units there from the other devices that share the model.

A layer gets what the one before it made, and besides it what every layer gets: a mask, rotary angles, positions. The
latter are copied when the first unit of the device asks for them; the others find the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device
from accelerate.utils.operations import honor_type
from torch.utils.weak import WeakIdKeyDictionary


class Boundary:
    """A forward pre-hook for the units of one device; register with `with_kwargs=True`.

    A copy lives as long as its original does, and is used as long as neither was changed in place. (Whether a tensor
    of inference mode was, it does not say: there an original counts as unchanged until the pass is over.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: Any = WeakIdKeyDictionary()  # original -> its version, the copy, the copy's version

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The inputs on the device, or None where they are there already."""
        there, named = self._brought(args), self._brought(kwargs)
        return None if there is args and named is kwargs else (there, named)

    def forget(self) -> None:
        """Begin another pass."""
        self._copies.clear()

    def _brought(self, value: Any) -> Any:
        """A value with its tensors on the device; the very same one if they are."""
        if isinstance(value, torch.Tensor):
            return value if value.device == self._device else self._copy(value)
        if hasattr(value, "to"):
            return send_to_device(value, self._device)
        if isinstance(value, tuple | list):
            parts = [self._brought(part) for part in value]
            same = all(part is old for part, old in zip(parts, value, strict=True))
            return value if same else honor_type(value, parts)
        if isinstance(value, Mapping):
            named = {key: self._brought(part) for key, part in value.items()}
            same = all(named[key] is value[key] for key in named)
            return value if same else type(value)(named)  # type: ignore[call-arg]
        return value

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        version = None if tensor.is_inference() else tensor._version
        known = self._copies.get(tensor)
        if known is not None and known[0] == version and known[1]._version == known[2]:
            copy: torch.Tensor = known[1]
            return copy
        if tensor.requires_grad:  # a copy has a history, and belongs to one use
            return tensor.to(self._device)
        with torch.inference_mode(False):  # so that the copy has a version
            copy = tensor.to(self._device)
        self._copies[tensor] = version, copy, copy._version
        return copy
