"""The KV cache of one sequence, a cache of transformers: growing, cutting, copying and measuring it.

What a cache can do depends on its kinds of layers (transformers 5, `cache_utils`):

    the KV cache of every token           cut at any length, with an index's keys if it has them
    a sliding window                      cut as long as it has not slid; after that older tokens are gone
    a state (linear attention, Mamba, …)  cannot be cut: it sums up all tokens

Windows and states go back by a copy of what they were: `saved` makes it, `restore` puts it back.

Two caches outlive an answer: `ConversationCache`, of one conversation, and `PrefixCache`, of many finished sequences.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

import torch
from transformers import DynamicCache, DynamicLayer, GenerationMixin

from rabbitllm.engine import kv_room
from rabbitllm.engine.identity import why_no_identity
from rabbitllm.engine.kv_room import (
    NEVER,
    GrowingCache,
    angles_change_after,
    has_states,
    is_indexed,
    is_window,
    keeps_every_token,
)
from rabbitllm.engine.transformers_api import DummyLayer, DynamicSlidingWindowLayer
from rabbitllm.generation.transformers_api import has_dynamic_cache

if TYPE_CHECKING:
    from transformers import Cache, CacheLayerMixin, PretrainedConfig

    from rabbitllm.engine.streamed_model import StreamedModel

_ARGUMENTS = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE_ARGUMENT = "cache" if "cache" in _ARGUMENTS else "past_key_values"
"""Name of the argument and of the result with the KV cache; "cache" since transformers 5.24."""

# kinds of layers -----------------------------------------------------------------------------------------------------


def is_nothing(layer: CacheLayerMixin) -> bool:
    """Whether a layer has no attention, or uses another layer's KV cache."""
    return type(layer) is DummyLayer


def is_plain(layer: CacheLayerMixin) -> bool:
    """Whether a layer has neither a state nor indexes."""
    return keeps_every_token(layer) or is_window(layer) or is_nothing(layer)


def can_be_cropped(layer: CacheLayerMixin) -> bool:
    """Whether the layer has no state: its last tokens can be dropped, of a window those that it has recorded."""
    return is_plain(layer) or is_indexed(layer)


def can_be_cut(layer: CacheLayerMixin) -> bool:
    """Whether the layer in its current state can be cut at any length."""
    if is_window(layer):
        return bool(layer.get_seq_length() < layer.sliding_window)
    return can_be_cropped(layer)


def grows(layer: CacheLayerMixin) -> bool:
    """Whether the layer keeps the KV cache of every token; it may also have a state."""
    return isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in a value and in its tuples, lists and mappings, which may contain themselves."""
    tensors: list[torch.Tensor] = []
    visited: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list | Mapping) and id(value) not in visited:
            visited.add(id(value))
            waiting += value.values() if isinstance(value, Mapping) else value
    return tensors


def _cloned(value: Any) -> Any:
    """A copy of a value and its tensors; of a view only the viewed part."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_cloned, value))
    return {name: _cloned(item) for name, item in value.items()} if isinstance(value, dict) else value


# growing and going back -----------------------------------------------------------------------------------------------


def drop_last(cache: Cache, tokens: int) -> None:
    """Drop the last tokens of a plain cache of one sequence, the only one that uses its tensors.

    Args:
        cache: a KV cache; windows have recorded their past since before these tokens.
        tokens: number of tokens, or 0.
    """
    own = [(room, layer) for layer in cache.layers if (room := vars(layer).get("_room")) and room.belongs_to(layer)]
    cache.crop(-tokens)
    for room, layer in own:
        room.used -= tokens
        room.give(layer)  # otherwise the next token would copy the layer into new room


def empty_cache(model: StreamedModel) -> DynamicCache:
    """An empty KV cache of one sequence; other hosts take transformers' own class alone."""
    config = model.config.get_text_config(decoder=True)
    return (GrowingCache if getattr(model, "hosts", None) is None else DynamicCache)(config=config)


def without_room(layer: CacheLayerMixin) -> Any:
    """The layer without its spare room; only for a copy of the layer, or before its tensors are replaced."""
    vars(layer).pop("_room", None)
    return layer


# sizes ---------------------------------------------------------------------------------------------------------------


STATE_TOKENS = 8
"""More than the tokens that a convolution before a state looks back on, and than RWKV's vectors of a layer."""


