"""Another forward for modules of a model whose class is tried first: what norms, gates, attentions and others share."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad

from rabbitllm.base.dict_changes import Answer, remembered
from rabbitllm.engine.transformers_api import is_for_outputs, keeps_outputs

MAX_ELEMENTS = 1 << 15
"""Elements from which torch computes in several threads."""
_NUMBERS = ("eps", "variance_epsilon", "act", "training", "top_k", "norm_topk_prob", "alpha", "limit", "layer_idx")
_OWN = ("forward", "config", *_NUMBERS, "_forward_hooks", "_forward_pre_hooks", "_parameters", "_modules")
"""Attributes of a module and its parts that what they compute depends on."""
_Fact: TypeAlias = tuple[dict[str, Any], str]
Facts: TypeAlias = tuple[Callable[[], bool], Sequence[dict[Any, Any]]]
"""A function that tells whether something is still true, and the dicts that this depends on, for `remembered`."""
Key = TypeVar("Key")
Forward: TypeAlias = Callable[..., Any] | None
"""A forward as a function, whose first argument is the module; None for that of the class."""


def fuse(model: nn.Module, key_of: Callable[[Any], Key | None], forward_of: Callable[[Any, Key], Forward]) -> int:
    """Let modules of a model compute by another forward than their class's.

    Args:
        model: its modules that have a forward of their own keep it.
        key_of: what the forward of a module depends on; None if it keeps its class's.
        forward_of: the first module with a key, and that -> the forward for all of them.

    Returns:
        How many these are.
    """
    fused, forwards = 0, dict[Key, Forward]()
    for module in model.modules():
        if "forward" in vars(module) or (key := key_of(module)) is None:
            continue
        if key not in forwards:
            forwards[key] = forward_of(module, key)
        if (forward := forwards[key]) is not None:
            # a method: a copy of the module then binds it to itself
            module.forward = MethodType(until_patched(forward, type(module).forward), module)
            fused += 1
    return fused


def until_patched(forward: Any, tried: Any) -> Any:
    """A forward that is the class's instead, once that is another than the one that was tried, or calls others."""
    calls_same = _calls_same(tried)

    @functools.wraps(forward)
    def call(module: Any, *args: Any, **named: Any) -> Any:
        own = type(module).forward
        return (forward if own is tried and calls_same() else own)(module, *args, **named)

    call.__dict__.update(tried=tried, calls_same=calls_same)
    return call


def forward_in(module: nn.Module) -> Any:
    """The function that `fuse` gave a module as forward; None if it has its class's, or that is another by now."""
    function = getattr(vars(module).get("forward"), "__func__", None)
    if (tried := getattr(function, "tried", None)) is None:
        return function
    is_same = type(module).forward is tried and function.calls_same()  # type: ignore[union-attr]
    return function.__wrapped__ if is_same else None  # type: ignore[union-attr]


def _calls_same(function: Any) -> Answer:
    """Whether what a function calls by names of its module, and what that calls in turn, still is the same."""
    facts = _globals_in(function)
    values = [table[name] for table, name in facts]

    def are_same() -> bool:
        return all(table.get(name) is value for (table, name), value in zip(facts, values, strict=True))

    return remembered(are_same, [table for table, _ in facts]) if facts else lambda: True


def _globals_in(function: Any) -> list[_Fact]:
    """What programs may replace of what a function does: values of its module that it uses, and that these use."""
    functions, facts = [inspect.unwrap(function)], dict[str, _Fact]()
    variables = getattr(functions[0], "__globals__", {})
    while functions:
        for name in getattr(getattr(functions.pop(), "__code__", None), "co_names", ()):
            if name in variables and name not in facts:
                facts[name] = variables, name
                value = inspect.unwrap(variables[name]) if callable(variables[name]) else None
                functions += [value] if getattr(value, "__globals__", None) is variables else []
    return [*facts.values()]


