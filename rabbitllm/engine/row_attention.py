"""Attention where matrices are multiplied from codes: a prompt's by one call, and single rows of several sequences.

Both round their result alone, where torch also rounds the weights of tokens. A row has the same bits beside any others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.programs import Place, Program, float_bits, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._fusing import is_transformed, result_of
from rabbitllm.engine.kv_room import CACHED, cached
from rabbitllm.engine.transformers_api import keeps_outputs, sdpa_attention_forward
from rabbitllm.quant import bfloat_products, prompt_attention

HeadForm = tuple[int, int, int, float]
"""Heads of queries and of keys, their width, and the factor of scores."""
_MULTIPLE = 32
"""Width of heads in steps."""
_LEAST_ROWS = 16
"""Rows from which attention is a prompt's."""
_OTHERS = "position_bias", "softcap", "output_attentions"
"""Arguments that say that attention is another one."""


def add_attention(
    program: Program, queries: Place, out: Place, first: int, rows: int, form: HeadForm, sinks: Place | int = 0
) -> None:
    """Add attention of rows to a program, with sinks of heads or 0; from `first` on the addresses of a call are those
    of `cached` of each row."""
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    heads, keys, width, scaling = form
    words = queries, out, program.word(first), rows, heads, heads // keys, width, float_bits(scaling), sinks
    program.add(_layer_kernels.attend, words, torch.get_num_threads() if torchs_team() is not None else 1)


def attended(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **named: Any
) -> Any:
    """transformers' `sdpa`: of a sequence's prompt, or of a part of it, by one call."""
    if _is_prompt(module, query, key, value, named) and type(scaling := named.get("scaling")) is float:
        rows, mask = query.shape[2], attention_mask
        if mask is None:  # a cache that has its room in advance
            key, value = key[:, :, :rows], value[:, :, :rows]
        elif type(mask) is torch.Tensor and mask.dtype is torch.bool and mask.stride(-1) == 1 and mask.is_cpu:
            mask = mask[0, 0] if mask.shape == (1, 1, rows, key.shape[2]) else ...
        else:
            mask = ...
        if mask is not ...:
            return prompt_attention.attend(query, key, value, mask, scaling), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **named)


@functools.lru_cache(64)
def with_sinks(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """A model's own attention whose heads have sinks (`s_aux`), of a prompt in float32 where torch has no instructions
    for bfloat16; the function itself if it is another one."""
    if bfloat_products.torch_has_instructions() or not _has_sinks(ordinary):
        return ordinary

    @functools.wraps(ordinary)
    def attended(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **named: Any) -> Any:
        mask, sinks, scaling = attention_mask, named.get("s_aux"), named.get("scaling")
        is_prompt = not keeps_outputs() and _is_prompt(module, query, key, value, named)
        if is_prompt and isinstance(sinks, nn.Parameter) and isinstance(scaling, float):
            forms = [(1, count, query.shape[2], key.shape[2]) for count in (1, query.shape[1])]
            is_added = type(mask) is torch.Tensor and mask.dtype is torch.bfloat16 and mask.shape in forms
            if mask is None or is_added:
                own = None if mask is None else mask[0]
                return prompt_attention.attend_with_sinks(query, key, value, own, scaling, sinks), None
        return ordinary(module, query, key, value, attention_mask, **named)

    return attended


@torch.no_grad()
def _has_sinks(ordinary: Callable[..., Any]) -> bool:
    """Whether a function computes attention with sinks."""
    random, rows = RandomTensors(), _LEAST_ROWS
    query, key, value = (random.normal(1, heads, rows, 32) for heads in (4, 2, 2))
    mask = torch.full((1, 1, rows, rows), torch.finfo(torch.bfloat16).min, device="cpu").triu(1).bfloat16()
    sinks = nn.Parameter(random.normal(4))
    module = nn.Module().eval()
    module.num_key_value_groups, module.sinks, module.is_causal = 2, sinks, True  # type: ignore[assignment]
    result = result_of(ordinary, module, query, key, value, mask, dropout=0.0, scaling=0.25, s_aux=sinks)
    expected = prompt_attention.attend_with_sinks(query, key, value, mask[0], 0.25, sinks).float()
    if type(result) is not tuple or not isinstance(result[0], torch.Tensor) or result[0].shape != expected.shape:
        return False
    return bool((result[0].float() - expected).norm() < expected.norm() / 64)


def _is_prompt(module: Any, query: Any, key: Any, value: Any, named: dict[str, Any]) -> bool:
    """Whether `prompt_attention.attend` computes what `sdpa` would of these, but for rounding and the mask."""
    is_causal = named.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal or named.get("dropout") or any(named.get(name) is not None for name in _OTHERS):
        return False
    for x in (query, key, value):
        if type(x) is not torch.Tensor or x.dtype is not torch.bfloat16 or not x.is_cpu or x.dim() != 4:
            return False
        if len(x) != 1 or x.stride(3) != 1 or x.shape[3] != query.shape[3]:
            return False
    heads, rows, groups = query.shape[1], query.shape[2], getattr(module, "num_key_value_groups", 1)
    if key.shape != value.shape or heads != groups * key.shape[1] or not _LEAST_ROWS <= rows <= key.shape[2]:
        return False
    if is_transformed() or torch.is_grad_enabled():
        return False
    return prompt_attention.attends(query.shape[3])


def attend(queries: torch.Tensor, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], scaling: float) -> torch.Tensor:
    """Attention of single rows, each of a sequence.

    Args:
        queries: (rows, heads, width), bfloat16, without gaps.
        pairs: of each row keys and values (1, fewer heads, tokens, width), for which `attends` holds.
        scaling: factor of scores.

    Returns:
        Like the queries.
    """
    out, (rows, heads, width) = torch.empty_like(queries), queries.shape
    form = heads, pairs[0][0].shape[1], width, scaling
    words = (word for keys, values in pairs for word in cached(keys, values))
    prepared(_add, 2 + CACHED * rows, rows, form, torch.get_num_threads())(queries.data_ptr(), out.data_ptr(), *words)
    return out


def attends(queries: torch.Tensor, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], scaling: Any) -> bool:
    """Whether `attend` computes the attention of such tensors."""
    if queries.shape[-1] % _MULTIPLE or type(scaling) is not float or not _is_plain(queries):
        return False
    width = queries.shape[-1]
    return all(x.shape[3] == width and x.shape[2] and _is_plain(x) for pair in pairs for x in pair)


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype is torch.bfloat16 and x.is_cpu and x.stride(-1) == 1


def _add(program: Program, queries: Place, out: Place, *others: Any) -> None:
    *_, rows, form, _ = others
    add_attention(program, queries, out, 2, rows, form)
