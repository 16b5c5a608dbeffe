"""Names of the tensors in a value saved by `torch.save`: a state dict directly, a training checkpoint unwrapped.

A flat dict keeps its names, as torch and transformers see them. Keys of nested dicts are joined with dots. The state
dict in a training checkpoint (`{"model": {...}, "optimizer": {...}}`) is unwrapped if nothing else in it could be
weights; the keys left out are reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rabbitllm.errors import CorruptShardError, UnsafePickleError
from rabbitllm.formats.pickle_machine import describe
from rabbitllm.formats.torch_pickle import PickledTensor

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


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The tensors by name, in the pickle's order, and the keys left out because they hold no weights."""

    tensors: Mapping[str, PickledTensor]
    left_out: tuple[str, ...]


def name_tensors(root: object, file: str) -> NamedTensors:
    """The names of all tensors of a checkpoint.

    Args:
        root: the value of the pickle.
        file: name for messages.

    Raises:
        CorruptShardError: the value is not a dict or has no tensor, or a name is repeated or not plain text.
        UnsafePickleError: the value contains itself, or exceeds the limits of nesting or size.
    """
    if not isinstance(root, dict):
        raise CorruptShardError(f"{file} holds {describe(root)}; expected a dict of tensors.", _REMEDY)
    looked_at = itertools.count(1)
    weights, left_out = _unwrapped(root, looked_at, file)
    tensors: dict[str, PickledTensor] = {}
    for path, tensor in _tensors_in(weights, looked_at, file):
        name = ".".join(path)
        if not name or not name.isprintable() or len(name) > MAX_NAME:
            raise CorruptShardError(f"{file} has a tensor named {name[:80]!r}, which is no plain text.", _REMEDY)
        if name in tensors:
            raise CorruptShardError(f"{file} has two tensors named {name!r}.", _REMEDY)
        tensors[name] = tensor
    if not tensors:
        raise CorruptShardError(f"{file} holds no tensor under a name.", _REMEDY)
    return NamedTensors(tensors, left_out)


def _unwrapped(
    root: Mapping[Any, object], looked_at: Iterator[int], file: str
) -> tuple[Mapping[Any, object], tuple[str, ...]]:
    """The innermost state dict, and the other keys of the dicts around it."""
    weights, left_out = root, []
    for _ in range(MAX_DEPTH):
        holding = [
            key for key, value in weights.items() if key not in _TRAINING and _holds_tensors(value, looked_at, file)
        ]
        if len(holding) != 1 or holding[0] not in WRAPPERS or not isinstance(weights[holding[0]], dict):
            break
        left_out += [str(key) for key in weights if key != holding[0]]
        inner = weights[holding[0]]
        assert isinstance(inner, dict)
        weights = inner
    return weights, tuple(left_out)


def _holds_tensors(value: object, looked_at: Iterator[int], file: str) -> bool:
    return next(_tensors_in(value, looked_at, file), None) is not None


def _tensors_in(root: object, looked_at: Iterator[int], file: str) -> Iterator[tuple[tuple[str, ...], PickledTensor]]:
    """Every tensor with the keys that lead to it, in order. Uses an explicit stack instead of recursion."""
    if isinstance(root, PickledTensor):
        yield (), root
    walks: list[Iterator[tuple[object, object]]] = [_children(root)]
    path: list[str] = []
    above = [id(root)]
    while walks:
        step = next(walks[-1], None)
        if step is None:
            walks.pop()
            above.pop()
            if path:
                path.pop()
            continue
        key, value = step
        if next(looked_at) > MAX_VALUES:
            raise UnsafePickleError(f"{file} holds more than {MAX_VALUES:,} values.", _REMEDY)
        if isinstance(value, PickledTensor):
            yield (*path, str(key)), value
        elif isinstance(value, dict | list | tuple):
            if id(value) in above:
                raise UnsafePickleError(f"{file} holds {describe(value)} that contains itself.", _REMEDY)
            if len(walks) >= MAX_DEPTH:
                raise UnsafePickleError(f"{file} is nested more than {MAX_DEPTH} deep.", _REMEDY)
            walks.append(_children(value))
            path.append(str(key))
            above.append(id(value))


def _children(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, dict):
        return iter(value.items())
    return iter(enumerate(value)) if isinstance(value, list | tuple) else iter(())
