"""RMSNorm in one call where it has the bits of the model's own class, which takes eight operations of torch.

A class is tried on samples of a norm's size and dtype, and in float32, which shows each rounding. Gradients, other
devices and large inputs are left to the class.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rabbitllm.engine._fusing import forward_in, fuse, kind_of, trial_of
from rabbitllm.quant.joint import Place, Program, Words, float_bits

LANES = (8, 16, -8, -16)
"""Elements of the vectors that torch may add squares with; negative for norms that multiply by `1 + weight`."""
MAX_ELEMENTS = 1 << 15
"""Elements from which torch computes in several threads."""
_DTYPES = (torch.bfloat16, torch.float32)


def fuse_norms(model: nn.Module) -> int:
    """Let the norms whose bits are reproduced compute in one call.

    Returns:
        How many these are.
    """
    return fuse(model, _key_of, lambda module, key: _FORWARDS.get(_lanes(module, *key[1:])))


def _key_of(module: nn.Module) -> tuple[object, int, torch.dtype, float] | None:
    """The kind, size, dtype and epsilon of a module that may be a norm; None if it has another form."""
    if not type(module).__name__.endswith("RMSNorm") or module._buffers:
        return None
    weight, epsilon = module._parameters.get("weight"), epsilon_of(module)
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or weight.dtype not in _DTYPES:
        return None
    if not isinstance(epsilon, float) or epsilon <= 0 or not 0 < len(weight) < MAX_ELEMENTS:
        return None
    return kind_of(module), len(weight), weight.dtype, epsilon


def lanes_of(module: nn.Module) -> int:
    """The lanes with which `fuse_norms` lets a norm compute; 0 if it does not."""
    function = forward_in(module)
    return next((lanes for lanes, forward in _FORWARDS.items() if forward is function), 0)


def with_weight(module: nn.Module, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the class of a norm computes with another weight."""
    return functools.partial(type(module).forward, trial_of(module, _parameters={"weight": nn.Parameter(weight)}))


def epsilon_of(module: nn.Module) -> Any:
    """The number that a norm adds to the mean of squares, if it has one."""
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
                return _norm(x, weight, count // columns, columns, lanes, epsilon_of(module))
    return type(module).forward(module, *args, **named)


def _forward_by_8(module: Any, *args: Any, **named: Any) -> Any:
    return _forward(8, module, *args, **named)


def _forward_by_16(module: Any, *args: Any, **named: Any) -> Any:
    return _forward(16, module, *args, **named)


def _shifted_by_8(module: Any, *args: Any, **named: Any) -> Any:
    return _forward(-8, module, *args, **named)


def _shifted_by_16(module: Any, *args: Any, **named: Any) -> Any:
    return _forward(-16, module, *args, **named)


_FORWARDS = {8: _forward_by_8, 16: _forward_by_16, -8: _shifted_by_8, -16: _shifted_by_16}
"""Lanes -> forward of a norm; functions, since torch.compile reads their source."""


def _norm(x: torch.Tensor, weight: torch.Tensor, rows: int, columns: int, lanes: int, epsilon: Any) -> torch.Tensor:
    out = torch.empty_like(x)
    program = _program(x.dtype is torch.bfloat16, rows, columns, lanes, epsilon)
    program(x.data_ptr(), weight.data_ptr(), out.data_ptr())
    return out


@functools.lru_cache(1024)
def _program(is_bfloat: bool, rows: int, columns: int, lanes: int, epsilon: float) -> Program:
    program = Program(3)
    x, weight, out = (program.address(index) for index in range(3))
    add_norm(program, (lanes, epsilon), columns, x, weight, out, rows, is_bfloat=is_bfloat)
    return program


def add_norm(
    program: Program,
    norm: tuple[int, float],
    columns: int,
    x: Place,
    weight: Place,
    out: Place,
    rows: int = 1,
    *,
    is_bfloat: bool = True,
) -> None:
    """Add a norm, given by its lanes and epsilon, to a program."""
    from rabbitllm.engine import _norm_kernels  # numba comes with it

    words: Words = [x, weight, out, int(is_bfloat), rows, columns, norm[0], float_bits(norm[1])]
    program.add(_norm_kernels.norm, words)


@torch.no_grad()
def _lanes(module: Any, columns: int, dtype: torch.dtype, epsilon: float) -> int:
    """The lanes with which results are those of the module's class; 0 if they are not."""
    generator = torch.Generator().manual_seed(0)
    samples = list[tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]]()
    for kind in (dtype, torch.float32):
        weight = (torch.rand(columns, generator=generator) + 0.5).to(kind)
        for rows in (1, 3, max(MAX_ELEMENTS // columns // 2, 1)):
            x = (torch.randn(rows, columns, generator=generator) * 10.0 ** (rows % 3)).to(kind)
            samples.append((x, weight, rows, with_weight(module, weight)(x)))
    for lanes in LANES:
        results = (torch.equal(_norm(x, w, rows, columns, lanes, epsilon), y) for x, w, rows, y in samples)
        if abs(lanes) <= columns and all(results):
            return lanes
    return 0
