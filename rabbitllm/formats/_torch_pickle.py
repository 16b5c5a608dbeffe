"""torch's objects in a pickle as records: storages and tensors as spans of bytes, dtypes and devices as names; and the
names of the tensors in the saved value.

Source: `torch.save` and the globals that `torch.load(weights_only=True)` allows
(https://github.com/pytorch/pytorch, torch/serialization.py, torch/_weights_only_unpickler.py, torch/_utils.py). Less
is allowed here: no sparse, quantized, nested or distributed tensors, no subclasses, and only safetensors' element
types. torch itself is never imported.

A flat dict keeps its names, as torch and transformers see them. Keys of nested dicts are joined with dots. The state
dict in a training checkpoint (`{"model": {...}, "optimizer": {...}}`) is unwrapped if nothing else in it could be
weights; the keys left out are reported.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rabbitllm.errors import CorruptShardError, UnsafePickleError
from rabbitllm.formats.pickle_reader import (
    Attributed,
    Global,
    RefusedValueError,
    describe,
    read_leading_pickle,
    read_pickle,
)
from rabbitllm.formats.tensor_spec import DTYPES

_Call: TypeAlias = Callable[[tuple[Any, ...]], object]

MAX_DIMENSIONS = 64
"""torch's own limit."""
MAX_SIZE = 1 << 63


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of bytes that tensors view: in a zip, the entry `data/<key>`.

    Attributes:
        key: digits.
        dtype: a key of `DTYPES`, or None for bytes that each tensor interprets in its own dtype.
        nbytes: its length.
    """

    key: str
    dtype: str | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor in a pickle, checked to lie within its storage.

    Attributes:
        storage: the storage that it views.
        dtype: a key of `DTYPES`.
        first: index of its first element, from the start of the storage.
        shape: as torch counts it (two F4 values are one element).
        strides: in elements, one per dimension, never negative.
    """

    storage: Storage
    dtype: str
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_pickle(data: bytes, file: str) -> tuple[object, Mapping[str, Storage]]:
    """The value saved by `torch.save`, with records instead of tensors, and its storages by key.

    Args:
        data: the whole pickle.
        file: name for messages.

    Raises:
        UnsafePickleError, CorruptShardError: see `read_pickle`.
    """
    storages: dict[str, Storage] = {}
    return read_pickle(data, _KNOWN, _recording(storages, _storage), file), storages


def read_legacy_torch_pickle(data: bytes, begin: int, file: str) -> tuple[object, Mapping[str, Storage], int]:
    """The same for the pickle in a file from before torch 1.6, which others follow; with the offset of the next one.

    Args:
        data: the beginning of the file.
        begin: offset of the pickle in it.
        file: name for messages.
    """
    storages: dict[str, Storage] = {}
    root, end = read_leading_pickle(data, begin, _KNOWN, _recording(storages, _legacy_storage), file)
    return root, storages, end


def read_plain_pickle(data: bytes, begin: int, file: str) -> tuple[object, int]:
    """The value of a pickle of plain values without globals, and the offset of the bytes after it."""
    return read_leading_pickle(data, begin, {}, _no_storage, file)


def _recording(storages: dict[str, Storage], read: Callable[[object], Storage]) -> Callable[[object], Storage]:
    def persistent(identity: object) -> Storage:
        storage = read(identity)
        if storages.setdefault(storage.key, storage) != storage:
            raise RefusedValueError(f"names storage {storage.key} again, with another type or size")
        return storage

    return persistent


def _no_storage(identity: object) -> Storage:
    raise RefusedValueError(f"refers to {describe(identity)}; expected plain values")


def _legacy_storage(identity: object) -> Storage:
    if type(identity) is not tuple or len(identity) != 6:
        raise RefusedValueError(
            f"refers to {describe(identity)}; expected type, key, location, size and view of a storage"
        )
    if identity[5] is not None:
        raise RefusedValueError("refers to a part of a storage, as torch wrote it before 0.4")
    return _storage(identity[:5])