@dataclass(frozen=True, slots=True)
class CacheCost:
    """The size of the KV cache of one sequence: measured for caches that exist, estimated for future tokens.

    Layers have spare room once they are large enough (`append`), which counts too.

    Attributes:
        every_token: bytes of a token in all layers that keep every token.
        layers: number of those layers.
        windows: of each sliding layer: the tokens of its window, and the bytes of one.
        fixed: bytes of states.
        least: bytes of a layer's keys from which it has room; 0 where all layers are one call, which makes room.
    """

    every_token: int
    layers: int = 1
    windows: tuple[tuple[int, int], ...] = ()
    fixed: int = 0
    least: int = kv_room.MIN_ROOM_BYTES

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the KV cache of a sequence of this length."""
        windows = sum(self._with_room(min(tokens, window), nbytes, 1) for window, nbytes in self.windows)
        return self.fixed + self._with_room(tokens, self.every_token, self.layers) + windows

    def _with_room(self, tokens: int, nbytes: int, layers: int) -> int:
        """Bytes of tokens in some layers, of `nbytes` each in all of them."""
        has_room = tokens * nbytes >= 2 * layers * self.least
        return nbytes * (tokens + (kv_room.spare(tokens) if has_room else 0))

    def tail_bytes(self, tokens: int) -> int:
        """Bytes in memory of a sequence in a file: its last tokens, with sliding windows and states."""
        return self.fixed + tokens * self.every_token + sum(window * nbytes for window, nbytes in self.windows)


def layer_configs(config: PretrainedConfig) -> Sequence[Any]:
    """The config of each layer where layers differ in sizes (transformers' heterogeneous configs), else the config."""
    return list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config]


