"""The gated delta rule for one token: all between its products by one call, with the bits of its class.

transformers takes some seventy operations of torch there. What a class computes is tried when a model is loaded, with
random values of its sizes. Anything else, several tokens, a hook or a state of another form, is left to the class.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from rabbitllm.base.programs import Place, Program, Words, float_bits, prepared
from rabbitllm.base.random_tensors import RandomTensors
from rabbitllm.engine._fusing import class_result, is_result, trial_of
from rabbitllm.engine._gates import sigmoids, table_of
from rabbitllm.engine._norms import NormForm, epsilon_of, norm_form
from rabbitllm.engine._siblings import has_hooks, is_plain

MAX_ROWS, RUN = 256, 16
"""Rows of a state up to which torch's order of adding them is followed, and of which they are a multiple."""
WORTH_A_THREAD = 1 << 15
"""Values of states for which a further thread pays."""
_WORTH_CHANNELS = 1 << 12
"""The same of channels of its convolution."""
_PRODUCTS = ("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Names of the first Linears: of all that belongs to a head of keys, or of queries, keys and values, and of others."""
_SIZES = "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size"
_READ = frozenset({"position_ids", "use_cache", "output_router_logits"})
"""Arguments that a step does not depend on; others are left to the class unless they are None."""
_EPSILON = 1e-6
_ACTIVATIONS, _MOST_TAPS = ("silu", "swish"), 4
"""Of more tokens torch adds in another order, and other activations have other bits of what is not in a row."""


@dataclass(frozen=True)
class DeltaForm:
    """Heads of keys and of values, their widths, the tokens of the convolution, its activation, the norm, and the
    names of the first Linears."""

    keys: int
    heads: int
    rows: int
    columns: int
    taps: int
    activation: str
    norm: NormForm
    products: tuple[str, ...]
    is_recurrent = True
    dtype = torch.bfloat16
    parameters = ()
    angles = index = None
    words = 3
    """Addresses of a row: those of the convolution's state, of the other one, and of the decays."""

    @classmethod
    def of(cls, module: Any) -> DeltaForm | None:
        """The form that a module may have; None if it has another."""
        parts, own = module._modules, vars(module)
        names = next((names for names in _PRODUCTS if parts.keys() == {*names, "conv1d", "norm", "out_proj"}), ())
        sizes = [own.get(name) for name in _SIZES]
        if not names or module._parameters.keys() != {"A_log", "dt_bias"} or sigmoids() is None:
            return None
        if not all(isinstance(size, int) and size > 0 for size in sizes) or not isinstance(own.get("layer_idx"), int):
            return None
        keys, heads, rows, columns, taps = sizes
        norm, act = norm_form(parts["norm"], vars(parts["norm"]).get("activation")), own.get("activation")
        if norm is None or norm.activation is None or act not in _ACTIVATIONS or taps > _MOST_TAPS:
            return None
        if heads % keys or rows % RUN or rows > MAX_ROWS or rows < norm.lanes:
            return None
        return cls(keys, heads, rows, columns, taps, act, norm, names)

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the Linears."""
        return *self.products, "out_proj"

    @property
    def outputs(self) -> list[int]:
        """Values that each Linear computes but the last."""
        of_first = self.channels + self.values
        return [of_first, 2 * self.heads] if self._is_mixed else [self.channels, self.values, *[self.heads] * 2]

    @functools.cached_property
    def heads_like(self) -> torch.Tensor:
        """A tensor like that of what the Linears compute, with betas and then rates last."""
        count = sum(self.outputs) + 2 * self.heads * self._is_mixed
        return torch.empty((), dtype=torch.bfloat16, device="cpu").expand(count)

    @property
    def _is_mixed(self) -> bool:
        """Whether a Linear computes all that belongs to a head of keys."""
        return len(self.products) == len(_PRODUCTS[0])

    @property
    def values(self) -> int:
        """Values of a token."""
        return self.heads * self.columns

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.keys * self.rows + self.values

    @functools.cached_property
    def _shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Of the states of the convolution and of the rule, of the taps and of the norm's weight."""
        of_heads = (1, self.heads, self.rows, self.columns), torch.float32
        shapes = (1, self.channels, self.taps), (self.channels, 1, self.taps), (self.columns,)
        of_taps, *of_weights = [(shape, torch.bfloat16) for shape in shapes]
        return [of_taps, of_heads, *of_weights]

    def has(self, *tensors: Any) -> bool:
        """Whether states and parameters are tensors of these sizes, in memory without gaps."""
        for x, (shape, dtype) in zip(tensors, self._shapes, strict=True):
            if not _is_in_memory(x) or x.shape != shape or x.dtype is not dtype:
                return False
        return True

    def is_of(self, module: Any) -> bool:
        """Whether a module still has it."""
        return DeltaForm.of(module) == self

    @staticmethod
    def own_parts(module: Any) -> list[nn.Module]:
        """The convolution and the norm."""
        return [module._modules["conv1d"], module._modules["norm"]]

    def states(self, module: Any, cache: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Those of the convolution and of the rule, which are changed in place; None if that is left to the class."""
        index, (convolution, norm) = module.layer_idx, self.own_parts(module)
        kept, state = cache.get_conv_state(index, state_idx=0), cache.get_recurrent_state(index, state_idx=0)
        weights = convolution._parameters.get("weight"), norm._parameters.get("weight")
        if convolution._parameters["bias"] is not None or not self.has(kept, state, *weights):
            return None
        is_own = not (cache.is_recording_past(index) or has_hooks(convolution) or has_hooks(norm))
        return (kept, state) if is_own else None

    def between(self, module: Any, cache: Any, heads: torch.Tensor) -> tuple[Sequence[Any], Sequence[int]] | None:
        """States and decays, and the addresses of a row; None if it is left to the class."""
        if (states := self.states(module, cache)) is None:
            return None
        tensors = *states, decays_of(module, heads[-self.heads :])
        return tensors, [tensor.data_ptr() for tensor in tensors]

    def decide(self, modules: Iterable[Any], heads: torch.Tensor, decays: torch.Tensor) -> Iterator[None]:
        """Compute the decays of layers, one after the other, each after its first Linears."""
        rates = heads[-self.heads :]
        for module in modules:
            decays_of(module, rates, decays)
            yield

    def add_first(self, program: Program, at: Any, own: Sequence[Place]) -> None:
        """Add what follows the first Linears to a program; `at` are `LayerPlaces`."""
        from rabbitllm.engine import _recurrent_kernels as kernels

        if self._is_mixed:
            betas, rates = self._of_heads(at.heads)
            both = at.heads[0], at.heads[1] + 2 * self.outputs[0]
            program.add(kernels.part_heads, [both, betas, rates, self.keys, 0, self.heads // self.keys])

    def add_between(self, program: Program, at: Any) -> None:
        """Add what comes before `add_last` where a call of all layers is given their `decide`."""
        program.ask()

    def add_last(self, program: Program, at: Any, own: Sequence[Place], out: Place) -> None:
        """Add what comes before the last Linear."""
        kept, state, decays = (program.address(at.cached + index) for index in range(self.words))
        z, (taps, weight) = _after(at.heads, 2 * self.channels), own
        others = self._of_heads(at.heads)[0], decays, kept, taps, state, weight, out, self, torch.get_num_threads()
        _add(program, at.heads, z, *others)

    def _of_heads(self, heads: Place) -> tuple[Place, Place]:
        """Where betas and rates are."""
        end = 2 * self.heads_like.numel()
        return _after(heads, end - 4 * self.heads), _after(heads, end - 2 * self.heads)


def step(
    form: DeltaForm, module: Any, hidden_states: Any = None, cache: Any = None, **named: Any
) -> torch.Tensor | None:
    """The result for one token, with changed states; None if that is left to the class."""
    x = hidden_states
    if cache is None or not is_plain(x) or x.shape[:2] != (1, 1):
        return None
    if any(value is not None and name not in _READ for name, value in named.items()):
        return None
    parts, norm = module._modules, module._modules["norm"]
    numbers = vars(module).get("activation"), epsilon_of(norm), vars(norm).get("activation")
    is_tried = "forward" not in vars(norm) or norm_form(norm, form.norm.activation) == form.norm  # a trial's has none
    if not is_tried or numbers != (form.activation, *form.norm[1:3]) or (states := form.states(module, cache)) is None:
        return None
    kept, state = states
    taps, weight = (part._parameters["weight"] for part in form.own_parts(module))
    first, *others = (parts[name](x) for name in form.products)
    z, b, a = others if len(others) > 1 else (first, *others[0].view(form.keys, 2, -1).transpose(0, 1).unbind())
    if not all(map(is_plain, (first, z, *others))):
        return None
    decays, b = decays_of(module, a.reshape(-1)), b.reshape(-1).contiguous()
    out = torch.empty(1, 1, form.values, dtype=x.dtype, device="cpu")
    tensors: Any = first, z, b, decays, kept, taps, state, weight, out
    prepared(_add, 9, form, torch.get_num_threads())(*[tensor.data_ptr() for tensor in tensors])
    cache.update_recurrent_state(state, module.layer_idx)
    return parts["out_proj"](out)  # type: ignore[no-any-return]


def decays_of(module: Any, rates: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The decay of each head's state, in float32, by torch, whose exponentials no kernel repeats."""
    log, steps = module.A_log, nn.functional.softplus(rates.float() + module.dt_bias)
    factor = _factor(ctypes.string_at(log.data_ptr(), log.nbytes), log.dtype) if _is_in_memory(log) else _negated(log)
    return torch.exp(steps.mul_(factor), out=out)


def _negated(log: torch.Tensor) -> torch.Tensor:
    return -log.float().exp()


@functools.lru_cache(1024)
def _factor(values: bytes, dtype: torch.dtype) -> torch.Tensor:
    """The same of values that most steps have in common."""
    return _negated(torch.frombuffer(bytearray(values), dtype=dtype))


def _is_in_memory(x: Any) -> bool:
    """Whether values lie on the CPU, without gaps."""
    return type(x) in (torch.Tensor, nn.Parameter) and x.is_cpu and x.is_contiguous()


@functools.cache
def _ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float32, device="cpu")


def _add(program: Program, *arguments: Any) -> None:
    from rabbitllm.engine import _recurrent_kernels as kernels  # numba comes with them
    from rabbitllm.quant import joint_kernels

    first, z, b, decays, kept, taps, state, weight, out, form, threads = arguments
    table = sigmoids()
    assert table is not None
    if form._is_mixed:
        first, z, of_heads = program.room(2 * form.channels), program.room(2 * form.values), first
        program.add(kernels.part_heads, [of_heads, first, z, form.keys, form.rows, form.values // form.keys])
    mixed, betas = program.room(2 * form.channels), program.room(4 * form.heads)
    queries, result = program.room(4 * form.channels), program.room(4 * form.values)
    count = form.keys * form.rows
    keys, values = _after(queries, 4 * count), _after(queries, 8 * count)
    convolved: Words = [1, form.channels, form.taps, form.taps, 1, 0, first, kept, taps, taps, mixed]
    program.add(kernels.convolution_step, convolved, min(threads, -(-form.channels // _WORTH_CHANNELS)))
    program.add(kernels.look_up, [table_of(form.activation).data_ptr(), mixed, queries, form.channels])
    program.add(kernels.look_up, [table.data_ptr(), b, betas, form.heads])
    norm, ones = NormForm(form.norm.lanes, _EPSILON), _ones(form.rows).data_ptr()
    norm.add_to(program, form.rows, queries, ones, queries, 2 * form.keys, is_half=False, is_mean=False)
    program.add(kernels.divide, [queries, count, float_bits(form.rows**0.5)])
    sizes = 1, 1, form.heads, form.heads // form.keys, form.rows, form.columns, 0
    words: Words = [*sizes, state, queries, keys, values, decays, betas, result]
    program.add(kernels.delta_step, words, min(threads, -(-form.values * form.rows // WORTH_A_THREAD)))
    program.add(joint_kernels.narrow, [result, out, form.values])
    form.norm.add_to(program, form.columns, out, weight, out, form.heads, z)


def _after(place: Place, nbytes: int) -> Place:
    return place[0], place[1] + nbytes


def _trial_cache(kept: torch.Tensor, state: torch.Tensor) -> Any:
    """A cache with the states of one layer."""
    return SimpleNamespace(
        get_conv_state=lambda *args, **named: kept,
        get_recurrent_state=lambda *args, **named: state,
        is_recording_past=lambda index: False,
        update_recurrent_state=lambda new, *args, **named: state.copy_(new),
    )


def right_form(module: Any, form: DeltaForm | None) -> DeltaForm | None:
    """The form if a module's class has the same result and states, with other products and parameters; else None."""
    if form is None:
        return None
    random = RandomTensors()

    def with_weight(part: Any, weight: torch.Tensor) -> Any:
        trial = trial_of(part, _parameters={**dict.fromkeys(part._parameters), "weight": nn.Parameter(weight)})
        vars(trial).pop("forward", None)  # a method of the module itself
        return trial

    own, x = module._modules, torch.zeros(1, 1, 1, dtype=torch.bfloat16, device="cpu")
    parts: dict[str, Any] = {"out_proj": lambda value: value}
    parts["conv1d"] = with_weight(own["conv1d"], random.normal(form.channels, 1, form.taps))
    parts["norm"] = with_weight(own["norm"], random.normal(form.columns))
    dtypes = {name: parameter.dtype for name, parameter in module._parameters.items()}
    numbers = {name: nn.Parameter(random.normal(form.heads).to(dtype)) for name, dtype in dtypes.items()}
    like = trial_of(module, _modules=parts, _parameters=numbers)
    for scale in (1, 8):
        for name in form.products:
            row = random.normal(1, 1, own[name].out_features) * scale
            parts[name] = lambda value, row=row: row.clone()
        state = random.normal(1, form.heads, form.rows, form.columns, dtype=torch.float32)
        states = random.normal(1, form.channels, form.taps), state
        own_states = [tensor.clone() for tensor in states]
        expected = class_result(like, hidden_states=x, cache=_trial_cache(*own_states), attention_mask=None)
        result = step(form, like, x, _trial_cache(*states))
        if result is None or not is_result(result, expected) or not all(map(torch.equal, states, own_states)):
            return None
    return form
