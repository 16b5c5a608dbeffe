"""Tensors that stand for weights: placeholders of those that are not in memory, and quantized matrices.

Neither can be written to: merging an adapter, loading other weights or initialising again would be lost with the next
pass, or have no effect, without an error. So functions that write are refused, also through a view. Writes to memory
that `__dlpack__` or a view's `untyped_storage` gave are not seen: torch has no read-only memory. Reading a weight that
is not in memory makes the weight itself, or is refused too. `torch.nn.functional.linear` multiplies the quantized
weight of a Linear from its codes; any other operation uses a dequantized matrix, which is freed after it.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from rabbitllm.engine._fusing import is_transformed
from rabbitllm.errors import AbsentWeightError, ReadOnlyWeightError
from rabbitllm.quant.coded import CodedMatrix
from rabbitllm.quant.products import FusedMatrix, Matrix
from rabbitllm.quant.turned import TurnedMatrix

StoredMatrix: TypeAlias = Matrix | FusedMatrix | CodedMatrix
"""A quantized matrix (N, K) as its stored parts, on the device that multiplies it."""
_HARMLESS = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_", "retain_grad"})
"""In-place methods that do not change the values."""
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _writes_to_the_first(func: Callable[..., Any]) -> bool:
    if func == _SET_DATA:
        return True
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, name[:2] + name[3:]))
    return name.endswith("_") and name not in _HARMLESS


_BY_MEMORY = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__})
"""Functions that read a tensor's memory directly; all others read it through operations."""
_ADDRESSES = frozenset({torch.Tensor.data_ptr, torch.Tensor.storage, torch.Tensor.untyped_storage})
_WITH_MEMORY = "deepcopy", "reduce_ex", "repr", "format"
"""Methods of tensors that have a storage."""


def read_only(why: str) -> ReadOnlyWeightError:
    """The error for writing to a weight."""
    return ReadOnlyWeightError(
        f"A weight of this model cannot be written to: {why}.",
        "Leave an adapter unmerged: then it changes no weights. To merge it, or to change weights, load the model "
        "uncompressed and with enough max_memory for all of it, or with transformers itself. A copy of some values, "
        "weight[...].clone(), can be written to.",
    )


_NO_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3)
"""A backend that does not exist: by it a tensor is read whose `data` is set to a weight, and so has its storage."""


