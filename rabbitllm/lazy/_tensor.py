"""A tensor that is read from its file when it is used in a torch function.

It is a `torch.Tensor` without memory (a meta tensor of its shape, dtype and strides), so that all code that expects a
tensor accepts it: also `load_state_dict` with `assign=True`, after which a module has ordinary parameters. Every
function of torch with such an argument calls `__torch_function__` first and gets an ordinary CPU tensor instead. Code
that accesses the memory without it, such as an extension in C++, fails as with any meta tensor.

The first function makes the tensor. The lazy tensor keeps it and stands for it from then on, so that it can be written
to in place and viewed like any other. (A write could not be detected afterwards: batch normalisation changes its
buffers without a trace.) Functions that are known to copy are the exception: tensors that are made for them are freed
after them, so that filling a model from a checkpoint keeps one tensor at a time in memory; and `copy_` reads the bytes
directly into its target if there is nothing to convert. Nothing else is cached: the mapping makes a new lazy tensor at
each look-up and keeps none.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rabbitllm.formats.tensor_spec import DTYPES, TensorSpec, torch_dtype
from rabbitllm.lazy._files import JoinedFiles, ShardFile


def _getter(name: str) -> Any:
    """The function that `__torch_function__` gets for an attribute of a tensor."""
    return getattr(torch.Tensor, name).__get__


_ELSEWHERE: Mapping[Any, object] = {
    _getter("device"): torch.device("cpu"),
    _getter("is_cpu"): True,
    _getter("is_meta"): False,
    torch.Tensor.get_device: -1,
}
"""Functions for which the meta tensor's result would differ from the tensor's -> the tensor's result."""
_PROPERTIES = (
    "shape", "dtype", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "grad", "grad_fn", "is_leaf", "is_cuda",
    "is_sparse", "is_quantized", "is_nested",
)  # fmt: skip
_METHODS = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_contiguous", "is_floating_point",
    "is_complex", "is_signed", "is_conj", "is_neg", "__len__", "_is_view",
)  # fmt: skip
_DESCRIBING: frozenset[Any] = frozenset(
    [_getter(name) for name in _PROPERTIES]
    + [getattr(torch.Tensor, name) for name in _METHODS]
    + [torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed]
)
"""Functions that need no bytes; the meta tensor's result is used."""
_COPYING: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name) for name in ("copy_", "clone", "to", "cuda", "float", "half", "bfloat16", "double")]
    + [torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.equal]
    + [torch.clone, torch.cat, torch.concat, torch.concatenate, torch.stack, torch.equal]
    + [torch.empty_like, torch.zeros_like, torch.ones_like]
)
"""Functions whose result does not refer to their arguments, unless they return one of them or write to it."""


