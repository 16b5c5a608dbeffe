"""A packed batch: the rows of several sequences go through the model in one forward, without padding.

    ids of sequence 1, ids of sequence 2, …  ->  (1, all rows)  ->  logits of the requested rows  ->  an output for each

Only attention combines rows, and there each sequence has its own keys and its own mask. While a packed pass runs, the
model's configs name the attention implementation of this module, which calls the model's own attention for each
sequence; no product between two sequences is computed. Other calls of the model at the same time (another thread, a
sequence that is not packed) get the model's own attention. The forward gets a `PackedCache`. It
appends each sequence's rows to the sequence's cache, and by its tensors attention finds the whole KV caches.

Which models can run packed batches is decided conservatively: those that a test covers. Whether a call can be packed is
decided from its arguments; with an unknown argument it is not packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, starmap
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from greenlet import getcurrent
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache

from rabbitllm.base.contexts import assigned
from rabbitllm.engine import row_attention
from rabbitllm.engine.expert_finding import is_routed
from rabbitllm.engine.kv_room import NEVER, NotTogetherError, angles_change_after, append
from rabbitllm.engine.transformers_api import attention_of
from rabbitllm.generation._cache_file import NO_MEMORY, CacheFile
from rabbitllm.generation.kv_cache import (
    CACHE_ARGUMENT,
    cache_layers,
    is_nothing,
    is_plain,
)
from rabbitllm.generation.request import ModelLimits
from rabbitllm.generation.transformers_api import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    attention_function,
    name_attention,
    sdpa_attention_forward,
)

if TYPE_CHECKING:
    from transformers import CacheLayerMixin

    from rabbitllm.engine.streamed_model import StreamedModel

Pair = tuple[torch.Tensor, torch.Tensor]
"""A key and a value tensor."""


def grouped(sizes: Sequence[int], limit: int | None) -> list[slice]:
    """Group neighbours greedily up to a maximum size; each group has at least one.

    Args:
        sizes: size of each item.
        limit: maximum size of a group; None for no limit.

    Returns:
        The indices of each group as a slice.
    """
    groups: list[slice] = []
    begin, total = 0, 0
    for index, size in enumerate(sizes):
        if index > begin and limit is not None and total + size > limit:
            groups.append(slice(begin, index))
            begin, total = index, 0
        total += size
    return [*groups, slice(begin, len(sizes))] if sizes else []


@dataclass(frozen=True, slots=True)
class MaskSpan:
    """The sizes of the mask of one sequence.

    Attributes:
        queries: number of new tokens.
        begins: number of tokens before them.
        keys: number of keys, including those of the new tokens.
        first_key: position of the first key in the sequence.
    """

    queries: int
    begins: int
    keys: int
    first_key: int


class PackedCache(Cache):  # type: ignore[misc]
    """The cache of a packed batch.

    Args:
        caches: KV cache of each sequence; their layers are of the same kinds.
        lengths: number of rows of each sequence.
        shares: whether layers use the KV cache of others.
        file: file in which some sequences may have their KV cache, unless `shares`.

    Attributes:
        lengths: see above.
        sequences: while the pass is to be one call (`_whole_steps.py`), the KV cache of each and its number of rows.
        errors: number of a sequence -> why its KV cache could not be read; its output is of no use.
    """

    def __init__(
        self, caches: Sequence[Any], lengths: Sequence[int], shares: bool, file: CacheFile | None = None
    ) -> None:
        super().__init__(layers=[])
        self.lengths = list(lengths)
        self._caches = list(caches)
        self._shares = shares
        self._file = file if file is not None and any(cache in file for cache in caches) else None
        self.sequences: list[tuple[Any, int]] | None = None
        self._mask_layer = 0
        self.errors: dict[int, Exception] = {}
        # layer -> new key and value tensor of all sequences, and the whole pair of each; None for one in the file
        self._new: dict[int, tuple[torch.Tensor, torch.Tensor, list[Pair | None]]] = {}
        self._unused = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append each sequence's rows to its own cache.

        Args:
            key_states, value_states: (1, heads, rows of all sequences, width).
            layer_idx: number of the layer.

        Returns:
            The same tensors.

        Raises:
            NotTogetherError: attention would not be by sequence.
        """
        if _active.get() is not self:
            raise NotTogetherError
        pairs: list[Pair | None] = []
        for cache, (key, value) in zip(self._caches, self._by_sequence(key_states, value_states), strict=True):
            is_in_file = self._file is not None and self._file.covers(cache, layer_idx)
            pairs.append(None if is_in_file else append(cache.layers[layer_idx], key, value))
        self._new[layer_idx] = key_states, value_states, pairs
        self._unused += 1
        return key_states, value_states

    def of(self, key_states: torch.Tensor, value_states: torch.Tensor, module: Any) -> Iterable[Pair]:
        """The KV cache of each sequence, as two tensors (1, heads, tokens, width).

        Args:
            key_states, value_states: the tensors passed to attention: those that `update` returned.
            module: the attention module. With latent attention (DeepSeek's), the cached values of each sequence are
                expanded by its `expand_kv` when they are iterated over.

        Raises:
            NotPackable: attention was given other keys.
        """
        self._unused -= 1
        layers = [layer for layer, (keys, _, _) in self._new.items() if keys is key_states]
        expand = getattr(module, "expand_kv", None) if not layers else None
        layer = layers[0] if layers else module.layer_idx if expand is not None else -1
        if layer not in self._new or (layers and self._new[layer][1] is not value_states):
            raise NotPackable("attention received other keys than the cache returned")
        pairs = self._pairs(layer, *self._new[layer])
        if not self._shares:
            self._new.clear()
        return pairs if expand is None else starmap(expand, pairs)

    @property
    def is_in_memory(self) -> bool:
        """Whether no sequence has its KV cache in the file."""
        return self._file is None

    def by_one_call(self) -> list[tuple[Any, int]]:
        """What `sequences` is for a pass by one call; empty if there cannot be one."""
        can = self.is_in_memory and not self._shares and all(cache.get_seq_length() for cache in self._caches)
        return list(zip(self._caches, self.lengths, strict=True)) if can else []

    def _by_sequence(self, keys: torch.Tensor, values: torch.Tensor) -> Iterable[Pair]:
        return zip(torch.split(keys, self.lengths, 2), torch.split(values, self.lengths, 2), strict=True)

    def _pairs(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, pairs: Sequence[Pair | None]
    ) -> Iterator[Pair]:
        """The KV cache of each sequence; one in the file is read when it is yielded, and freed before the next."""
        if self._file is None:
            yield from (pair for pair in pairs if pair is not None)
            return
        by_sequence = zip(self._caches, pairs, self._by_sequence(keys, values), strict=True)
        for index, (cache, pair, (key, value)) in enumerate(by_sequence):
            if pair is not None:
                yield pair
                continue
            try:
                pair = self._file.load(cache, layer, key, value)
            except (OSError, *NO_MEMORY) as error:  # of this sequence alone: no other one attends to its zeros
                self.errors.setdefault(index, error)
                self._file.lose(cache, error)
                tokens = cache.layers[layer].get_seq_length() + key.shape[2]
                yield _zeros(key, tokens), _zeros(value, tokens)
            else:
                yield pair
                self._file.store(cache, layer, key, value)

    def rows_of(self, cache: Any) -> slice | None:
        """The rows of the sequence with this KV cache; None if it is not in the batch."""
        ends = accumulate(self.lengths)
        rows = (slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True))
        return next((part for part, other in zip(rows, self._caches, strict=True) if other is cache), None)

    def spans(self) -> list[MaskSpan]:
        """The sizes of each sequence's mask in the layer of the latest `get_mask_sizes` or `get_query_offset`."""
        spans = []
        for cache, length in zip(self._caches, self.lengths, strict=True):
            keys, first = cache.get_mask_sizes(length, self._mask_layer)
            spans.append(MaskSpan(length, cache.get_query_offset(self._mask_layer), keys, first))
        return spans

    def finish(self) -> None:
        """Check that all attention used each sequence's own keys.

        Raises:
            NotPackable: some did not, so that sequences may have attended to each other.
        """
        if self._unused > 0:
            raise NotPackable("attention was not computed by transformers' attention interface")

    # called by models and mask functions ----------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Record the layer of the mask; its sizes are in `spans`."""
        self._mask_layer = layer_idx
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """See `get_mask_sizes`."""
        self._mask_layer = layer_idx
        return 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not supported, since the sequences have no common length.

        Raises:
            NotPackable: always.
        """
        raise NotPackable("the model needs one length for all sequences of a pass, and their lengths differ")

    @property
    def is_sliding(self) -> list[bool]:
        """Whether each layer has a sliding window."""
        return list(self._caches[0].is_sliding)

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer has linear attention."""
        return list(self._caches[0].is_linear)

    @property
    def is_dummy(self) -> list[bool]:
        """Whether each layer is a dummy."""
        return list(self._caches[0].is_dummy)

    @property
    def is_compileable(self) -> bool:
        """Always False."""
        return False


