"""Linears that get the same input: with the first of them, the products of the others are computed too.

Queries, keys and values have one input, and so have gate and up. Which Linears these are is found while the model
computes: one that is called with the values that another had just before is computed with it from then on, and its own
call gets that result. Values are compared, not tensors: an input that a hook changed in place, or another tensor at the
same address, is multiplied on its own.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules import module as modules

from rabbitllm.base.programs import HALVES
from rabbitllm.engine._fusing import ROUNDING, are_watching, is_transformed
from rabbitllm.engine.turns import takes_turns
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.quant import plain
from rabbitllm.quant.coded import CodedMatrix
from rabbitllm.quant.joint import JointProduct

_has_global_hook: Callable[[], bool] = modules._has_any_global_hook
MAX_UNUSED = 3
"""How often the result of a Linear may be left unused; then it is computed by its own calls alone."""
_MOST_INPUTS = 48
"""Rows of input up to which any matrix is multiplied as integers."""
_DTYPES = frozenset({*HALVES, torch.float32})
_PLAIN = "_plain_sibling"
"""The attribute of a Linear with the `Sibling` by which plain weights are multiplied."""
_OF_CLASS, _OF_TORCH = nn.Linear.forward, nn.functional.linear
"""What `Sibling.install` replaces, and the function that it calls; a program may assign others."""
_MOST_PLACES = 8
"""Addresses of a Linear's weights of which something is kept."""
_NONE = list[Any]()
"""The followers of a Linear that is computed alone."""


_Result = tuple[Any, torch.Tensor, bool, int]
"""A matrix, its product without bias, whether a bias is to be added, to float32, and changes of the matrix so far."""


@dataclass(slots=True)
class _LinearCall:
    """A call of a Linear: its input, and the results of its followers that were not used yet."""

    leader: Sibling
    values: bytes
    shape: torch.Size
    dtype: torch.dtype
    results: dict[Sibling, _Result] = field(default_factory=dict)

    def is_of(self, x: torch.Tensor) -> bool:
        """Whether a tensor has the same values, shape and dtype."""
        is_alike = x.shape == self.shape and x.dtype is self.dtype and x.is_cpu and x.is_contiguous()
        return is_alike and ctypes.string_at(x.data_ptr(), len(self.values)) == self.values


@dataclass(slots=True)
class _Together:
    """What a Linear computes: its own matrix and those of its followers.

    Attributes:
        followers: the list of the Linear that it was made of.
        weights: of each follower that has a weight: its module's parameters, their weight and whether it has a bias.
        absent: the others.
        product: None if there is none.
    """

    followers: list[Sibling]
    is_wide: bool
    weights: list[tuple[Sibling, dict[str, Any], FusedWeight, bool]]
    absent: list[Sibling]
    product: JointProduct | None

    def is_valid(self, followers: list[Sibling], is_wide: bool) -> bool:
        """Whether these are still the weights."""
        if self.followers is not followers or self.is_wide is not is_wide:
            return False
        for sibling, parameters, weight, wide in self.weights:
            if sibling.weight() is not weight or (parameters["bias"] is not None) is not wide:
                return False
        return all(sibling.weight() is None for sibling in self.absent)


class LastCall(threading.local):
    """The last call of a Linear in each thread; one object for all Linears of a model."""

    call: _LinearCall | None = None

    def __reduce__(self) -> tuple[type[LastCall], tuple[()]]:
        return LastCall, ()  # of a copy of the model


class OwnWeight:
    """A matrix of a Linear that is plain, or rounds its inputs, and what is kept of it, with the attributes of a
    `QuantizedWeight`."""

    def __init__(self, matrix: Any, sibling: Any) -> None:
        self.matrix, self.sibling = matrix, sibling
        self.joint: Any = None
        self.calls: Any = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copies of the Linear have other weights


FusedWeight: TypeAlias = QuantizedWeight | OwnWeight


