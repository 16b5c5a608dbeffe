"""KV caches that are distributed: each process has the layers that it computes.

The first process has the caller's own cache object. For the layers on other hosts it has stand-ins, one byte for each
token of each sequence, so that the cache reports its lengths and can be cut, reordered and repeated as usual. These
operations are recorded, and the workers apply them to their caches before the next pass.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache

from rabbitllm.engine.transformers_api import cache_layer_class
from rabbitllm.errors import HostsError

if TYPE_CHECKING:
    from transformers import CacheLayerMixin

KINDS = (
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
"""Transformers' names of the cache layers that can be on other hosts."""
_SETTINGS = ("sliding_window", "number_of_states")

Event = list[Any]
"""An operation on a cache, as JSON: its name, the cache's number, and its arguments."""


class _RecordedCache:
    """Mixin before a cache's own class that records the operations on it, which `_recording` adds."""

    _recorder: CacheRecorder
    _number: int

    def _record(self, operation: str, *arguments: Any) -> None:
        self._recorder.events.append([operation, self._number, *arguments])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        state = {name: value for name, value in vars(self).items() if name not in ("_recorder", "_number")}
        copied.__dict__.update(copy.deepcopy(state, memo))
        self._recorder.enter(copied)
        copied._record("copy", self._number)
        return copied


_OPERATIONS = (
    "reorder_cache",
    "crop",
    "batch_repeat_interleave",
    "batch_select_indices",
    "reset",
    "activate_past_recording",
)
"""Methods of a cache, and of its layers, whose arguments are integers and tensors of integers."""


def _recording(name: str) -> Callable[..., None]:
    def method(self: _RecordedCache, *args: Any, **kwargs: Any) -> None:
        getattr(super(_RecordedCache, self), name)(*args, **kwargs)
        values = (*args, *kwargs.values())
        self._record(name, *(value.tolist() if isinstance(value, torch.Tensor) else int(value) for value in values))

    return method


for _name in _OPERATIONS:
    setattr(_RecordedCache, _name, _recording(_name))


class CacheRecorder:
    """Numbers the caches of passes, and records the operations on them since the last pass.

    Args:
        remote: cache indices of the layers on other hosts.

    Attributes:
        events: operations that were not sent to the workers yet.
    """

    def __init__(self, remote: Iterable[int]) -> None:
        self._remote = frozenset(remote)
        self._last = 0
        self.events: list[Event] = []

    def take(self) -> list[Event]:
        """Remove and return the events."""
        events: list[Event] = []
        while self.events:  # a cache may be freed at any moment, in any thread
            events.append(self.events.pop(0))
        return events

    def number_of(self, cache: Cache) -> int:
        """The number of a cache; a new cache is assigned one.

        Raises:
            HostsError: its kind cannot be spread over hosts, or it was filled by another model.
        """
        number = getattr(cache, "_number", None)
        if number is not None and getattr(cache, "_recorder", None) is self:
            return int(number)
        recipe = recipe_of(cache)
        if any(_is_filled(cache.layers[index]) for index in self._remote if index < len(cache.layers)):
            raise HostsError("This KV cache was not filled by these hosts.", "Use a new cache.")
        cache.__class__ = type(type(cache).__name__, (_RecordedCache, type(cache)), {})
        self.enter(cache)
        cache._record("new", recipe)
        return int(cache._number)

    def enter(self, cache: Cache) -> None:
        """Assign a number to a cache, and record its garbage collection as an event."""
        self._last += 1
        cache._recorder, cache._number = self, self._last
        weakref.finalize(cache, self.events.append, ["drop", self._last]).atexit = False


def recipe_of(cache: Cache) -> Any:
    """A recipe for an empty cache of the same kind, as JSON; see `build_cache`.

    Raises:
        HostsError: its kind cannot be spread over hosts.
    """
    class_name, layers = type(cache).__name__, getattr(cache, "layers", ())
    odd = [type(layer).__name__ for layer in layers if type(layer).__name__ not in (*KINDS, "DummyLayer")]
    if type(cache) is not DynamicCache or odd or cache.offloading:
        raise HostsError(
            f"A KV cache of this kind cannot be spread over hosts: {', '.join([class_name, *odd[:1]])}.",
            "Remove cache_implementation and cache (past_key_values), or run the model on one host.",
        )
    layer_recipes = [
        [type(layer).__name__, {name: getattr(layer, name) for name in _SETTINGS if hasattr(layer, name)}]
        for layer in layers
    ]
    recording = any(getattr(layer, "record_past", False) for layer in layers)
    return [layer_recipes, cache.layer_class_to_replicate is not None, recording]


