"""Recurrent layers' steps of one token by one call each, with the bits of the model's own functions.

transformers computes them by a dozen operations of torch each, unless packages for GPUs are installed; every operation
reads and writes the states of all heads. Instances of the layers get their class's forward, in which the names of these
functions mean ours (`with_globals`). Before a step of some shape is computed by one call, its results with random
values are compared with those of the model's own function, which computes all else.
"""

from __future__ import annotations

import functools
import inspect
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from rabbitllm.base.openmp import torchs_team
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._delta_layers import MAX_ROWS, RUN, WORTH_A_THREAD, DeltaForm, right_form, step
from rabbitllm.engine._fusing import form_in, fuse, is_transformed, with_globals
from rabbitllm.engine._widened import with_wide_convolutions
from rabbitllm.engine.transformers_api import ACT2FN

MAX_TOKENS = 32
"""Tokens that continue a text and are computed one after the other, where longer ones are computed in chunks."""
_TRIED, _SEQUENCES = 2, 16
"""Most tokens and sequences with which a shape is tried: more are computed alike, and a hundred would take seconds."""
MAX_TAPS = 16
"""Tokens of a short convolution up to which it is computed by one call."""
_EPSILON = 1e-6
_NO_LIMIT = (0.0, math.inf)
_Results: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Of a step: its result and the next state."""
_OF_STATES = "state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z"
"""Arguments of steps of Mamba."""
_CONVOLUTION = "causal_conv1d_fn"
_STATE_SPACE_STEP = "mamba2_selective_state_update"
_DTYPES = torch.bfloat16, torch.float32
_ALIKE = {("silu", torch.bfloat16), ("swish", torch.bfloat16)}
"""Activations that have the same bits whether values lie side by side or not (asserted)."""


def fuse_recurrences(model: nn.Module, prompts: bool = False) -> int:
    """Let recurrent layers compute steps of few tokens on a CPU by few calls.

    Args:
        prompts: also delta rules of prompts, whose results differ from transformers' chunks in rounding.

    Returns:
        How many layers these are.
    """

    def trial(module: nn.Module, form: tuple[DeltaForm | None]) -> object:
        return (function := _forward_of(type(module), prompts)) and (right_form(module, form[0]), function)

    return fuse(model, _forward, lambda module: (DeltaForm.of(module),), trial, kind=type)


def _forward(forms: tuple[DeltaForm | None, Any], module: Any, *args: Any, **named: Any) -> Any:
    form, function = forms
    if is_transformed():  # torch.compile cannot follow it
        return None
    result = None if form is None or args else step(form, module, **named)
    return function(module, *args, **named) if result is None else result


def delta_form(module: nn.Module) -> DeltaForm | None:
    """The form by which `fuse_recurrences` lets a layer compute one token by one call; None if it does not."""
    forms = form_in(module, _forward)
    return None if forms is None else forms[0]


def _forward_of(kind: type[nn.Module], prompts: bool) -> Callable[..., Any] | None:
    """A class's forward with our functions; None if it calls none of those that we have."""
    inner = inspect.unwrap(kind.forward)
    variables = getattr(inner, "__globals__", {})
    names = [name for name in _STEPS if name in variables and name in inner.__code__.co_names]
    if not names or torchs_team() is None:
        return None
    steps: dict[str, Any] = {name: step_of(variables[name], prompts) for name in names}
    if prompts and _CONVOLUTION in variables:
        steps[_CONVOLUTION] = with_wide_convolutions(variables[_CONVOLUTION])
    forward: Callable[..., Any] | None = with_globals(kind.forward, steps)
    return forward


@functools.cache
def step_of(ordinary: Callable[..., Any], prompts: bool = False) -> _Steps:
    """Ours for a function of transformers, which computes what ours does not."""
    kind = _STEPS[ordinary.__name__]
    if kind is ConvolutionStep and prompts:
        return ConvolutionStep(ordinary, with_wide_convolutions(ordinary))
    return DeltaStep(ordinary, prompts) if kind is DeltaStep else kind(ordinary)


class _StepCall(NamedTuple):
    """What one call computes: the name of an activation, operands, and others with which it is tried, if any."""

    named: str | None
    operands: Sequence[torch.Tensor]
    tried: Sequence[torch.Tensor] = ()