@dataclass(eq=False)
class Sibling:
    """A Linear whose product may be computed together with others.

    Attributes:
        module: the Linear.
        last: of its model.
        followers: those that are computed with it.
        unused: how often its result was left unused.
        plain: its last plain matrices, by address: a streamed one lies in one of a few places.
    """

    module: nn.Module
    last: LastCall
    followers: list[Sibling] = field(default_factory=list)
    unused: int = 0
    plain: dict[int, OwnWeight] = field(default_factory=dict)

    def install(self) -> None:
        """Let the Linear call `linear` itself: `torch.nn.functional.linear` takes longer to find it than a product."""
        if "forward" not in vars(self.module):
            # a method: a copy of the module then binds it to itself
            self.module.forward = MethodType(_forward, self.module)

    def install_for_plain(self) -> Callable[[], object]:
        """The same, also for weights that are plain matrices, which are else left to torch; returns what undoes it."""
        names = {_PLAIN, "forward"} - vars(self.module).keys()
        self.install()
        vars(self.module)[_PLAIN] = self
        return functools.partial(list, map(vars(self.module).pop, names))

    def linear(self, x: torch.Tensor, own: FusedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias` for the weight of the Linear, or a copy, with the bits of `own.matrix.linear`."""
        matrix: Any = own.matrix
        call, followers = self.last.call, self.followers
        if call is not None and call.leader is not self and call.is_of(x):
            ready = call.results.pop(self, None)
            if ready is not None and ready[0] is matrix and ready[2:] == (bias is not None, matrix.changes()):
                return _finished(ready[1], bias, x.dtype)
            followers = _NONE
        shape = x.shape
        columns = matrix.form.shape[1]
        rows = x.numel() // columns if shape[-1] == columns else 0
        if not (0 < rows <= _MOST_INPUTS and x.is_cpu and x.dtype in _DTYPES and x.is_contiguous()):
            return matrix.linear(x, bias)  # type: ignore[no-any-return]
        if followers is not _NONE or call is None:
            if call is not None and call.results:
                call.leader.leave(call.results)
                followers = self.followers
            values = ctypes.string_at(x.data_ptr(), rows * columns * x.itemsize)
            call = self.last.call = _LinearCall(self, values, shape, x.dtype)
        together = own.joint
        if together is None or not together.is_valid(followers, bias is not None):
            together = own.joint = _together(matrix, followers, bias is not None)
        product = together.product
        if product is None or not product.takes(x, rows):
            return matrix.linear(x, bias)  # type: ignore[no-any-return]
        call.leader.lead(self)
        result, *others = product(x, rows)
        for (sibling, _, weight, is_wide), other in zip(together.weights, others, strict=True):
            call.results[sibling] = weight.matrix, other, is_wide, weight.matrix.changes()
        return result if bias is None else _finished(result, bias, x.dtype)

    def weight(self) -> FusedWeight | None:
        """Its weight, if that is the one that it was made for, in memory, and nothing may change it before a call."""
        if self.module._forward_pre_hooks or not is_installed(self.module):
            return None
        weight = fused_weight(self.module)
        return weight if weight is not None and weight.sibling is self else None

    def plain_weight(self, weight: Any) -> OwnWeight | None:
        """The plain matrix that a weight is now; None if our kernels do not multiply it."""
        if type(weight) not in (nn.Parameter, torch.Tensor):
            return None
        own = self.plain.get(weight.data_ptr())
        if own is None or not own.matrix.is_of(weight):
            if (matrix := plain.matrix_of(weight)) is None:
                return None
            if len(self.plain) == _MOST_PLACES:
                self.plain.clear()
            own = self.plain[weight.data_ptr()] = OwnWeight(matrix, self)
        return own

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
    is_changed, rounding = not _is_of_torch(module), vars(module).get(ROUNDING)
    if is_changed and rounding is None:
        return type(module).forward(module, input)  # type: ignore[no-any-return]
    own, parameters = None if is_changed or is_transformed() else fused_weight(module), module._parameters
    is_ours = own is not None and type(input) is torch.Tensor and "bias" in parameters
    if is_ours and rounding is not None:
        is_ours = is_plain(input, rounding.dtype)
    elif is_ours and torch.is_grad_enabled():
        needs = input.requires_grad or parameters["bias"] is not None
        is_ours = not (needs or (type(own) is OwnWeight and parameters["weight"].requires_grad))
    if is_ours:
        sibling: Any = own.sibling  # type: ignore[union-attr]
        return sibling.linear(input, own, parameters["bias"])  # type: ignore[no-any-return]
    if rounding is not None:
        return rounding.by_settings(module, input)  # type: ignore[no-any-return]
    multiply = row_product if multiplies_plain(module) else nn.functional.linear
    return multiply(input, module.weight, module.bias)


def row_product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` with our product of plain bfloat16, where it is faster and no gradient is wanted."""
    # the kernels have no backward pass: a gradient would be missing, and others would be wrong without an error
    if (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)) or is_transformed():
        return nn.functional.linear(input, weight, bias)
    if bias is None and (multiply := getattr(weight, "by_pieces", None)) is not None:
        return multiply(input, row_product)  # type: ignore[no-any-return]
    return plain.product(input, weight, bias)


def fused_weight(linear: nn.Module) -> FusedWeight | None:
    """The weight of a Linear if our kernels multiply it, together with others; else None."""
    weight: Any = linear._parameters.get("weight")  # None where it is parametrized
    if type(weight) is QuantizedWeight:
        rounding = vars(linear).get(ROUNDING)
        return None if weight.sibling is None else weight if rounding is None else _rounding(linear, weight, rounding)
    sibling: Sibling | None = vars(linear).get(_PLAIN)
    return None if sibling is None else sibling.plain_weight(weight)


def _rounding(linear: nn.Module, weight: QuantizedWeight, rounding: Any) -> OwnWeight | None:
    """The weight of a Linear that rounds its inputs; None if its settings are others now."""
    rounding = rounding.now(linear)
    if rounding is None or not isinstance(weight.matrix, CodedMatrix):
        return None
    own: OwnWeight | None = weight.rounding
    if own is None or own.matrix.rounding != rounding:
        own = weight.rounding = OwnWeight(replace(weight.matrix, rounding=rounding), weight.sibling)
    return own


def has_hooks(module: nn.Module) -> bool:
    """Whether something watches or changes what a module gets and returns."""
    hooks = module._forward_hooks
    return bool(module._forward_pre_hooks or (hooks and are_watching(hooks.values())))


def dtype_of(weight: Any) -> torch.dtype:
    """The dtype with which programs may compute with a weight: its own, or bfloat16."""
    dtype = getattr(weight, "dtype", None)
    return dtype if dtype in HALVES else torch.bfloat16


def is_plain(x: Any, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether rows of a dtype on the CPU are given, no gradients are wanted, and no hook watches all modules."""
    if type(x) is not torch.Tensor or x.dtype is not dtype or not x.is_cpu or not x.is_contiguous():
        return False
    return not (torch.is_grad_enabled() or is_transformed() or _has_global_hook()) and x.numel() > 0


def plain_weights(*linears: nn.Module, with_bias: bool = False) -> list[FusedWeight] | None:
    """The weights of Linears of which nothing but their products is wanted, now; else None.

    They have no hook, no adapter and, unless that is wanted, no bias, and no other call waits for their products.
    """
    weights = list[FusedWeight]()
    if takes_turns():
        return None
    for linear in linears:
        if not is_installed(linear) or (weight := fused_weight(linear)) is None:
            return None
        if has_hooks(linear) or not (with_bias or linear._parameters["bias"] is None):
            return None
        weights.append(weight)
    return weights


def multiplies_plain(module: nn.Module) -> bool:
    """Whether `Sibling.install_for_plain` was called for a Linear."""
    return _PLAIN in vars(module)


def round_inputs(module: nn.Module, rounding: Any) -> None:
    """Let a Linear round its inputs with what multiplies them, where its settings still mean that; else by these."""
    vars(module)[ROUNDING] = rounding
    module.forward = MethodType(_forward, module)


def is_installed(module: nn.Module) -> bool:
    """Whether `Sibling.install` set its forward, and that of its class is the one that this replaces."""
    return getattr(vars(module).get("forward"), "__func__", None) is _forward and _is_of_torch(module)


def _is_of_torch(module: nn.Module) -> bool:
    """Whether its class computes what it did."""
    return type(module).forward is _OF_CLASS and nn.functional.linear is _OF_TORCH


def _finished(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The result of the Linear."""
    if bias is None:
        return product
    product += bias
    return product.to(dtype)


def _together(matrix: Any, followers: list[Sibling], is_wide: bool) -> _Together:
    weights = [
        (sibling, parameters, weight, parameters["bias"] is not None)
        for sibling in followers
        if (weight := sibling.weight()) is not None and (parameters := sibling.module._parameters)
    ]
    absent = [sibling for sibling in followers if all(sibling is not present for present, *_ in weights)]
    matrices = [matrix, *(weight.matrix for _, _, weight, _ in weights)]
    product = JointProduct.of(matrices, [is_wide, *(wide for *_, wide in weights)])
    return _Together(followers, is_wide, weights, absent, product)
