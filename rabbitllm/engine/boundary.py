"""Copies the inputs of a device's units from the other devices that share the model.

A layer gets the output of the previous layer, and the inputs that all layers share: a mask, rotary angles, positions.
The shared ones are copied once, for the first unit of the device that uses them; the other units reuse the copy.
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

    A copy lives as long as its original does, and is used until either is changed in place. (Inference tensors have
    no version counter: such an original counts as unchanged until the pass is over.)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: Any = WeakIdKeyDictionary()  # original -> its version, the copy, the copy's version

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The inputs on the device, or None if they are there already."""
        there, named = self._brought(args), self._brought(kwargs)
        return None if there is args and named is kwargs else (there, named)

    def forget(self) -> None:
        """Begin another pass."""
        self._copies.clear()

    def _brought(self, value: Any) -> Any:
        """A value with its tensors on the device; the same object if they are there already."""
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
        if tensor.requires_grad:  # such a copy has an autograd history, so it serves one use only
            return tensor.to(self._device)
        with torch.inference_mode(False):  # so that the copy has a version
            copy = tensor.to(self._device)
        self._copies[tensor] = version, copy, copy._version
        return copy