def _class_facts(module: nn.Module) -> list[_Fact]:
    """The forward of a module's class, which programs may replace, in it or in a class that comes before its own, and
    what it calls."""
    classes = type(module).__mro__
    count = next(index for index, each in enumerate(classes) if "forward" in vars(each)) + 1
    facts = [(gc.get_referents(vars(each))[0], "forward") for each in classes[:count]]
    return facts + _globals_in(type(module).forward)


def kind_of(module: nn.Module) -> object:
    """Equal for modules that compute alike: their class and their own numbers and texts, which may differ by layer."""
    own = ((name, value) for name, value in vars(module).items() if isinstance(value, int | float | str))
    return type(module), *sorted(own)


def own_facts(module: nn.Module) -> list[_Fact]:
    """What a module's own computation depends on, for `unchanged`."""
    return [(vars(module), name) for name in _OWN]


def unchanged(
    is_true: Callable[[], bool],
    facts: Iterable[_Fact],
    parts: Iterable[tuple[nn.Module, str]],
    others: Iterable[dict[Any, Any]],
) -> Facts:
    """Whether what was true of modules still is.

    Args:
        is_true: what is asked again after a change.
        facts: dicts, and the names of those of their values that are to stay.
        parts: modules and the names of their parts, which are to stay, with forwards and numbers, and without hooks.
        others: dicts that `is_true` depends on, besides.
    """
    true, hooks = list(facts), list[Any]()
    for parent, name in parts:
        module: Any = parent._modules[name]
        true += [(parent._modules, name), *own_facts(module), *_class_facts(parent), *_class_facts(module)]
        hooks += [module._forward_hooks, module._forward_pre_hooks]
    tables, names = (list(column) for column in zip(*true, strict=True))
    values = list(map(dict.get, tables, names))

    def are_true() -> bool:
        same = map(operator.is_, map(dict.get, tables, names), values)
        return not are_watching(itertools.chain(*(table.values() for table in hooks))) and is_true() and all(same)

    return are_true, [*tables, *hooks, *others]


def is_transformed() -> bool:
    """Whether torch compiles, traces, maps or differentiates forward what computes: none of these sees our kernels."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
    )


def are_watching(hooks: Iterable[Any]) -> bool:
    """Whether hooks see what a module computes; those with which transformers keeps outputs stay after a pass that was
    asked for these."""
    return any(not is_for_outputs(hook) or keeps_outputs() for hook in hooks)


def trial_of(module: nn.Module, **attributes: Any) -> Any:
    """A copy of a module with some other attributes, by which the forward of its class is tried."""
    copied = copy.copy(module)
    copied.__dict__.update(attributes)
    return copied


def class_result(module: Any, *args: Any, **named: Any) -> Any:
    """What the forward of a module's class returns; None if it has other arguments, or uses other parts."""
    return result_of(type(module).forward, module, *args, **named)


def result_of(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The same for a function."""
    try:
        return function(*args, **named)
    except (TypeError, AttributeError, RuntimeError, LookupError, ValueError):
        return None


def is_result(tensor: torch.Tensor, expected: Any) -> bool:
    """Whether a tensor has the bits of what a class returned, which may be no tensor."""
    return isinstance(expected, torch.Tensor) and torch.equal(tensor, expected)


def with_globals(function: Any, values: Mapping[str, object]) -> Any:
    """The same function, and the functions around it, for which names of its module mean other values.

    None if a function around it is not a closure.
    """
    variables, cells = function.__globals__, function.__closure__
    if not hasattr(function, "__wrapped__"):
        variables = {**variables, **values}
    else:
        inner, changed = function.__wrapped__, with_globals(function.__wrapped__, values)
        places = [index for index, cell in enumerate(cells or ()) if cell.cell_contents is inner]
        if changed is None or not places:
            return None
        cells = tuple(CellType(changed) if index in places else cell for index, cell in enumerate(cells))
    changed_function = FunctionType(function.__code__, variables, function.__name__, function.__defaults__, cells)
    changed_function.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(changed_function, function)
