"""All layers of a model by one call of compiled code, for a token of one sequence, or for a few rows of several.

Between the calls of two layers Python takes as long as the products of a small one. Here the forward of a model's own
class runs with a single layer in place of all, which computes what they do. What a class does with its layers is tried
when a model is loaded: one after the other, each with the same arguments. What may have changed since is compared
before each step. Anything else, a hook of a layer, a mask, or another kind of KV cache, is left to the layers. Layers
with and without a window are groups, whose masks and angles differ.
Mixtures are part of it, also those whose experts are read in its midst; what their call leaves to their class is
computed by that, and the program goes on behind it. Layers of the gated delta rule may stand between those of
attention, with masks of their own; the program asks Python for their decays.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from rabbitllm.base.programs import Place, Program, Programs
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._attention import (
    CACHES,
    LayerCalls,
    LayerPlaces,
    are_rows,
    hides_nothing,
    is_step,
    layer_calls,
    mixer_in,
    values_of,
)
from rabbitllm.engine._fusing import Watch, form_in, fuse, is_transformed, notes_on, places_of, result_of, trial_of
from rabbitllm.engine._mixtures import mixture_call, routing_in
from rabbitllm.engine._siblings import has_hooks
from rabbitllm.engine.kv_room import (
    CACHED,
    NotTogetherError,
    can_grow,
    has_states_alone,
    is_ordinary,
    room_for,
    sequences_in,
)
from rabbitllm.engine.transformers_api import keeps_outputs
from rabbitllm.engine.turns import takes_turns

_INPUTS = "input_ids", "inputs_embeds"
_ROUTERS, _MASK = "output_router_logits", "attention_mask"
_KNOWN = frozenset({*_INPUTS, *CACHES, _MASK, "position_ids", "cache_position", "use_cache"})
"""Arguments with which a class is known to call its layers as it was tried."""
_OUTPUTS = {"output_hidden_states": False, "output_attentions": False, _ROUTERS: False, "return_dict": True}
"""Attributes of a config, and their values if only the last layer's result is wanted."""
_OF_STATES = frozenset({"get_conv_state", "get_recurrent_state", "update_recurrent_state"})
"""Methods by which a layer of the delta rule reads and writes states, which a cache may have replaced."""
_STEPS_BETWEEN = 16
"""After how many steps whose layers were called one by one it is tried again whether they must be."""
_PAST = 2
"""Tokens in the cache of a trial."""
_HEAD = 7
"""Addresses of a call that belong to no layer."""
_ANGLES = "position_embeddings"
"""Besides its mask what a layer shares with those of its group alone, such as all with a window."""
_angles = ContextVar[dict[int, Any]]("angles")
"""In a step those of each group so far."""


def fuse_models(model: nn.Module) -> int:
    """Let models whose layers `fuse_layers` has replaced compute a decode step of one sequence by one call.

    Returns:
        How many these are.
    """

    def form_of(module: nn.Module) -> int | None:
        layers = module._modules.get("layers")
        return id(module) if isinstance(layers, nn.ModuleList) and _calls_of([*layers]) else None

    def trial(module: nn.Module, form: int) -> frozenset[str] | None:
        names = _KNOWN & inspect.signature(inspect.unwrap(type(module).forward)).parameters.keys()
        return names if _groups(module, names) else None

    return fuse(model, _forward, form_of, trial)


def is_whole(module: nn.Module) -> bool:
    """Whether `fuse_models` set its forward."""
    return form_in(module, _forward) is not None


def _calls_of(layers: Sequence[nn.Module]) -> list[LayerCalls]:
    """What each of two or more layers computes now, mixtures left out; none if they cannot be one call."""
    calls = [
        of_layer
        for layer in layers
        if (of_layer := layer_calls(layer)) is not None and of_layer.can_add() and of_layer.form.index is None
        if not of_layer.calls_mlp or routing_in(layer._modules["mlp"])  # type: ignore[arg-type]
    ]
    # all attentions have one form, and all delta rules
    kinds = {of_layer.form: of_layer.form.is_recurrent for of_layer in calls}.values()
    is_whole = len(calls) == len(layers) > 1 and len({of_layer.columns for of_layer in calls}) == 1
    is_whole = is_whole and False in kinds and len({*kinds}) == len(kinds)
    is_whole = is_whole and len({of_layer.form.dtype for of_layer in calls}) == 1
    return calls if is_whole and len({*_indices_of(layers)}) == len(layers) else []


