"""RMSNorm in one call where it has the bits of the model's own class, which takes eight operations of torch.

A class is tried on samples of a norm's size and dtype, and in float32, which shows each rounding. Gradients, other
devices and large inputs of norms with a gate are left to the class.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from rabbitllm.base.programs import HALVES, Place, Program, float_bits, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._fusing import (
    MAX_ELEMENTS,
    form_in,
    fuse,
    is_result,
    is_transformed,
    result_of,
    threads_for,
    trial_of,
)
from rabbitllm.engine._gates import every_half, table_of
from rabbitllm.engine._siblings import is_plain
from rabbitllm.engine.transformers_api import ACT2FN

LANES = 8, 16
"""Elements of the vectors that torch may add squares with."""
_DTYPES = frozenset({*HALVES, torch.float32})


class NormForm(NamedTuple):
    """What a norm computes: torch's lanes (`LANES`), the number added to the mean of squares, and transformers' name of
    the activation of a gate, which multiplies the result in float32, if there is a gate; one of
    `_norm_kernels.KINDS`; and how many parts of a row are normalized each by itself."""

    lanes: int
    epsilon: float
    activation: str | None = None
    kind: int = 0
    groups: int = 1

    def add_to(
        self,
        program: Program,
        columns: int,
        x: Place,
        weight: Place | int,
        out: Place,
        rows: int | Place = 1,
        gate: Place | None = None,
        *,
        is_half: bool = True,
        is_mean: bool = True,
        threads: int = 1,
    ) -> None:
        """Add the norm of rows of its dtype, or of float32, to a program; of the mean of squares, or of their sum. A
        call may give the number of rows that have neither parts nor a gate."""
        from rabbitllm.engine import _layer_kernels, _norm_kernels  # numba comes with it

        width, count = columns // self.groups, rows * self.groups if isinstance(rows, int) else rows
        words: list[int | Place] = [x, weight, out, int(is_half), count, width, self.lanes, float_bits(self.epsilon)]
        program.add(_norm_kernels.norm, [*words, width if is_mean else 1, self.kind, self.groups], threads)
        if self.activation is not None:
            assert gate is not None
            assert isinstance(rows, int)
            table = table_of(self.activation, torch.float32)
            program.add(_layer_kernels.gate_widely, [table.data_ptr(), gate, out, rows * columns])


def fuse_norms(model: nn.Module) -> int:
    """Let the norms whose bits are reproduced compute in one call, also those with a gate.

    Returns:
        How many these are.
    """
    return fuse(model, _computed, _form_of, _right_form)


def _form_of(module: nn.Module) -> tuple[int, torch.dtype, NormForm] | None:
    """The size and dtype of a module that may be a norm, and its form without lanes; None if it has another form."""
    name, activation = type(module).__name__, None
    if not name.endswith(("RMSNorm", "RMSNormGated")) or module._buffers:
        return None
    weight, epsilon = module._parameters.get("weight"), epsilon_of(module)
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or weight.dtype not in _DTYPES:
        return None
    if not isinstance(epsilon, float) or epsilon <= 0 or not 0 < len(weight) < MAX_ELEMENTS:
        return None
    if name.endswith("Gated"):
        activation = vars(module).get("activation")
        if weight.dtype is not torch.bfloat16 or not isinstance(activation, str) or activation not in ACT2FN:
            return None
    return len(weight), weight.dtype, NormForm(0, epsilon, activation, groups=_groups_of(module, len(weight)))


def norm_form(module: nn.Module, activation: str | None = None) -> NormForm | None:
    """What `fuse_norms` lets a norm compute, if it has a gate with this activation, or none; else None."""
    form: NormForm | None = form_in(module, _computed)
    if form is None or form[1:3] != (epsilon_of(module), activation):
        return None
    return form if form.groups == _groups_of(module, module.weight.numel()) else None  # type: ignore[operator]


def _groups_of(module: nn.Module, columns: int) -> int:
    """Parts of a row that a norm normalizes each by itself."""
    size = vars(module).get("group_size")
    return columns // size if isinstance(size, int) and size > 0 and columns % size == 0 else 1


def with_weight(module: nn.Module, weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """What the class of a norm computes with another weight."""
    return functools.partial(type(module).forward, trial_of(module, _parameters={"weight": nn.Parameter(weight)}))


def epsilon_of(module: nn.Module) -> Any:
    """The number that a norm adds to the mean of squares, if it has one."""
    own = vars(module)
    value = own.get("variance_epsilon")
    return own.get("eps") if value is None else value


def _computed(form: NormForm, module: Any, *args: Any, **named: Any) -> torch.Tensor | None:
    weight = module._parameters.get("weight")  # None where it is parametrized
    is_step = len(args) == 1 + (form.activation is not None) and not named and type(weight) is nn.Parameter
    if is_step and not is_transformed() and type(x := args[0]) is torch.Tensor and epsilon_of(module) == form.epsilon:
        count, columns, dtype = x.numel(), weight.shape[0], x.dtype
        is_alike = dtype is weight.dtype and dtype in _DTYPES and x.shape[-1] == columns and count > 0
        is_alike = is_alike and form.groups == _groups_of(module, columns)
        is_alike = is_alike and weight.is_contiguous() and weight.is_cpu
        if is_alike and form.activation is not None:
            gate = args[1]
            is_alike = is_plain(gate) and gate.dtype is dtype and gate.shape == x.shape
            is_alike = is_alike and module.activation == form.activation and count < MAX_ELEMENTS
        if is_alike and x.is_cpu and _has_rows(x) and not torch.is_grad_enabled():
            return _norm(x.contiguous(), weight, count // columns, form, *args[1:])
    return None


def _has_rows(x: torch.Tensor) -> bool:
    """Whether rows have no gaps within, as slices of wider ones have, and are in the order in which results are."""
    return x.is_contiguous() or (x.stride(-1) == 1 and torch.empty_like(x).is_contiguous())


def _norm(x: torch.Tensor, weight: torch.Tensor, rows: int, form: NormForm, *gate: torch.Tensor) -> torch.Tensor:
    """What a norm computes of rows."""
    out, numbers = torch.empty_like(x), (x.dtype in HALVES, rows, weight.shape[0], threads_for(x.numel()))
    program = prepared(_add, 3 + len(gate), form, *numbers, dtype=x.dtype)
    program(*[tensor.data_ptr() for tensor in (x, weight, out, *gate)])
    return out


def _add(program: Program, x: Place, weight: Place, out: Place, *others: Any) -> None:
    """Add a norm to a program; the others are the place of a gate, if there is one, the form, and `_norm`'s numbers."""
    *gate, form, is_half, rows, columns, threads = others
    form.add_to(program, columns, x, weight, out, rows, *gate, is_half=is_half, threads=threads)


