"""A gated MLP by one call of compiled code, where that has the bits of the model's own class.

bfloat16 has 65,536 values, so an activation is a table of its results, which the activation itself computes.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rabbitllm.engine._fusing import forward_in, fuse, kind_of, trial_of
from rabbitllm.engine._siblings import has_hooks, is_plain, plain_weights
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant.joint import JointProduct, Place, Program

MULTIPLE = 64
"""Elements that torch computes at once with any of its vectors; it computes a rest in another way."""
MAX_ELEMENTS = 1 << 15
"""Elements from which torch computes in several threads."""
_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")
_OF_ANY = frozenset({*vars(nn.Module()), "_is_hf_initialized"})
"""Attributes of any module; transformers sets the last one."""
_tables = dict[type[nn.Module], torch.Tensor]()


def fuse_gates(model: nn.Module) -> int:
    """Let the MLPs whose bits are reproduced compute `down(act(gate(x)) * up(x))` by one call, for few rows.

    It is used while their matrices are multiplied as integers, without gradients, and no hook sees what is within.

    Returns:
        How many these are.
    """

    def key_of(module: nn.Module) -> object:
        is_fit = module._modules.keys() == set(_PARTS) and is_by_class(module._modules["act_fn"])
        return (kind_of(module), type(module._modules["act_fn"])) if is_fit else None

    return fuse(model, key_of, lambda module, _: _forward if _has_bits(module) else None)


def is_by_class(act: nn.Module | None) -> bool:
    """Whether an activation of one tensor has no attributes or parts: its class says all of what it computes."""
    if act is None or vars(act).keys() - _OF_ANY or act._parameters or act._buffers or act._modules:
        return False
    return len(inspect.signature(act.forward).parameters) == 1


def every_bfloat() -> torch.Tensor:
    """Every number of bfloat16, in the order of its bits."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def is_tabled(act: Any) -> bool:
    """Whether `gated` has computed an activation of this class, and nothing sees what this one computes."""
    return type(act) in _tables and not has_hooks(act)


def add_gate(program: Program, act: type[nn.Module], gate: Place, up: Place, out: Place, count: int) -> None:
    """Add `act(gate) * up` to a program; see `is_tabled`."""
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    program.add(_layer_kernels.gate, [_tables[act].data_ptr(), gate, up, out, count])


class OneCall:
    """What an MLP computes by one call for some matrices; the weight of its gate keeps it.

    Args:
        act: its activation.
        matrices: of gate, up and down.
    """

    def __init__(self, act: type[nn.Module], matrices: Sequence[Any]) -> None:
        self.matrices, self._act = matrices, act
        (self._width, columns), last = matrices[0].form.shape, matrices[2].form.shape
        of_input, of_product = JointProduct.of(matrices[:2], [False] * 2), JointProduct.of(matrices[2:], [False])
        self._products = None
        self._most = 0
        self._programs = dict[tuple[int, int], Program]()
        if of_input is not None and of_product is not None and last == (columns, self._width):
            self._products = of_input, of_product
            self._most = min(of_input.max_inputs, of_product.max_inputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The MLP's result for rows of input; None if it is not computed by one call."""
        if not self.is_for(rows := x.numel() // x.shape[-1]):
            return None
        program = self._programs.get(key := (torch.get_num_threads(), rows))
        if program is None:
            program = self._programs[key] = Program(2)
            self.add_to(program, rows, program.address(0), program.address(1))
        out = torch.empty_like(x)
        program(x.data_ptr(), out.data_ptr())
        return out

    def is_for(self, rows: int) -> bool:
        """Whether the MLP is computed by one call for so many rows."""
        count = rows * self._width
        return rows <= self._most and count % MULTIPLE == 0 and 0 < count < MAX_ELEMENTS

    def add_to(self, program: Program, rows: int, x: Place, out: Place) -> None:
        """Add it to a program, for rows at a place."""
        assert self._products is not None
        of_input, of_product = self._products
        count = rows * self._width
        gate, up, product = (program.room(2 * count) for _ in range(3))
        of_input.add_to(program, rows, torch.bfloat16, x, [gate, up])
        add_gate(program, self._act, gate, up, product, count)
        of_product.add_to(program, rows, torch.bfloat16, product, [out])


def mlp_weights(module: Any) -> list[QuantizedWeight] | None:
    """The weights of an MLP that `fuse_gates` lets compute by one call; None if it does not now."""
    parts = module._modules
    if forward_in(module) is not _forward or not is_tabled(parts["act_fn"]):
        return None
    return plain_weights(*(parts[name] for name in _PARTS[:3]))


def _forward(module: Any, *args: Any, **named: Any) -> Any:
    weights = mlp_weights(module) if len(args) == 1 and not named and is_plain(args[0]) else None
    if weights is not None:
        own, matrices = weights[0], [weight.matrix for weight in weights]
        call = own.calls
        if call is None or not all(map(operator.is_, call.matrices, matrices)):
            call = own.calls = OneCall(type(module.act_fn), matrices)
        if (result := call(args[0])) is not None:
            return result
    return type(module).forward(module, *args, **named)


def gated(act: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`act(gate) * up`, of tensors without gaps."""
    if type(act) not in _tables:
        _tables[type(act)] = act(every_bfloat())
    program, out = Program(3), torch.empty_like(gate)
    gates, ups, results = (program.address(index) for index in range(3))
    add_gate(program, type(act), gates, ups, results, gate.numel())
    program(gate.data_ptr(), up.data_ptr(), out.data_ptr())
    return out


def has_every_gate(act: Any) -> bool:
    """Whether an activation has the results of its table for all numbers."""
    every = every_bfloat()
    gates = every[every.isfinite()]
    gates = gates[: len(gates) // MULTIPLE // 4 * MULTIPLE * 4].view(4, -1)
    return all(torch.equal(gated(act, gate, gate), act(gate) * gate) for gate in gates)


@torch.no_grad()
def _has_bits(module: nn.Module) -> bool:
    """Whether a module has the results of its class, also for all values of its activation."""
    act: Any = module._modules["act_fn"]
    generator = torch.Generator().manual_seed(0)
    # on the meta device a Linear draws no weights from torch's random state, which is the program's
    linear = nn.Linear(MULTIPLE, MULTIPLE, bias=False, device="meta", dtype=torch.bfloat16)
    parts = {name: copy.deepcopy(linear).to_empty(device="cpu") for name in _PARTS[:3]}
    for part in parts.values():
        part.weight.copy_(torch.randn(MULTIPLE, MULTIPLE, generator=generator))
    like = trial_of(module, _modules={**parts, "act_fn": act})
    for rows in (1, 3, 100):
        x = torch.randn(1, rows, MULTIPLE, generator=generator).bfloat16() * 10.0 ** (rows % 3)
        try:
            expected = type(module).forward(like, x)
        except (TypeError, AttributeError, RuntimeError):  # it has other arguments or parts
            return False
        gate, up, down = parts.values()
        if not isinstance(expected, torch.Tensor) or not torch.equal(down(gated(act, gate(x), up(x))), expected):
            return False
    return has_every_gate(act)