def _indices_of(layers: Sequence[Any]) -> list[int]:
    """Their numbers in the KV cache."""
    return [mixer_in(layer).layer_idx for layer in layers]


def _least(groups: Sequence[int]) -> int:
    """How many layers have one of each group."""
    return 1 + groups.index(max(groups))


def _forward(names: frozenset[str], module: Any, *args: Any, **named: Any) -> Any:
    inputs = [value for name in _INPUTS if (value := named.get(name)) is not None]
    given = {name: value for name, value in named.items() if name != _ROUTERS or value}
    cache = next((named[name] for name in CACHES if name in named), None)
    sequences = sequences_in(cache)
    rows = sum(count for _, count in sequences)
    is_few = not args and len(inputs) == 1 and inputs[0].shape[:2] == (1, rows) and given.keys() <= names
    # rows of one that waits for others at its layers are computed with theirs there
    is_few = is_few and not keeps_outputs() and (sequences[0][0] is not cache or not takes_turns())
    if is_few and not torch.is_grad_enabled() and not is_transformed():
        notes = notes_on(module)
        whole: _Whole | None = notes.get("whole")
        if whole is None or not whole.holds():
            whole = notes["whole"] = _Whole(module, names)
        if whole.calls and _hides_nothing(named, sequences):
            with contextlib.suppress(NotTogetherError):
                return inspect.unwrap(type(module).forward)(whole.like, **given)
    if sequences[0][0] is not cache:
        raise NotTogetherError
    return None


def _hides_nothing(named: dict[str, Any], sequences: Sequence[tuple[Any, int]]) -> bool:
    """Whether no token is masked, and the caches have keys and values, or states."""
    mask = named.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2 and bool(mask.all())):
        return False
    caches = [cache for cache, _ in sequences]
    return all(is_ordinary(each) and _OF_STATES.isdisjoint(vars(each)) for each in caches) and all(
        (has_states_alone(layer) and _OF_STATES.isdisjoint(vars(layer))) or can_grow(layer)
        for each in caches
        for layer in each.layers
    )


