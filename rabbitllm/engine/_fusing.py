"""Another forward for modules of a model whose class is tried first: what norms, gates, attentions and others share."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad

from rabbitllm.base.openmp import torchs_team
from rabbitllm.engine._dict_changes import Answer, remembered
from rabbitllm.engine.transformers_api import ALL_ATTENTION_FUNCTIONS, is_for_outputs, keeps_outputs
from rabbitllm.quant.plain import PlainMatrix

MAX_ELEMENTS = 1 << 15
"""Elements from which torch computes in several threads."""
_NUMBERS = ("eps", "variance_epsilon", "act", "training", "top_k", "norm_topk_prob", "alpha", "limit", "layer_idx")
_OWN = ("forward", "config", *_NUMBERS, "_forward_hooks", "_forward_pre_hooks", "_parameters", "_modules")
"""Attributes of a module and its parts that what they compute depends on."""
_Fact: TypeAlias = tuple[dict[str, Any], str]
_MOST_ANSWERS = 256
_answers = dict[frozenset[tuple[int, str]], tuple[list[Any], Answer]]()
"""Facts -> their values, and whether they are these yet: for modules of a class that are asked one after the other."""
AROUND = "around"
"""An attribute of a module's own forward that does something around its class's: gives one that does so around
another."""
ROUNDING = "_rabbitllm_rounding"
"""The attribute of a Linear with the `Rounding` of its inputs."""
_NOTES = "_rabbitllm_notes"
"""The attribute of a module for `notes_on`: its forward is also that of its copies."""
Form = TypeVar("Form", bound=Hashable)
Compute: TypeAlias = Callable[..., Any]
"""What is computed in place of a class's forward: a form, a module and the arguments of its forward -> the result; None
if that is left to the class."""


def fuse(
    model: nn.Module,
    compute: Compute,
    form_of: Callable[[Any], Form | None],
    trial: Callable[[Any, Form], object],
    kind: Callable[[nn.Module], object] | None = None,
) -> int:
    """Let modules of a model compute otherwise than by their class's forward, after a trial.

    Args:
        model: its modules that have a forward of their own keep it, unless that has `AROUND`.
        compute: what they compute, each by its form.
        form_of: the form that a module may have; None if it keeps its class's forward.
        trial: the first module of a kind with a form, and that -> true if it has the results of its class, or the form
            with which it has these; else false.
        kind: equal for modules of which one is tried for all; None for `kind_of`.

    Returns:
        How many these are.
    """
    fused, forms = 0, dict[object, Any]()
    for module in model.modules():
        own = vars(module).get("forward")
        if (own is not None and not hasattr(own, AROUND)) or (form := form_of(module)) is None:
            continue
        key = (kind or kind_of)(module), form
        if key not in forms:
            with torch.no_grad():
                right = trial(module, form)
            forms[key] = form if right is True else right or None
        if forms[key] is not None:
            replace(module, compute, forms[key])
            fused += 1
    return fused


def replace(module: nn.Module, compute: Compute, form: Any) -> None:
    """Let a module compute so until a program replaces its class's forward, which computes all that is left to it, or
    what that calls."""
    tried: Any = type(module).forward
    calls_same = _calls_same(module)

    @functools.wraps(tried)
    def call(module: Any, *args: Any, **named: Any) -> Any:
        own = type(module).forward
        if own is tried and calls_same() and (result := compute(form, module, *args, **named)) is not None:
            return result
        return own(module, *args, **named)

    call.__dict__.update(fused=(compute, form, lambda module: type(module).forward is tried and calls_same()))
    around = getattr(vars(module).get("forward"), AROUND, lambda forward: forward)
    module.forward = MethodType(around(call), module)  # a method: a copy of the module then binds it to itself


def form_in(module: nn.Module, compute: Compute) -> Any:
    """The form by which `replace` lets a module compute so; None if it does not, or its class does otherwise now."""
    own, form, is_as_tried = getattr(vars(module).get("forward"), "fused", (None, None, None))
    return form if own is compute and is_as_tried is not None and is_as_tried(module) else None


class _Notes(dict[str, Any]):
    """What is kept of a module, which may lead to it; its copies have none of it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def notes_on(module: nn.Module) -> dict[str, Any]:
    """What may be kept of a module that `replace` lets compute: it goes with the module, whatever refers to what."""
    notes: _Notes | None = vars(module).get(_NOTES)
    if notes is None or notes.module() is not module:  # of what it is a shallow copy of
        notes = vars(module)[_NOTES] = _Notes(module)
    return notes