class WeightStandIn(torch.Tensor):
    """A read-only tensor that stands for a weight which is not in memory as a matrix.

    Shape, strides, dtype, device and all that follows from them are available without reading. Subclasses answer some
    functions of torch. Any other one gets `whole()`, for that function only. There is no storage, so no kernel can use
    other memory as the values.

    A meta tensor would not work: code that moves inputs to `weight.device` would move them to meta, and an embedding of
    meta ids returns garbage without an error.
    """

    _why: str | None = None
    """Why it cannot be written to, for messages; None if it can."""
    is_at_hand: bool = False
    """Whether it can be read at any time: the weights of the model fit in memory. Its copies are ordinary weights."""
    _answers: Mapping[Any, Callable[..., Any]]
    """Function of torch -> one with the same arguments, which returns None for those that it does not answer."""
    _by_memory = _BY_MEMORY
    """Functions that get `whole()` although they are not operations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def _without_storage(cls, shape: Sequence[int], **form: Any) -> Any:
        """A tensor of this form whose memory torch refuses to give."""
        make: Any = torch.Tensor._make_wrapper_subclass
        weight: Any = make(cls, torch.Size(shape), _extra_dispatch_keys=_NO_KERNELS, **form)
        torch._C._set_throw_on_mutable_data_ptr(weight)  # what asks for its address below gets an error, not 0
        weight._reference = weakref.ref(weight)  # torch.utils.swap_tensors refuses what is referred to so
        return weight

    def whole(self) -> torch.Tensor:
        """The weight as an ordinary tensor."""
        raise NotImplementedError

    def again(self) -> torch.Tensor:
        """Another object for the same weight."""
        raise NotImplementedError

    @classmethod
    def _operation(cls, func: Any, args: tuple[Any, ...]) -> Any:
        """The result of an operation of torch inside of others; None if it gets the whole weight."""
        return None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        answer = cls._answers.get(func)
        if answer is not None and (result := answer(*args, **options)) is not None:
            return result
        if _writes_to_the_first(func):  # torch.nn.init passes it by name
            _refuse(args[0] if args else options.get("tensor", options.get("input")))
        _refuse(options.get("out"))
        if func is torch.Tensor.share_memory_:  # what cannot be written to is the same in each process
            return args[0]
        # what is read of a weight at hand is freed, and an address with it
        if func in _ADDRESSES and (func not in cls._by_memory or (cls is AbsentWeight and args[0].is_at_hand)):
            _refuse_storage(args[0])
        if func in cls._by_memory:
            whole = args[0].whole().detach().requires_grad_(args[0].requires_grad)
            result = func(whole, *args[1:], **options)
            if isinstance(result, np.ndarray) and result.base is not None and args[0]._why:
                result.flags.writeable = False
            return result
        with torch._C.DisableTorchFunctionSubclass():  # else its results would be of this type too
            return func(*args, **options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled():  # no weight is made in that mode, so its views are not
            with torch.inference_mode(False), torch.no_grad():
                return cls.__torch_dispatch__(func, types, args, kwargs)
        weight, options = args[0] if args else None, dict(kwargs or {})
        if func is torch.ops.aten.set_.source_Tensor and weight is args[1]:  # a parametrization sets it to itself
            return weight
        for target in _written(func, args, options) if func._schema.is_mutable else ():
            _refuse(target)
        if func is torch.ops.aten.set_.source_Tensor:
            _refuse_storage(args[1])
        if isinstance(weight, WeightStandIn):
            if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # called by nn.Parameter
                return weight.again()
            if func is torch.ops.aten.is_pinned.default:
                return False
            if func.__name__.startswith("new_") or func.__name__.partition(".")[0].endswith("_like"):
                form = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
                return func(form, *args[1:], **{**options, "device": options.get("device") or weight.device})
        result = cls._operation(func, args)
        if result is not None:
            return result
        values = tree_map(_whole, args)
        result = func(*values, **tree_map(_whole, options))
        if not func.is_view or values[0] is weight:
            return result
        of = _storage(values[0])  # what may be a view of it may be a copy, too
        return tree_map(lambda each: view_of(weight, each) if _storage(each) == of else each, result)


def _written(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """What an operation writes to; optimizers pass lists."""
    named = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **options}
    targets = (each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write)
    return tree_leaves([named.get(name) for name in targets])


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, WeightStandIn) else value


def _refuse(target: Any) -> None:
    """Refuse to write to a weight.

    Raises:
        ReadOnlyWeightError: it cannot be written to.
    """
    if not isinstance(target, WeightStandIn) or target._why is None:
        return
    if target.is_at_hand:
        raise ReadOnlyWeightError(
            "A weight of this model cannot be written to: its rows are read when they are looked up.",
            "Set a copy in its place before a program trains it or merges an adapter into it: "
            "module.weight = torch.nn.Parameter(module.weight.clone()).",
        )
    raise read_only(target._why)


def _refuse_storage(weight: Any) -> None:
    """Refuse to give the memory of a weight that cannot be written to.

    Raises:
        AbsentWeightError: it cannot be.
    """
    if weight._why is not None:
        raise AbsentWeightError(
            f"The storage of a weight was requested, but the weight is not in memory as a matrix: {weight._why}.",
            "Use `weight * 1` to copy it; model.save_pretrained(folder) writes all weights.",
        )


def _storage(values: Any) -> object:
    """Equal for tensors in the same memory; equal to nothing for what is no ordinary tensor."""
    return values.untyped_storage()._cdata if type(values) in (torch.Tensor, torch.nn.Parameter) else object()


def view_of(weight: Any, values: torch.Tensor) -> torch.Tensor:
    """Values in memory that were read from a weight: a `WeightView` if what is written to them would be lost."""
    return values if weight._why is None or isinstance(values, WeightStandIn) else WeightView(values, weight)


class WeightView(WeightStandIn):
    """A view of values that were read from a weight: an ordinary tensor that cannot be written to.

    Args:
        plain: the values.
        of: the weight, or another view.
    """

    plain: torch.Tensor
    _by_memory = _BY_MEMORY | _ADDRESSES | {getattr(torch.Tensor, f"__{name}__") for name in _WITH_MEMORY}

    @staticmethod
    def __new__(cls, plain: torch.Tensor, of: WeightStandIn) -> WeightView:
        view: WeightView = torch.Tensor._make_subclass(cls, plain)
        view.plain, view._why, view.is_at_hand = plain, of._why, of.is_at_hand
        return view

    def whole(self) -> torch.Tensor:
        """The values."""
        return self.plain

    def again(self) -> WeightView:
        """Another view of the same values."""
        return WeightView(self.plain, self)


Multiply: TypeAlias = Callable[[torch.Tensor, Callable[..., torch.Tensor]], torch.Tensor]
"""Inputs (..., K), and a product with rows of a matrix -> that with the matrix, (..., N)."""


class AbsentWeight(WeightStandIn):
    """A placeholder of a weight that is not in memory: its shape, strides, dtype and device, without values.

    Args:
        read: returns the weight itself, or raises an error if it cannot be read now.
        shape, dtype, device: of the weight.
        is_parameter: whether it is a parameter; else it is a buffer.
        marks: further attributes.
    """

    _is_hf_initialized = True  # transformers checks it before it initialises
    _read: Callable[[], torch.Tensor]
    look_up: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Of a table: distinct rising ids, int64 (n,) on the CPU -> their rows (n, width) on the weight's device."""
    by_pieces: Multiply | None = None
    """Of a Linear's matrix that is read in pieces."""
    target: str | None = None
    """The name of the parameter whose placeholder it is."""
    _why = "it is read from the disk when its layer computes"
    _by_memory = _BY_MEMORY | _ADDRESSES

    @staticmethod
    def __new__(
        cls,
        read: Callable[[], torch.Tensor],
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_parameter: bool = True,
        marks: Mapping[str, object] | None = None,
    ) -> AbsentWeight:
        needs = is_parameter and dtype.is_floating_point and dtype.itemsize > 1  # see `Place.bind`
        weight: AbsentWeight = cls._without_storage(shape, dtype=dtype, device=device, requires_grad=needs)
        weight.__dict__.update(marks or {})
        weight._read = read
        weight._is_param = is_parameter  # makes isinstance(made, nn.Parameter) true
        return weight

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"AbsentWeight({tuple(self.shape)}, {self.dtype}, {self.device}, not in memory)"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if self.is_at_hand:  # peft trains a copy
            whole: torch.Tensor = copy.deepcopy(self.whole(), memo)
            return whole.requires_grad_(self.requires_grad)
        copied = self.again()
        copied.__dict__.update(vars(self))
        copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AbsentWeightError(
            "A weight of this model is not in memory; torch.save cannot pickle it.",
            "model.save_pretrained(folder) writes the whole model.",
        )

    def whole(self) -> torch.Tensor:
        """The weight itself."""
        return self._read()

    def again(self) -> AbsentWeight:
        """Another object for the same weight, not a parameter, as from `detach`."""
        weight = AbsentWeight(self._read, self.shape, self.dtype, self.device, is_parameter=False)
        weight.look_up, weight.by_pieces, weight.is_at_hand = self.look_up, self.by_pieces, self.is_at_hand
        return weight