class _Recurrence:
    """A function of transformers, and the operands for which one call has its bits.

    Args:
        ordinary: transformers' own.
        otherwise: computes all else; None for the same.
    """

    _returns_state = False
    _orders: tuple[int, ...] = (1,)
    """Orders of a sum, one of which may be torch's for operands of some shapes on this processor."""

    def __init__(self, ordinary: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> None:
        self._ordinary = ordinary
        self._otherwise = otherwise or ordinary
        self._tried = dict[object, int]()

    def __call__(self, *args: Any, **named: Any) -> Any:
        call = self._call(*args, **named)
        order = call and self._order_of(call.named, call.tried or call.operands)
        if call is None or not order:
            return self._otherwise(*args, **named)
        results = self._computed(call.named, call.operands, order)
        return results if self._returns_state else results[0]

    def _call(self, *args: Any, **named: Any) -> _StepCall | None:
        """What one call is to compute of such arguments; None if they have another form."""
        raise NotImplementedError

    def _order_of(self, named: str | None, operands: Sequence[torch.Tensor]) -> int:
        """The order in which one call has the bits of such operands, 0 if in none; it is tried once with random values
        of their shapes and dtypes."""
        if torch.is_grad_enabled() or is_transformed() or not all(map(_is_plain, operands)):
            return 0
        key = named, *((x.shape, x.dtype) for x in operands)
        if key not in self._tried:
            expected = self._expected(named, self._samples(operands))
            of_orders = ((order, self._computed(named, self._samples(operands), order)) for order in self._orders)
            right = (order for order, results in of_orders if all(map(torch.equal, expected, results)))
            self._tried[key] = next(right, 0)
        return self._tried[key]

    def _samples(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Random values of their shapes and dtypes."""
        random = RandomTensors()
        return [random.normal(*x.shape, dtype=x.dtype) for x in operands]

    def _expected(self, named: str | None, operands: Sequence[torch.Tensor]) -> _Results:
        """The result and the next state, by the ordinary function."""
        raise NotImplementedError

    def _computed(self, named: str | None, operands: Sequence[torch.Tensor], order: int) -> _Results:
        """The same by one call, which changes the state in place, as caches of transformers are changed."""
        raise NotImplementedError


class DeltaStep(_Recurrence):
    """The gated delta rule, with a decay for each head, or for each row of its state (Kimi delta attention).

    Queries and keys are (B, T, H', K), values (B, T, H, V), decays (B, T, H) or (B, T, H, K), betas (B, T, H), states
    (B, H, K, V) in float32. transformers computes several tokens in chunks of 64, which takes longer than one after the
    other takes here. Few that continue a text, as those of a draft, have the bits that they have alone.

    Args:
        prompts: whether any number of tokens is computed so, also without a state.
    """

    _returns_state = True

    def __init__(self, ordinary: Callable[..., Any], prompts: bool = False) -> None:
        super().__init__(ordinary)
        self._prompts = prompts
        module = inspect.unwrap(ordinary).__globals__
        self._normalized = module["l2norm"]
        self._by_token = module[_BY_TOKEN[ordinary.__name__]] if ordinary.__name__ in _BY_TOKEN else ordinary

    def _call(
        self, query: Any, key: Any, value: Any, g: Any = None, beta: Any = None, initial_state: Any = None, **more: Any
    ) -> _StepCall | None:
        state, tokens = initial_state, key.shape[1]
        if not (more.get("output_final_state") and more.get("use_qk_l2norm_in_kernel")) or _is_packed(more):
            return None
        if state is None and self._prompts:
            shape = len(key), value.shape[2], key.shape[-1], value.shape[-1]
            state = torch.zeros(shape, dtype=torch.float32, device="cpu")
        if state is None or not (self._prompts or tokens <= MAX_TOKENS) or not self._fits(key, value, state):
            return None
        of_tokens = query, key, value, g, beta
        if tokens <= _TRIED and len(key) <= _SEQUENCES:
            return _StepCall(None, (*of_tokens, state))
        if any(x.shape[:2] != key.shape[:2] for x in of_tokens):
            return None  # what is tried would be alike, and a call would leave the memory of the others
        few = (*(x[:_SEQUENCES, :_TRIED] for x in of_tokens), state[:_SEQUENCES])
        return _StepCall(None, (*of_tokens, state), few)

    @staticmethod
    def _fits(key: Any, value: Any, state: Any) -> bool:
        (count, _, keys, rows), (heads, columns) = key.shape, value.shape[2:]
        has_form = state.dtype is torch.float32 and state.shape == (count, heads, rows, columns)
        return has_form and state.is_contiguous() and heads % keys == 0 and rows % RUN == 0 and 0 < rows <= MAX_ROWS

    def _expected(self, named: str | None, operands: Sequence[torch.Tensor]) -> _Results:
        *of_tokens, g, beta, state = operands
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        result: _Results = self._by_token(*of_tokens, g=g, beta=beta, initial_state=state, **options)
        return result

    def _computed(self, named: str | None, operands: Sequence[torch.Tensor], order: int) -> _Results:
        query, key, value, g, beta, state = operands
        (count, tokens, heads, columns), rows, has_rows = value.shape, key.shape[-1], g.dim() == 4
        both = torch.cat((query, key)).float()
        queries, keys = self._normalized(both, dim=-1, eps=_EPSILON).split(count)
        queries = queries * (1 / rows**0.5) if has_rows else queries / rows**0.5
        out = torch.empty(value.shape, dtype=torch.float32, device="cpu")
        inputs = queries, keys, value.float(), g.float().exp(), beta.float()
        sizes = count, tokens, heads, heads // key.shape[2], rows, columns, has_rows
        _run("delta_step", state.numel(), sizes, (state, *inputs, out))
        return out.to(query.dtype), state


class ConvolutionStep(_Recurrence):
    """A causal convolution of each channel over the last tokens: (B, C, 1) of bfloat16 or float32."""

    _orders = 2, 1  # a bias comes last, or first

    def _call(
        self, hidden_states: Any, conv_state: Any, weight: Any, bias: Any = None, activation: Any = None
    ) -> _StepCall | None:
        others = (weight,) if bias is None else (weight, bias)
        if hidden_states.shape[-1] != 1 or not self._fits(hidden_states, conv_state, *others):
            return None
        # the class computes more tokens if it can, and rounds of their strided results some activations otherwise
        is_strided = weight.shape[-1] <= conv_state.shape[-1]
        if is_strided and activation is not None and (activation, weight.dtype) not in _ALIKE:
            return None
        states = hidden_states, conv_state
        few = (*(x[:_SEQUENCES] for x in states), *others) if len(conv_state) > _SEQUENCES else ()
        return _StepCall(activation, (*states, *others), few)

    @staticmethod
    def _fits(x: Any, state: Any, weight: Any, bias: Any = None) -> bool:
        is_alike = x.dtype is state.dtype is weight.dtype and (bias is None or bias.dtype is x.dtype)
        has_tokens = state.shape[:2] == x.shape[:2] and weight.shape[-1] <= state.shape[-1] + 1 <= MAX_TAPS
        return is_alike and has_tokens and x.dtype in _DTYPES and state.is_contiguous()

    def _samples(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Products whose sums are mostly rounding, so that bfloat16 shows in which order they are added."""
        x, state, weight, *bias = super()._samples(operands)
        random, taps = RandomTensors(), weight.shape[-1]
        for values in (state, *bias):
            values *= 2.0 ** random.integers(-12, 13, *values.shape, dtype=torch.int8)
        sums = (state[..., state.shape[-1] + 1 - taps :].float() * weight[:, :-1].float()).sum(-1, keepdim=True)
        sums += bias[0][:, None].float() if bias else 0
        return [(-sums / weight[:, -1:].float()).to(x.dtype), state, weight, *bias]

    def _expected(self, named: str | None, operands: Sequence[torch.Tensor]) -> _Results:
        x, state, weight, *bias = operands
        return self._ordinary(x, state, weight, bias[0] if bias else None, named), state

    def _computed(self, named: str | None, operands: Sequence[torch.Tensor], order: int) -> _Results:
        x, state, weight, *bias = operands
        out, is_bfloat = torch.empty(x.shape, dtype=x.dtype, device="cpu"), x.dtype is torch.bfloat16
        sizes = len(x), x.shape[1], state.shape[-1], weight.shape[-1], is_bfloat, order if bias else 0
        _run("convolution_step", state.numel(), sizes, (x, state, weight, *(bias or [weight]), out))
        return out if named is None else _activation(named)(out), state


class _StateStep(_Recurrence):
    """A step of Mamba in bfloat16, whose states are float32."""

    def _call(self, *args: Any, **named: Any) -> _StepCall | None:
        arguments = dict(zip(_OF_STATES, args, strict=False)) | named
        *tensors, is_soft, z = (arguments.get(name) for name in _OF_STATES)
        operands = self._operands(*tensors, z) if is_soft and not _is_packed(arguments) else None
        return None if operands is None or not operands[0].is_contiguous() else _StepCall(None, operands)

    def _operands(self, *tensors: Any) -> tuple[torch.Tensor, ...] | None:
        """The tensors that one call computes with; None if they have another form."""
        raise NotImplementedError


class StateSpaceStep(_StateStep):
    """A step of Mamba-2.

    States are (B, H, P, N), inputs (B, H, P); groups of heads share a B and a C, (B, G, N). Step sizes, their biases
    and A are numbers of heads, which transformers expands to all dimensions.
    """

    def _operands(self, *tensors: Any) -> tuple[torch.Tensor, ...] | None:
        state, x, dt, a, b, c, d, bias, z = tensors
        is_whole = d is not None and bias is not None and z is None
        if not is_whole or (x.dim(), dt.dim(), a.dim(), d.dim(), bias.dim()) != (3, 3, 3, 2, 2):
            return None
        of_heads = dt.stride(2), a.stride(1), a.stride(2), d.stride(1), bias.stride(1)
        has_types = state.dtype is torch.float32 and {y.dtype for y in (x, dt, b, c, bias)} == {torch.bfloat16}
        if any(of_heads) or not has_types:
            return None
        return state, x, dt[..., 0], a[:, 0, 0], b, c, d[:, 0], bias[:, 0]

    def _expected(self, named: str | None, operands: Sequence[torch.Tensor]) -> _Results:
        state, x, dt, a, b, c, d, bias = operands
        width = x.shape[-1]
        a = a[:, None, None].expand(-1, width, state.shape[-1])
        dt, d, bias = dt[..., None].expand(-1, -1, width), d[:, None].expand(-1, width), bias[:, None].expand(-1, width)
        return self._ordinary(state, x, dt, a, b, c, d, bias, True), state

    def _computed(self, named: str | None, operands: Sequence[torch.Tensor], order: int) -> _Results:
        state, x, dt, a, b, c, d, bias = operands
        (count, heads, width, size), groups = state.shape, b.shape[1]
        steps = nn.functional.softplus(dt + bias)
        decays = torch.exp(steps.float() * a.float())
        rounded = torch.empty(state.shape, dtype=x.dtype, device="cpu")
        inputs = state, decays, steps.float(), b.float(), x.float(), rounded
        _run("state_space_step", state.numel(), (count * heads, heads // groups, width, size), inputs)
        shared = c.repeat_interleave(heads // groups, dim=1).reshape(count * heads, size, 1)
        out = torch.bmm(rounded.view(count * heads, width, size), shared).view(count, heads, width)
        return (out + x * d[:, None]).to(out.dtype).to(x.dtype), state


class SelectiveStep(_StateStep):
    """A step of Mamba-1.

    States are (B, C, N), inputs, step sizes and gates (B, C); channels share a B and a C, (B, N). A is (C, N), in
    float32.
    """

    def _operands(self, *tensors: Any) -> tuple[torch.Tensor, ...] | None:
        state, x, dt, a, b, c, d, bias, z = tensors
        if d is None or bias is None or z is None or state.dim() != 3:
            return None
        count, channels, size = state.shape
        are_alike = x.shape == dt.shape == z.shape == (count, channels) and b.shape == c.shape == (count, size)
        of_channels = a.shape == (channels, size) and d.shape == bias.shape == (channels,)
        are_bfloats = {y.dtype for y in (x, dt, b, c, d, z)} == {torch.bfloat16}
        if not (are_alike and of_channels and are_bfloats and state.dtype is a.dtype is torch.float32):
            return None
        return state, x, dt, a, b, c, d, bias, z

    def _expected(self, named: str | None, operands: Sequence[torch.Tensor]) -> _Results:
        return self._ordinary(*operands[:-1], True, operands[-1]), operands[0]

    def _computed(self, named: str | None, operands: Sequence[torch.Tensor], order: int) -> _Results:
        state, x, dt, a, b, c, d, bias, z = operands
        steps = nn.functional.softplus(dt + bias.to(dt.dtype)).float()
        decays, rounded = (steps[..., None] * a).exp_(), torch.empty(state.shape, dtype=x.dtype, device="cpu")
        inputs = state, decays, steps, b.float(), x.float(), rounded
        _run("selective_step", state.numel(), state.shape, inputs)
        out = torch.matmul(rounded, c.unsqueeze(-1)).squeeze(-1)
        return ((out + x * d) * nn.functional.silu(z)).to(x.dtype), state


class StateSpaceChunk:
    """Tokens of Mamba-2 that continue a text: few are computed one after the other, with the bits that they have alone.

    A chunk has 256 tokens; whatever it lacks of them is computed as zeros.

    Args:
        ordinary: transformers' function of chunks.
    """

    def __init__(self, ordinary: Callable[..., Any]) -> None:
        self._ordinary = ordinary
        self._step: Callable[..., Any] = step_of(inspect.unwrap(ordinary).__globals__[_STATE_SPACE_STEP])

    def __call__(self, hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, *args: Any, **named: Any) -> Any:
        if not self._fits(hidden_states, **named) or args or torch.is_grad_enabled() or is_transformed():
            return self._ordinary(hidden_states, dt, A, B, C, *args, **named)
        state, width, outputs = named["initial_states"], hidden_states.shape[-1], list[torch.Tensor]()
        a, d, bias = A[:, None, None].expand(-1, width, state.shape[-1]), named["D"][:, None], named["dt_bias"][:, None]
        for token in range(hidden_states.shape[1]):
            x, steps = hidden_states[:, token], dt[:, token, :, None].expand(-1, -1, width)
            of_heads = d.expand(-1, width), bias.expand(-1, width)
            outputs.append(self._step(state, x, steps, a, B[:, token], C[:, token], *of_heads, dt_softplus=True))
        return torch.stack(outputs, dim=1), state

    @staticmethod
    def _fits(x: Any, **named: Any) -> bool:
        state, d, bias = (named.get(name) for name in ("initial_states", "D", "dt_bias"))
        is_whole = named.get("dt_softplus") and named.get("return_final_states") and named.get("z") is None
        if not is_whole or tuple(named.get("dt_limit", _NO_LIMIT)) != _NO_LIMIT or _is_packed(named):
            return False
        if state is None or d is None or bias is None or d.dim() != 1 or bias.dim() != 1:
            return False
        is_kept = state.dtype is torch.float32 and state.is_contiguous() and state.is_cpu
        return is_kept and x.shape[1] <= MAX_TOKENS


_Steps: TypeAlias = DeltaStep | ConvolutionStep | StateSpaceStep | SelectiveStep | StateSpaceChunk
_BY_TOKEN = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}
"""transformers' names for functions of chunks -> for those of single tokens."""
_STEPS: Mapping[str, type[_Steps]] = {
    "torch_recurrent_gated_delta_rule": DeltaStep,
    "recurrent_kimi_delta_attention": DeltaStep,
    **dict.fromkeys(_BY_TOKEN, DeltaStep),
    "causal_conv1d_update": ConvolutionStep,
    _STATE_SPACE_STEP: StateSpaceStep,
    "mamba_selective_state_update": SelectiveStep,
    "mamba2_chunk_scan": StateSpaceChunk,
}
"""transformers' names for functions -> ours."""


def _is_packed(arguments: Mapping[str, Any]) -> bool:
    """Whether arguments say where sequences of one row begin."""
    return any(arguments.get(name) is not None for name in ("cu_seqlens", "seq_idx"))


def _is_plain(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, nn.Parameter) and x.is_cpu


@functools.cache
def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    function: Callable[[torch.Tensor], torch.Tensor] = ACT2FN[name]
    return function


def _run(kernel: str, values: int, sizes: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Call a function of `_recurrent_kernels.py` in torch's team; what it writes to has no gaps."""
    from rabbitllm.base.compiling import address_of  # numba comes with it
    from rabbitllm.engine import _recurrent_kernels

    team = torchs_team()
    assert team is not None
    operands = [x.contiguous() for x in tensors]  # results of torch keep their operands' strides, also joined ones
    words = array("q", [0, *sizes, *(x.data_ptr() for x in operands)])
    threads = min(torch.get_num_threads(), -(-values // WORTH_A_THREAD))
    team.run(address_of(getattr(_recurrent_kernels, kernel)), words.buffer_info()[0], threads)