def _zeros(like: torch.Tensor, tokens: int) -> torch.Tensor:
    """Keys or values of so many tokens, all zero, which take no memory."""
    return like.new_zeros((1, 1, 1, 1)).expand(*like.shape[:2], tokens, like.shape[3])


class NotPackable(NotImplementedError):
    """A model cannot be run with packed batches."""


OWN = ("sdpa", "eager")
"""Implementations that can be called for each sequence."""
_NAME = "rabbitllm_packed_{}"
_BY_HEAD = frozenset({"s_aux"})
"""Further tensor arguments of attention that do not depend on rows."""
_BY_ROW = frozenset({"position_ids", "cache_position"})
"""Tensor arguments that the implementations of `OWN` ignore."""
_FEW_ROWS = 16
"""The most rows, as of a draft, for which the heads of a sequence that share keys are computed as one."""
_PLAIN = frozenset({"dropout", "scaling", "sliding_window", "use_cache", "output_attentions", "output_hidden_states"})
"""Arguments of which transformers' `sdpa` uses only `scaling`, if there is no dropout."""
_PASSES_BETWEEN = 16
"""After so many passes it is tried again whether all layers are one call for as many rows."""
_active: ContextVar[PackedCache | None] = ContextVar("packed pass", default=None)
"""The packed pass of this thread and greenlet."""


