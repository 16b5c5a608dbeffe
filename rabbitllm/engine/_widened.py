"""Products and convolutions of bfloat16, computed in float32 where torch's take up to 100 times as long: it has no
instructions for bfloat16, and the second matrix is (K, N)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rabbitllm.engine._fusing import WithFunctions, fuse, is_transformed, with_globals
from rabbitllm.quant import turned

_BY_FORWARD: dict[Any, str] = {kind.forward: kind.__name__ for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}


def widen_convolutions(model: nn.Module) -> int:
    """Let a model's convolutions of bfloat16 compute in float32, and return how many these are."""
    if not turned.is_faster():
        return 0
    return fuse(model, _convolved, lambda module: _BY_FORWARD.get(type(module).forward), lambda module, form: True)


def _convolved(form: object, module: Any, input: torch.Tensor) -> torch.Tensor | None:
    return _in_wide(module._conv_forward, input, module.weight, module.bias)


def _in_wide(compute: Callable[..., torch.Tensor], *operands: torch.Tensor | None, **named: Any) -> torch.Tensor | None:
    """The result of operands in float32, rounded; None if they are none of bfloat16."""
    if not _are_widened([x for x in operands if x is not None]):
        return None
    return compute(*(x if x is None else x.float() for x in operands), **named).bfloat16()


def with_wide_convolutions(function: Any) -> Any:
    """A function of transformers whose `F.conv1d` computes in float32; itself if torch is as fast, or where a function
    around it is unknown."""
    return (with_globals(function, {"F": _WIDE_FUNCTIONAL}) if turned.is_faster() else None) or function


def _wide_conv1d(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **named: Any) -> Any:
    result = _in_wide(nn.functional.conv1d, input, weight, bias, **named)
    return nn.functional.conv1d(input, weight, bias, **named) if result is None else result


_WIDE_FUNCTIONAL = WithFunctions(nn.functional, {"conv1d": _wide_conv1d})


def _are_widened(tensors: list[torch.Tensor]) -> bool:
    """Whether tensors are plain ones of bfloat16 on the CPU, of which nothing else is wanted than the result."""
    are_plain = all(type(x) in (torch.Tensor, nn.Parameter) and x.dtype is torch.bfloat16 and x.is_cpu for x in tensors)
    return are_plain and not is_transformed() and not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def _in_float32(ordinary: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(ordinary)
    def product(*args: Any, **named: Any) -> torch.Tensor:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if len(tensors) < 2 or not named.keys() <= {"beta", "alpha"} or not _are_widened(tensors):
            return ordinary(*args, **named)
        *before, x, matrix = tensors
        takes_rows = len(args) == 2 if ordinary is torch.matmul else ordinary is torch.addmm and x.dim() == 2
        if takes_rows and not named and x.dim() > 1 and matrix.dim() == 2 and 0 < x.shape[-1] == len(matrix):
            bias = before[0] if before else None
            if bias is None or bias.shape == matrix.shape[1:]:
                rows = x.reshape(-1, len(matrix))
                return turned.product(rows, matrix, bias).view(*x.shape[:-1], matrix.shape[1])
        wide = (x.float() if isinstance(x, torch.Tensor) else x for x in args)
        return ordinary(*wide, **named).bfloat16()

    return product


PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum", "addmm"})
wide_torch: Any = WithFunctions(torch, {name: _in_float32(getattr(torch, name)) for name in PRODUCTS})
"""`torch` with other products."""