def _right_form(module: Any, key: tuple[int, torch.dtype, NormForm]) -> NormForm | None:
    """The form with which a norm has the results of its class, also for all values of a gate; None if none has."""
    from rabbitllm.engine._norm_kernels import KINDS  # numba comes with it

    columns, dtype, form = key
    random = RandomTensors()
    samples = list[tuple[torch.Tensor, torch.Tensor, int, Any, Any]]()

    def add(rows: int, scale: float, dtype: torch.dtype, *gate: torch.Tensor) -> None:
        x, weight = random.normal(rows, columns, dtype=dtype) * scale, random.positive(columns, dtype=dtype)
        samples.append((x, weight, rows, gate, result_of(with_weight(module, weight), x, *gate)))

    if form.activation is not None:
        gates = every_half()
        gates = gates[gates.isfinite()]
        rows = len(gates) // columns
        add(rows, 3, dtype, gates[: rows * columns].view(rows, columns))
    else:
        for computed in (torch.bfloat16 if dtype is torch.float32 else dtype, torch.float32):
            for rows in (1, 3, max(MAX_ELEMENTS // columns // 2, 1), 2 * MAX_ELEMENTS // columns + 1):
                add(rows, 10.0 ** (rows % 3), computed)
    for lanes, kind in itertools.product(LANES, KINDS):
        own = form._replace(lanes=lanes, kind=kind)
        results = (is_result(_norm(x, w, rows, own, *gate), y) for x, w, rows, gate, y in samples)
        if lanes <= columns // form.groups and all(results):
            return own
    return None