def by_function(function: Any, module: Any, *args: Any, **named: Any) -> Any:
    """A `Compute` whose form is another forward."""
    return function(module, *args, **named)


def _calls_same(module: nn.Module) -> Answer:
    """Whether what a module's forward uses besides its own values, and the forwards of its parts, still is the same."""
    parts = [part for part in module.children() if type(part).forward is not nn.Module.forward]
    facts = {(id(table), name): (table, name) for table, name in _used_by(module)}
    facts |= {(id(table), name): (table, name) for part in parts for table, name in _class_facts(part)}
    key, values = frozenset(facts), [table.get(name) for table, name in facts.values()]
    known, answer = _answers.get(key, ([], lambda: True))
    if len(known) == len(values) and all(map(operator.is_, known, values)):
        return answer
    tables, names = [table for table, _ in facts.values()], [name for _, name in facts.values()]
    same = remembered(lambda: all(map(operator.is_, map(dict.get, tables, names), values)), tables)
    if len(_answers) > _MOST_ANSWERS:
        _answers.clear()
    _answers[key] = values, same
    return same


def _used_by(module: Any) -> list[_Fact]:
    """What programs may replace of what a module's forward uses: see `_called_by`, and values of its config."""
    kind: Any = type(module)
    facts, names = _called_by(kind, kind.forward)
    config = vars(module).get("config")
    own = getattr(config, "__dict__", {})
    return [*facts, *((own, name) for name in names if name in own or hasattr(type(config), name))]


@functools.lru_cache(256)
def _called_by(kind: Any, forward: Any) -> tuple[list[_Fact], list[str]]:
    """Methods beside a class's forward, values of its file that they use, and what these use, of modules the values
    that they name; and all names in its methods."""
    functions, facts, used = [inspect.unwrap(forward)], dict[object, _Fact](), dict[str, None]()
    variables, files = getattr(functions[0], "__globals__", {}), (kind.__module__, forward.__module__)
    for each in kind.__mro__:
        own = vars(each).items() if each.__module__ in files else ()
        methods = {name: value for name, value in own if isinstance(value, FunctionType) and name[:2] != "__"}
        functions += map(inspect.unwrap, methods.values())
        facts |= {(each, name): (gc.get_referents(vars(each))[0], name) for name in methods}
    while functions:
        names = getattr(getattr(functions.pop(), "__code__", None), "co_names", ())
        used |= dict.fromkeys(names)
        tables = [variables]
        for table in tables:
            for name in filter(table.__contains__, names):
                value = table[name]
                if isinstance(value, ModuleType) and not any(vars(value) is each for each in tables):
                    tables.append(vars(value))
                elif value is ALL_ATTENTION_FUNCTIONS:
                    facts["sdpa"] = vars(nn.functional), "scaled_dot_product_attention"
                elif table is variables and (id(table), name) not in facts and callable(value):
                    inner = inspect.unwrap(value)
                    functions += [inner] if getattr(inner, "__globals__", None) is variables else []
                facts[id(table), name] = table, name
    return [*facts.values()], [*used]


def _class_facts(module: nn.Module) -> list[_Fact]:
    """The forward of a module's class, which programs may replace, in it or in a class that comes before its own, and
    what it uses."""
    classes = type(module).__mro__
    count = next(index for index, each in enumerate(classes) if "forward" in vars(each)) + 1
    facts = [(gc.get_referents(vars(each))[0], "forward") for each in classes[:count]]
    return facts + _used_by(module)


def kind_of(module: nn.Module) -> object:
    """Equal for modules that compute alike: their class and their own numbers and texts, which may differ by layer."""
    own = ((name, value) for name, value in vars(module).items() if isinstance(value, int | float | str))
    return type(module), *sorted(own)


def own_facts(module: nn.Module) -> list[_Fact]:
    """What a module's own computation depends on, for `Watch`."""
    rounding = vars(module).get(ROUNDING)
    facts = [*((vars(module), name) for name in _OWN), *_class_facts(module)]
    return facts + ([] if rounding is None else rounding.facts(module))