def cost_by_config(config: PretrainedConfig, dtype: torch.dtype) -> CacheCost:
    """The cost according to the config: the KV cache of all heads in all layers; without attention, the states.

    Args:
        config: config of the text model.
        dtype: dtype of the KV cache.
    """
    layers = layer_configs(config)
    if not any(getattr(layer, "num_attention_heads", None) for layer in layers):
        return CacheCost(0, config.num_hidden_layers, fixed=config.num_hidden_layers * state_bytes(config))
    values = sum(map(_values_of_a_token, layers)) * (config.num_hidden_layers // len(layers))
    return CacheCost(values * dtype.itemsize, config.num_hidden_layers)


def _values_of_a_token(config: PretrainedConfig) -> int:
    """Number of values that a layer keeps for a token."""
    heads = config.num_attention_heads
    keyed = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    both = 2 * keyed * width
    if getattr(config, "kv_lora_rank", None) and getattr(config, "v_head_dim", None):  # DeepSeek's latent attention
        both = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return int(both)


def state_bytes(config: PretrainedConfig) -> int:
    """At least the bytes of a layer's state, in float32, in Mamba, xLSTM, RWKV and linear attention."""
    heads = getattr(config, "linear_num_value_heads", None)
    wide = heads * config.linear_value_head_dim if heads else getattr(config, "intermediate_size", None)
    names = "linear_key_head_dim", "state_size", "qk_head_dim"
    deep = next((size for name in names if (size := getattr(config, name, None))), 0)
    return int(4 * (wide or 2 * config.hidden_size) * (deep + STATE_TOKENS))


def cost_by_cache(cache: Cache) -> CacheCost | None:
    """The cost measured on a cache with some tokens in it; None if it cannot be derived, or nothing is in it."""
    every_token = fixed = layers = 0
    windows = []
    for layer in layers_of(cache):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        tensors = sum(tensor.nbytes for tensor in tensors_in(vars(layer)))
        if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.dim() == 4 and keys.shape[-2]:
            token = (keys.nbytes + values.nbytes) // keys.shape[-2]
            if is_indexed(layer):
                token, tensors = tensors // keys.shape[-2], keys.nbytes + values.nbytes
            window = getattr(layer, "sliding_window", None)
            if isinstance(window, int):
                windows.append((window, token))
            else:
                every_token += token
                layers += 1
            tensors -= keys.nbytes + values.nbytes
        elif tensors == 0 and getattr(layer, "is_initialized", True) and not is_nothing(layer):
            return None
        fixed += tensors
    cost = CacheCost(every_token, max(layers, 1), tuple(windows), fixed)
    return cost if cost.bytes_for(1) else None


def bytes_of(cache: Any) -> int:
    """Bytes that a cache holds now, with what a draft keeps beside it; of a view the whole storage, once."""
    held = cache if isinstance(cache, list) else [vars(cache), *map(vars, layers_of(cache))]
    storages = (tensor.untyped_storage() for tensor in tensors_in(held))
    beside = beside_of(cache)
    nbytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return nbytes + (beside.nbytes if beside is not None else 0)


# drafts --------------------------------------------------------------------------------------------------------------


@dataclass
class Beside:
    """What a draft keeps of a sequence; the attribute `beside` of the sequence's KV cache while it has no answer.

    Attributes:
        of: the draft model or the heads that have computed it.
        cache: their KV cache.
        tokens: number of tokens of which it is.
        levels: of each head the number of its rows and its states.
    """

    of: ReferenceType[Any]
    cache: Any
    tokens: int
    levels: Sequence[tuple[int, torch.Tensor | None]] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return bytes_of(self.cache) + sum(tensor.nbytes for tensor in tensors_in(self.levels))

    def can_be_cut(self, tokens: int) -> bool:
        """Whether it can go on from so many tokens."""
        can = isinstance(self.cache, DynamicCache) and all(map(can_be_cut, self.cache.layers))
        return self.tokens <= tokens or can

    def copied(self, tokens: int) -> Beside | None:
        """An independent copy for the first tokens; None if there can be none."""
        if not isinstance(self.cache, DynamicCache) or not self.can_be_cut(tokens):
            return None
        kept = min(tokens, self.tokens)
        lengths, levels = [kept] * len(self.cache.layers), list[tuple[int, torch.Tensor | None]]()
        for layer, (rows, states) in zip(self.cache.layers, self.levels, strict=False):
            surplus = max(rows - max(kept - 1, 0), 0)  # a row is of two tokens
            lengths[len(levels)] = max(layer.get_seq_length() - surplus, 0)
            levels.append((rows - surplus, None if surplus or states is None else states[:, : kept - rows]))
        return replace(self, cache=copied(self.cache, lengths), tokens=kept, levels=_cloned(levels))


def beside_of(cache: Any) -> Beside | None:
    """What a draft keeps beside a cache."""
    return getattr(cache, "beside", None)


# prefixes ------------------------------------------------------------------------------------------------------------

MIN_PREFIX_TOKENS = 16
"""Shorter prefixes are recomputed."""
MAX_SEQUENCES = 256
"""Maximum finished sequences in the cache. A new request is compared with each of them, in about 40 microseconds
(1,000 tokens, 80 layers)."""


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix; compares slices, which is a hundred times faster than single ids."""
    low, high = 0, min(len(first), len(second))
    a, b = tuple(first[:high]), tuple(second[:high])
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def usable(prompt: Sequence[int], ids: Sequence[int], cache: Cache) -> int:
    """Number of tokens of a cache that can be reused for a sequence.

    At least one token is left to compute, since it yields the first generated one.

    Args:
        prompt: ids of the new sequence.
        ids: ids of the tokens in the cache.
        cache: the KV cache.
    """
    common = min(common_prefix(prompt, ids), len(prompt) - 1)
    if common < MIN_PREFIX_TOKENS:
        return 0
    return common if common == len(ids) or all(can_be_cut(layer) for layer in cache.layers) else 0


def copied(cache: Cache, tokens: int | Sequence[int]) -> Any:
    """An independent copy of the first tokens of a cache.

    Args:
        cache: KV cache with at least that number of tokens.
        tokens: number of tokens, as `usable` returned it; or that of each layer.
    """
    copied_cache = copy(cache)
    lengths = [tokens] * len(cache.layers) if isinstance(tokens, int) else tokens
    copied_cache.layers = list(map(_copied_layer, cache.layers, lengths))
    copied_cache.beside = None
    return copied_cache


def _copied_layer(layer: CacheLayerMixin, tokens: int) -> Any:
    cut = without_room(copy(layer))
    if can_be_cut(layer):
        _cut_layer(cut, tokens)
    vars(cut).update(_cloned(vars(cut)))
    return cut


def _cut_layer(layer: CacheLayerMixin, length: int) -> None:
    """Cut a layer's key and value tensor, (batch, heads, tokens, width), to a number of tokens."""
    if not is_nothing(layer) and layer.is_initialized and layer.keys is not None:
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
        if is_window(layer):
            layer.cumulative_length = min(layer.cumulative_length, length)
        if is_indexed(layer) and layer.indexer_keys is not None:
            layer.indexer_keys = layer.indexer_keys[:, :length]
        if is_indexed(layer) and layer.indexer_position_ids is not None:
            layer.indexer_position_ids = layer.indexer_position_ids[..., :length]


Saved = Mapping[int, Mapping[Any, Any]]
"""Number of a layer -> its attributes to restore; -1 -> those of the cache itself."""


def saved(cache: Any) -> Saved:
    """A copy of the windows and states of a cache, which may also be an object or a list of a model's own."""
    copies = {
        index: _cloned(_uncroppable(layer))
        for index, layer in enumerate(layers_of(cache))
        if is_window(layer) or not can_be_cropped(layer)
    }
    states = {name: value for name, value in _held(cache).items() if name != "layers" and tensors_in(value)}
    return copies | ({-1: _cloned(states)} if states else {})


def restore(cache: Any, attributes: Saved, length: int) -> None:
    """Make a cache what it was when `attributes` were saved; layers that keep every token are cut to a length."""
    for index, layer in enumerate(layers_of(cache)):
        if index not in attributes or grows(layer):
            _cut_layer(layer, length)
        vars(layer).update(_cloned(dict(attributes.get(index, {}))))
    for name, value in _cloned(dict(attributes.get(-1, {}))).items():
        cache.__setitem__(name, value) if isinstance(cache, list) else setattr(cache, name, value)


def layers_of(cache: Any) -> Sequence[CacheLayerMixin]:
    """The layers of a cache of transformers; none if there is no such cache."""
    return getattr(cache, "layers", ())


def _held(cache: Any) -> dict[Any, Any]:
    return dict(enumerate(cache)) if isinstance(cache, list) else vars(cache)


def _uncroppable(layer: CacheLayerMixin) -> dict[str, Any]:
    """The attributes of a layer that cutting does not restore."""
    state: dict[str, Any] = dict(vars(layer))
    if grows(layer):
        del state["keys"], state["values"]
    return state


class PrefixCache:
    """KV caches of up to `MAX_SEQUENCES` finished sequences; evicts the least recently used.

    A system prompt that many requests share is computed once. A conversation with one more question continues from the
    cache of its last answer. Requests get copies, so that no sequence can change the cache of another one.

    Attributes:
        nbytes: bytes of all of them.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[int, ...], tuple[Any, int]] = OrderedDict()
        self.nbytes = 0

    def put(self, ids: Sequence[int], cache: Cache) -> None:
        """Keep the cache of a finished sequence; entries that are its prefixes are dropped.

        Args:
            ids: ids of the tokens in the cache.
            cache: KV cache; must not be used elsewhere afterwards.
        """
        key = tuple(ids)
        for prefix in [prefix for prefix in self._entries if prefix == key[: len(prefix)]]:
            self._drop(prefix)
        nbytes = bytes_of(cache)
        self._entries[key] = cache, nbytes
        self.nbytes += nbytes
        if len(self._entries) > MAX_SEQUENCES:
            self._drop(next(iter(self._entries)))

    def used(self, ids: Sequence[int]) -> None:
        """Mark an entry as recently used; other ids are ignored."""
        if tuple(ids) in self._entries:
            self._entries.move_to_end(tuple(ids))

    def shrink(self, nbytes: int) -> None:
        """Evict the least recently used entries until at most `nbytes` are left."""
        while self._entries and self.nbytes > max(nbytes, 0):
            self._drop(next(iter(self._entries)))

    def entries(self) -> Iterable[tuple[Sequence[int], Any]]:
        """Ids and cache of each entry."""
        return [(ids, cache) for ids, (cache, _) in self._entries.items()]

    def _drop(self, ids: tuple[int, ...]) -> None:
        self.nbytes -= self._entries.pop(ids)[1]


# a conversation ------------------------------------------------------------------------------------------------------

CONTINUING = frozenset(
    {
        *("bailing_hybrid", "falcon_h1", "glm5_next_text", "granitemoehybrid", "inkling_text", "inkling2_text"),
        *("kimi_linear", "lfm2", "lfm2_moe", "lfm3", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text"),
        *("qwen3_next", "qwen4_exp_text", "zamba2", "zaya"),
    }
)
"""Model types whose states continue with further prompts (transformers 5.23 and 5.24), tested in
`tests/generation/test_kv_cache.py`."""
BY_ROWS = frozenset({"falcon_mamba", "jamba", "mamba", "nemotron_h", "recurrent_gemma", "zamba", "zamba2"})
"""Model types whose states, after several tokens at once, differ from those after one after the other: with Mamba of
the first kind the recurrence starts anew, with others only its steps are limited."""
_TESTED_STATES = (
    CONTINUING
    | BY_ROWS
    | {*("bamba", "deepseek_v4", "inkling2_loop_text", "lara_mini", "mamba2", "minimax"), *("rwkv", "xlstm")}
)
"""Model types whose states can be put back, each with a test in `tests/generation/test_rewind.py`.

A check of the loaded model cannot replace this list. The test compares states after several tokens at once with those
of one after the other, in float32: to 5e-7 in Falcon-H1, while Jamba's recurrence that starts anew is 3e-2 away. In the
16 bits of a loaded model rounding alone is 1e-2 away in Falcon-H1, and Jamba 4e-2. And a streamed model would read all
of its weights for each pass of such a check.
"""
NOT_CONTINUING = frozenset(
    {"big_bird", "cpmant", "megatron-bert", "moshi", "prophetnet", "rembert", "roformer", "unlimited_ocr_text", "xlm"}
)
"""Model types that take a KV cache but compute something else with it, or fail, if a prompt comes in parts. The
published models of most are encoders; Moshi attends to all tokens of a prompt, and its KV cache is a window. What
follows the first part of a prompt is in a window of Unlimited-OCR's, as its answer is."""
MAX_SNAPSHOTS = 2
"""Maximum snapshots: at the beginning of a turn and at the end of its prompt."""


def can_go_back(model: StreamedModel) -> bool:
    """Whether a model can compute several tokens in a pass and drop the last of them, as after a wrong draft."""
    return not why_not_back(model)


def why_not_back(model: StreamedModel) -> str:
    """Why a model cannot; "" if it can."""
    config, layers = model.config.get_text_config(decoder=True), cache_layers(model)
    if not cache_argument(model):
        return "it takes no KV cache"
    if angles_change_after(config) < (getattr(config, "max_position_embeddings", None) or NEVER):
        return "its rotary angles change within the context, and with a draft a few tokens too early"
    if getattr(model, "hosts", None) is not None and not all(map(keeps_every_token, layers)):
        return "each host has the states of its own layers only"
    if not _continues(model):
        return "it is an encoder or has one, or computes something else if a text comes in parts"
    if config.model_type in _TESTED_STATES or (has_dynamic_cache(model) and all(map(can_be_cropped, layers))):
        return ""
    return "it is not known to compute several tokens as one after the other"


def cache_layers(model: StreamedModel) -> Sequence[CacheLayerMixin]:
    """The empty layers of the cache that transformers makes for a model."""
    layers: Sequence[CacheLayerMixin] = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return layers


def cache_argument(model: StreamedModel) -> str:
    """Name of a model's argument for its cache: "state" of RWKV, "cache_params" of Mamba in transformers 5.23."""
    arguments = inspect.signature(model.forward).parameters
    return next((name for name in (CACHE_ARGUMENT, "cache_params", "state") if name in arguments), "")


def looks_ahead(model: StreamedModel) -> bool:
    """Whether tokens of a model's text attend to later ones, as in an encoder."""
    # in some models it is "vision", which concerns images
    sees_both = getattr(model.config.get_text_config(decoder=True), "use_bidirectional_attention", False)
    return sees_both in (True, "all") or any(
        getattr(module, "is_causal", True) is False for module in (model.get_decoder() or model).modules()
    )


def keeps(model: StreamedModel) -> bool:
    """Whether a model's cache continues exactly, so that it can be kept.

    The results for further tokens are then the same as for all tokens at once, except for rounding. This holds for full
    attention and sliding windows. With states it depends on the model's own code, which in some models resets the state
    at every prompt (Jamba, RecurrentGemma). `CONTINUING` names the models that continue, each with a test. An index may
    choose otherwise among tokens of equal scores, which many heads (64 in published models) do not give. For all others
    nothing is kept, and each prompt is computed whole: other models with states, caches of other kinds (DeepSeek-V4),
    models without attention or a cache (GPT-1), and models whose tokens attend to later ones.
    """
    if not _continues(model) or not has_dynamic_cache(model):
        return False
    config = model.config.get_text_config(decoder=True)
    layers = cache_layers(model)
    if not any(isinstance(layer, DynamicLayer) for layer in layers):
        return False  # the number of its tokens would be unknown
    if getattr(model, "hosts", None) is not None and not all(map(keeps_every_token, layers)):
        return False  # a snapshot has the layers of this host only
    continues = config.model_type in CONTINUING
    return all(can_be_cropped(layer) or (continues and has_states(layer)) for layer in layers)


def why_not_kept(model: StreamedModel) -> str:
    """Why a model's prompts cannot be kept on disk; "" if they can."""
    return why_no_identity(model) if keeps(model) else "its KV caches do not go on with further tokens"


def _continues(model: StreamedModel) -> bool:
    """Whether a model takes further tokens with its cache, and none attends to later ones."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or config.model_type in NOT_CONTINUING:
        return False
    # Inkling 2 attends to other layers so, not tokens
    return bool(cache_argument(model)) and (config.model_type in _TESTED_STATES or not looks_ahead(model))


class ConversationCache:
    """The KV cache of one conversation, from one answer to the next.

    The next prompt is seldom an exact continuation of the last one: a template strips the model's reasoning, and a
    tokenizer may split the text of the answer differently from the model. So the cache is cut to their common prefix.
    Windows and states cannot be cut. Snapshots of them are made at the beginning of a turn and at the end of its
    prompt, and the cache is cut to the longest snapshot that is short enough. A snapshot is as large as the windows and
    states, whatever the length of the sequence.

    Args:
        model: a model for which `keeps` holds.

    Attributes:
        ids: ids of the tokens in the cache.
        cache: the `CACHE_ARGUMENT` for `generate`.
    """

    def __init__(self, model: StreamedModel) -> None:
        self._model = model
        self.clear()

    def clear(self) -> None:
        """Empty the cache and drop its snapshots."""
        self.ids: list[int] = []
        self.cache = empty_cache(self._model)
        # length of the cache -> what is restored; ascending
        self._snapshots: dict[int, Saved] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of the cache, its snapshots, and what a draft keeps beside it."""
        beside = beside_of(self.cache)
        kept = [*map(vars, self.cache.layers), self._snapshots]
        return sum(tensor.nbytes for tensor in tensors_in(kept)) + (beside.nbytes if beside is not None else 0)

    def crop(self, length: int) -> int:
        """Cut the cache, and return its new length.

        Args:
            length: maximum number of tokens; a shorter cache does not change.
        """
        return len(self.ids) if length >= len(self.ids) else self._crop(length)

    def snapshot(self, ids: list[int]) -> None:
        """Record that the cache has exactly these tokens now, and copy its windows and states."""
        self.ids = list(ids)
        layers = saved(self.cache)
        if layers and ids:
            before = [item for item in self._snapshots.items() if item[0] < len(ids)][1 - MAX_SNAPSHOTS :]
            self._snapshots = dict([*before, (len(ids), layers)])

    def recover(self, length: int, ids: list[int]) -> int:
        """Make the cache consistent after an interrupted pass, which some layers have computed and others have not.

        Args:
            length: number of tokens in every layer before that pass.
            ids: those tokens, and possibly more.

        Returns:
            The new length of the cache.
        """
        self.ids = ids[:length]
        return self._crop(length)

    def _crop(self, length: int) -> int:
        layers = self.cache.layers
        self._snapshots = {tokens: snapshot for tokens, snapshot in self._snapshots.items() if tokens <= length}
        restored: Saved = {}
        if not length or not all(can_be_cut(layer) for layer in layers):
            if not self._snapshots:
                self.clear()
                return 0
            length = max(self._snapshots)
            restored = self._snapshots[length]
        restore(self.cache, restored, length)
        self.ids = self.ids[:length]
        return length
