"""What n-grams of a text add to a layer's streams (Qwen4-Exp), for one token: a look-up of rows, and one call.

The class takes a hundred operations of torch there, and a convolution whose preparation takes longer than its sums.
What it computes is tried when a model is loaded. Anything else, several tokens, a mask or a hook for example, is left
to the class.
"""

from __future__ import annotations

import functools
import math
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from rabbitllm.base.programs import Place, Program, Words, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._attention import are_rows
from rabbitllm.engine._fusing import AROUND, MAX_ELEMENTS, Watch, class_result, fuse, is_result, notes_on, trial_of
from rabbitllm.engine._gates import every_bfloat, sigmoids, table_of
from rabbitllm.engine._norms import NormForm, norm_form
from rabbitllm.engine._siblings import is_plain
from rabbitllm.engine.transformers_api import LinearAttentionLayer

_EMBEDDING, _CONVOLUTION, _TABLE = "ple_embedding", "conv1d", "ngram_embedding"
_LINEARS, _NORMS = ("key_proj", "value_proj"), ("norm_key", "norm_query", "norm_conv")
"""Names of the parts of a module, and of the table in the first."""
_NUMBERS = "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"
"""Names of what row numbers are computed with: a factor of each token, and of each row its remainder and its offset."""
_OF_VALUES, _OF_TOKENS = 1, 2
"""Numbers of the states in a cache: inputs of the convolution, and the last tokens."""
_WORTH_A_THREAD = 1 << 12
"""Channels of the convolution for which a further thread pays."""


class _NgramForm(NamedTuple):
    """Streams and their width, the taps of the convolution and the tokens from a tap to the next one, the tokens of
    the longest n-gram, rows of each, the end token, and the norms."""

    streams: int
    width: int
    taps: int
    dilation: int
    tokens: int
    rows: int
    end: int
    norms: tuple[NormForm, ...]

    @classmethod
    def of(cls, module: Any) -> _NgramForm | None:
        """The form that a module may have; None if it has another."""
        parts, own = module._modules, vars(module)
        if parts.keys() != {_EMBEDDING, _CONVOLUTION, *_LINEARS, *_NORMS} or sigmoids() is None:
            return None
        embedding, convolution = vars(parts[_EMBEDDING]), parts[_CONVOLUTION]
        norms = tuple(norm for name in _NORMS if (norm := norm_form(parts[name])) is not None)
        sizes = [own.get("hc_count"), own.get("hidden_size")]
        sizes += [embedding.get(name) for name in ("ngram_size", "heads_per_ngram", "eos_token_id")]
        if not isinstance(convolution, nn.Conv1d) or not all(isinstance(size, int) for size in sizes):
            return None
        (streams, width, tokens, rows, end), total = sizes, sizes[0] * sizes[1]
        (taps,), (dilation,) = convolution.kernel_size, convolution.dilation
        numbers = convolution.groups, convolution.padding, convolution.stride, own.get("short_conv_state_len")
        is_fit = numbers == (total, (0,), (1,), (taps - 1) * dilation) and convolution.bias is None
        is_fit = is_fit and convolution.weight.shape == (total, 1, taps) and 0 < total < MAX_ELEMENTS
        is_fit = is_fit and [norm.groups for norm in norms] == [streams] * len(_NORMS)
        is_fit = is_fit and all(parts[name].weight.shape == (total,) for name in _NORMS)
        return cls(streams, width, taps, dilation, tokens, rows, end, norms) if is_fit else None

    @property
    def total(self) -> int:
        """Values of all streams."""
        return self.streams * self.width

    @property
    def kept(self) -> int:
        """Tokens before, whose values the convolution needs."""
        return (self.taps - 1) * self.dilation

    def rows_of(self, embedding: Any, token: int, before: list[int]) -> torch.Tensor | None:
        """The numbers of a token's rows, int64 (1, 1, n), by the tokens before it; None if the class's numbers are not
        in memory. No n-gram goes beyond an end token."""
        numbers = [embedding._buffers.get(name) for name in _NUMBERS]
        if any(type(each) is not torch.Tensor or each.dtype is not torch.int64 for each in numbers):
            return None
        factors, sizes, offsets = (each.numpy() for each in numbers)
        tokens = [token, *reversed(before)]
        if self.end in before:
            first = tokens.index(self.end, 1)
            tokens[first:] = [self.end] * (self.tokens - first)
        mixed = np.bitwise_xor.accumulate(np.multiply(tokens, factors))[1:]
        return torch.from_numpy(mixed.repeat(self.rows) % sizes + offsets).view(1, 1, -1)


def fuse_ngrams(model: nn.Module) -> int:
    """Let modules compute what a token's n-grams add to its layer by one call.

    Returns:
        How many these are.
    """
    return fuse(model, _computed, _NgramForm.of, _is_alike)


