"""Tensors that stand for weights: placeholders of those that are not in memory, and quantized matrices.

Neither can be written to. Merging an adapter, loading other weights or initialising again would be lost with the next
pass, or have no effect, without an error. So functions that write are refused, by name. Reading a weight that is not in
memory makes the weight itself, or is refused too. A quantized weight of a Linear is multiplied from its codes by
`torch.nn.functional.linear`; any other operation uses a dequantized matrix, made for that operation only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from rabbitllm.errors import AbsentWeightError, ReadOnlyWeightError
from rabbitllm.quant.schemes import Quantized

_HARMLESS = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_", "retain_grad"})
"""In-place methods that do not change the values."""


def refuse_writing(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, kind: type, why: str
) -> None:
    """Refuse a function of torch that would write to a weight of this kind.

    Args:
        func, args, kwargs: from `__torch_function__`.
        kind: the type of the weights.
        why: the reason, for the message.

    Raises:
        ReadOnlyWeightError: the function writes to such a weight.
    """
    named = kwargs or {}
    target = args[0] if args else named.get("tensor", named.get("input"))  # torch.nn.init passes it by name
    written = isinstance(target, kind) and _writes_to_the_first(func)
    if written or isinstance(named.get("out"), kind):
        raise ReadOnlyWeightError(
            f"A weight of this model cannot be written to: {why}.",
            "Leave an adapter unmerged: then it changes no weights. To merge it, or to change weights, load the "
            "model uncompressed and with enough max_memory for all of it, or with transformers itself.",
        )


def _writes_to_the_first(func: Callable[..., Any]) -> bool:
    if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        return True
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and hasattr(torch.Tensor, name[:2] + name[3:]))
    return name.endswith("_") and name not in _HARMLESS


_BY_MEMORY = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__})
_ADDRESSES = frozenset({torch.Tensor.data_ptr, torch.Tensor.storage})


def reads_memory(func: Callable[..., Any], why: str) -> bool:
    """Whether a function of torch reads a tensor's memory directly; all others read it through operations.

    Args:
        func: from `__torch_function__`.
        why: the reason why the tensor has no memory, for the message.

    Raises:
        AbsentWeightError: it returns the address or the storage.
    """
    if func in _ADDRESSES:
        raise AbsentWeightError(
            f"The memory of a weight was asked for, and the weight is not in memory as a matrix: {why}.",
            "weight * 1 is an ordinary tensor; model.save_pretrained(folder) writes all weights.",
        )
    return func in _BY_MEMORY


_ABSENT = "it is read from the disk when its layer computes"

_METADATA = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "name", "_version", "output_nr"),
        *("requires_grad", "requires_grad_", "grad", "_grad", "grad_fn", "retains_grad", "retain_grad"),
        *("_backward_hooks", "_post_accumulate_grad_hooks", "register_hook", "register_post_accumulate_grad_hook"),
        *("size", "dim", "ndimension", "numel", "element_size", "stride", "storage_offset", "dim_order", "get_device"),
        *("has_names", "untyped_storage", "result_type", "detach_", "rename_", "__len__", "__dir__"),
        *("__dlpack_device__",),
    }
)
"""Attributes, methods and functions of torch that need no values, by name; all `is_…` except `_VALUES` count too."""
_VALUES = frozenset({"is_nonzero", "is_set_to"})
"""Functions `is_…` that need values."""
_CONVERSIONS = frozenset(
    {"to", "type", "cpu", "cuda", "contiguous", "float", "double", "half", "bfloat16", "int", "long", "bool"}
)
"""Methods that return the tensor itself if there is no change."""
_OTHERS_FORM = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Methods of another tensor that take the dtype, the device or the shape of this one."""
_THE_SAME = frozenset({"data", "detach"})
"""Attributes and methods that return another object for the same weight."""


