"""Linears that get the same input: with the first of them, the products of the others are computed too.

Queries, keys and values have one input, and so have gate and up. Which Linears these are is found while the model
computes: one that is called with the values that another had just before is computed with it from then on, and its own
call gets that result. Values are compared, not tensors: an input that a hook changed in place, or another tensor at the
same address, is multiplied on its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Container
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant.joint import JointProduct

MAX_UNUSED = 3
"""How often the result of a Linear may be left unused; then it is computed by its own calls alone."""
_MOST_INPUTS = 48
"""Rows of input up to which any matrix is multiplied as integers."""
_DTYPES = frozenset({torch.bfloat16, torch.float32})


@dataclass(slots=True)
class _LinearResult:
    """A product without its bias; `is_wide` if a bias is to be added, to float32."""

    matrix: Any
    product: torch.Tensor
    is_wide: bool

    def finished(self, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """The result of the Linear."""
        if bias is None:
            return self.product
        self.product += bias
        return self.product.to(dtype)


@dataclass(slots=True)
class _LinearCall:
    """A call of a Linear: its input, and the results of its followers that were not used yet."""

    leader: Sibling
    values: bytes
    shape: torch.Size
    dtype: torch.dtype
    results: dict[Sibling, _LinearResult]


class LastCall(threading.local):
    """The last call of a Linear in each thread; one object for all Linears of a model."""

    call: _LinearCall | None = None


@dataclass(eq=False)
class Sibling:
    """A Linear whose product may be computed together with others.

    Attributes:
        module: the Linear.
        last: of its model.
        followers: those that are computed with it.
        unused: how often its result was left unused.
    """

    module: nn.Module
    last: LastCall
    followers: list[Sibling] = field(default_factory=list)
    unused: int = 0

    def install(self) -> None:
        """Let the Linear call `linear` itself: `torch.nn.functional.linear` takes longer to find it than a product."""
        if "forward" not in vars(self.module):
            # a method: a copy of the module then binds it to itself
            self.module.forward = MethodType(_forward, self.module)

    def linear(self, x: torch.Tensor, own: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias` for the weight of the Linear, or a copy, with the bits of `own.matrix.linear`."""
        matrix: Any = own.matrix
        columns = x.shape[-1]
        rows = x.numel() // columns if columns == matrix.form.shape[1] else 0
        if not (0 < rows <= _MOST_INPUTS and x.is_cpu and x.dtype in _DTYPES and x.is_contiguous()):
            return matrix.linear(x, bias)  # type: ignore[no-any-return]
        values = ctypes.string_at(x.data_ptr(), rows * columns * x.itemsize)
        call, others = self.last.call, list[tuple[Sibling, Any]]()
        is_same = call is not None and call.values == values and call.shape == x.shape and call.dtype == x.dtype
        if call is not None and is_same and call.leader is not self:
            ready = call.results.pop(self, None)
            if ready is not None and ready.matrix is matrix and ready.is_wide == (bias is not None):
                return ready.finished(bias, x.dtype)
        else:
            if call is not None and call.results:
                call.leader.leave(call.results)
            others = [(other, weight.matrix) for other in self.followers if (weight := other.weight()) is not None]
            call = self.last.call = _LinearCall(self, values, x.shape, x.dtype, {})
        is_wide = [bias is not None, *(other.module._parameters["bias"] is not None for other, _ in others)]
        product = _product(own, [matrix, *(other for _, other in others)], is_wide)
        if product is None or rows > product.max_inputs:
            return matrix.linear(x, bias)  # type: ignore[no-any-return]
        call.leader.lead(self)
        result, *products = map(_LinearResult, product.matrices, product(x, rows), is_wide)
        call.results.update(zip((other for other, _ in others), products, strict=True))
        return result.finished(bias, x.dtype)

    def weight(self) -> QuantizedWeight | None:
        """Its weight, if that is the one that it was made for, and in memory."""
        weight: Any = self.module._parameters["weight"]
        return weight if isinstance(weight, QuantizedWeight) and weight.sibling is self else None

    def lead(self, other: Sibling) -> None:
        """From now on compute another one too."""
        if other is not self and other not in self.followers and other.unused < MAX_UNUSED:
            self.followers = [*self.followers, other]  # other threads may use the present list

    def leave(self, unused: Container[Sibling]) -> None:
        """No longer compute those whose results were left unused."""
        for sibling in self.followers:
            sibling.unused += sibling in unused
        self.followers = [sibling for sibling in self.followers if sibling not in unused]


def _forward(module: Any, input: torch.Tensor) -> torch.Tensor:
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    is_plain = type(weight) is QuantizedWeight and type(input) is torch.Tensor and weight.sibling is not None
    if not is_plain or (torch.is_grad_enabled() and (input.requires_grad or bias is not None)):
        return nn.functional.linear(input, module.weight, module.bias)
    return weight.sibling.linear(input, weight, bias)  # type: ignore[no-any-return]


def is_installed(module: nn.Module) -> bool:
    """Whether `Sibling.install` set its forward."""
    return getattr(vars(module).get("forward"), "__func__", None) is _forward


def _product(weight: QuantizedWeight, matrices: list[Any], is_wide: list[bool]) -> JointProduct | None:
    """The product of a weight's matrix and others, kept with the weight; None if there is none."""
    key = (*map(id, matrices), *is_wide)
    kept = weight.joint
    if kept is None or kept[0] != key:
        # the matrices are kept too, so their ids stay theirs
        kept = weight.joint = key, JointProduct.of(matrices, is_wide), matrices
    product: JointProduct | None = kept[1]
    return product