def element_bytes(dtype: str) -> int:
    """Bytes of one element as torch counts them."""
    return max(1, DTYPES[dtype].bits // 8)


def _storage(identity: object) -> Storage:
    if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
        raise RefusedValueError(f"refers to {describe(identity)}; expected type, key, location and size of a storage")
    _, storage_type, key, location, elements = identity
    if not isinstance(storage_type, Global) or storage_type.name not in _STORAGE_DTYPES:
        raise RefusedValueError(f"refers to a storage of type {describe(storage_type)}")
    if type(key) is not str or not (key.isascii() and key.isdigit()) or len(key) > 20:
        raise RefusedValueError(f"refers to a storage by {describe(key)}; expected digits")
    if type(location) is not str:
        raise RefusedValueError(f"refers to a storage on {describe(location)}; expected a device's name")
    dtype = _STORAGE_DTYPES[storage_type.name]
    return Storage(key, dtype, _check_natural(elements, "a storage's size") * (element_bytes(dtype) if dtype else 1))


def _check_natural(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value < MAX_SIZE:
        raise RefusedValueError(f"has {describe(value)} as {name}; expected a natural number")
    return value


def _check_naturals(value: object, name: str) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > MAX_DIMENSIONS:
        raise RefusedValueError(f"has {describe(value)} as {name}; expected at most {MAX_DIMENSIONS} natural numbers")
    return tuple(_check_natural(part, name) for part in value)


def _tensor(arguments: tuple[Any, ...], dtype: object, metadata: object) -> PickledTensor:
    """A tensor from (storage, first element, shape, strides), checked to lie within its storage."""
    storage = arguments[0]
    if not isinstance(storage, Storage):
        raise RefusedValueError(f"is given {describe(storage)} as a storage")
    if not isinstance(dtype, str):
        raise RefusedValueError(f"is given {describe(dtype)} as a dtype")
    if metadata:  # torch marks conjugated or negated tensors; their bytes are not the values
        raise RefusedValueError("makes a conjugated or negated view, whose bytes are not its values")
    _check_requires_grad(arguments[4])
    first = _check_natural(arguments[1], "its first element")
    shape, strides = _check_naturals(arguments[2], "a shape"), _check_naturals(arguments[3], "strides")
    if len(shape) != len(strides):
        raise RefusedValueError(f"has {len(shape)} sizes and {len(strides)} strides")
    if math.prod(size or 1 for size in shape) >= MAX_SIZE:
        raise RefusedValueError(f"has shape {shape}; no tensor is that large")
    available = storage.nbytes // element_bytes(dtype)
    elements = math.prod(shape)
    if elements > available:
        raise RefusedValueError(f"makes {elements:,} elements of a storage that has {available:,}")
    if not elements:  # an empty slice of an empty tensor begins behind its storage
        first = 0
    last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if elements else -1
    if last >= available:
        raise RefusedValueError(f"reaches element {last:,} of a storage that has {available:,}")
    return PickledTensor(storage, dtype, first, shape, strides)


def _rebuild_tensor_v2(arguments: tuple[Any, ...]) -> PickledTensor:
    """storage, first element, shape, strides, requires_grad, hooks, [metadata]."""
    storage = arguments[0]
    return _tensor(arguments, storage.dtype if isinstance(storage, Storage) else None, _rest(arguments, 6))


def _rebuild_tensor_v3(arguments: tuple[Any, ...]) -> PickledTensor:
    """storage, first element, shape, strides, requires_grad, hooks, dtype, [metadata]."""
    storage, dtype = arguments[0], arguments[6]
    if isinstance(storage, Storage) and storage.dtype is not None:
        raise RefusedValueError(f"is given a storage of {storage.dtype}; expected one of bytes")
    return _tensor(arguments, _DTYPE_NAMES.get(dtype.name) if isinstance(dtype, Global) else None, _rest(arguments, 7))


def _rest(arguments: tuple[Any, ...], index: int) -> object:
    """The optional metadata; only an empty one is accepted."""
    metadata = arguments[index] if len(arguments) > index else None
    if metadata is not None and type(metadata) is not dict:
        raise RefusedValueError(f"is given {describe(metadata)} as metadata")
    return metadata


def _rebuild_parameter(arguments: tuple[Any, ...]) -> PickledTensor:
    """tensor, requires_grad, hooks, [state]."""
    if not isinstance(arguments[0], PickledTensor):
        raise RefusedValueError(f"is given {describe(arguments[0])}; expected a tensor")
    _check_requires_grad(arguments[1])
    return arguments[0]


def _check_requires_grad(value: object) -> None:
    """Not used here, but torch accepts nothing else."""
    if type(value) is not bool:
        raise RefusedValueError(f"is given {describe(value)} as requires_grad")


def _rebuild_from_type(arguments: tuple[Any, ...]) -> object:
    """function, class, its arguments, attributes (which are dropped)."""
    function, tensor_type, inner, _ = arguments
    if not isinstance(function, Global) or not function.name.startswith("torch._utils.") or function.call is None:
        raise RefusedValueError(f"is given {describe(function)}; expected a function that rebuilds a tensor")
    if not isinstance(tensor_type, Global) or tensor_type.name not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        raise RefusedValueError(f"is given {describe(tensor_type)}; expected the class of a plain tensor")
    if type(inner) is not tuple:
        raise RefusedValueError(f"is given {describe(inner)}; expected a tuple")
    return function.call(inner)


def _passes_through(value_type: type, default: Callable[[], object]) -> _Call:
    """A constructor that takes one value of a type and returns it."""

    def call(arguments: tuple[Any, ...]) -> object:
        if arguments and type(arguments[0]) is not value_type:
            raise RefusedValueError(f"is given {describe(arguments[0])}; expected a {value_type.__name__}")
        return arguments[0] if arguments else default()

    return _taking(0, 1, call)


def _device(arguments: tuple[Any, ...]) -> str:
    if type(arguments[0]) is not str or any(type(index) is not int for index in arguments[1:]):
        raise RefusedValueError(f"is given {describe(arguments[0])}; expected a device's name")
    return ":".join(str(part) for part in arguments)


def _encoded(arguments: tuple[Any, ...]) -> bytes:
    """Bytes, written by protocol 2 as Latin-1 text to be encoded."""
    text, encoding = arguments
    if type(text) is not str or encoding != "latin1":
        raise RefusedValueError(f"is given {describe(text)} and {describe(encoding)}; expected text and 'latin1'")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise RefusedValueError("is given text that is not Latin-1") from None


def _complex(arguments: tuple[Any, ...]) -> complex:
    if not all(type(part) is float for part in arguments):
        raise RefusedValueError("is not given two numbers")
    return complex(*arguments)


def _taking(minimum: int, maximum: int, call: _Call) -> _Call:
    """A function that checks the number of its arguments."""

    def checked(arguments: tuple[Any, ...]) -> object:
        if not minimum <= len(arguments) <= maximum:
            raise RefusedValueError(f"is given {len(arguments)} arguments; expected {minimum} to {maximum}")
        return call(arguments)

    return checked


_STORAGE_DTYPES: Mapping[str, str | None] = {
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
    "torch.ComplexFloatStorage": "C64",
    "torch.storage.UntypedStorage": None,
}
_DTYPE_NAMES = {f"torch.{dtype.torch_name}": name for name, dtype in DTYPES.items()}

_CALLS: Mapping[str, _Call | None] = {
    "collections.OrderedDict": _taking(0, 0, lambda _: Attributed()),
    "collections.Counter": _passes_through(dict, dict),
    "builtins.set": _passes_through(list, list),
    "builtins.bytes": _passes_through(bytes, bytes),
    "builtins.bytearray": _passes_through(bytes, bytes),
    "builtins.complex": _taking(2, 2, _complex),
    "_codecs.encode": _taking(2, 2, _encoded),
    "torch.Size": _passes_through(tuple, tuple),
    "torch.device": _taking(1, 2, _device),
    "torch.Tensor": None,
    "torch.nn.parameter.Parameter": None,
    "torch._utils._rebuild_tensor": _taking(4, 4, lambda arguments: _rebuild_tensor_v2((*arguments, False, None))),
    "torch._utils._rebuild_tensor_v2": _taking(6, 7, _rebuild_tensor_v2),
    "torch._utils._rebuild_tensor_v3": _taking(7, 8, _rebuild_tensor_v3),
    "torch._utils._rebuild_parameter": _taking(3, 4, _rebuild_parameter),
    "torch._utils._rebuild_parameter_with_state": _taking(3, 4, _rebuild_parameter),
    "torch._tensor._rebuild_from_type_v2": _taking(4, 4, _rebuild_from_type),
    **dict.fromkeys(_STORAGE_DTYPES),
    **dict.fromkeys(_DTYPE_NAMES),
}


def _table() -> dict[tuple[str, str], Global]:
    table = {}
    for full, call in _CALLS.items():
        module, _, name = full.rpartition(".")
        table[module, name] = Global(full, call)
        if module == "builtins":  # its name in protocol 2
            table["__builtin__", name] = table[module, name]
    return table


_KNOWN = _table()


MAX_DEPTH = 32
MAX_VALUES = 1_000_000
"""Limit of visited values; a few pickled bytes can refer to one list very often."""
MAX_NAME = 1024

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net")
"""Keys of the model's state dict in training checkpoints."""
_TRAINING = {
    *("optimizer", "optimizers", "optimizer_state", "optimizer_states", "optimizer_state_dict", "optim", "optim_state"),
    *("scheduler", "schedulers", "lr_scheduler", "lr_schedulers", "lr_scheduler_state_dict", "scheduler_state_dict"),
    *("scaler", "grad_scaler", "rng_state", "rng_states", "cuda_rng_state", "random_rng_state", "callbacks", "loops"),
}
"""Keys of a training checkpoint whose tensors are not weights of the model."""

_REMEDY = "Save a dict of names and tensors, for instance model.state_dict(), and use that file."


def name_tensors(root: object, file: str) -> tuple[dict[str, PickledTensor], list[tuple[str, list[PickledTensor]]]]:
    """The tensors of a checkpoint by name, in the pickle's order; and the keys that are left out, with their tensors.

    Args:
        root: the value of the pickle.
        file: name for messages.

    Raises:
        CorruptShardError: the value is not a dict or has no tensor, or a name is repeated or not plain text.
        UnsafePickleError: the value contains itself, or exceeds the limits of nesting or size.
    """
    if not isinstance(root, dict):
        raise CorruptShardError(f"{file} holds {describe(root)}; expected a dict of tensors.", _REMEDY)
    visited = itertools.count(1)
    weights, left_out = _unwrapped(root, visited, file)
    tensors: dict[str, PickledTensor] = {}
    for path, tensor in _tensors_in(weights, visited, file):
        name = ".".join(path)
        if not name or not name.isprintable() or len(name) > MAX_NAME:
            raise CorruptShardError(f"{file} has a tensor named {name[:80]!r}, which is not plain text.", _REMEDY)
        if name in tensors:
            raise CorruptShardError(f"{file} has two tensors named {name!r}.", _REMEDY)
        tensors[name] = tensor
    if not tensors:
        raise CorruptShardError(f"{file} has no named tensor.", _REMEDY)
    visited = itertools.count(1)
    return tensors, [(key, [tensor for _, tensor in _tensors_in(value, visited, file)]) for key, value in left_out]


def _unwrapped(
    root: Mapping[Any, object], visited: Iterator[int], file: str
) -> tuple[Mapping[Any, object], list[tuple[str, object]]]:
    """The innermost state dict, and the other keys of the dicts around it with their values."""
    weights, left_out = root, list[tuple[str, object]]()
    for _ in range(MAX_DEPTH):
        holding = [
            key
            for key, value in weights.items()
            if key not in _TRAINING and next(_tensors_in(value, visited, file), None) is not None
        ]
        if len(holding) != 1 or holding[0] not in WRAPPERS or not isinstance(weights[holding[0]], dict):
            break
        left_out += [(str(key), value) for key, value in weights.items() if key != holding[0]]
        inner = weights[holding[0]]
        assert isinstance(inner, dict)
        weights = inner
    return weights, left_out


def _tensors_in(
    value: object, visited: Iterator[int], file: str, path: tuple[str, ...] = (), above: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[str, ...], PickledTensor]]:
    """Every tensor with the keys that lead to it, in order; `above` has the ids of the containers of `value`."""
    if isinstance(value, PickledTensor):
        yield path, value
    elif id(value) in above:
        raise UnsafePickleError(f"{file} holds {describe(value)} that contains itself.", _REMEDY)
    elif len(above) >= MAX_DEPTH:
        raise UnsafePickleError(f"{file} is nested more than {MAX_DEPTH} deep.", _REMEDY)
    else:
        for key, inner in _children(value):
            if next(visited) > MAX_VALUES:
                raise UnsafePickleError(f"{file} holds more than {MAX_VALUES:,} values.", _REMEDY)
            if isinstance(inner, PickledTensor | dict | list | tuple):
                yield from _tensors_in(inner, visited, file, (*path, str(key)), (*above, id(value)))


def _children(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, dict):
        return iter(value.items())
    return iter(enumerate(value)) if isinstance(value, list | tuple) else iter(())
