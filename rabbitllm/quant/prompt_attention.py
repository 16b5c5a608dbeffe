"""Attention of the rows of a prompt by one call, in float32: torch's rounds weights, and takes three times as long."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.programs import Program, float_bits, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.quant import _kernels

_MULTIPLE, _MOST = 32, 256
"""Widths of heads: in steps, and the largest."""
MOST_SCORES = 1 << 24
"""Scores that `attend_in_float32` computes at a time: 64 MiB."""
_TOLERANCE = 1 / 256
"""Of a result that is rounded once."""


def attends(width: int) -> bool:
    """Whether there is a kernel for heads of a width on this machine, whose results are right."""
    if width % _MULTIPLE or not 0 < width <= _MOST:
        return False
    from rabbitllm.quant import _vectors  # numba comes with it

    return bool(_vectors.lanes()) and _agrees(width)


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attention of the last rows of a sequence.

    Args:
        queries: (1, heads, rows, width).
        keys, values: (1, fewer heads, tokens, width); like queries bfloat16 without gaps within a row.
        mask: bool (rows, tokens), whether a row sees a token; None: it sees itself and all before it.
        scaling: factor of scores.

    Returns:
        (1, rows, heads, width), with the same bits for any number of threads and of rows.
    """
    _, heads, rows, width = queries.shape
    out = torch.empty(1, rows, heads, width, dtype=torch.bfloat16, device="cpu")
    steps = [2 * x.stride(dim) for x in (queries, keys, values) for dim in (1, 2)]
    addresses = [x.data_ptr() for x in (queries, keys, values, out)]
    of_mask = (0, 0) if mask is None else (mask.data_ptr(), mask.stride(0))
    factor = float_bits(scaling * math.log2(math.e))
    addresses += [of_mask[0], rows, keys.shape[2], *steps, of_mask[1], heads, heads // keys.shape[1], factor]
    threads = torch.get_num_threads() if torchs_team() is not None else 1
    prepared(_add, len(addresses), width, threads)(*addresses)
    return out


def attend_in_float32(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention that torch's `sdpa` does not compute, of some rows at a time.

    torch takes 30 times as long for products of bfloat16 where it has no instructions for them.

    Args:
        queries, keys, values: as for `attend`, of any floating dtype.
        mask: added to the scores (1 or heads, rows, tokens); None: nothing is.
        scaling: factor of scores.
        sinks: (heads,), scores that take part in the softmax, and have no value (gpt-oss).
        softcap: which scores get close to at most (Gemma 2).

    Returns:
        (1, rows, heads, width).
    """
    _, heads, rows, _ = queries.shape
    out = torch.empty(1, rows, heads, values.shape[3], dtype=queries.dtype, device="cpu")
    groups, step = heads // keys.shape[1], max(MOST_SCORES // keys.shape[2] * keys.shape[1] // heads, 1)
    for head, (key, value) in enumerate(zip(keys[0], values[0], strict=True)):
        wide, of_value, own = key.float().mT, value.float(), slice(head * groups, (head + 1) * groups)
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            scores = (queries[0, own, part].float() @ wide).mul_(scaling)
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
            if mask is not None:
                scores += mask[own if len(mask) > 1 else slice(None), part]
            largest, sink = scores.amax(-1, keepdim=True), None
            if sinks is not None:
                sink = sinks[own].float().view(-1, 1, 1)
                largest = torch.maximum(largest, sink)
            total = scores.sub_(largest).exp_().sum(-1, keepdim=True)
            if sink is not None:
                total += (sink - largest).exp_()
            out[0, part, own] = (scores @ of_value).div_(total).transpose(0, 1).to(out.dtype)
    return out


def _add(program: Program, *words: Any) -> None:
    from rabbitllm.quant import _attention_kernels

    *places, width, threads = words
    program.add(_attention_kernels.attend(width), places, threads)


@functools.cache
def _agrees(width: int) -> bool:
    random = RandomTensors()

    def products() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for heads, keys, rows, tokens in ((2, 2, 130, 130), (6, 1, 50, 150)):
            q, *cached = (random.normal(1, *shape, width) for shape in ((heads, rows), *[(keys, tokens)] * 2))
            k, v = cached
            causal = torch.ones(rows, tokens, dtype=torch.bool, device="cpu").tril(tokens - rows)
            wide = [x.float().repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v)]
            expected = torch.nn.functional.scaled_dot_product_attention(wide[0], wide[1], wide[2], causal)
            for mask in (None, causal):
                yield attend(q, k, v, mask, width**-0.5).float(), expected.transpose(1, 2)

    return _kernels.agrees(f"of attention with heads of {width}", products(), _TOLERANCE)
