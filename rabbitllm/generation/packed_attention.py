"""Attention of several texts whose rows lie side by side: each text's rows with its own keys, by the model's own code.

While a packed pass runs, the model's configs name an attention implementation of ours. Its masks are one for each text,
made by transformers with that text's sizes; its attention calls the model's own, a text at a time. Nothing is padded,
and no product between two texts is ever computed. Other calls of the model at the same time (another thread, a
generation that goes through its layers by itself) get the model's own attention.
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
"""Implementations that can be called for each text."""
_NAME = "rabbitllm_packed_{}"
_BY_HEAD = frozenset({"s_aux"})
"""Further arguments of attention that are tensors and belong to no row."""
_BY_ROW = frozenset({"position_ids", "cache_position"})
"""Those that the implementations of `OWN` do not look at."""
_PLAIN = frozenset({"dropout", "scaling", "sliding_window", "use_cache", "output_attentions", "output_hidden_states"})
"""What changes nothing of transformers' `sdpa` but its scale, dropout being none."""
_active: ContextVar[PackedCache | None] = ContextVar("packed pass", default=None)
"""Of this thread, and this greenlet."""


@contextlib.contextmanager
def packed_attention(configs: Iterable[Any], cache: PackedCache) -> Iterator[None]:
    """Let the model attend by text inside the context.

    Args:
        configs: of the model and its modules, each once; their implementation is one of `OWN`.
        cache: of the pass.
    """
    with attention_by_text(configs), texts_of(cache):
        yield


@contextlib.contextmanager
def attention_by_text(configs: Iterable[Any]) -> Iterator[None]:
    """Let a model inside the context attend by text, where `texts_of` names the texts.

    Contexts may be inside of one another; those that are open at the same time in any order need one around them all.

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
    """Say to this greenlet's attention inside the context whose rows lie side by side.

    Args:
        cache: of the forward.
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
    """As transformers has it, but for a mask a text: (1, heads, rows, width) -> (1, rows, heads, width)."""
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
    """transformers' `sdpa`, with as little as can be around the one product of a text that has one row.

    The heads that share keys are taken as rows of one head then, as transformers does it too where there is a mask:
    with `enable_gqa` a CPU takes ten times as long for one row (bfloat16, 1000 tokens, 32 heads, 8 of keys).
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
    """The function that the model would call."""
    eager = getattr(type(module).forward, "__globals__", {}).get("eager_attention_forward")
    found: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(own, eager)
    if found is None:
        raise NotPackable(f"{type(module).__name__} attends by no function that is known")
    return found


def _masks(own: str, **kwargs: Any) -> Any:
    """One mask for each text; None if none of them needs one."""
    make = ALL_MASK_ATTENTION_FUNCTIONS[own]
    cache = _active.get()
    if cache is None:
        return make(**kwargs)
    spans = cache.spans()
    made: dict[MaskSpan, Any] = {}  # texts of the same sizes share one
    for span in spans:
        if span not in made:
            kwargs |= {"q_length": span.queries, "q_offset": span.begins}
            kwargs |= {"kv_length": span.keys, "kv_offset": span.first_key}
            made[span] = _mask_of_one_row(make, kwargs) if span.queries == 1 and own == "sdpa" else make(**kwargs)
    return None if all(mask is None for mask in made.values()) else tuple(made[span] for span in spans)


def _mask_of_one_row(make: Callable[..., Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """None where the row may look at all keys, as the last one of a sliding window does; found out on the host, which
    does not wait for a GPU."""
    mask: torch.Tensor | None = make(**{**kwargs, "device": "cpu"})
    return None if mask is None or bool(mask.all()) else mask.to(kwargs["device"])


for _own in OWN:
    AttentionInterface.register(_NAME.format(_own), partial(_attention, _own))
    AttentionMaskInterface.register(_NAME.format(_own), partial(_masks, _own))
