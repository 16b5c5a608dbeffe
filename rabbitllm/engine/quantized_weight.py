"""The weight of a Linear that is kept quantized, at 4bit or 8bit, and multiplied from its codes.

To a model it is a parameter of the ordinary shape and dtype. `torch.nn.functional.linear` multiplies from the codes;
any other operation uses a dequantized matrix, made for that operation only. `StoredMatrix` has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from rabbitllm.engine.unwritable import reads_memory, refuse_writing
from rabbitllm.quant.compression import Quantized

_WHY = "it is there by its codes alone, at 4bit or 8bit"


class Grouping(Protocol):
    """Groups of rows (S, K), each times a matrix of its own."""

    def multiply(self, matrices: Sequence[Any], groups: Sequence[tuple[int, int]]) -> None:
        """Add the product `x[begin:end] @ W.T` for each of these matrices and its group (begin, end)."""
        ...

    def result(self) -> torch.Tensor:
        """The products of all groups, (S, N) of x's dtype; rows of no group are zero."""
        ...


class StoredMatrix(Protocol):
    """A matrix (N, K) as its stored parts, on the device that multiplies it."""

    def __init__(self, form: Quantized, payload: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor) -> None: ...

    @property
    def form(self) -> Quantized: ...

    @property
    def payload(self) -> torch.Tensor: ...

    @property
    def absmax(self) -> torch.Tensor: ...

    @property
    def table(self) -> torch.Tensor: ...

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantized matrix."""
        ...

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias`, (..., K) -> (..., N)."""
        ...

    def grouped(self, x: torch.Tensor) -> Grouping | None:
        """Products of groups of these rows (S, K) with matrices like this one; None if one by one is as fast."""
        ...


class QuantizedWeight(torch.Tensor):
    """A quantized matrix as a tensor.

    Args:
        matrix: its stored parts; nothing is copied.
        dtype: of the tensor, and of the matrix when it is dequantized.
    """

    matrix: StoredMatrix

    @staticmethod
    def __new__(cls, matrix: StoredMatrix, dtype: torch.dtype) -> QuantizedWeight:
        where = matrix.payload.device
        made: QuantizedWeight = torch.Tensor._make_wrapper_subclass(cls, matrix.form.shape, dtype=dtype, device=where)
        return made

    def __init__(self, matrix: StoredMatrix, dtype: torch.dtype) -> None:
        self.matrix = matrix

    def dequantized(self) -> torch.Tensor:
        """The matrix as an ordinary tensor."""
        return self.matrix.dequantized(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedWeight({tuple(self.shape)}, {self.dtype}, stored at {self.matrix.form.scheme})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        refuse_writing(func, args, kwargs, QuantizedWeight, _WHY)
        if reads_memory(func, _WHY):
            return func(args[0].dequantized(), *args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():  # else its results would be of this type too
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # called by nn.Parameter
            return QuantizedWeight(args[0].matrix, args[0].dtype)
        if func is torch.ops.aten.clone.default:
            old = args[0].matrix
            copied = type(old)(old.form, old.payload.clone(), old.absmax.clone(), old.table.clone())
            return QuantizedWeight(copied, args[0].dtype)
        plain = tree_map(lambda value: value.dequantized() if isinstance(value, QuantizedWeight) else value, args)
        named = tree_map(
            lambda value: value.dequantized() if isinstance(value, QuantizedWeight) else value, kwargs or {}
        )
        return func(*plain, **named)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Like `torch.nn.functional.linear`, whose arguments may be passed by name."""
    if isinstance(input, QuantizedWeight) or not isinstance(weight, QuantizedWeight):
        plain = [
            value.dequantized() if isinstance(value, QuantizedWeight) else value for value in (input, weight, bias)
        ]
        return torch.nn.functional.linear(*plain)  # type: ignore[arg-type]
    if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
        return _Differentiable.apply(input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return weight.matrix.linear(input, bias)


class _Differentiable(torch.autograd.Function):
    """The product with gradients for input and bias; the codes have none."""

    @staticmethod
    def forward(context: Any, input: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        context.weight = weight
        return weight.matrix.linear(input, bias)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        of_input = of_bias = None
        if context.needs_input_grad[0]:
            of_input = gradient @ context.weight.dequantized().to(gradient.dtype)
        if context.needs_input_grad[2]:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_input, None, of_bias