def _clone(*args: Any, **options: Any) -> None:
    if called_by("peft"):  # it clones the weights that it will merge into
        _refuse(args[0])


def _new_tensor(form: torch.Tensor, data: Any, **options: Any) -> torch.Tensor:
    return torch.empty(0, dtype=form.dtype, device=form.device).new_tensor(_whole(data), **options)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: Any = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """The answer to `torch.nn.functional.embedding`, from the rows of a table that it needs."""
    look_up = weight.look_up if isinstance(weight, AbsentWeight) else None
    is_trained = look_up is not None and weight.is_at_hand and weight.requires_grad and torch.is_grad_enabled()
    # torch takes no other ids
    is_of_ids = not isinstance(input, WeightStandIn) and input.dtype in (torch.int64, torch.int32)
    if look_up is None or max_norm is not None or not is_of_ids or (is_trained and sparse):
        return None
    with torch.no_grad():
        if input.numel() == 1:
            rows = look_up(input.cpu().reshape(1).long()).view(*input.shape, -1)
        else:
            distinct, renumbered = torch.unique(input.cpu(), return_inverse=True)
            rows = torch.nn.functional.embedding(renumbered.to(weight.device), look_up(distinct.long()))
    if not is_trained:
        return rows
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    return _TrainableRows.apply(weight, rows, input, padding, scale_grad_by_freq)  # type: ignore[no-any-return, no-untyped-call]


