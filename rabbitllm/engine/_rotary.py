"""Rotary embeddings by one call where it has the bits of the model's function, which is a dozen operations, and where
matrices are multiplied from codes attention of a prompt; for attentions that are not computed as a whole
(`_attention.py`).

transformers' attention classes call functions of their module. Their instances here get the class's own forward, with
its decorators, in which these names mean functions of ours; the module and its other users keep theirs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from rabbitllm.base.programs import HALVES, Place, Program, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._fusing import by_function, fuse, is_transformed, result_of, threads_for, with_globals
from rabbitllm.engine._widened import PRODUCTS, wide_torch
from rabbitllm.engine.row_attention import attended, in_float32
from rabbitllm.engine.transformers_api import sdpa_attention_forward
from rabbitllm.quant import turned

NAME, _INTERFACES = "apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"
_GETTER, _EAGER = "get_interface", "eager_attention_forward"
_WIDTHS = (32, 32), (128, 128), (128, 96)
"""Of heads, and of what is rotated, with which functions are tried."""
_PLAIN = 4
"""Arguments of a call with queries, keys, cos and sin; Qwen4-Exp's index rotates one tensor, and names the others."""


def fuse_rotary(model: nn.Module, *, prompts: bool) -> int:
    """Let attentions rotate the queries and keys of a sequence in one call, and attend to prompts in another one.

    Returns:
        How many these are.
    """
    return fuse(model, by_function, type, lambda _, kind: rotating_forward(kind, prompts=prompts), kind=type)


def rotating_forward(kind: Any, *, prompts: bool) -> Callable[..., Any] | None:
    """A class's forward that rotates and attends in one call, until others replace it or its functions for these; None
    if it calls none that this can replace."""
    own = kind.forward
    inner = inspect.unwrap(own)
    variables: dict[str, Any] = getattr(inner, "__globals__", {})
    names = getattr(getattr(inner, "__code__", None), "co_names", ())
    ordinary = {name: variables[name] for name in (NAME, _INTERFACES) if name in names and name in variables}
    ours = dict[str, Any]()
    if NAME in ordinary and _has_bits(ordinary[NAME]):
        ours[NAME] = functools.partial(_rotated, ordinary[NAME])
    if prompts and _GETTER in names and type(functions := ordinary.get(_INTERFACES)) is AttentionInterface:
        eager = variables.get(_EAGER)
        ours[_INTERFACES] = _Interfaces(functions, eager, eager and in_float32(eager))
    if prompts and turned.is_faster() and not PRODUCTS.isdisjoint(names) and variables.get("torch") is torch:
        ordinary["torch"], ours["torch"] = torch, wide_torch
    if not ours or (changed := with_globals(own, ours)) is None:
        return None

    @functools.wraps(own)
    def forward(module: nn.Module, *args: Any, **named: Any) -> Any:
        is_own = kind.forward is own and all(variables[name] is ordinary[name] for name in ours)
        return (changed if is_own else kind.forward)(module, *args, **named)

    return forward


@dataclass(frozen=True)
class _Interfaces:
    """transformers' attention functions, with `attended` in place of `sdpa`, what `in_float32` makes of a model's own,
    and of others what they name `fused`."""

    ordinary: AttentionInterface
    eager: Any
    own: Any

    def get_interface(self, *names: Any) -> Any:
        function = self.ordinary.get_interface(*names)
        if function is sdpa_attention_forward:
            return attended
        return self.own if function is self.eager else getattr(function, "fused", function)


def _rotated(ordinary: Callable[..., Any], *args: Any, **named: Any) -> Any:
    is_plain = len(args) == _PLAIN and not named and all(type(x) is torch.Tensor for x in args)
    if is_plain and not is_transformed() and not torch.is_grad_enabled():
        q, k, cos, sin = args
        width, rotated = q.shape[-1], cos.shape[-1]
        # as a projection leaves them: all heads of a token, then the next one's
        forms = [x.shape[0] == 1 and x.transpose(1, 2).is_contiguous() for x in (q, k) if x.dim() == 4]
        has_forms = forms == [True, True] and k.shape[2:] == q.shape[2:] and q.numel() and k.numel()
        has_forms = has_forms and rotated % 2 == 0 and rotated <= width
        has_forms = has_forms and cos.shape == sin.shape == (1, q.shape[2], rotated)
        has_forms = has_forms and cos.is_contiguous() and sin.is_contiguous()
        if has_forms and q.dtype in HALVES and all(x.dtype is q.dtype and x.is_cpu for x in args):
            return _rotate(q, k, cos, sin)
    return ordinary(*args, **named)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rotated, (_, heads, tokens, width) = (q.clone(), k.clone()), q.shape
    angles = cos.shape[-1]
    sizes = heads, k.shape[1], angles, width, tokens, angles, threads_for(q.numel())
    program = prepared(_add, 4, *sizes, dtype=q.dtype)
    program(*(x.data_ptr() for x in (*rotated, cos, sin)))
    return rotated


def _add(program: Program, q: Place, k: Place, cos: Place, sin: Place, heads: int, keys: int, *sizes: int) -> None:
    from rabbitllm.engine import _layer_kernels  # numba comes with it

    *of_heads, angles, threads = sizes
    for x, count in ((q, heads), (k, keys)):
        program.add(_layer_kernels.rotate, [x, cos, sin, count, *of_heads, angles, angles], threads)


def _has_bits(ordinary: Callable[..., Any]) -> bool:
    random = RandomTensors()
    for (width, rotated), dtype in itertools.product(_WIDTHS, HALVES):
        forms = (1, 4, 1, width), (1, 2, 1, width), (1, 1, rotated), (1, 1, rotated)
        q, k, cos, sin = (random.normal(*form, dtype=dtype) for form in forms)
        expected = result_of(ordinary, q, k, cos, sin)
        if expected is None:  # it has other arguments, or rotates whole heads only
            return rotated < width
        if type(expected) is not tuple or not all(map(torch.equal, expected, _rotate(q, k, cos, sin))):
            return False
    return True