class _Whole:
    """What the layers of a model compute by one call.

    Attributes:
        calls: of each layer; none if they are to be called one by one.
        mixtures: of those that are one.
        like: the model with few layers, of which the last one computes what all do.
        holds: whether this is so yet.
    """

    def __init__(self, module: Any, names: frozenset[str]) -> None:
        config, modules = module.config, module._modules.get("layers")
        layers = [*modules] if isinstance(modules, nn.ModuleList) else []
        is_plain = all(getattr(config, name, value) is value for name, value in _OUTPUTS.items())
        self.calls = _calls_of(layers) if is_plain and not any(map(has_hooks, layers)) else []
        mixed = [number for number, of_layer in enumerate(self.calls) if of_layer.calls_mlp]
        mixtures = [mixture_call(layers[number].mlp) for number in mixed]
        # experts that were not used yet, or something has changed since it was loaded
        if not self.calls or None in mixtures or not (groups := _groups(module, names)):
            steps = iter(range(_STEPS_BETWEEN))
            self.holds: Callable[[], bool] = lambda: next(steps, None) is not None
            self.calls = []
            return
        self.mixtures = {number: mixture for number, mixture in zip(mixed, mixtures, strict=True) if mixture}
        self._indices, self._programs, calls = _indices_of(layers), Programs(), self.calls
        self._can_add = functools.cache(lambda rows: all(of_layer.can_add(rows) for of_layer in calls))
        self._sizes = [size for of_layer in self.calls for size in of_layer.sizes]
        self._tables = [table for of_layer in self.calls for table in of_layer.tables]
        self._tables += [table for mixture in self.mixtures.values() for table in mixture.weights()]
        self._places, self._read, self._addresses = list[Any](), [list[Any]() for _ in self.mixtures], list[int]()
        self._form: Any = next(of_layer.form for of_layer in self.calls if not of_layer.form.is_recurrent)
        pairs: Any = [(of_layer.form, mixer_in(layer)) for of_layer, layer in zip(self.calls, layers, strict=True)]
        self._recurrent = [(form, mixer) for form, mixer in pairs if form.is_recurrent]
        self._groups, self._others = groups, max(groups)
        *first, last = layers[: _least(groups)]
        few = [
            trial_of(layer, forward=functools.partial(self._pass, number), _compiled_call_impl=None)
            for number, layer in enumerate(first)
        ]
        few.append(trial_of(last, forward=self._compute, _compiled_call_impl=None))
        self.like = trial_of(module, _modules={**module._modules, "layers": few})
        tables = [vars(module), module._modules, vars(modules), modules._modules, vars(config)]
        for layer, of_layer in zip(layers, self.calls, strict=True):
            queries = mixer_in(layer)._modules[of_layer.form.linears[0]]
            tables += [vars(layer), layer._forward_hooks, layer._forward_pre_hooks, queries._parameters]
        within = [*(each.watch for each in self.calls), *(each.watch for each in self.mixtures.values())]
        always = list[Callable[[], bool]]()
        if (types := getattr(config, "layer_types", None)) is not None:  # by which a class may tell groups
            always.append(functools.partial([*types].__eq__, types))
        self.holds = Watch(lambda: True, tables=tables, within=within, always=always).holds

    def _pass(self, number: int, x: Any, *args: Any, attention_mask: Any = None, **named: Any) -> Any:
        """What stands for a layer before the one that computes all: its angles are kept.

        Raises:
            NotTogetherError: its mask hides something.
        """
        if not hides_nothing(attention_mask, is_added=bool(self._form.parameters)):
            raise NotTogetherError
        _angles.set({**(_angles.get() if number else {}), self._groups[number]: named.get(_ANGLES)})
        return x

    def _compute(self, x: Any, *args: Any, **named: Any) -> torch.Tensor:
        """What all layers do.

        Raises:
            NotTogetherError: they are to be called.
        """
        values = values_of({"hidden_states": x, **named})
        if args or values is None:
            raise NotTogetherError
        _, angles, mask, cache = values
        of_groups = [*(_angles.get()[group] for group in range(self._others)), angles]
        sequences = sequences_in(cache)
        rows = sum(count for _, count in sequences)
        form = self._form
        is_fit = all(is_step(form, x, each, mask, rows) for each in of_groups) and x.shape[-1] == self.calls[0].columns
        is_fit = is_fit and self._follows(x.shape[-1]) and self._can_add(rows)
        if not is_fit or any(len(cache.layers) <= max(self._indices) for cache, _ in sequences):
            raise NotTogetherError
        of_forms = zip(self.calls, self._indices, strict=True)
        indices = [index for of_layer, index in of_forms if not of_layer.form.is_recurrent]
        layers = [(cache.layers[index], count) for index in indices for cache, count in sequences]
        if any(not can_grow(layer) or layer.keys is None or layer.keys.dim() != 4 for layer, _ in layers):
            raise NotTogetherError
        rooms = [room_for(layer, layer.keys.shape[2] + count) for layer, count in layers]
        like = form.dtype, x.device, 1, form.keys, form.width, form.width
        is_apart = len({*(id(layer) for layer, _ in layers), *map(id, rooms)}) == 2 * len(rooms)  # not a layer twice
        if not is_apart or any(room.form != like for room in rooms):
            raise NotTogetherError
        arrays = [mixture.arrays(x, is_followed=True) for mixture in self.mixtures.values()]
        routers = [words[0].buffer_info()[0] for words in arrays if words is not None]
        if len(routers) < len(arrays):
            raise NotTogetherError
        of_rooms = [
            word
            for room, (layer, count) in zip(rooms, layers, strict=True)
            for tokens in range(room.used + 1, room.used + 1 + count)
            for word in room.cached(layer, tokens)
        ]
        heads, of_rules, deciding = self._rules(sequences[0][0])
        out, normed, left = torch.empty_like(x), torch.empty_like(x), array("q", [0])
        asked = self._asked(deciding, arrays, left)
        first, *others = [[each.data_ptr() for each in of_group] for of_group in of_groups]
        addresses = [x.data_ptr(), *first, heads, out.data_ptr(), normed.data_ptr(), left.buffer_info()[0]]
        addresses += [*itertools.chain(*others), *routers, *self._addresses, *of_rooms, *of_rules]
        program = self._programs.of(self._add, len(addresses), rows, dtype=form.dtype)
        program(*addresses, asked=asked)
        while (number := left[0]) < 0:  # a mixture is left to its class
            out += self.mixtures[~number].by_class(normed)
            left[0] = 0
            program(*addresses, begin=program.ends[~number], asked=asked)
        for (layer, count), room in zip(layers, rooms, strict=True):
            room.grow(layer, count)
        return out

    def _follows(self, width: int) -> bool:
        """Whether the weights of norms and routers are as they are to be for rows of so many values, wherever they lie
        now."""
        weights: list[Any] = [table.get(name) for table, name in self._tables]
        if any(weight is None for weight in weights):
            return False
        places, mixtures = places_of(weights), self.mixtures.values()
        if places != self._places or not all(map(operator.is_, (each.places for each in mixtures), self._read)):
            of_layers = weights[: len(self._sizes)]
            are_ours = are_rows(of_layers, self._sizes, self._form.dtype)
            if not are_ours or not all(each.follows(width) for each in mixtures):
                return False
            self._places, self._addresses = places, [weight.data_ptr() for weight in of_layers]
            self._read = [each.places for each in mixtures]
        return True

    def _rules(self, cache: Any) -> tuple[int, list[int], Iterator[None] | None]:
        """Of the delta rules where each has what its Linears compute, the addresses that they are given, and what
        computes their decays, and keeps these tensors.

        Raises:
            NotTogetherError: a state is left to the class.
        """
        if not self._recurrent:
            return 0, [], None
        form, modules = self._recurrent[0][0], [module for _, module in self._recurrent]
        heads, decays = torch.empty_like(form.heads_like), torch.empty(form.heads, dtype=torch.float32, device="cpu")
        pairs = [pair for module in modules if (pair := form.states(module, cache)) is not None]
        addresses = [tensor.data_ptr() for pair in pairs for tensor in (*pair, decays)]
        if len({*addresses}) < 2 * len(modules) + 1:  # one is missing, or there twice
            raise NotTogetherError
        return heads.data_ptr(), addresses, form.decide(modules, heads, decays)

    def _asked(self, deciding: Iterator[None] | None, arrays: Sequence[Any], left: array[int]) -> Iterator[None] | None:
        """What the program asks for, layer by layer: decays of delta rules, and experts that are read; None if
        nothing."""
        of_mixtures = zip(self.mixtures.items(), arrays, strict=True)
        reading = {n: asked for (n, mixture), (words, _) in of_mixtures if (asked := mixture.asked(words, left))}
        if not reading:
            return deciding
        of_rules = (itertools.islice(deciding or (), of_layer.form.is_recurrent) for of_layer in self.calls)
        return (None for n, of_rule in enumerate(of_rules) for _ in itertools.chain(of_rule, reading.get(n, ())))

    def _add(self, program: Program, x: Place, cos: Place, sin: Place, heads: Place, *others: Any) -> None:
        """Add all layers for rows, whose number comes last."""
        out, normed, left, *more, rows = others
        places, count = iter(more), rows * CACHED * (len(self.calls) - len(self._recurrent))
        angles = [(cos, sin), *((next(places), next(places)) for _ in range(self._others))]
        routers = {number: next(places) for number in self.mixtures}
        # rooms of caches come before states
        of_rule = _HEAD + len(more) - sum(form.words for form, _ in self._recurrent)
        cached = {False: of_rule - count, True: of_rule}
        for number, of_layer in enumerate(self.calls):
            weights, words = [next(places) for _ in of_layer.tables], routers.get(number, left)
            form = of_layer.form
            own = angles[self._groups[number]]
            at = LayerPlaces(x, *own, heads, out, normed, words, left, weights, cached[form.is_recurrent], rows)
            with program.passing():
                of_layer.add_to(program, at, self.mixtures.get(number), ~number)
            x = out
            cached[form.is_recurrent] += rows * form.words


