"""Weights that cannot be written to, and what stands for a weight while it is not in memory.

Merging an adapter, loading other weights or initialising anew would be lost with the next pass, or not happen at all,
and nobody would notice. So writing is refused, by name. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rabbitllm.errors import ReadOnlyWeightError

_HARMLESS = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
"""In-place methods that leave the values as they are."""
_STAYS = frozenset({torch.Tensor.data.__get__, torch.Tensor.detach})  # type: ignore[attr-defined]
"""What gives another name to the same weight."""


def refuse_writing(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, kind: type, why: str
) -> None:
    """Refuse a function of torch that would write to a weight of this kind.

    Args:
        func, args, kwargs: as `__torch_function__` gets them.
        kind: of the weights.
        why: what they are, for the message.

    Raises:
        ReadOnlyWeightError: it would.
    """
    written = bool(args) and isinstance(args[0], kind) and _writes_to_the_first(func)
    if written or (kwargs and isinstance(kwargs.get("out"), kind)):
        raise ReadOnlyWeightError(
            f"A weight of this model cannot be written to: {why}.",
            "Leave an adapter unmerged: it computes beside the weights. To merge it, or to change weights, load the "
            "model uncompressed and with enough max_memory for all of it, or with transformers itself.",
        )


def _writes_to_the_first(func: Callable[..., Any]) -> bool:
    if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        return True
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, name[:2] + name[3:]))
    return name.endswith("_") and name not in _HARMLESS


_WHY = "it is read from the disk when its layer computes"


class AbsentWeight(nn.Parameter):
    """A parameter of the right device, dtype and shape that takes no memory; its values are not numbers.

    A meta tensor would not do: code that moves inputs to `weight.device` would move them to meta, and an embedding of
    meta ids returns garbage without an error.

    Args:
        element: see `no_number`; it may be shared.
        shape: of the weight.
        marks: attributes that it has besides.
    """

    _is_hf_initialized = True  # transformers asks before it initialises

    @staticmethod
    def __new__(
        cls, element: torch.Tensor, shape: torch.Size, marks: Mapping[str, object] | None = None
    ) -> AbsentWeight:
        made = _absent(element.expand(shape))
        if marks:
            made.__dict__.update(marks)
        return made

    def __init__(self, element: torch.Tensor, shape: torch.Size, marks: Mapping[str, object] | None = None) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentWeight:
        return AbsentWeight(no_number(self.dtype, self.device), self.shape, vars(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ReadOnlyWeightError(
            "A weight of this model is not in memory, so it cannot be pickled (torch.save does that).",
            "model.save_pretrained(folder) writes the whole model.",
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == torch.Tensor.clone:  # of what is not there; peft clones what it will merge into
            refuse_writing(torch.Tensor.copy_, args, None, AbsentWeight, _WHY)
        refuse_writing(func, args, kwargs, AbsentWeight, _WHY)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return _absent(result, result.requires_grad) if func in _STAYS else result


def no_number(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element, (), that is not a number (0 where there is no such thing).

    A GPU is waited for until it is there, so it is made once, and not between two layers.
    """
    empty = float("nan") if dtype.is_floating_point else 0
    return torch.full((), empty, dtype=torch.float32).to(device, dtype)


def _absent(tensor: torch.Tensor, requires_grad: bool | None = None) -> AbsentWeight:
    needs = tensor.is_floating_point() and tensor.dtype.itemsize > 1 if requires_grad is None else requires_grad
    made: AbsentWeight = torch.Tensor._make_subclass(AbsentWeight, tensor, needs)
    return made