class _TrainableRows(torch.autograd.Function):
    """Rows of a table that is at hand, with the gradient of torch's embedding for the whole of it."""

    @staticmethod
    def forward(context: Any, weight: AbsentWeight, rows: torch.Tensor, ids: torch.Tensor, *form: Any) -> torch.Tensor:
        context.save_for_backward(ids)
        context.form = len(weight), *form
        return rows.view_as(rows)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = context.saved_tensors
        gradient = torch.ops.aten.embedding_dense_backward(gradients[0].contiguous(), ids, *context.form)
        return gradient, None, None, None, None


def _linear_in_pieces(input: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    """The answer to `torch.nn.functional.linear`, piece by piece."""
    multiply = weight.by_pieces if isinstance(weight, AbsentWeight) else None
    if multiply is None or bias is not None or (torch.is_grad_enabled() and input.requires_grad):
        return None
    return multiply(input, torch.nn.functional.linear)


AbsentWeight._answers = {
    torch.nn.functional.embedding: _embedding,
    torch.nn.functional.linear: _linear_in_pieces,
    torch.clone: _clone,
    torch.Tensor.clone: _clone,
    torch.Tensor.new_tensor: _new_tensor,
}


class _Untrainable(torch.autograd.Function):
    """A copy of the value whose backward pass is refused."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> None:
        raise AbsentWeightError(
            "This model is streamed and cannot be trained: its weights are not in memory for a backward pass.",
            "Load it with enough max_memory for all of it; then an adapter (LoRA) can be trained, compressed or not. "
            "Without a backward pass, call it under torch.no_grad().",
        )


def untrainable(output: Any, inputs: Sequence[Any], *, training: bool) -> Any:
    """The output of a pass without gradients, whose loss refuses a backward pass with an `AbsentWeightError`.

    In training mode, or where an input wants a gradient, all other tensors refuse it too.

    Args:
        output: of a forward, changed in place where that is possible.
        inputs: arguments of the forward.
        training: whether the model is in training mode.
    """
    if not torch.is_grad_enabled():
        return output
    training = training or any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)

    def refusing(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_inference() or not value.is_floating_point():
            return value
        return _Untrainable.apply(value, torch.zeros((), requires_grad=True, device="cpu"))  # type: ignore[no-untyped-call]

    if isinstance(output, dict):
        for name in [*output] if training else [name for name in output if name == "loss"]:
            output[name] = refusing(output[name])
    elif training and isinstance(output, tuple):
        return tuple(map(refusing, output))
    return output


def called_by(package: str) -> bool:
    """Whether the nearest caller that is neither torch nor ours is in this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in ("torch", "rabbitllm"):
            return name == package
        frame = frame.f_back
    return False


class LinearProduct(Protocol):
    """Multiplies inputs of a Linear by its weight; see `_siblings.Sibling`."""

    def linear(self, x: torch.Tensor, own: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """`x @ W.T + bias`."""


class QuantizedWeight(WeightStandIn):
    """A quantized matrix as a tensor.

    Args:
        matrix: the matrix.
        dtype: of the tensor.
        sibling: multiplies it, together with other weights; None for its own product.
    """

    matrix: StoredMatrix
    sibling: LinearProduct | None
    joint: Any = None
    """What the sibling keeps."""
    calls: Any = None
    """What computes it together with other matrices."""
    rounding: Any = None
    """Its matrix as a Linear multiplies it that rounds its inputs first."""
    _why = "only its codes are in memory"

    @staticmethod
    def __new__(cls, matrix: StoredMatrix, dtype: torch.dtype, sibling: LinearProduct | None = None) -> QuantizedWeight:
        form = {"dtype": dtype, "device": matrix.payload.device}
        with torch.inference_mode(False):  # what a pass makes may be kept, and a later one computes gradients with it
            weight: QuantizedWeight = cls._without_storage(matrix.form.shape, **form)
        weight.matrix, weight.sibling = matrix, sibling
        return weight

    def whole(self) -> torch.Tensor:
        """The matrix, dequantized."""
        return self.matrix.dequantized(self.dtype)

    def again(self) -> QuantizedWeight:
        """Another object for the same codes."""
        return QuantizedWeight(self.matrix, self.dtype, self.sibling)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        copied = memo[id(self)] = QuantizedWeight(self.matrix.clone(), self.dtype)  # without siblings
        copied.__dict__.update(self._marks())
        copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch._tensor._rebuild_from_type_v2, (type(self), type(self), (self.matrix, self.dtype), self._marks())

    def _marks(self) -> dict[str, Any]:
        own = ("matrix", "sibling", "joint", "calls", "rounding", "_reference")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedWeight({tuple(self.shape)}, {self.dtype}, stored at {self.matrix.form.scheme})"

    @classmethod
    def _operation(cls, func: Any, args: tuple[Any, ...]) -> Any:
        if func is not torch.ops.aten.clone.default:
            return None
        return QuantizedWeight(args[0].matrix.clone(), args[0].dtype)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Like `torch.nn.functional.linear`, whose arguments may be passed by name."""
    if isinstance(input, QuantizedWeight) or not isinstance(weight, QuantizedWeight) or is_transformed():
        return torch.nn.functional.linear(*map(_whole, (input, weight, bias)))
    if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
        return _Differentiable.apply(input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    if weight.sibling is not None:
        return weight.sibling.linear(input, weight, bias)
    return weight.matrix.linear(input, bias)


def _matmul(input: Any = None, weight: Any = None, **options: Any) -> torch.Tensor | None:
    """The answer to `input @ weight`; None if that is multiplied by rows, a shape differs, or gradients are needed."""
    matrix = weight.matrix if isinstance(weight, QuantizedWeight) else None
    if not isinstance(matrix, TurnedMatrix) or options or isinstance(input, QuantizedWeight) or is_transformed():
        return None
    if input.dtype is not torch.bfloat16 or input.dim() != 2 or input.shape[1] != matrix.form.shape[0]:
        return None
    return None if torch.is_grad_enabled() and input.requires_grad else matrix.times(input)


def _product_of_views(product: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The answer to a product: that of the values, without an operation's detour; None if gradients are needed."""
    views = [each for each in (*args, *options.values()) if isinstance(each, WeightView)]
    if torch.is_grad_enabled() and any(view.requires_grad for view in views):
        return None
    args, options = tree_map(lambda each: each.plain if isinstance(each, WeightView) else each, (args, options))
    return product(*args, **options)


_PRODUCTS = torch.mm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__
WeightView._answers = {
    product: functools.partial(_product_of_views, product) for product in (torch.nn.functional.linear, *_PRODUCTS)
}
QuantizedWeight._answers = {torch.nn.functional.linear: _linear, **dict.fromkeys(_PRODUCTS, _matmul)}


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
            of_input = gradient @ context.weight.whole().to(gradient.dtype)
        if context.needs_input_grad[2]:
            of_bias = gradient.flatten(0, -2).sum(0)
        return of_input, None, of_bias
