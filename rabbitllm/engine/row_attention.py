"""Attention where matrices are multiplied from codes: a prompt's by one call, and single rows of several sequences.

Both round their result alone, where torch also rounds the weights of tokens. A row has the same bits beside any others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.programs import Place, Program, float_bits, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._fusing import is_transformed, result_of, with_globals
from rabbitllm.engine._widened import wide_torch
from rabbitllm.engine.kv_room import CACHED, cached
from rabbitllm.engine.transformers_api import keeps_outputs, sdpa_attention_forward
from rabbitllm.quant import bfloat_products, prompt_attention

HeadForm = tuple[int, int, int, float]
"""Heads of queries and of keys, their width, and the factor of scores."""
_MULTIPLE = 32
"""Width of heads in steps."""
_LEAST_ROWS = 16
"""Rows from which attention is a prompt's."""
_OTHERS = "position_bias", "output_attentions"
"""Arguments that say that attention is another one."""
_MORE = {"s_aux": "sinks", "softcap": "softcap"}
"""Arguments of a model's own attention, as `attend_in_float32` calls them."""
_KNOWN = "module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"
_FORMS: tuple[tuple[str, ...], ...] = (), ("sinks",), ("softcap",)
_NONE = nn.Parameter(torch.empty(0, device="cpu"))


def add_attention(
    program: Program,
    queries: Place,
    out: Place,
    first: int,
    rows: int,
    form: HeadForm,
    sinks: Place | int = 0,
    runs: Place | int = 0,
) -> None:
    """Add attention of rows to a program, with sinks of heads or 0, to all tokens or to some (`_layer_kernels.attend`);
    from `first` on the addresses of a call are those of `cached` of each row."""
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    heads, keys, width, scaling = form
    words = queries, out, program.word(first), rows, heads, heads // keys, width, float_bits(scaling), sinks, runs
    program.add(_layer_kernels.attend, words, torch.get_num_threads() if torchs_team() is not None else 1)


def attended(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **named: Any
) -> Any:
    """transformers' `sdpa`: of a sequence's prompt, or of a part of it, by one call; with AMX by torch, which takes
    0.4 to 0.8 of its time."""
    is_ours = named.get("softcap") is None and not bfloat_products.torch_has_tiles()
    is_prompt = is_ours and _is_prompt(module, query, key, value, named)
    if is_prompt and type(scaling := named.get("scaling")) is float:
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
def in_float32(ordinary: Callable[..., Any]) -> Callable[..., Any]:
    """A model's own attention, computed in float32 where torch has no instructions for bfloat16: of a prompt, if that
    has no other arguments than sinks (`s_aux`) or `softcap`, with fewer roundings; else with all of its own."""
    if bfloat_products.torch_has_instructions():
        return ordinary
    forms = [names for names in _FORMS if _computes(ordinary, names)]
    others = [name for name in inspect.signature(ordinary).parameters if name not in (*_KNOWN, *_MORE)]
    own = with_globals(ordinary, {"torch": wide_torch}) or ordinary

    @functools.wraps(ordinary)
    def attended(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **named: Any) -> Any:
        mask, scaling = attention_mask, named.get("scaling")
        more: dict[str, Any] = {ours: x for name, ours in _MORE.items() if (x := named.get(name)) is not None}
        is_known = tuple(more) in forms and isinstance(more.get("sinks", _NONE), nn.Parameter)
        is_known = is_known and isinstance(more.get("softcap", 0.0), float) and not keeps_outputs()
        is_known = is_known and all(named.get(name) is None for name in others)
        if is_known and isinstance(scaling, float) and _is_prompt(module, query, key, value, named):
            shapes = [(1, count, query.shape[2], key.shape[2]) for count in (1, query.shape[1])]
            is_added = type(mask) is torch.Tensor and mask.dtype is torch.bfloat16 and mask.shape in shapes
            if mask is None or is_added:
                added = None if mask is None else mask[0]
                return prompt_attention.attend_in_float32(query, key, value, added, scaling, **more), None
        return own(module, query, key, value, attention_mask, **named)

    return attended


@torch.no_grad()
def _computes(ordinary: Callable[..., Any], names: tuple[str, ...]) -> bool:
    """Whether a function computes attention with these further arguments as `attend_in_float32` does."""
    random, rows = RandomTensors(), _LEAST_ROWS
    query, key, value = (random.normal(1, heads, rows, 32) for heads in (4, 2, 2))
    mask = torch.full((1, 1, rows, rows), torch.finfo(torch.bfloat16).min, device="cpu").triu(1).bfloat16()
    sinks = nn.Parameter(random.normal(4))
    module = nn.Module().eval()
    module.num_key_value_groups, module.sinks, module.is_causal = 2, sinks, True  # type: ignore[assignment]
    every: dict[str, Any] = {"sinks": sinks, "softcap": 0.5}
    more = {name: every[name] for name in names}
    own = {name: every[ours] for name, ours in _MORE.items() if ours in names}
    result = result_of(ordinary, module, query, key, value, mask, dropout=0.0, scaling=0.25, **own)
    expected = prompt_attention.attend_in_float32(query, key, value, mask[0], 0.25, **more).float()
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
