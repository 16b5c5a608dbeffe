"""A gated MLP by one call of compiled code, where that has the bits of the model's own class.

Of a mixture with an expert for all tokens, the call also multiplies that by its gate, and adds the chosen experts.

bfloat16 has 65,536 values, so an activation is a table of its results, which the activation itself computes.
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

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.programs import Place, Program
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._fusing import MAX_ELEMENTS, class_result, forward_in, fuse, is_result, kind_of, trial_of
from rabbitllm.engine._siblings import FusedWeight, has_hooks, is_plain, plain_weights
from rabbitllm.engine.transformers_api import ACT2FN
from rabbitllm.quant.joint import JointProduct

MULTIPLE = 64
"""Elements that torch computes at once with any of its vectors; it computes a rest in another way."""
_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn"), ("gate_up_proj", "down_proj", "activation_fn")
"""Names of the parts of MLPs, in the order of computation; gate and up may be one matrix."""
SHARED = ("gate", "experts", "shared_expert", "shared_expert_gate")
"""Names of the parts of mixtures whose shared expert has a gate."""
_OF_ANY = frozenset({*vars(nn.Module()), "_is_hf_initialized"})
"""Attributes of any module; transformers sets the last one."""
_WITHOUT_STATE = int, float, str, FunctionType, BuiltinFunctionType
ActKind: TypeAlias = tuple[object, ...]
_tables = dict[ActKind, torch.Tensor]()
"""`act_kind` -> results for every number of bfloat16."""


def fuse_gates(model: nn.Module) -> int:
    """Let the MLPs whose bits are reproduced compute `down(act(gate(x)) * up(x))` by one call, for few rows.

    It is used while their matrices are multiplied as integers, without gradients, and no hook sees what is within.

    Returns:
        How many these are.
    """

    def key_of(module: nn.Module) -> object:
        names = names_in(module)
        kind = act_kind(module._modules[names[-1]]) if names else None
        return None if kind is None else (kind_of(module), kind)

    return fuse(model, key_of, lambda module, _: _forward if _has_bits(module) else None)


def fuse_shared(model: nn.Module) -> int:
    """Let mixtures compute what comes after their chosen experts by one call.

    Those are meant whose shared expert has a gate, and is an MLP that `fuse_gates` has replaced.

    Returns:
        How many these are.
    """

    def key_of(module: Any) -> object:
        is_mixture = module._modules.keys() == {*SHARED} and not (module._parameters or module._buffers)
        return kind_of(module) if is_mixture and is_one_call(module.shared_expert) else None

    return fuse(model, key_of, lambda module, _: shared_forward if has_shared_bits(module) else None)


def names_in(module: nn.Module) -> tuple[str, ...]:
    """The names of the parts of a module that may be a gated MLP; none if it is not."""
    return next((names for names in _PARTS if module._modules.keys() == {*names}), ())


def act_kind(act: nn.Module | None) -> ActKind | None:
    """What says all of what an activation computes: its class, and its functions and numbers; None if more does."""
    if act is None or act._parameters or act._buffers or act._modules:
        return None
    if not _takes_one(type(act).forward):
        return None
    kind: list[object] = [type(act)]
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


def every_bfloat() -> torch.Tensor:
    """Every number of bfloat16, in the order of its bits."""
    return torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(torch.bfloat16)


@functools.cache
def table_of(activation: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The results of an activation, by transformers' name, for every number of bfloat16, computed in this dtype."""
    table: torch.Tensor = ACT2FN[activation](every_bfloat().to(dtype))
    return table


def is_tabled(act: Any) -> bool:
    """Whether `gated` has computed an activation of this kind, and nothing sees what this one computes."""
    return act_kind(act) in _tables and not has_hooks(act)


def add_gate(program: Program, act: ActKind, gate: Place, up: Place, out: Place, count: int, threads: int = 1) -> None:
    """Add `act(gate) * up` to a program; see `is_tabled`."""
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    program.add(_layer_kernels.gate, [_tables[act].data_ptr(), gate, up, out, count], threads)


def add_gates_of_rows(program: Program, act: ActKind, both: Place, out: Place, rows: int, width: int) -> None:
    """Add the same for rows, each of gates and then of factors."""
    for row in range(rows):
        gate, result = both[1] + 4 * row * width, out[1] + 2 * row * width
        add_gate(program, act, (both[0], gate), (both[0], gate + 2 * width), (out[0], result), width)