class Watch:
    """Whether what was true of modules still is.

    Args:
        is_true: what is asked again after a change.
        parts: modules and the names of their parts, which are to stay, with classes, forwards and numbers, and without
            hooks.
        facts: dicts, and the names of those of their values that are to stay.
        tables: dicts that are to stay as they are, in their order.
        others: dicts that `is_true` depends on, besides.
        matrices: the parameters of Linears and their matrices: no dict tells of changes of those that are plain.
        within: other watches that are to hold.
        always: what no dict tells of, either.
    """

    def __init__(
        self,
        is_true: Callable[[], bool],
        parts: Iterable[tuple[Any, str]] = (),
        *,
        facts: Iterable[_Fact] = (),
        tables: Iterable[dict[str, Any]] = (),
        others: Iterable[dict[Any, Any]] = (),
        matrices: Iterable[tuple[dict[str, Any], Any]] = (),
        within: Sequence[Watch] = (),
        always: Iterable[Callable[[], bool]] = (),
    ) -> None:
        listed, hooks, own, self._modules = list(facts), list[Any](), list(always), list[Any]()
        for parent, name in parts:
            self._modules += parent, parent._modules[name]
            part, rounding = parent._modules[name], vars(parent._modules[name]).get(ROUNDING)
            own += [] if rounding is None else rounding.watches(part)
            listed += [(parent._modules, name), *own_facts(part), *_class_facts(parent)]
            hooks += [part._forward_hooks, part._forward_pre_hooks]
        true = {(id(table), name): (table, name) for table, name in listed}.values()
        names, values = [name for _, name in true], [table.get(name) for table, name in true]
        facts_in, whole = [table for table, _ in true], [(table, dict(table)) for table in tables]
        others = [*others, *itertools.chain(*(watch.dicts for watch in within))]

        def are_true() -> bool:
            same = map(operator.is_, map(dict.get, facts_in, names), values)
            if are_watching(itertools.chain(*(table.values() for table in hooks))) or not (is_true() and all(same)):
                return False
            alike = ([*a] == [*b] and all(map(operator.is_, a.values(), b.values())) for a, b in whole)
            return all(alike) and all(watch.are_true() for watch in within)

        self.are_true = are_true
        self.dicts: list[dict[Any, Any]] = [*facts_in, *hooks, *(table for table, _ in whole), *others]
        self.plain = [(table, matrix) for table, matrix in matrices if type(matrix) is PlainMatrix]
        self.plain += itertools.chain(*(watch.plain for watch in within))
        self._in_place: tuple[list[Any], list[Any]] = [], []
        self.always: list[Callable[[], bool]] = [*own, *itertools.chain(*(watch.always for watch in within))]
        self._modules += itertools.chain(*(watch._modules for watch in within))
        self._modules = [*{id(each): each for each in self._modules}.values()]
        self._types = [*map(type, self._modules)]  # no dict tells of another class of a module
        self._is_same = remembered(self.are_true, self.dicts)

    def holds(self) -> bool:
        """Whether it is all still true."""
        are_same = self._is_same() and [*map(type, self._modules)] == self._types
        return are_same and self._are_in_place() and all(ask() for ask in self.always)

    def _are_in_place(self) -> bool:
        """Whether the plain weights still lie where their matrices do; no dict tells of other `data` of one."""
        weights = [table.get("weight") for table, _ in self.plain]
        known, places = self._in_place
        are_known = len(known) == len(weights) and all(map(operator.is_, weights, map(operator.call, known)))
        if not weights or (are_known and places_of(weights) == places):
            return True
        if not all(matrix.is_of(weight) for (_, matrix), weight in zip(self.plain, weights, strict=True)):
            return False
        self._in_place = [*map(weakref.ref, weights)], places_of(weights)
        return True


_dtype_of = operator.attrgetter("dtype")


def places_of(weights: Sequence[Any]) -> list[Any]:
    """Where tensors lie, and in which form."""
    own = torch.Tensor
    facts = map(own.data_ptr, weights), map(own.size, weights), map(own.stride, weights), map(_dtype_of, weights)
    return [*itertools.chain(*facts, map(type, weights))]


def threads_for(count: int) -> int:
    """Threads that compute so many elements."""
    return min(torch.get_num_threads(), -(-count // MAX_ELEMENTS)) if torchs_team() is not None else 1


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
    except Exception:  # classes of models and quantizers may raise anything, such as an AssertionError
        return None


def is_result(tensor: torch.Tensor, expected: Any) -> bool:
    """Whether a tensor has the bits of what a class returned, which may be no tensor."""
    return isinstance(expected, torch.Tensor) and torch.equal(tensor, expected)


class WithFunctions:
    """A module, of which functions with these names are other ones."""

    def __init__(self, module: Any, functions: Mapping[str, Callable[..., Any]]) -> None:
        self._module = module
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


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