class LazyTensor(torch.Tensor):
    """A tensor of a checkpoint, read when it is used. `rabbitllm.lazy_load` makes them.

    Shape, dtype, strides and all that follows from them are available without reading. Results of torch functions are
    ordinary tensors; an in-place function returns the lazy tensor itself. Pickles and deep copies are ordinary tensors
    too. Indexing a mapped tensor reads only the pages that are used (of a split, all of it is compared first); if the
    file is read and not mapped, `tensor[3:5]` reads these rows alone, into a tensor of their own.

    Attributes:
        spec: its name, dtype, shape, location (`file`, `offset`, `nbytes`) and strides in the file.
        path: the file.
    """

    spec: TensorSpec
    _file: ShardFile | JoinedFiles
    _lock: threading.Lock
    _kept: torch.Tensor | None
    _made: weakref.ref[torch.Tensor] | None

    @staticmethod
    def __new__(cls, spec: TensorSpec, file: ShardFile | JoinedFiles, kept: torch.Tensor | None = None) -> LazyTensor:
        with torch.inference_mode(False), torch._C.DisableTorchFunction():
            tensor = torch.Tensor._make_subclass(cls, _described(spec, file) if kept is None else kept.to("meta"))
        tensor.spec, tensor._file, tensor._lock, tensor._kept, tensor._made = spec, file, threading.Lock(), kept, None
        return tensor

    def __init__(self, spec: TensorSpec, file: ShardFile | JoinedFiles, kept: torch.Tensor | None = None) -> None:
        super().__init__()

    @property
    def path(self) -> Path:
        """The file that it is in."""
        return self._file.path

    def read(self) -> torch.Tensor:
        """The tensor as an ordinary one, mapped if possible; this one keeps it and stands for it from now on.

        Raises:
            ClosedCheckpointError: it has not been read, and its file is closed.
            CorruptShardError: it has not been read, and its file has changed since it was opened.
            IncompleteSplitError: it has not been read, and a checksum of its layer file differs.
        """
        return self._keep(self._ordinary())

    def _ordinary(self) -> torch.Tensor:
        """An ordinary tensor: the one that is kept, one that another function still uses, or a new one."""
        with self._lock:
            ordinary = self._kept if self._kept is not None else self._made() if self._made is not None else None
            if ordinary is None:
                ordinary = self._file.tensor(self.spec)
                self._made = weakref.ref(ordinary)
            return ordinary

    def _keep(self, ordinary: torch.Tensor) -> torch.Tensor:
        with self._lock:
            if self._kept is None:
                self._kept = ordinary
                self._file.hold_mapping()
            return self._kept

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyTensor) and first._kept is None:
            if func in _ELSEWHERE:
                return _ELSEWHERE[func]
            if func in _DESCRIBING:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is torch.Tensor.__getitem__ and (rows := first._rows(args[1])) is not None:
                return rows
        if func is torch.Tensor.copy_ and len(args) > 1 and isinstance(args[1], LazyTensor) and args[1]._fill(first):
            return first
        used: dict[int, tuple[LazyTensor, torch.Tensor]] = {}
        args, kwargs = _ordinary_in(args, used), _ordinary_in(kwargs, used)
        result = func(*args, **kwargs)
        for lazy, tensor in used.values():
            if func not in _COPYING or tensor._version or result is tensor:
                lazy._keep(tensor)
        if isinstance(first, LazyTensor) and func in (torch.Tensor.detach, torch.detach):
            return LazyTensor(first.spec, first._file, result)  # `Parameter` requires the same type; see `_is_param`
        return next((lazy for lazy, tensor in used.values() if result is tensor), result)

    def _fill(self, target: Any) -> bool:
        """Read the bytes directly into an ordinary tensor, such as a parameter of a model.

        This is several times as fast as touching the pages of a mapping. False if torch has to convert or to record.
        """
        if self._kept is not None or (self._made is not None and self._made() is not None):
            return False
        if type(target) not in (torch.Tensor, torch.nn.Parameter) or target.device.type != "cpu":
            return False
        if (target.dtype, target.shape) != (self.dtype, self.shape) or not target.is_contiguous() or target.is_neg():
            return False
        if target.is_conj() or target.is_inference() or (target.requires_grad and torch.is_grad_enabled()):
            return False
        if not self.spec.nbytes:
            return False
        buffer = target.detach().view(-1).view(torch.uint8).numpy().data
        if not self._file.fill(self.spec, memoryview(buffer)):
            return False
        torch.autograd.graph.increment_version(target)
        return True

    def _rows(self, index: object) -> torch.Tensor | None:
        """The rows that an index of the first dimension selects, read without the rest of the tensor.

        None for any other index, and for a tensor that is mapped: indexing it reads nothing.
        """
        spec = self.spec
        if self._file.viewable(spec) or not self._file.has_rows(spec):
            return None
        if len(spec.shape) < (1 if DTYPES[spec.dtype].bits >= 8 else 2):
            return None
        rows = spec.shape[0]
        if isinstance(index, slice):
            begin, end, step = index.indices(rows)
            if step != 1:
                return None
        elif type(index) is int and -rows <= index < rows:
            begin = index % rows
            end = begin + 1
        else:
            return None
        count, row_bytes = max(0, end - begin), spec.nbytes // rows
        part = spec._replace(
            shape=(count, *spec.shape[1:]), offset=spec.offset + begin * row_bytes, nbytes=count * row_bytes
        )
        read = self._file.tensor(part)
        return read if isinstance(index, slice) else read[0]

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """Become a genuine parameter: `torch.nn.Parameter(tensor)` sets this for a tensor of another class."""
        parameter = torch.nn.Parameter(self.read(), requires_grad=self.requires_grad)
        with torch._C.DisableTorchFunctionSubclass():
            torch.utils.swap_tensors(self, parameter)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor."""
        tensor: torch.Tensor = copy.deepcopy(self._ordinary(), memo)
        memo[id(self)] = tensor
        return tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the ordinary tensor that it stands for."""
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __format__(self, specification: str) -> str:
        """A number as a number, anything else as its description."""
        return object.__format__(self, specification) if self.dim() else format(self.read(), specification)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        strides = "" if self.is_contiguous() else f", strides={tuple(self.stride())}"
        return (
            f"{type(self).__name__}({self.spec.name!r}, shape={tuple(self.shape)}{strides}, dtype={self.dtype}, "
            f"file={str(self.path)!r}, offset={self.spec.offset}, nbytes={self.spec.nbytes}, "
            f"{'not read' if self._kept is None else 'read'})"
        )


def _described(spec: TensorSpec, file: ShardFile | JoinedFiles) -> torch.Tensor:
    """A meta tensor like the one that `file` makes from `spec`."""
    bits = DTYPES[spec.dtype].bits
    shape = spec.shape if bits >= 8 else (*spec.shape[:-1], spec.shape[-1] * bits // 8)
    dtype = torch_dtype(spec.dtype)
    if spec.strides is None or not file.viewable(spec):
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, spec.strides, dtype=dtype, device="meta")


def _ordinary_in(value: Any, used: dict[int, tuple[LazyTensor, torch.Tensor]]) -> Any:
    """The value with ordinary tensors instead of lazy ones, at any depth; adds each pair to `used`."""
    if isinstance(value, LazyTensor):
        if id(value) not in used:
            used[id(value)] = (value, value._ordinary())
        return used[id(value)][1]
    if type(value) in (tuple, list):
        return type(value)(_ordinary_in(item, used) for item in value)
    if type(value) is dict:
        return {key: _ordinary_in(item, used) for key, item in value.items()}
    return value