def build_cache(recipe: Any) -> DynamicCache:
    """An empty cache made by a recipe.

    Raises:
        HostsError: the recipe names an unknown kind of layer.
    """
    layers, grows, recording = recipe
    if any(name not in (*KINDS, "DummyLayer") for name, _ in layers):
        raise HostsError("A host asks for an unknown kind of KV cache.", "Start the same versions on every host.")
    cache = DynamicCache()
    if not grows:
        cache.layer_class_to_replicate = None
    cache.layers = [
        cache_layer_class(name)(**{key: int(value) for key, value in settings.items() if key in _SETTINGS})
        for name, settings in layers
    ]
    if recording:
        cache.activate_past_recording()
    return cache


def _is_filled(layer: CacheLayerMixin) -> bool:
    states = getattr(layer, "has_previous_state", None)
    return getattr(layer, "keys", None) is not None or (isinstance(states, Mapping) and any(states.values()))


def lengths_of(cache: Cache, indices: Iterable[int]) -> list[list[int]]:
    """Index and number of tokens of layers of a cache, for those that report it.

    A caller may cut layers directly, which is not recorded; so the workers compare these lengths before each pass.
    """
    indexed = [(index, cache.layers[index]) for index in indices if index < len(cache.layers)]
    return [[index, int(layer.get_seq_length())] for index, layer in indexed if hasattr(layer, "get_seq_length")]


def stand_in(cache: Cache, index: int, batch: int, tokens: int, device: torch.device) -> None:
    """Append to the stand-in of a layer on another host as many tokens as the pass adds there.

    Args:
        cache: cache of the caller.
        index: index of the layer in the cache.
        batch, tokens: number of sequences in the pass, and of new tokens of each.
        device: device of the caller's layers.
    """
    if index >= len(cache.layers) and cache.layer_class_to_replicate is None:
        return
    states = torch.zeros((batch, 1, tokens, 1), dtype=torch.uint8, device=device)
    layer: CacheLayerMixin = cache.layers[index] if index < len(cache.layers) else None
    if layer is None or hasattr(layer, "get_seq_length"):
        cache.update(states, states, index)
    if hasattr(layer, "update_conv_state"):
        for state in range(layer.number_of_states):
            layer.update_conv_state(states[:, :, :, 0], state_idx=state, conv_kernel_size=1)
            layer.update_recurrent_state(states[:, :, :1, 0], state_idx=state)


class MirroredCaches:
    """A worker's caches, by the numbers that the first process gave them.

    Args:
        indices: cache indices of the layers that this worker computes.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = sorted(indices)
        self._caches: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._caches)

    def __call__(self, number: int) -> Any:
        """The cache with a number."""
        return self._caches[number]

    def follow(self, events: Iterable[Event]) -> None:
        """Apply the operations on the caller's caches to the layers in this process."""
        for operation, number, *args in events:
            if operation == "new":
                self._caches[number] = build_cache(args[0])
            elif operation == "copy":
                self._caches[number] = copy.deepcopy(self._caches[args[0]])
            elif operation == "drop":
                self._caches.pop(number, None)
            elif operation in _OPERATIONS:
                arguments = [torch.tensor(value) if isinstance(value, list) else value for value in args]
                self._on_layers(self._caches[number], operation, arguments)

    def align(self, number: int, lengths: Iterable[Sequence[int]]) -> None:
        """Cut the layers in this process to the lengths of the caller's.

        Args:
            number: number of the cache.
            lengths: see `lengths_of`.

        Raises:
            HostsError: a layer has fewer tokens, or its sliding window has already dropped older tokens.
        """
        cache = self._caches[number]
        for index, expected in lengths:
            layer = cache.layers[index] if index in self._indices and index < len(cache.layers) else None
            length = 0 if layer is None else int(layer.get_seq_length())
            if layer is None or length == expected:
                continue
            if length < expected or length >= getattr(layer, "sliding_window", math.inf):
                raise HostsError(
                    f"Layer {index} of a KV cache has {length} tokens here and {expected} in the first process.",
                    "Use a new cache after an error. To shorten a cache, call its crop().",
                )
            layer.keys, layer.values = layer.keys[..., :expected, :], layer.values[..., :expected, :]
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = expected

    def _on_layers(self, cache: Cache, name: str, args: Sequence[Any]) -> None:
        for index in self._indices:
            layer = cache.layers[index] if index < len(cache.layers) else None
            if layer is not None and hasattr(layer, name) and (_is_filled(layer) or name == "activate_past_recording"):
                getattr(layer, name)(*args)
