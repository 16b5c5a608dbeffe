"""Attention of several texts whose rows lie side by side: each text's rows with its own keys, by the model's own code.

While a packed pass runs, the model's configs name an attention implementation of ours. Its masks are one for each text,
made by transformers with that text's sizes; its attention calls the model's own, a text at a time. Nothing is padded,
and no product between two texts is ever computed. Whoever else uses the model meanwhile (another thread, a generation
that goes through its layers by itself) is passed on to the model's own attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rabbitllm.batching.packed_cache import NotPackable, PackedCache

OWN = ("sdpa", "eager")
"""Implementations that can be called for each text."""
_NAME = "rabbitllm_packed_{}"
_BY_HEAD = frozenset({"s_aux"})
"""Tensors that attention is given besides queries, keys, values and mask, and that belong to no row."""
_BY_ROW = frozenset({"position_ids", "cache_position"})
"""Those that the implementations of `OWN` do not look at."""
_active: ContextVar[PackedCache | None] = ContextVar("packed pass", default=None)
"""Of this thread, and this greenlet."""


@contextlib.contextmanager
def packed_attention(configs: Iterable[Any], cache: PackedCache) -> Iterator[None]:
    """Let the model attend by text inside the context.

    Args:
        configs: of the model and its modules, each once; their implementation is one of `OWN`.
        cache: of the pass.
    """
    before = [(config, config._attn_implementation) for config in configs]
    token = _active.set(cache)
    try:
        for config, own in before:
            config._attn_implementation_internal = _NAME.format(own)
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own
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
    keys, values = cache.of(key)
    for name in [name for name, given in kwargs.items() if isinstance(given, torch.Tensor)]:
        if name in _BY_ROW:
            del kwargs[name]
        elif name not in _BY_HEAD:
            raise NotPackable(f"attention was given {name}, and nothing is known of it")
    masks = attention_mask if attention_mask is not None else [None] * len(keys)
    rows = zip(torch.split(query, cache.lengths, 2), keys, values, masks, strict=True)
    parts = [
        attend(module, own_query, its_keys, its_values, mask, **kwargs)[0]
        for own_query, its_keys, its_values, mask in rows
    ]
    return torch.cat(parts, 1), None


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
    made = []
    for span in cache.spans():
        kwargs |= {"q_length": span.queries, "q_offset": span.begins}
        kwargs |= {"kv_length": span.keys, "kv_offset": span.first_key}
        made.append(make(**kwargs))
    return None if all(mask is None for mask in made) else tuple(made)


for _own in OWN:
    AttentionInterface.register(_NAME.format(_own), partial(_attention, _own))
    AttentionMaskInterface.register(_NAME.format(_own), partial(_masks, _own))
