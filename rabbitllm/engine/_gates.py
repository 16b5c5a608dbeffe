"""A gated MLP by one call of compiled code, where that has the bits of the model's own class.

Of an expert for all tokens of a mixture, the call also multiplies that by its gate, and adds the chosen experts.

bfloat16 and float16 have 65,536 values, so an activation is a table of its results, which the activation itself
computes.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn

from rabbitllm.base.programs import Place, Program, Programs
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._fusing import class_result, form_in, fuse, is_result, threads_for, trial_of
from rabbitllm.engine._siblings import FusedWeight, dtype_of, has_hooks, is_plain, plain_weights
from rabbitllm.engine.transformers_api import ACT2FN
from rabbitllm.quant.joint import JointProduct

MULTIPLE = 64
"""Elements that torch computes at once with any of its vectors; it computes a rest in another way."""
_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn"), ("gate_up_proj", "down_proj", "activation_fn")
"""Names of the parts of MLPs, in the order of computation; gate and up may be one matrix."""
_OF_ANY = frozenset({*vars(nn.Module()), "_is_hf_initialized"})
"""Attributes of any module; transformers sets the last one."""
_WITHOUT_STATE = int, float, str, FunctionType, BuiltinFunctionType
ActKind: TypeAlias = tuple[Any, ...]
_tables = dict[ActKind, torch.Tensor]()
"""`act_kind` -> results for every number of its dtype."""


def fuse_gates(model: nn.Module) -> int:
    """Let the MLPs whose bits are reproduced compute `down(act(gate(x)) * up(x))` by one call, for few rows.

    It is used while their matrices are multiplied as integers, without gradients, and no hook sees what is within.

    Returns:
        How many these are.
    """
    return fuse(model, _computed, _form_of, _has_bits)


def _form_of(module: nn.Module) -> ActKind | None:
    names = names_in(module)
    parts: Any = [module._modules[name] for name in names]
    return act_kind(parts[-1], dtype_of(parts[0]._parameters.get("weight"))) if names else None


def names_in(module: nn.Module) -> tuple[str, ...]:
    """The names of the parts of a module that may be a gated MLP; none if it is not."""
    return next((names for names in _PARTS if module._modules.keys() == {*names}), ())


def act_kind(act: nn.Module | None, dtype: torch.dtype = torch.bfloat16) -> ActKind | None:
    """What says all of what an activation computes: the dtype, its class, with its forward, and its functions and
    numbers; None if more does."""
    if act is None or act._parameters or act._buffers or act._modules:
        return None
    if not _takes_one(type(act).forward):
        return None
    kind: list[object] = [dtype, type(act), type(act).forward]
    for name, value in vars(act).items():
        if name in _OF_ANY:
            continue
        if isinstance(value, functools.partial):
            kind += [value.args, *sorted(value.keywords.items())]
            value = value.func
        if not isinstance(value, _WITHOUT_STATE):
            return None
        kind += [name, value]
    return tuple(kind)


@functools.cache
def _takes_one(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward has one argument; a forward of an instance's own is among its attributes."""
    return len(inspect.signature(forward).parameters) == 2