class AbsentWeight(torch.Tensor):
    """A placeholder of a weight that is not in memory: its shape, strides, dtype and device, and no values.

    These are available without reading. An operation that needs the values calls `bring` for the weight and computes
    with it; the result is an ordinary tensor. There is no storage, so no kernel can use other memory as the values.

    A meta tensor would not work: code that moves inputs to `weight.device` would move them to meta, and an embedding of
    meta ids returns garbage without an error.

    Args:
        bring: returns the weight itself, or raises if it cannot be read now.
        shape, dtype, device: of the weight.
        is_parameter: whether it is a parameter; else it is a buffer.
        marks: further attributes.
    """

    _is_hf_initialized = True  # transformers checks it before it initialises
    _bring: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(
        cls,
        bring: Callable[[], torch.Tensor],
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_parameter: bool = True,
        marks: Mapping[str, object] | None = None,
    ) -> AbsentWeight:
        needs = is_parameter and dtype.is_floating_point and dtype.itemsize > 1  # see `Place.bind`
        made: AbsentWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=needs
        )
        made.__dict__.update(marks or {})
        made._bring = bring
        made._is_param = is_parameter  # makes isinstance(made, nn.Parameter) true
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"AbsentWeight({tuple(self.shape)}, {self.dtype}, {self.device}, not in memory)"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentWeight:
        copied = self._again()
        copied.__dict__.update(vars(self))
        copied.requires_grad_(self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AbsentWeightError(
            "A weight of this model is not in memory, so it cannot be pickled (torch.save does that).",
            "model.save_pretrained(folder) writes the whole model.",
        )

    def _again(self) -> AbsentWeight:
        """Another object for the same weight, not a parameter, as from `detach`."""
        return AbsentWeight(self._bring, self.shape, self.dtype, self.device, is_parameter=False)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        name = _name_of(func)
        refuse_writing(func, args, named, AbsentWeight, _ABSENT)
        if name == "clone" and called_by("peft"):  # it clones the weights that it will merge into
            refuse_writing(torch.Tensor.copy_, args, None, AbsentWeight, _ABSENT)
        own = args[0] if args and isinstance(args[0], AbsentWeight) else None
        if (
            name in _METADATA
            or (name.startswith("is_") and name not in _VALUES)
            or (own is None and name in _OTHERS_FORM)
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        if own is not None and not any(isinstance(value, AbsentWeight) for value in (*args[1:], *named.values())):
            if name in _THE_SAME:
                return own._again()
            if name == "share_memory_":
                return own
            if name in _CONVERSIONS:
                empty = torch.empty(0, dtype=own.dtype, device=own.device)
                converted = func(empty, *args[1:], **named)
                if converted is empty:
                    return own
                if isinstance(converted, str):  # `type` names the dtype
                    return converted
            if name.endswith("_like") or name.startswith("new_"):
                form = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
                return func(form, *args[1:], **{**named, "device": named.get("device") or own.device})
        return func(*tree_map(_brought, args), **tree_map(_brought, named))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle operations that did not go through `__torch_function__`: those inside of others."""
        if func is torch.ops.aten.detach.default or func is torch.ops.aten.alias.default:
            return args[0]._again()
        if func is torch.ops.aten.is_pinned.default:
            return False
        return func(*tree_map(_brought, args), **tree_map(_brought, dict(kwargs or {})))


class _Untrainable(torch.autograd.Function):
    """A copy of the value whose backward pass is refused."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> None:
        raise AbsentWeightError(
            "This model is streamed and cannot be trained: its weights are not in memory for a backward pass.",
            "Load it with enough max_memory for all of it: then an adapter (LoRA) can be trained, compressed or not. "
            "Without a backward pass, call it under torch.no_grad().",
        )


def untrainable(output: Any, *, training: bool) -> Any:
    """The output of a pass without gradients, whose loss refuses a backward pass with an `AbsentWeightError`.

    In training mode all other tensors refuse it too.

    Args:
        output: of a forward, changed in place where that is possible.
        training: whether the model is in training mode.
    """
    if not torch.is_grad_enabled():
        return output

    def refusing(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.is_inference() or not value.is_floating_point():
            return value
        return _Untrainable.apply(value, torch.zeros((), requires_grad=True))  # type: ignore[no-untyped-call]

    if isinstance(output, dict):
        for name in [*output] if training else [name for name in output if name == "loss"]:
            output[name] = refusing(output[name])
    elif training and isinstance(output, tuple):
        return tuple(map(refusing, output))
    return output


def _brought(value: Any) -> Any:
    return value._bring() if isinstance(value, AbsentWeight) else value


def _name_of(func: Callable[..., Any]) -> str:
    """The name of a function or a method, or of the attribute that it gets or sets."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def called_by(package: str) -> bool:
    """Whether the nearest caller that is neither torch nor ours is in this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if name not in ("torch", "rabbitllm"):
            return name == package
        frame = frame.f_back
    return False


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


class WeightStandIn(torch.Tensor):
    """A read-only tensor that stands for a weight which is not in memory as a matrix.

    Some functions of torch are answered by the subclass. Any other one gets `whole()`, made for that function only.
    """

    _why: str
    """Why it cannot be written to, for messages."""
    _answers: Mapping[Any, Callable[..., Any]]
    """Function of torch -> one with the same arguments, which returns None for those that it does not answer."""

    def whole(self) -> torch.Tensor:
        """The weight as an ordinary tensor."""
        raise NotImplementedError

    def again(self) -> WeightStandIn:
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
        given = dict(kwargs or {})
        answer = cls._answers.get(func)
        if answer is not None and (found := answer(*args, **given)) is not None:
            return found
        refuse_writing(func, args, kwargs, cls, cls._why)
        if reads_memory(func, cls._why):
            return func(args[0].whole(), *args[1:], **given)
        with torch._C.DisableTorchFunctionSubclass():  # else its results would be of this type too
            return func(*args, **given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # called by nn.Parameter
            return args[0].again()
        found = cls._operation(func, args)
        if found is not None:
            return found
        return func(*tree_map(_whole, args), **tree_map(_whole, dict(kwargs or {})))


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, WeightStandIn) else value


class QuantizedWeight(WeightStandIn):
    """A quantized matrix as a tensor.

    Args:
        matrix: its stored parts; nothing is copied.
        dtype: of the tensor, and of the matrix when it is dequantized.
    """

    matrix: StoredMatrix
    _why = "it is there by its codes alone, at 4bit or 8bit"

    @staticmethod
    def __new__(cls, matrix: StoredMatrix, dtype: torch.dtype) -> QuantizedWeight:
        where = matrix.payload.device
        made: QuantizedWeight = torch.Tensor._make_wrapper_subclass(cls, matrix.form.shape, dtype=dtype, device=where)
        return made

    def __init__(self, matrix: StoredMatrix, dtype: torch.dtype) -> None:
        self.matrix = matrix

    def whole(self) -> torch.Tensor:
        """The matrix, dequantized."""
        return self.matrix.dequantized(self.dtype)

    def again(self) -> QuantizedWeight:
        """Another object for the same codes."""
        return QuantizedWeight(self.matrix, self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedWeight({tuple(self.shape)}, {self.dtype}, stored at {self.matrix.form.scheme})"

    @classmethod
    def _operation(cls, func: Any, args: tuple[Any, ...]) -> Any:
        if func is not torch.ops.aten.clone.default:
            return None
        old = args[0].matrix
        return QuantizedWeight(
            type(old)(old.form, old.payload.clone(), old.absmax.clone(), old.table.clone()), args[0].dtype
        )


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Like `torch.nn.functional.linear`, whose arguments may be passed by name."""
    if isinstance(input, QuantizedWeight) or not isinstance(weight, QuantizedWeight):
        return torch.nn.functional.linear(*map(_whole, (input, weight, bias)))
    if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
        return _Differentiable.apply(input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return weight.matrix.linear(input, bias)


QuantizedWeight._answers = {torch.nn.functional.linear: _linear}


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