@contextlib.contextmanager
def attention_by_sequence(configs: Iterable[Any]) -> Iterator[None]:
    """Make a model attend by sequence inside the context, for the sequences set by `sequences_of`.

    Contexts may be nested; contexts that are closed in another order need one around all of them.

    Args:
        configs: configs of the model and its modules, each once; their implementation is one of `OWN`.
    """
    before = [(config, name) for config in configs if (name := attention_of(config)) in OWN]
    try:
        for config, name in before:
            name_attention(config, _NAME.format(name))
        yield
    finally:
        for config, name in before:
            name_attention(config, name)


def sequences_of(cache: PackedCache) -> contextlib.AbstractContextManager[None]:
    """Set the sequences of this greenlet's packed batch inside the context.

    Args:
        cache: cache of the packed forward.
    """
    return assigned(_active, cache)


def _attention(
    own: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    is_fused: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function of transformers, with a mask for each sequence.

    Query (1, heads, rows, width) -> output (1, rows, heads, width); if fused, by `row_attention` where that can.
    """
    attend = attention_function(own, module)
    if attend is None:
        raise NotPackable(f"{type(module).__name__} uses an unknown attention function")
    if is_fused and own == "eager":
        attend = row_attention.in_float32(attend)
    cache = _active.get()
    if cache is None:
        result: tuple[torch.Tensor, torch.Tensor | None] = attend(module, query, key, value, attention_mask, **kwargs)
        return result
    pairs = cache.of(key, value, module)
    for name in [name for name, argument in kwargs.items() if isinstance(argument, torch.Tensor)]:
        if name in _BY_ROW:
            del kwargs[name]
        elif name not in _BY_HEAD:
            raise NotPackable(f"attention received the unknown argument {name}")
    masks = attention_mask if attention_mask is not None else [None] * len(cache.lengths)
    if attend is sdpa_attention_forward and kwargs.keys() <= _PLAIN and not kwargs.get("dropout"):
        together = cache.is_in_memory if is_fused else None
        return _by_rows(module, query, pairs, masks, cache.lengths, kwargs, together), None
    rows = zip(torch.split(query, cache.lengths, 2), pairs, masks, strict=True)
    parts = [attend(module, queries, keys, values, mask, **kwargs)[0] for queries, (keys, values), mask in rows]
    return torch.cat(parts, 1), None


def _by_rows(
    module: nn.Module,
    query: torch.Tensor,
    pairs: Iterable[Pair],
    masks: Sequence[torch.Tensor | None],
    lengths: Sequence[int],
    kwargs: dict[str, Any],
    together: bool | None,
) -> torch.Tensor:
    """transformers' `sdpa`, with minimal overhead for a sequence of one row without a mask.

    For such a row, and for few rows, the heads that share keys are computed as rows of one head. With `enable_gqa` a
    CPU takes ten times as long for one row (bfloat16, 1000 tokens, 32 heads, 8 of keys), and transformers repeats the
    keys for several, which takes four to eight times as long.

    Args:
        together: whether such rows may be one call of `row_attention`; None if it computes nothing.
    """
    heads = query.shape[1]
    groups = getattr(module, "num_key_value_groups", 1)
    rows = query.transpose(1, 2)[0].contiguous()
    by_row = rows.view(-1, heads // groups, groups, query.shape[3])
    scale: Any = kwargs.get("scaling")
    parts: list[torch.Tensor] = []
    single: dict[int, tuple[int, Pair]] = {}  # of a part -> its row, and keys and values; all are one call
    begin = 0
    for length, (keys, values), mask in zip(lengths, pairs, masks, strict=True):
        end = begin + length
        if length == 1 and mask is None:
            if together and row_attention.attends(rows, [(keys, values)], scale):
                single[len(parts)] = begin, (keys, values)
                parts.append(rows)
            else:
                part = scaled_dot_product_attention(by_row[begin:end], keys, values, scale=scale)
                parts.append(part.reshape(1, heads, -1))
        elif length <= _FEW_ROWS and mask is not None and groups > 1:
            queries = query[:, :, begin:end].reshape(1, heads // groups, groups * length, -1)
            part = scaled_dot_product_attention(queries, keys, values, mask.repeat(1, 1, groups, 1), scale=scale)
            parts.append(part.reshape(heads, length, -1).transpose(0, 1))
        else:
            attend = sdpa_attention_forward if together is None else row_attention.attended
            parts.append(attend(module, query[:, :, begin:end], keys, values, mask, **kwargs)[0][0])
        begin = end
    if single:
        numbers, of_rows = zip(*single.values(), strict=True)
        results = row_attention.attend(rows if len(numbers) == len(rows) else rows[list(numbers)], of_rows, scale)
        if len(results) == len(rows):
            return results[None]
        for part_number, result in zip(single, torch.split(results, 1), strict=True):
            parts[part_number] = result
    return torch.cat(parts)[None]


def _masks(own: str, **kwargs: Any) -> Any:
    """One mask for each sequence; None if none of them needs one."""
    make = ALL_MASK_ATTENTION_FUNCTIONS[own]
    cache = _active.get()
    if cache is None:
        return make(**kwargs)
    spans = cache.spans()
    masks: dict[MaskSpan, Any] = {}  # sequences of the same sizes share one
    for span in spans:
        if span not in masks:
            kwargs |= {"q_length": span.queries, "q_offset": span.begins}
            kwargs |= {"kv_length": span.keys, "kv_offset": span.first_key}
            masks[span] = _mask_of_one_row(make, kwargs) if span.queries == 1 and own == "sdpa" else make(**kwargs)
    return None if all(mask is None for mask in masks.values()) else tuple(masks[span] for span in spans)


def _mask_of_one_row(make: Callable[..., Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The mask of a single row; None if the row attends to all keys, as the last one of a sliding window does.

    Computed on the host, so that it does not synchronize with a GPU.
    """
    mask: torch.Tensor | None = make(**{**kwargs, "device": "cpu"})
    return None if mask is None or bool(mask.all()) else mask.to(kwargs["device"])


for _own in OWN:
    _by_sequence = partial(_attention, _own)
    _by_sequence.fused = partial(_attention, _own, is_fused=True)  # type: ignore[attr-defined]
    AttentionInterface.register(_NAME.format(_own), _by_sequence)
    AttentionMaskInterface.register(_NAME.format(_own), partial(_masks, _own))


PACKABLE = frozenset(
    {
        *("afmoe", "apertus", "arcee", "aria_text", "beam", "bitnet", "cohere", "cohere2", "cohere2_moe"),
        *("cwm", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe"),
        *("flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text"),
        *("gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode"),
        *("gpt_neox", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"),
        *("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "internlm3", "iquestcoder"),
        *("jais2", "kolibri1", "laguna", "llama", "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3"),
        *("minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat"),
        *("nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2"),
        *("qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text"),
        *("qwen3_vl_text", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma"),
    }
)
"""Model types (transformers 5.23 and 5.24), tested in `tests/generation/test_packed_batch.py`."""
WITH_IMAGES = frozenset({"gemma3", "gemma4", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Model types around a text model of `PACKABLE`; calls with images are not packed: their arguments are unknown."""
_EXTRAS = ("output_attentions", "output_hidden_states", "output_router_logits", "alibi")
"""Config settings that must be off."""


def can_be_packed(model: StreamedModel) -> bool:
    """Whether a model can run packed batches."""
    config = model.config
    text = config.get_text_config(decoder=True)
    return (
        text.model_type in PACKABLE
        and (config.model_type in PACKABLE or config.model_type in WITH_IMAGES)
        and attention_of(config) in OWN
        and getattr(config, "return_dict", True)
        and not model.training
        and not any(getattr(part, extra, False) for part in (config, text) for extra in _EXTRAS)
        and angles_change_after(text) == NEVER
        and all(map(is_plain, cache_layers(model)))
        and not (shares_keys(model) and len(set(model.hf_device_map.values())) > 1)
        and not _rounds_together(model)
    )


def _rounds_together(model: nn.Module) -> bool:
    """Whether a published scheme may round rows of several sequences with one scale: all rows of a tensor, or those of
    two dimensions, as a mixture's class gives them to its Linears."""
    modules = dict(model.named_modules())
    mixtures = tuple(name.rpartition(".")[0] + "." for name, module in modules.items() if is_routed(module))
    for name, module in modules.items():
        scheme: Any = getattr(module, "quantization_scheme", None)
        for args in () if scheme is None else (scheme.input_activations, scheme.output_activations):
            one_scale = ("tensor", "token") if name.startswith(mixtures) else ("tensor",)
            if args is not None and args.dynamic and args.strategy in one_scale:
                return True
    return False


def attending_configs(model: StreamedModel) -> list[Any]:
    """The configs of a model and its modules that name an attention implementation, each once."""
    seen = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    return [config for config in seen.values() if attention_of(config) is not None]


def shares_keys(model: StreamedModel) -> bool:
    """Whether layers use the KV cache of others."""
    return any(map(is_nothing, cache_layers(model)))


def _is_one_sequence(layer: CacheLayerMixin) -> bool:
    keys = getattr(layer, "keys", None)
    return keys is None or keys.dim() < 2 or len(keys) == 1


_READ = frozenset({"input_ids", "position_ids", "attention_mask", CACHE_ARGUMENT, "logits_to_keep"})
_EXPECTED: Mapping[str, Any] = {"use_cache": True, "return_dict": True}
_EMPTY: Mapping[str, Any] = {"mm_encoder_outputs": {}}
"""Arguments that `generate` passes without images."""


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """The sequence of a request in a packed batch.

    Attributes:
        ids: (1, rows).
        positions: (1, rows); (kinds, 1, rows) if the model has several kinds.
        cache: its KV cache.
        logits: number of last rows whose logits are computed.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    cache: Cache
    logits: int

    def first(self, rows: int | None) -> PackedSequence:
        """Its first rows, of which the last one has logits; all of it for None."""
        if rows is None or rows >= self.ids.shape[1]:
            return self
        return PackedSequence(self.ids[:, :rows], self.positions[..., :rows], self.cache, 1)


class PackedForward:
    """Computes passes with packed batches.

    Args:
        model: a model for which `can_be_packed` holds.
        file: file in which some sequences have their KV cache; None for none.
    """

    def __init__(self, model: StreamedModel, file: CacheFile | None = None) -> None:
        self._model = model
        self._file = file
        config = model.config.get_text_config(decoder=True)
        self._configs = attending_configs(model)
        self._layers = list(map(type, cache_layers(model)))
        self._shares = shares_keys(model)
        self._vocabulary = ModelLimits.of(model).vocabulary
        self._joins = model.takes_sequences
        # passes so far; and of rows that were not one call, from which on it is tried again whether they are
        self._passes, self._next = 0, dict[int, int]()
        self._positions = getattr(config, "max_position_embeddings", None) or 1 << 62

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PackedSequence | None:
        """The sequence in a call of the model's forward; None if the call cannot be packed."""
        if args or not all(name in _READ or _is_default(name, value) for name, value in kwargs.items()):
            return None
        ids, cache, last = kwargs.get("input_ids"), kwargs.get(CACHE_ARGUMENT), kwargs.get("logits_to_keep", 0)
        if not _is_row(ids) or type(last) is not int or last < 0 or not self._knows(cache):
            return None
        before, rows = cache.get_seq_length(), ids.shape[1]
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if positions is None:
            positions = torch.arange(before, before + rows, device=ids.device)[None]
        if positions.shape[-2:] != ids.shape or positions.dim() > 3 or positions.device != ids.device:
            return None
        if mask is not None and (mask.shape != (1, before + rows) or not bool(mask.all())):
            return None
        return PackedSequence(ids, positions, cache, min(last, rows) or rows)

    def fitting(self, sequences: Sequence[PackedSequence]) -> list[bool]:
        """Whether each sequence matches the first one and has valid ids and positions.

        The others are not packed, so that an error ends only one of them.
        """
        kinds = sequences[0].positions.shape[:-1]
        lowest = torch.stack([torch.minimum(sequence.ids.min(), sequence.positions.min()) for sequence in sequences])
        highest = torch.stack([torch.stack([sequence.ids.max(), sequence.positions.max()]) for sequence in sequences])
        return [
            low >= 0
            and token < self._vocabulary
            and position < self._positions
            and sequence.positions.shape[:-1] == kinds
            for sequence, low, (token, position) in zip(sequences, lowest.tolist(), highest.tolist(), strict=True)
        ]

    def attending(self) -> AbstractContextManager[None]:
        """The context for several forwards that take turns."""
        return attention_by_sequence(self._configs)

    def __call__(self, sequences: Sequence[PackedSequence]) -> list[Any]:
        """Run one pass; returns for each sequence the output that the model's forward would return for it alone.

        In its place is the error of a sequence whose KV cache could not be read.

        Raises:
            NotPackable: the model deviates from the tested behaviour of its family.
        """
        lengths = [sequence.ids.shape[1] for sequence in sequences]
        cache = PackedCache([sequence.cache for sequence in sequences], lengths, self._shares, self._file)
        arguments: dict[str, Any] = {
            "input_ids": torch.cat([sequence.ids for sequence in sequences], 1),
            "position_ids": torch.cat([sequence.positions for sequence in sequences], -1),
            "logits_to_keep": _logit_rows(sequences, lengths),
            CACHE_ARGUMENT: cache,
            **_EXPECTED,
        }
        with self._model.streamer.memory_explained():
            output = self._by_one_call(arguments, cache)
            if output is None:
                with self.attending(), sequences_of(cache):
                    # bypasses the model's own call, which would wait for this very pass
                    output = nn.Module.__call__(self._model, **arguments)
        cache.finish()
        output_type, logits = type(output), output.logits
        unknown = output.keys() - {"logits", CACHE_ARGUMENT}
        if unknown:
            raise NotPackable(f"the model returned unknown values: {', '.join(sorted(unknown))}")
        parts = logits.split([sequence.logits for sequence in sequences], 1)
        return [
            cache.errors.get(index) or output_type(logits=part, **{CACHE_ARGUMENT: sequence.cache})
            for index, (sequence, part) in enumerate(zip(sequences, parts, strict=True))
        ]

    def _by_one_call(self, arguments: dict[str, Any], cache: PackedCache) -> Any:
        """The model's output if all its layers are one call for these rows (`_whole_steps.py`), else None."""
        rows, sequences = sum(cache.lengths), cache.by_one_call() if self._joins else []
        self._passes += 1
        if rows > _FEW_ROWS or self._passes < self._next.get(rows, 0) or not sequences:
            return None
        if getcurrent().parent is not None:  # a coroutine, which waits for others between layers
            return None
        cache.sequences = sequences
        try:
            return nn.Module.__call__(self._model, **arguments)
        except NotTogetherError:
            self._next[rows] = self._passes + _PASSES_BETWEEN
            return None
        finally:
            cache.sequences = None

    def _knows(self, cache: Cache) -> TypeGuard[DynamicCache]:
        """Whether a cache has the kinds of layers that the model would make, with one sequence in it."""
        if type(cache) is not DynamicCache or cache.offloading or list(map(type, cache.layers)) != self._layers:
            return False
        return all(map(_is_one_sequence, cache.layers))


def _is_row(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and len(value) == 1 and value.shape[1] > 0


def _is_default(name: str, value: Any) -> bool:
    """Whether an argument has the same effect as its absence."""
    if isinstance(value, torch.Tensor):
        return False
    return value is None or (name in _EXPECTED and value is _EXPECTED[name]) or (name in _EMPTY and value == {})


def _logit_rows(sequences: Sequence[PackedSequence], lengths: Sequence[int]) -> torch.Tensor:
    """Indices of the rows whose logits are computed."""
    rows: list[int] = []
    end = 0
    for sequence, length in zip(sequences, lengths, strict=True):
        end += length
        rows += range(end - sequence.logits, end)
    return torch.tensor(rows)