class OneCall:
    """What an MLP computes by one call for some matrices; the weight of its gate keeps it.

    Args:
        act: the kind of its activation.
        matrices: of gate and up, which may be one, and of down.
    """

    def __init__(self, act: ActKind, matrices: Sequence[Any]) -> None:
        self.matrices, self.act = matrices, act
        *first, down = matrices
        columns, self._width = down.form.shape
        of_input, of_product = JointProduct.of(first, [False] * len(first)), JointProduct.of([down], [False])
        self._products = None
        self._most = 0
        self._programs = dict[tuple[int, int], Program]()  # by threads and rows, negative for `shared`
        is_fit = sum(matrix.form.shape[0] for matrix in first) == 2 * self._width and first[0].form.shape[1] == columns
        if of_input is not None and of_product is not None and is_fit:
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

    def shared(self, x: torch.Tensor, gates: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """The MLP's results, each row times the sigmoid of its gate, plus others; `is_for` holds for the rows."""
        key = torch.get_num_threads(), -len(x)
        if (program := self._programs.get(key)) is None:
            program = self._programs[key] = Program(4)
            result = program.room(2 * x.numel())
            self.add_to(program, len(x), program.address(0), result)
            places = [result, *(program.address(index) for index in (1, 2, 3))]
            add_shared(program, places, len(x), x.shape[1])
        out = torch.empty_like(x)
        program(x.data_ptr(), gates.data_ptr(), others.data_ptr(), out.data_ptr())
        return out

    def is_for(self, rows: int) -> bool:
        """Whether the MLP is computed by one call for so many rows."""
        count = rows * self._width
        return rows <= self._most and self._width % MULTIPLE == 0 and count > 0

    def add_to(self, program: Program, rows: int, x: Place, out: Place) -> None:
        """Add it to a program, for rows at a place."""
        assert self._products is not None
        of_input, of_product = self._products
        count = rows * self._width
        both, product = program.room(4 * count), program.room(2 * count)
        gate, up = both, (both[0], both[1] + 2 * count)
        if len(of_input.matrices) == 2:
            of_input.add_to(program, rows, torch.bfloat16, x, [gate, up])
            add_gate(program, self.act, gate, up, product, count, _threads_for(count))
        else:
            of_input.add_to(program, rows, torch.bfloat16, x, [both])
            add_gates_of_rows(program, self.act, both, product, rows, self._width)
        of_product.add_to(program, rows, torch.bfloat16, product, [out])


def is_one_call(module: nn.Module) -> bool:
    """Whether `fuse_gates` set its forward."""
    return forward_in(module) is _forward


def mlp_weights(module: Any) -> list[FusedWeight] | None:
    """The weights of an MLP that `fuse_gates` lets compute by one call; None if it does not now."""
    parts = module._modules
    *linears, act = names_in(module) or (None,)
    if module.training or not is_one_call(module) or not linears or not is_tabled(parts[act]):
        return None
    return plain_weights(*(parts[name] for name in linears))


def act_of(module: nn.Module) -> ActKind:
    """The kind of the activation of a gated MLP that has weights by `mlp_weights`."""
    return act_kind(module._modules[names_in(module)[-1]]) or ()


def _forward(module: Any, *args: Any, **named: Any) -> Any:
    call = call_of(module) if len(args) == 1 and not named and is_plain(args[0]) else None
    if call is not None and (result := call(args[0])) is not None:
        return result
    if call is not None and len(names := names_in(module)) == len(_PARTS[0]):
        first, second, down, act = (module._modules[name] for name in names)
        return down(gated(act, first(args[0]), second(args[0])))
    return type(module).forward(module, *args, **named)


def call_of(module: Any) -> OneCall | None:
    """The call of an MLP; None if `mlp_weights` has none."""
    if (weights := mlp_weights(module)) is None:
        return None
    own, matrices, act = weights[0], [weight.matrix for weight in weights], act_of(module)
    call: OneCall | None = own.calls
    if call is None or call.act != act or not all(map(operator.is_, call.matrices, matrices)):
        call = own.calls = OneCall(act, matrices)
    return call


def shared_forward(module: Any, *args: Any, **named: Any) -> Any:
    if len(args) == 1 and not named and is_plain(args[0]):
        router, experts, shared, gate = (module._modules[name] for name in SHARED)
        x = args[0].view(-1, args[0].shape[-1])
        call = None if has_hooks(shared) else call_of(shared)
        if call is not None and call.is_for(len(x)):
            _, weights, index = router(x)
            others, gates = experts(x, index, weights), gate(x)
            if is_plain(others) and is_plain(gates):
                return call.shared(x, gates, others).view(args[0].shape)
            return (others + torch.sigmoid(gates) * shared(x)).view(args[0].shape)
    return type(module).forward(module, *args, **named)


@functools.cache
def sigmoids() -> torch.Tensor | None:
    """Those of all numbers of bfloat16; None if torch computes some otherwise that are no vector."""
    every = every_bfloat()
    table = torch.sigmoid(every)
    apart = torch.sigmoid(every.repeat_interleave(2)[::2])
    return table if torch.equal(table.nan_to_num(), apart.nan_to_num()) else None


def add_shared(program: Program, places: Sequence[Place], rows: int, width: int) -> None:
    """Add `others + sigmoid(gates) * terms` to a program, whose places are of terms, gates, others and results."""
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    table = sigmoids()
    assert table is not None
    program.add(_layer_kernels.add_gated, [table.data_ptr(), *places, rows, width])


@torch.no_grad()
def has_shared_bits(module: Any) -> bool:
    """Whether a mixture's class adds these, and calls its parts so."""
    random, width, rows = RandomTensors(), MULTIPLE, 3
    x, others, result = (random.normal(rows, width) for _ in range(3))
    gates, routing = random.normal(rows, 1) * 4, (object(), object(), object())

    def part(answer: Any, *expected: object) -> Callable[..., Any]:
        """What returns an answer, but None for another input than x, or for others after it than expected."""
        return lambda value, *more: answer if torch.equal(value, x) and more == expected else None

    answers = part(routing), part(others, *reversed(routing[1:])), part(result), part(gates)
    expected = class_result(trial_of(module, _modules=dict(zip(SHARED, answers, strict=True))), x[None])
    if sigmoids() is None:
        return False
    program, out = Program(4), torch.empty_like(x)
    add_shared(program, [program.address(index) for index in range(4)], rows, width)
    program(*(tensor.data_ptr() for tensor in (result, gates, others, out)))
    return is_result(out[None], expected)


def gated(act: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`act(gate) * up`, of tensors without gaps."""
    if (kind := act_kind(act) or ()) not in _tables:
        _tables[kind] = act(every_bfloat())
    program, out, count = Program(3), torch.empty_like(gate), gate.numel()
    gates, ups, results = (program.address(index) for index in range(3))
    add_gate(program, kind, gates, ups, results, count, _threads_for(count))
    program(gate.data_ptr(), up.data_ptr(), out.data_ptr())
    return out


def _threads_for(count: int) -> int:
    """Threads that compute so many elements."""
    return min(torch.get_num_threads(), -(-count // MAX_ELEMENTS)) if torchs_team() is not None else 1


def has_every_gate(act: Any) -> bool:
    """Whether an activation has the results of its table for all numbers."""
    every = every_bfloat()
    gates = every[every.isfinite()]
    gates = gates[: len(gates) // MULTIPLE // 4 * MULTIPLE * 4].view(4, -1)
    return all(torch.equal(gated(act, gate, gate), act(gate) * gate) for gate in gates)


@torch.no_grad()
def _has_bits(module: nn.Module) -> bool:
    """Whether a module has the results of its class, also for all values of its activation."""
    *linears, name = names_in(module)
    act: Any = module._modules[name]
    random = RandomTensors()
    parts, gates = dict[str, Any](), 2 // (len(linears) - 1)  # of gate and up in a matrix
    for linear in linears:
        # on the meta device a Linear draws no weights from torch's random state, which is the program's
        count = MULTIPLE * (gates if linear != linears[-1] else 1)
        part = nn.Linear(MULTIPLE, count, bias=False, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
        part.weight.copy_(random.normal(count, MULTIPLE))
        parts[linear] = part
    *first, down = parts.values()
    like = trial_of(module, _modules={**parts, name: act})
    for rows in (1, 3, 100):
        x = random.normal(1, rows, MULTIPLE) * 10.0 ** (rows % 3)
        expected = class_result(like, x)
        gate, up = torch.cat([part(x) for part in first], -1).chunk(2, -1)
        result = down(gated(act, gate.contiguous(), up.contiguous()))
        if not is_result(result, expected):
            return False
    return has_every_gate(act)
