"""A gated MLP's activation and product by one call, where it has the bits of the model's own class.

bfloat16 has 65,536 values, so an activation is a table of its results, which the activation itself computes.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn

from rabbitllm.engine._norms import kind_of

MULTIPLE = 64
"""Elements that torch computes at once with any of its vectors; it computes a rest in another way."""
MAX_ELEMENTS = 1 << 15
"""Elements from which torch computes in several threads."""
_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")
_OF_ANY = frozenset({*vars(nn.Module()), "_is_hf_initialized"})
"""Attributes of any module; transformers sets the last one."""
_tables = dict[type[nn.Module], torch.Tensor]()


def fuse_gates(model: nn.Module) -> int:
    """Let the MLPs whose bits are reproduced compute `down(act(gate(x)) * up(x))` with one call for the middle.

    Returns:
        How many these are.
    """
    fused, tried = 0, dict[object, bool]()
    for module in model.modules():
        if "forward" in vars(module) or module._modules.keys() != set(_PARTS):
            continue
        act = module._modules["act_fn"]
        # without attributes of its own, a class says all of what it computes
        if act is None or vars(act).keys() - _OF_ANY or act._parameters or act._buffers:
            continue
        if (kind := (kind_of(module), type(act))) not in tried:
            tried[kind] = _has_bits(module)
        if tried[kind]:
            # a method: a copy of the module then binds it to itself
            module.forward = MethodType(_forward, module)
            fused += 1
    return fused


def _forward(module: Any, *args: Any, **named: Any) -> Any:
    parts = module._modules
    act = parts["act_fn"]
    is_watched = (
        act._forward_hooks or act._forward_pre_hooks or torch.is_grad_enabled() or torch.compiler.is_compiling()
    )
    if len(args) != 1 or named or is_watched:
        return type(module).forward(module, *args, **named)
    gate, up = parts["gate_proj"](args[0]), parts["up_proj"](args[0])
    return parts["down_proj"](_gated(act, gate, up))


def _gated(act: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`act(gate) * up`."""
    table, count = _tables.get(type(act)), gate.numel()
    is_plain = type(gate) is type(up) is torch.Tensor and gate.dtype is up.dtype is torch.bfloat16
    if table is None or not is_plain or count % MULTIPLE or not 0 < count < MAX_ELEMENTS or gate.shape != up.shape:
        return act(gate) * up  # type: ignore[no-any-return]
    if not (gate.is_cpu and up.is_cpu and gate.is_contiguous() and up.is_contiguous()):
        return act(gate) * up  # type: ignore[no-any-return]
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    out = torch.empty_like(gate)
    _layer_kernels.gate()(table.data_ptr(), gate.data_ptr(), up.data_ptr(), out.data_ptr(), count)
    return out


@torch.no_grad()
def _has_bits(module: nn.Module) -> bool:
    """Whether a module has the results of its class, also for all values of its activation."""
    act: Any = module._modules["act_fn"]
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    if type(act) not in _tables:
        _tables[type(act)] = act(every.clone())
    generator = torch.Generator().manual_seed(0)
    like: Any = copy.copy(module)
    parts = {name: nn.Linear(MULTIPLE, MULTIPLE, bias=False).bfloat16() for name in _PARTS[:3]}
    for part in parts.values():
        part.weight.copy_(torch.randn(MULTIPLE, MULTIPLE, generator=generator))
    like.__dict__.update(_modules={**parts, "act_fn": act}, _forward_pre_hooks={}, _forward_hooks={})
    for rows in (1, 3, 100):
        x = torch.randn(1, rows, MULTIPLE, generator=generator).bfloat16() * 10.0 ** (rows % 3)
        try:
            expected = type(module).forward(like, x)
        except (TypeError, AttributeError, RuntimeError):  # it has other arguments or parts
            return False
        if not isinstance(expected, torch.Tensor) or not torch.equal(_forward(like, x), expected):
            return False
    gates = every[every.isfinite()]
    gates = gates[: len(gates) // MULTIPLE // 4 * MULTIPLE * 4].view(4, -1)
    return all(torch.equal(_gated(act, gate, gate), act(gate) * gate) for gate in gates)
