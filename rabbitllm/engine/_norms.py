"""RMSNorm in one call where it has the bits of the model's own class, which takes eight operations of torch.

A class is tried on samples of a norm's size and dtype, and in float32, which shows each rounding. Gradients, other
devices and large inputs are left to the class.
"""

from __future__ import annotations

import contextlib
import copy
from types import MethodType
from typing import Any

import torch
from torch import nn

LANES = (8, 16)
"""Elements of the vectors that torch may add squares with."""
MAX_ELEMENTS = 1 << 15
"""Elements from which torch computes in several threads."""
_DTYPES = (torch.bfloat16, torch.float32)


def fuse_norms(model: nn.Module) -> int:
    """Let the norms whose bits are reproduced compute in one call.

    Returns:
        How many these are.
    """
    fused, tried = 0, dict[object, int]()
    for module in model.modules():
        if not type(module).__name__.endswith("RMSNorm") or "forward" in vars(module) or module._buffers:
            continue
        weight, epsilon = module._parameters.get("weight"), _epsilon(module)
        if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or weight.dtype not in _DTYPES:
            continue
        if not isinstance(epsilon, float) or epsilon <= 0 or not 0 < len(weight) < MAX_ELEMENTS:
            continue
        form = len(weight), weight.dtype, epsilon
        if (key := (kind_of(module), *form)) not in tried:
            tried[key] = _lanes(module, *form)
        if lanes := tried[key]:
            # a method: a copy of the module then binds it to itself
            module.forward = MethodType(_FORWARDS[lanes], module)
            fused += 1
    return fused


def kind_of(module: nn.Module) -> object:
    """Equal for modules that compute alike: their class and their own numbers and texts, which may differ by layer."""
    own = ((name, value) for name, value in vars(module).items() if isinstance(value, int | float | str))
    return type(module), *sorted(own)


def _epsilon(module: nn.Module) -> object:
    own = vars(module)
    value = own.get("variance_epsilon")
    return own.get("eps") if value is None else value


def _forward(lanes: int, module: Any, *args: Any, **named: Any) -> Any:
    weight = module._parameters["weight"]
    is_step = len(args) == 1 and not named and type(weight) is nn.Parameter and not torch.compiler.is_compiling()
    if is_step and type(x := args[0]) is torch.Tensor:
        count, columns, dtype = x.numel(), weight.shape[0], x.dtype
        is_alike = dtype is weight.dtype and dtype in _DTYPES and x.shape[-1] == columns
        if is_alike and 0 < count < MAX_ELEMENTS and x.is_cpu and x.is_contiguous() and not torch.is_grad_enabled():
            # a tensor within torch.func's transforms has no memory
            with contextlib.suppress(RuntimeError):
                return _norm(x, weight, count // columns, columns, lanes, _epsilon(module))
    return type(module).forward(module, *args, **named)


def _forward_by_8(module: Any, *args: Any, **named: Any) -> Any:
    return _forward(8, module, *args, **named)


def _forward_by_16(module: Any, *args: Any, **named: Any) -> Any:
    return _forward(16, module, *args, **named)


_FORWARDS = {8: _forward_by_8, 16: _forward_by_16}
"""Lanes -> forward of a norm; functions, since torch.compile reads their source."""


def _norm(x: torch.Tensor, weight: torch.Tensor, rows: int, columns: int, lanes: int, epsilon: Any) -> torch.Tensor:
    from rabbitllm.engine import _norm_kernels  # numba comes with it

    out = torch.empty_like(x)
    source, factor, result = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    is_bfloat = x.dtype is torch.bfloat16
    pointers = source, source, factor, factor, result, result
    _norm_kernels.norm()(*pointers, is_bfloat, rows, columns, lanes, epsilon)
    return out


@torch.no_grad()
def _lanes(module: Any, columns: int, dtype: torch.dtype, epsilon: float) -> int:
    """The lanes with which results are those of the module's class; 0 if they are not."""
    generator = torch.Generator().manual_seed(0)
    samples = list[tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]]()
    for kind in (dtype, torch.float32):
        like = copy.copy(module)
        weight = (torch.rand(columns, generator=generator) + 0.5).to(kind)
        like.__dict__.update(_parameters={"weight": nn.Parameter(weight)}, _forward_pre_hooks={}, _forward_hooks={})
        for rows in (1, 3, max(MAX_ELEMENTS // columns // 2, 1)):
            x = (torch.randn(rows, columns, generator=generator) * 10.0 ** (rows % 3)).to(kind)
            samples.append((x, weight, rows, type(module).forward(like, x)))
    for lanes in LANES:
        results = (torch.equal(_norm(x, w, rows, columns, lanes, epsilon), y) for x, w, rows, y in samples)
        if lanes <= columns and all(results):
            return lanes
    return 0