def every_half(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Every number of bfloat16, or of float16, in the order of its bits."""
    return torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)


@functools.cache
def table_of(activation: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The results of an activation, by transformers' name, for every number of bfloat16, computed in this dtype."""
    table: torch.Tensor = ACT2FN[activation](every_half().to(dtype))
    return table


def add_gate(program: Program, gate: Place, up: Place, out: Place, act: ActKind, count: int, threads: int = 1) -> None:
    """Add `act(gate) * up` to a program of the dtype; `gated` has computed an activation of this kind."""
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    program.add(_layer_kernels.gate, [_tables[act].data_ptr(), gate, up, out, count], threads)


def add_gates_of_rows(program: Program, act: ActKind, both: Place, out: Place, rows: int, width: int) -> None:
    """Add the same for rows, each of gates and then of factors."""
    from rabbitllm.engine import _layer_kernels

    words = _tables[act].data_ptr(), both, out, rows, width
    program.add(_layer_kernels.gate_rows, words, threads_for(rows * width))


class OneCall:
    """What an MLP computes by one call for some matrices; the weight of its gate keeps it.

    Args:
        act: the kind of its activation.
        matrices: of gate and up, which may be one, and of down.
    """

    def __init__(self, act: ActKind, matrices: Sequence[Any]) -> None:
        self.matrices, self.act = matrices, act
        self._dtype: Any = act[0]
        *first, down = matrices
        columns, self._width = down.form.shape
        of_input, of_product = JointProduct.of(first, [False] * len(first)), JointProduct.of([down], [False])
        self._products = None
        self._most = 0
        self._programs = Programs()
        is_fit = sum(matrix.form.shape[0] for matrix in first) == 2 * self._width and first[0].form.shape[1] == columns
        is_fit = is_fit and all(each is not None and each.is_for(self._dtype) for each in (of_input, of_product))
        if of_input is not None and of_product is not None and is_fit:
            self._products = of_input, of_product
            self._most = min(of_input.max_inputs, of_product.max_inputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """The MLP's result for rows of input; None if it is not computed by one call."""
        rows = x.numel() // x.shape[-1]
        return self._run(self.add_to, rows, x) if self.is_for(rows, x) else None

    def shared(self, x: torch.Tensor, gates: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """The MLP's results, each row times the sigmoid of its gate, plus others; `is_for` holds for the rows."""
        return self._run(self._add_shared, len(x), x, gates, others)

    def _run(self, add: Callable[..., None], rows: int, *tensors: torch.Tensor) -> torch.Tensor:
        program, out = self._programs.of(add, len(tensors) + 1, rows, dtype=self._dtype), torch.empty_like(tensors[0])
        program(*[tensor.data_ptr() for tensor in (*tensors, out)])
        return out

    def is_for(self, rows: int, x: torch.Tensor | None = None) -> bool:
        """Whether the MLP is computed by one call for so many rows, of their own or in a tensor."""
        count = rows * self._width
        if self._products is None or rows > self._most or self._width % MULTIPLE or count <= 0:
            return False
        return x is None or (x.dtype is self._dtype and all(product.takes(x, rows) for product in self._products))

    def add_to(self, program: Program, x: Place, out: Place, rows: int) -> None:
        """Add it to a program, for rows at a place."""
        assert self._products is not None
        of_input, of_product = self._products
        count = rows * self._width
        both, product = program.room(4 * count), program.room(2 * count)
        gate, up = both, (both[0], both[1] + 2 * count)
        if len(of_input.matrices) == 2:
            of_input.add_to(program, rows, self._dtype, x, [gate, up])
            add_gate(program, gate, up, product, self.act, count, threads_for(count))
        else:
            of_input.add_to(program, rows, self._dtype, x, [both])
            add_gates_of_rows(program, self.act, both, product, rows, self._width)
        of_product.add_to(program, rows, self._dtype, product, [out])

    def _add_shared(self, program: Program, x: Place, gates: Place, others: Place, out: Place, rows: int) -> None:
        columns: int = self.matrices[-1].form.shape[0]
        terms = program.room(2 * rows * columns)
        self.add_to(program, x, terms, rows)
        add_shared(program, terms, gates, others, out, rows, columns)


def is_one_call(module: nn.Module) -> bool:
    """Whether `fuse_gates` set its forward."""
    return form_in(module, _computed) is not None


def mlp_in(module: Any) -> tuple[ActKind, list[FusedWeight]] | None:
    """The kind of the activation and the weights of an MLP that `fuse_gates` lets compute by one call; None if it does
    not now."""
    *linears, name = names_in(module) or ("",)
    act = module._modules.get(name)
    form: ActKind | None = None if module.training else form_in(module, _computed)
    kind = None if form is None else act_kind(act, form[0])
    if kind is None or kind not in _tables or has_hooks(act):
        return None
    weights = plain_weights(*(module._modules[linear] for linear in linears))
    return None if weights is None else (kind, weights)


def _computed(form: ActKind, module: Any, *args: Any, **named: Any) -> torch.Tensor | None:
    call = call_of(module) if len(args) == 1 and not named and is_plain(args[0], form[0]) else None
    if call is None:
        return None
    if (result := call(args[0])) is None and len(names := names_in(module)) == len(_PARTS[0]):
        first, second, down, act = (module._modules[name] for name in names)
        result = down(gated(act, first(args[0]), second(args[0])))
    return result


def call_of(module: Any) -> OneCall | None:
    """The call of an MLP; None if it is none by `mlp_in`."""
    if (mlp := mlp_in(module)) is None:
        return None
    act, (own, *_), matrices = *mlp, [weight.matrix for weight in mlp[1]]
    call: OneCall | None = own.calls
    if call is None or call.act != act or not all(map(operator.is_, call.matrices, matrices)):
        call = own.calls = OneCall(act, matrices)
    return call


@functools.cache
def sigmoids(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor | None:
    """Those of all numbers of a dtype; None if torch computes some otherwise that are no vector."""
    every = every_half(dtype)
    table = torch.sigmoid(every)
    apart = torch.sigmoid(every.repeat_interleave(2)[::2])
    return table if torch.equal(table.nan_to_num(), apart.nan_to_num()) else None


def add_shared(program: Program, *places: Any) -> None:
    """Add `others + sigmoid(gates) * terms` to a program, by the places of terms, gates, others and results, rows and
    their width."""
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    table = sigmoids(program.dtype)
    assert table is not None
    program.add(_layer_kernels.add_gated, [table.data_ptr(), *places])


def gated(act: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`act(gate) * up`, of tensors without gaps."""
    if (kind := act_kind(act, gate.dtype) or ()) not in _tables:
        _tables[kind] = act(every_half(gate.dtype))
    out, count = torch.empty_like(gate), gate.numel()
    program = Program.of(add_gate, 3, kind, count, threads_for(count), dtype=gate.dtype)
    program(gate.data_ptr(), up.data_ptr(), out.data_ptr())
    return out


def has_every_gate(act: Any, dtype: Any) -> bool:
    """Whether an activation has the results of its table for all numbers of a dtype."""
    every = every_half(dtype)
    gates = every[every.isfinite()]
    gates = gates[: len(gates) // MULTIPLE // 4 * MULTIPLE * 4].view(4, -1)
    return all(torch.equal(gated(act, gate, gate), act(gate) * gate) for gate in gates)


def _has_bits(module: nn.Module, form: ActKind) -> bool:
    """Whether a module has the results of its class, also for all values of its activation."""
    *linears, name = names_in(module)
    act: Any = module._modules[name]
    random, dtype = RandomTensors(), form[0]
    parts, gates = dict[str, Any](), 2 // (len(linears) - 1)  # of gate and up in a matrix
    for linear in linears:
        weight = random.normal(MULTIPLE * (gates if linear != linears[-1] else 1), MULTIPLE, dtype=dtype)
        parts[linear] = functools.partial(nn.functional.linear, weight=weight)
    *first, down = parts.values()
    like = trial_of(module, _modules={**parts, name: act})
    for rows in (1, 3, 100):
        x = random.normal(1, rows, MULTIPLE, dtype=dtype) * 10.0 ** (rows % 3)
        expected = class_result(like, x)
        gate, up = torch.cat([part(x) for part in first], -1).chunk(2, -1)
        result = down(gated(act, gate.contiguous(), up.contiguous()))
        if not is_result(result, expected):
            return False
    return has_every_gate(act, dtype)