def _computed(
    form: _NgramForm, module: Any, x: Any, ids: Any = None, cache: Any = None, conv_mask: Any = None, **more: Any
) -> torch.Tensor | None:
    if not is_plain(x) or x.shape != (1, 1, form.total) or cache is None or conv_mask is not None or more:
        return None
    parts, index, notes = module._modules, module.layer_idx, notes_on(module)
    watch: Watch | None = notes.get(_EMBEDDING)
    if watch is None or not watch.holds():
        watch = notes[_EMBEDDING] = _watch_on(module, form)
        if not watch.are_true():
            return None
    if cache.is_recording_past(index):
        return None
    embedding = parts[_EMBEDDING]
    kept, before = (cache.get_conv_state(index, state_idx=number) for number in (_OF_VALUES, _OF_TOKENS))
    tensors = [kept, *(parts[name]._parameters.get("weight") for name in (*_NORMS, _CONVOLUTION))]
    if not are_rows(tensors, [form.total * count for count in (form.kept, 1, 1, 1, form.taps)]):
        return None
    if type(before) is not torch.Tensor or before.shape != (1, form.tokens - 1) or before.dtype is not torch.int64:
        return None
    past, token = before.numpy()[0], int(ids)
    if (numbers := form.rows_of(embedding, token, past.tolist())) is None:
        return None
    rows = embedding._modules[_TABLE](numbers).flatten(-2)
    keys, values = (parts[name](rows) for name in _LINEARS)
    if not is_plain(keys) or not are_rows([keys, values], [form.total, form.width]):
        return None
    out = torch.empty_like(x)
    addresses = [tensor.data_ptr() for tensor in (x, keys, values, *tensors, out)]
    prepared(_add, len(addresses), form, torch.get_num_threads())(*addresses)
    past[:-1], past[-1] = past[1:], token
    return out


def _watch_on(module: Any, form: _NgramForm) -> Watch:
    """Whether a module has its form, and its parts compute what their classes do, as others have replaced it."""
    parts = {name: module._modules[name] for name in (_EMBEDDING, _CONVOLUTION, *_NORMS)}

    def is_true() -> bool:
        forwards = (vars(part).get("forward") for part in parts.values())
        known = (own is None or hasattr(own, AROUND) or hasattr(own, "fused") for own in forwards)
        return _NgramForm.of(module) == form and all(known)

    others = [vars(each) for each in (module, *parts.values())]
    return Watch(is_true, [(module, name) for name in parts], others=others)


@functools.cache
def _gates(width: int) -> torch.Tensor:
    """For every number of bfloat16 the gate of a stream for which that is the sum of products."""
    gate = every_bfloat() / math.sqrt(width)
    return torch.sigmoid(gate.abs().clamp_min(1e-6).sqrt() * gate.sign())


@functools.cache
def _ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bfloat16, device="cpu")


def _add(program: Program, x: Place, keys: Place, values: Place, kept: Place, *others: Any) -> None:
    from rabbitllm.engine import _layer_kernels, _norm_kernels, _recurrent_kernels  # numba comes with them

    *weights, taps, out, form, threads = others
    count, of_value = form.total, form.norms[-1]
    normed, queries, gated, mixed = (program.room(2 * count) for _ in range(4))
    for norm, place, weight, result in zip(form.norms, (keys, x), weights, (normed, queries), strict=False):
        norm.add_to(program, count, place, weight, result)
    sizes = form.streams, form.width, of_value.lanes
    words = normed, queries, _gates(form.width).data_ptr(), values, gated, *sizes
    program.add(_norm_kernels.gate_by_products, words)
    of_value.add_to(program, count, gated, weights[-1], normed)
    convolved: Words = [1, count, form.kept, form.taps, 1, 0, form.dilation, normed, kept, taps, taps, mixed]
    program.add(_recurrent_kernels.convolution_step, convolved, min(threads, -(-count // _WORTH_A_THREAD)))
    program.add(_layer_kernels.gate, [table_of("silu").data_ptr(), mixed, _ones(count).data_ptr(), mixed, count])
    program.add(_layer_kernels.add, [gated, mixed, out, count])


def _is_alike(module: Any, form: _NgramForm) -> bool:
    """Whether a module's class has the same result and states, with other products, weights and rows."""
    random, own, seen = RandomTensors(), module._modules, list[torch.Tensor]()
    count = (form.tokens - 1) * form.rows

    def looked_up(ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids)
        return ids[..., None].bfloat16()

    looked_up.weight = torch.empty(0, device="cpu")  # type: ignore[attr-defined]
    sizes = random.integers(2, 1 << 20, count, dtype=torch.int64)
    factors = random.integers(1, 1 << 40, form.tokens, dtype=torch.int64)
    numbers = dict(zip(_NUMBERS, (factors, sizes, torch.arange(count, device="cpu") << 20), strict=True))
    parts: dict[str, Any] = {
        _EMBEDDING: trial_of(own[_EMBEDDING], _modules={_TABLE: looked_up}, _buffers=numbers, layer_idx=0)
    }
    vars(parts[_EMBEDDING]).pop("forward", None)
    for name in (*_NORMS, _CONVOLUTION):
        weight = random.positive(*own[name].weight.shape)
        parts[name] = part = trial_of(own[name], _parameters={"weight": nn.Parameter(weight), "bias": None})
        if (forward := vars(part).get("forward")) is not None:
            part.forward = MethodType(forward.__func__, part)
    like, caches = trial_of(module, _modules=parts, layer_idx=0), [DynamicCache(), DynamicCache()]
    for cache in caches:
        cache.layers = [LinearAttentionLayer(number_of_states=3)]
    for token in (5, 6, form.end, 7, 8, 9, 10):
        x, keys = (random.normal(1, 1, form.total) * token for _ in range(2))
        values, ids = random.normal(1, 1, form.width) * token, torch.tensor([[token]], device="cpu")
        parts |= {name: lambda rows, each=each: each for name, each in zip(_LINEARS, (keys, values), strict=True)}
        expected, *others = (class_result(like, x, ids, cache) for cache in caches[: 1 + (token == 5)])
        result = others[0] if others else _computed(form, like, x, ids, caches[1])
        first, second = (cache.layers[0].conv_states for cache in caches)
        if result is None or not is_result(result, expected) or not torch.equal(*seen[-2:]):
            return False
        if not all(torch.equal(state, second[number]) for number, state in first.items() if state is not None):
            return False
    return True