def _groups(module: Any, names: frozenset[str]) -> tuple[int, ...]:
    """The group of each layer, numbered in their order; none if the forward of a model's class does not call its layers
    one after the other, with the same arguments but for the groups' masks and angles, or does anything else that
    depends on how many they are."""
    layers, random, groups = [*module._modules["layers"]], RandomTensors(), tuple[int, ...]()
    of_layers = _calls_of(layers)
    form: Any = next(each.form for each in of_layers if not each.form.is_recurrent)
    columns, count = of_layers[0].columns, len(layers) + 1
    x, *results = (random.normal(1, 1, columns, dtype=form.dtype) for _ in range(count))
    last = list[torch.Tensor]()
    for is_least in (False, True):
        count = _least(groups) if is_least else len(layers)
        cache, calls = DynamicCache(config=module.config), list[tuple[int, tuple[Any, ...], dict[str, Any]]]()
        past = torch.zeros(1, form.keys, _PAST, form.width, dtype=form.dtype, device="cpu")
        for index, each in zip(_indices_of(layers), of_layers, strict=True):
            if not each.form.is_recurrent and result_of(cache.update, past, past, index) is None:
                return ()

        def called(number: int, *args: Any, calls: list[Any] = calls, count: int = count, **named: Any) -> torch.Tensor:
            calls.append((number, args, named))
            return results[number - count]

        free: dict[str, Any] = {"_forward_hooks": {}, "_forward_pre_hooks": {}, "_compiled_call_impl": None}
        parts = [trial_of(each, forward=functools.partial(called, n), **free) for n, each in enumerate(layers[:count])]
        like = trial_of(module, _modules={**module._modules, "layers": parts})
        own = dict(vars(like))
        # a mask that hides something is a tensor, which layers of two kinds have two of
        mask = torch.tensor([[0, *[1] * _PAST]], device="cpu")
        named = {"inputs_embeds": x, "attention_mask": mask, **dict.fromkeys(CACHES, cache), "use_cache": True}
        arguments = {name: value for name, value in named.items() if name in names}
        result = result_of(inspect.unwrap(type(module).forward), like, **arguments)
        hidden = getattr(result, "last_hidden_state", None)
        if not isinstance(hidden, torch.Tensor) or [number for number, *_ in calls] != [*range(count)]:
            return ()
        if vars(like).keys() != own.keys() or any(vars(like)[name] is not value for name, value in own.items()):
            return ()
        first, of_groups = calls[0][2], list[tuple[int, int]]()
        for number, args, given in calls:
            is_next = len(args) == 1 and (number == 0 or args[0] is results[number - 1 - count])
            shared = first.keys() - {_MASK, _ANGLES}
            if not is_next or given.keys() != first.keys() or any(given[name] is not first[name] for name in shared):
                return ()
            of_groups.append((id(given.get(_MASK)), id(given.get(_ANGLES))))
        numbers = tuple(map([*dict.fromkeys(of_groups)].index, of_groups))
        if is_least and numbers != groups[:count]:
            return ()
        groups = groups or numbers
        last.append(hidden)
    return groups if torch.equal(*last) else ()
