"""Attention in a packed batch: each sequence's rows attend to its own keys, by the model's own code.

While a packed pass runs, the model's configs name the attention implementation of this module. It has one mask for each
sequence, made by transformers with that sequence's sizes, and calls the model's own attention for each sequence.
Nothing is padded, and no product between two sequences is computed. Other calls of the model at the same time (another
thread, a generation that goes through its layers by itself) get the model's own attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rabbitllm.generation.packed_cache import MaskSpan, NotPackable, PackedCache

OWN = ("sdpa", "eager")
"""Implementations that can be called for each sequence."""
_NAME = "rabbitllm_packed_{}"
_BY_HEAD = frozenset({"s_aux"})
"""Further tensor arguments of attention that do not depend on rows."""
_BY_ROW = frozenset({"position_ids", "cache_position"})
"""Tensor arguments that the implementations of `OWN` ignore."""
_PLAIN = frozenset({"dropout", "scaling", "sliding_window", "use_cache", "output_attentions", "output_hidden_states"})
"""Arguments of which transformers' `sdpa` uses only `scaling`, if there is no dropout."""
_active: ContextVar[PackedCache | None] = ContextVar("packed pass", default=None)
"""The packed pass of this thread and greenlet."""


@contextlib.contextmanager
def packed_attention(configs: Iterable[Any], cache: PackedCache) -> Iterator[None]:
    """Make the model attend by sequence inside the context.

    Args:
        configs: configs of the model and its modules, each once; their implementation is one of `OWN`.
        cache: cache of the pass.
    """
    with attention_by_text(configs), texts_of(cache):
        yield


@contextlib.contextmanager
def attention_by_text(configs: Iterable[Any]) -> Iterator[None]:
    """Make a model attend by sequence inside the context, for the sequences set by `texts_of`.

    Contexts may be nested; contexts that are closed in another order need one around all of them.

    Args:
        configs: see `packed_attention`.
    """
    before = [(config, config._attn_implementation) for config in configs if config._attn_implementation in OWN]
    try:
        for config, own in before:
            config._attn_implementation_internal = _NAME.format(own)
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


@contextlib.contextmanager
def texts_of(cache: PackedCache) -> Iterator[None]:
    """Set the sequences of this greenlet's packed batch inside the context.

    Args:
        cache: cache of the packed forward.
    """
    token = _active.set(cache)
    try:
        yield
    finally:
        _active.reset(token)


def _attention(
    own: str,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function of transformers, with a mask for each sequence.

    Query (1, heads, rows, width) -> output (1, rows, heads, width).
    """
    attend = _own_attention(own, module)
    cache = _active.get()
    if cache is None:
        result: tuple[torch.Tensor, torch.Tensor | None] = attend(module, query, key, value, attention_mask, **kwargs)
        return result
    pairs = cache.of(key, value, module)
    for name in [name for name, given in kwargs.items() if isinstance(given, torch.Tensor)]:
        if name in _BY_ROW:
            del kwargs[name]
        elif name not in _BY_HEAD:
            raise NotPackable(f"attention was given {name}, and nothing is known of it")
    masks = attention_mask if attention_mask is not None else [None] * len(cache.lengths)
    if attend is sdpa_attention_forward and kwargs.keys() <= _PLAIN and not kwargs.get("dropout"):
        return _by_rows(module, query, pairs, masks, cache.lengths, kwargs), None
    rows = zip(torch.split(query, cache.lengths, 2), pairs, masks, strict=True)
    parts = [attend(module, own, keys, values, mask, **kwargs)[0] for own, (keys, values), mask in rows]
    return torch.cat(parts, 1), None


def _by_rows(
    module: nn.Module,
    query: torch.Tensor,
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    masks: Sequence[torch.Tensor | None],
    lengths: Sequence[int],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """transformers' `sdpa`, with minimal overhead for a sequence of one row without a mask.

    For such a row the heads that share keys are computed as rows of one head. With `enable_gqa` a CPU takes ten times
    as long for one row (bfloat16, 1000 tokens, 32 heads, 8 of keys).
    """
    heads = query.shape[1]
    groups = getattr(module, "num_key_value_groups", 1)
    by_row = query.transpose(1, 2).reshape(-1, heads // groups, groups, query.shape[3])
    scale = kwargs.get("scaling")
    parts = []
    begin = 0
    for length, (keys, values), mask in zip(lengths, pairs, masks, strict=True):
        end = begin + length
        if length == 1 and mask is None:
            part = scaled_dot_product_attention(by_row[begin:end], keys, values, scale=scale)
            parts.append(part.reshape(1, 1, heads, -1))
        else:
            own = query[:, :, begin:end]
            parts.append(sdpa_attention_forward(module, own, keys, values, mask, **kwargs)[0])
        begin = end
    return torch.cat(parts, 1)


def _own_attention(own: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function of the model itself."""
    eager = getattr(type(module).forward, "__globals__", {}).get("eager_attention_forward")
    found: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(own, eager)
    if found is None:
        raise NotPackable(f"{type(module).__name__} attends by no function that is known")
    return found


def _masks(own: str, **kwargs: Any) -> Any:
    """One mask for each sequence; None if none of them needs one."""
    make = ALL_MASK_ATTENTION_FUNCTIONS[own]
    cache = _active.get()
    if cache is None:
        return make(**kwargs)
    spans = cache.spans()
    made: dict[MaskSpan, Any] = {}  # sequences of the same sizes share one
    for span in spans:
        if span not in made:
            kwargs |= {"q_length": span.queries, "q_offset": span.begins}
            kwargs |= {"kv_length": span.keys, "kv_offset": span.first_key}
            made[span] = _mask_of_one_row(make, kwargs) if span.queries == 1 and own == "sdpa" else make(**kwargs)
    return None if all(mask is None for mask in made.values()) else tuple(made[span] for span in spans)


def _mask_of_one_row(make: Callable[..., Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The mask of a single row; None if the row attends to all keys, as the last one of a sliding window does.

    Computed on the host, so that it does not synchronize with a GPU.
    """
    mask: torch.Tensor | None = make(**{**kwargs, "device": "cpu"})
    return None if mask is None or bool(mask.all()) else mask.to(kwargs["device"])


for _own in OWN:
    AttentionInterface.register(_NAME.format(_own), partial(_attention, _own))
    AttentionMaskInterface.register(_NAME.format(_own), partial(_masks, _own))
