"""Layers that call the modules inside them as functions, where nobody watches these.

Of a token of a small model half of the time passes in Python, some of that in `nn.Module.__call__` and `__getattr__`,
a dozen times a layer. Here a class's own forward runs on an object that has the attributes of the module, always the
present ones, but the forwards of its children instead of these. If a child or a forward changes, the object is made
anew, and while there are hooks the modules are called.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torchs_module

_NAME = "_plain_layer"
_CALL: Any = nn.Module.__call__
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def call_plainly(layers: Iterable[nn.Module]) -> int:
    """Let layers call the modules inside them as functions.

    Returns:
        How many these are.
    """
    count = 0
    for layer in layers:
        if "forward" not in vars(layer) and layer._modules and _is_free(type(layer).forward):
            # a method: a copy of the module then binds it to itself
            layer.forward = MethodType(forward, layer)
            count += 1
    return count


def forward(module: Any, *args: Any, **named: Any) -> Any:
    """The forward of a layer; by this name a pickled one finds that of its class."""
    own = vars(module)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return type(module).forward(module, *args, **named)
    plain = own.get(_NAME)
    if plain is None or not plain.is_of(own):
        plain = own[_NAME] = _Plain(module)
    if plain.is_watched():
        return type(module).forward(module, *args, **named)
    return plain.call(*args, **named)


class _Plain:
    """A layer's forward with those of the modules in it.

    Args:
        module: the layer; None for none, as in a copy of another module.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._own = vars(module) if module is not None else None
        self._parts = list[tuple[dict[str, Any], str, Any]]()
        self._hooks: list[Any] = [torchs_module._global_forward_hooks, torchs_module._global_forward_pre_hooks]
        if module is not None:
            self.call = self._stand_in(module, type(module).forward)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Plain, ()

    def is_of(self, own: dict[str, Any]) -> bool:
        """Whether a module with these attributes still consists of the same parts."""
        if self._own is not own:
            return False
        return all(attributes.get(name) is value for attributes, name, value in self._parts)

    def is_watched(self) -> bool:
        """Whether there are hooks on modules inside."""
        return any(self._hooks)

    def _called(self, module: nn.Module) -> Callable[..., Any]:
        """What a module computes when it is called."""
        own = vars(module)
        forward = own.get("forward")
        self._parts.append((own, "forward", forward))
        self._hooks += own["_forward_hooks"], own["_forward_pre_hooks"]
        is_bound = isinstance(forward, MethodType) and forward.__self__ is module
        if type(module).__call__ is not _CALL or not (forward is None or is_bound):
            return module
        function = forward.__func__ if isinstance(forward, MethodType) else type(module).forward
        if module._modules and not isinstance(module, _CONTAINERS) and _is_free(function):
            return self._stand_in(module, function)
        return MethodType(function, module)

    def _stand_in(self, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        """A forward with an object in place of its module."""
        kind: Any = type(module)  # mypy does not take it as hashable
        stand_in = _kind(kind, tuple(module._modules))()
        stand_in.__dict__ = vars(module)
        stand_in.stands_for = module
        for name, child in module._modules.items():
            self._parts.append((module._modules, name, child))
            setattr(stand_in, name, None if child is None else self._called(child))
        return MethodType(function, stand_in)


@functools.cache
def _kind(kind: type[nn.Module], children: tuple[str, ...]) -> Any:
    def rest(self: Any, name: str) -> Any:
        return getattr(self.stands_for, name)

    slots = (*children, "stands_for", "__dict__")
    return type(kind.__name__, (), {"__slots__": slots, "__getattr__": rest, "forward": kind.forward})


@functools.cache
def _is_free(forward: Callable[..., Any]) -> bool:
    """Whether a forward does with another object what it does with its module: it sets no attribute, and neither asks
    for its class nor for its children as such."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or "__class__" in code.co_freevars or _ASKING.intersection(code.co_names):
        return False
    return all(step.opname not in ("STORE_ATTR", "DELETE_ATTR") for step in dis.get_instructions(code))


_ASKING = frozenset({"isinstance", "modules", "children", "parameters", "setattr", "super"})
