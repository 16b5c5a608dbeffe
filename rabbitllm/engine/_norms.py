"""RMSNorm in one call where it has the bits of the model's own class, which takes eight operations of torch.

A class is tried on samples of a norm's size and dtype, and in float32, which shows each rounding. Gradients, other
devices and large inputs are left to the class.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rabbitllm.base.programs import Place, Program, float_bits
from rabbitllm.engine._fusing import Forward, forward_in, fuse, kind_of, trial_of
from rabbitllm.engine._gates import every_bfloat
from rabbitllm.engine._siblings import is_plain
from rabbitllm.engine.transformers_api import ACT2FN

LANES = (8, 16, -8, -16)
"""Elements of the vectors that torch may add squares with; negative for norms that multiply by `1 + weight`."""
MAX_ELEMENTS = 1 << 15
"""Elements from which torch computes in several threads."""
_DTYPES = (torch.bfloat16, torch.float32)
_tables = dict[str, torch.Tensor]()
"""Activation -> its results for every number of bfloat16, in float32."""


def fuse_norms(model: nn.Module) -> int:
    """Let the norms whose bits are reproduced compute in one call.

    Returns:
        How many these are.
    """
    gated = fuse(model, lambda module: _key_of(module, "RMSNormGated"), lambda module, key: _gated_by(module, *key[1:]))
    return gated + fuse(model, _key_of, lambda module, key: _FORWARDS.get(_lanes(module, *key[1:])))


def _key_of(module: nn.Module, name: str = "RMSNorm") -> tuple[object, int, torch.dtype, float] | None:
    """The kind, size, dtype and epsilon of a module that may be a norm; None if it has another form."""
    if not type(module).__name__.endswith(name) or module._buffers:
        return None
    weight, epsilon = module._parameters.get("weight"), epsilon_of(module)
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or weight.dtype not in _DTYPES:
        return None
    if not isinstance(epsilon, float) or epsilon <= 0 or not 0 < len(weight) < MAX_ELEMENTS:
        return None
    return kind_of(module), len(weight), weight.dtype, epsilon


def lanes_of(module: nn.Module) -> int:
    """The lanes with which `fuse_norms` lets a norm compute; 0 if it does not."""
    return _lanes_in(_FORWARDS, module)


def gated_lanes_of(module: nn.Module) -> int:
    """The same of a norm with a gate."""
    return _lanes_in(_GATED_FORWARDS, module)


def _lanes_in(forwards: Mapping[int, Callable[..., Any]], module: nn.Module) -> int:
    function = forward_in(module)
    return next((lanes for lanes, forward in forwards.items() if forward is function), 0)


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
        if is_alike and 0 < count < MAX_ELEMENTS and x.is_cpu and _has_rows(x) and not torch.is_grad_enabled():
            # a tensor within torch.func's transforms has no memory
            with contextlib.suppress(RuntimeError):
                return _norm(x.contiguous(), weight, count // columns, columns, lanes, epsilon_of(module))
    return type(module).forward(module, *args, **named)


def _has_rows(x: torch.Tensor) -> bool:
    """Whether rows have no gaps within, as slices of wider ones have, and are in the order in which results are."""
    return x.is_contiguous() or (x.stride(-1) == 1 and torch.empty_like(x).is_contiguous())


def _by(forward: Callable[..., Any], lanes: int) -> Callable[..., Any]:
    """A forward with these lanes; a function, since `torch.compile` takes no `partial` for the forward of a module."""
    return lambda module, *args, **named: forward(lanes, module, *args, **named)


_FORWARDS = {lanes: _by(_forward, lanes) for lanes in LANES}
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
    weight: Place | int,
    out: Place,
    rows: int = 1,
    *,
    is_bfloat: bool = True,
    is_mean: bool = True,
) -> None:
    """Add a norm, given by its lanes and epsilon, to a program; of the mean of squares, or of their sum."""
    from rabbitllm.engine import _norm_kernels  # numba comes with it

    words: list[int | Place] = [x, weight, out, int(is_bfloat), rows, columns, norm[0], float_bits(norm[1])]
    words += [columns if is_mean else 1]
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


# Norms whose result is multiplied by an activation of a gate, in float32.


def _gated_forward(lanes: int, module: Any, *args: Any, **named: Any) -> Any:
    weight = module._parameters["weight"]
    if len(args) == 2 and not named and type(weight) is nn.Parameter and all(map(is_plain, args)):
        x, gate = args
        is_alike = x.shape == gate.shape and x.shape[-1] == weight.shape[0] and weight.dtype is torch.bfloat16
        if is_alike and x.numel() < MAX_ELEMENTS and module.activation in _tables:
            return _gated_norm(lanes, module.activation, x, gate, weight, epsilon_of(module))
    return type(module).forward(module, *args, **named)


_GATED_FORWARDS = {lanes: _by(_gated_forward, lanes) for lanes in LANES}


def _gated_norm(
    lanes: int, activation: str, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    out = torch.empty_like(x)
    program = _gated_program(lanes, activation, x.numel() // x.shape[-1], x.shape[-1], epsilon)
    program(x.data_ptr(), weight.data_ptr(), out.data_ptr(), gate.data_ptr())
    return out


@functools.lru_cache(1024)
def _gated_program(lanes: int, activation: str, rows: int, columns: int, epsilon: float) -> Program:
    program = Program(4)
    x, weight, out, gate = (program.address(index) for index in range(4))
    add_gated_norm(program, (lanes, epsilon), activation, columns, x, weight, out, gate, rows)
    return program


def add_gated_norm(
    program: Program,
    norm: tuple[int, float],
    activation: str,
    columns: int,
    x: Place,
    weight: Place,
    out: Place,
    gate: Place,
    rows: int,
) -> None:
    """Add a norm that `fuse_norms` has replaced, times an activation of its gate, to a program."""
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    add_norm(program, norm, columns, x, weight, out, rows)
    program.add(_layer_kernels.gate_widely, [_tables[activation].data_ptr(), gate, out, rows * columns])


@torch.no_grad()
def _gated_by(module: Any, columns: int, dtype: torch.dtype, epsilon: float) -> Forward:
    """The forward with which a module has the results of its class, also for all values of its gate; else None."""
    activation, generator = vars(module).get("activation"), torch.Generator().manual_seed(0)
    if dtype is not torch.bfloat16 or not isinstance(activation, str) or activation not in ACT2FN:
        return None
    every = every_bfloat()
    _tables.setdefault(activation, ACT2FN[activation](every.float()))
    gates = every[every.isfinite()]
    rows = len(gates) // columns
    weight = (torch.rand(columns, generator=generator) + 0.5).bfloat16()
    like = trial_of(module, _parameters={"weight": nn.Parameter(weight)})
    for lanes in (lanes for lanes in LANES if abs(lanes) <= columns and rows):
        x = (torch.randn(rows, columns, generator=generator) * 3).bfloat16()
        gate = gates[: rows * columns].view(rows, columns)
        try:
            expected = type(module).forward(like, x, gate)
        except (TypeError, AttributeError, RuntimeError):  # it has other arguments or parts
            return None
        result = _gated_norm(lanes, activation, x, gate, weight, epsilon)
        if isinstance(expected, torch.Tensor) and torch.equal(result, expected):
            return _GATED_FORWARDS[lanes]
    return None
